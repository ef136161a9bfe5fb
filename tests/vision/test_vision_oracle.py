"""Rows with images against TRL 1.16: its own processing, collators and losses, and ours, of one model and one batch.

TRL lets a policy say placeholders of images, and ours does not, so both sides score with a plain head. The template
ends with EOS: white space behind that is learned by TRL, and not by us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import in_turn
from torch import Tensor, nn
from vision_kinds import KINDS
from vision_seen import Toy, image
from vision_toys import made

sys.path.append(str(Path(__file__).parents[1] / "oracle"))  # whose helpers hold TRL and ours side by side

import oracle_dpo
import oracle_sft
from oracle_cases import GIVEN, LIMIT, TEMPERATURE, WEIGHTS, Outcome, assert_same_step, backward, first, second
from oracle_ours import our_grpo, our_rloo

from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, frozen_logprobs, micro_batch, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.rollout import Completions, PromptBatch, Rollout, Sampling
from lit_rl.core.vision_inputs import Vision
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.models import LanguageModel
from lit_rl.models.forward import score
from lit_rl.ops.reductions import masked_sum

pytestmark = pytest.mark.all

HELD = tuple(kind for kind in KINDS if kind != "paligemma")
"""But for PaliGemma: TRL's collators give its processor completions alone, which it refuses without images."""

SEEN = [
    ("What?", [image(1)]),
    ("And what are these two, please?", [image(2, 40, 24), image(3, 24, 48)]),
    ("Say a word.", []),
    ("Well?", [image(4, 60, 30)]),
]
"""What a prompt says and shows: images of several sizes, two of them, and none."""

ANSWERS = [("A cat.", "No."), ("Two dogs and a bird", "Two cats"), ("Yes", "Word"), ("x", "A long one, this")]
GROUP = 2
LENGTHS = (6, 4, 3, 6, 5, 1, 6, 2)
SAMPLING = Sampling(temperature=TEMPERATURE, max_new_tokens=LIMIT)


@dataclass(eq=False)
class Sides:
    """One model, loaded by us, and what each side makes of rows for it."""

    toy: Toy
    folder: Path
    processor: Any
    """TRL's own: ours has another."""

    def trainer(self, kind: Any, config: Any, rows: Sequence[dict[str, Any]], **settings: Any) -> Any:
        from datasets import Dataset

        shared = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": "none"}
        args = config(output_dir=str(self.folder), per_device_train_batch_size=len(rows), **shared, **settings)
        trainer = kind(
            model=self.toy.policy,
            args=args,
            train_dataset=Dataset.from_list(list(rows)),
            processing_class=self.processor,
            **({"reward_funcs": [first, second]} if "num_generations" in settings else {}),
        )
        trainer.model.train()
        return trainer


@pytest.fixture(scope="module")
def sides_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sides]:
    """Both sides of a kind of toy, every weight of it trained."""
    from transformers import AutoProcessor

    folder_of = cache(lambda kind: save_calm(kind, tmp_path_factory.mktemp(kind)))

    def made(kind: str) -> Sides:
        folder = folder_of(kind)
        model = LanguageModel(str(folder), freeze=[])
        return Sides(
            Toy(kind, model, model.load()), tmp_path_factory.mktemp("trl"), AutoProcessor.from_pretrained(folder)
        )

    return made


def save_calm(kind: str, folder: Path) -> Path:
    """Weights as they are made: float32 rounds gradients of sharper toys by more than is compared here."""
    model, processor = made(kind)
    processor.chat_template = processor.chat_template.replace("<|end|>\n", "<|end|>")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def rule_nothing_out(policy: Any) -> None:
    """Give the policy a plain head of the same weights."""
    head = policy.get_output_embeddings()
    plain = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    plain.weight, plain.bias = head.weight, head.bias
    policy.set_output_embeddings(plain)


def move(model: Any, by: float, seed: int) -> None:
    """Away from what it was, so that ratios are not 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        width = by * (parameter.detach().std() if parameter.numel() > 1 else 1.0)
        parameter.data += width * torch.randn(parameter.shape, generator=generator)


def rows_of(*columns: str) -> list[dict[str, Any]]:
    """A prompt with its images, and an answer in each of the columns."""
    rows = []
    for (text, images), answers in zip(SEEN, ANSWERS):
        said = {name: [{"role": "assistant", "content": each}] for name, each in zip(columns, answers)}
        shown = [each.open() for each in images]
        rows.append({"prompt": [{"role": "user", "content": text}], **said, "images": shown})
    return rows


# ---------------------------------------------------------------------- GRPO, RLOO


def drawn(sides: Sides) -> Completions:
    """Completions of our own sampler, of uneven lengths."""
    toy = sides.toy
    prompts = [toy.prompt(text, images, row) for row, (text, images) in enumerate(SEEN)]
    rows = toy.drawn(toy.asked(prompts, GROUP), temperature=TEMPERATURE)
    mask = rows.response_mask & (torch.arange(rows.response_mask.shape[1]) < torch.tensor(LENGTHS)[:, None])
    return replace(rows, response_mask=mask, sampler_logprobs=rows.sampler_logprobs.masked_fill(~mask, 0.0))


def grpo_trainer(sides: Sides, completions: Completions) -> Any:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    return drawing_trainer(sides, completions, GRPOTrainer, GRPOConfig, lambda ids: (ids, None))


def rloo_trainer(sides: Sides, completions: Completions) -> Any:
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer

    return drawing_trainer(sides, completions, RLOOTrainer, RLOOConfig, lambda ids: ids, epsilon=0.5)


def drawing_trainer(
    sides: Sides, completions: Completions, kind: Any, config: Any, said: Callable[..., Any], **settings: Any
) -> Any:
    """TRL's trainer, which is given these completions, with a reference away from the policy."""
    trainer = sides.trainer(
        kind,
        config,
        [row for row in rows_of() for _ in range(GROUP)],
        num_generations=GROUP,
        num_iterations=2,
        max_completion_length=LIMIT,
        temperature=TEMPERATURE,
        beta=0.1,
        reward_weights=list(WEIGHTS.values()),
        **settings,
    )
    ids = [row[mask].tolist() for row, mask in zip(completions.response_ids, completions.response_mask)]
    trainer._generate_single_turn = lambda *_: said(ids)
    trainer._tokenize_prompts = partial(no_images_are_a_list, trainer._tokenize_prompts)
    if sides.toy.kind == "llava_onevision":
        trainer._get_per_token_logps_and_entropies = partial(
            the_model_hears_counts, trainer._get_per_token_logps_and_entropies
        )
    trainer.current_gradient_accumulation_steps = 1
    move(trainer.ref_model, 0.03, seed=5)
    return trainer


def no_images_are_a_list(tokenize: Callable[..., Any], prompts: Any) -> Any:
    """TRL says None for what a prompt without images shows, beside others that have some, and processors refuse it."""
    ids, images, fields = tokenize(prompts)
    return ids, [each or [] for each in images], fields


def the_model_hears_counts(scores: Callable[..., Any], model: Any, *args: Any, **inputs: Any) -> Any:
    """TRL's scores take no `batch_num_images`, by which OneVision knows an image that is alone in its prompt."""
    counts = torch.tensor(inputs["num_images"])
    inputs.pop("batch_num_images", None)
    hook = model.register_forward_pre_hook(
        lambda _, given, named: (given, {**named, "batch_num_images": counts}), with_kwargs=True
    )
    try:
        return scores(model, *args, **inputs)
    finally:
        hook.remove()


def their_rollout(trainer: Any) -> dict[str, Any]:
    GIVEN.update(first=[0.0, 1.0, 0.35, 0.2, 3.0, 4.0, 0.0, 2.0], second=[None] * len(LENGTHS))
    return trainer._generate_and_score_completions([row for row in rows_of() for _ in range(GROUP)])


def our_rollout(trainer: Any, completions: Completions, taken: dict[str, Any]) -> Rollout:
    """The same completions with log-probs of our own, and TRL's advantages, which tests/oracle compares."""

    def scored(model: Any) -> Tensor:
        return frozen_logprobs(model, completions, sampling=SAMPLING, rows_at_once=3)

    return Rollout(
        completions=completions,
        rewards=torch.zeros(len(completions)),
        advantages=taken["advantages"],
        loss_mask=completions.response_mask,
        old_logprobs=scored(trainer.model),
        ref_logprobs=scored(trainer.ref_model),
    )


def our_step(trainer: Any, module: Any, rollout: Rollout, parts: Sequence[Tensor]) -> Outcome:
    """Our loss of a step in micro-batches of these rows."""
    module.policy = trainer.model
    plan = BatchPlan(len(SEEN), GROUP, minibatches=1, iterations=1, accumulate=len(parts), world_size=1)
    totals = step_totals(step_counts(rollout, plan, seed=0, index=0)[0], plan)
    shares = []
    for rows in parts:
        part = micro_batch(rollout, rows)
        shares.append(module.loss(part, module.token_scores(part.completions), totals)[0])
    return backward(trainer.model, shares)


def assert_same_scores(found: Tensor, theirs: Tensor, mask: Tensor) -> None:
    """Relative to all of them: float32 rounds a log-prob by the size of the logits that it is made of."""
    assert (found - theirs)[mask].norm() <= 1e-5 * theirs[mask].norm()


@pytest.mark.parametrize("kind", HELD)
def test_grpo(sides_of: Callable[[str], Sides], kind: str) -> None:
    """Prompts as TRL's processor makes them, log-probs of three models, and the step in any micro-batches."""
    sides = sides_of(kind)
    completions = drawn(sides)
    rule_nothing_out(sides.toy.policy)
    trainer = grpo_trainer(sides, completions)
    mask = completions.response_mask

    taken = their_rollout(trainer)
    assert torch.equal(taken["prompt_ids"], completions.prompt_ids)
    assert torch.equal(taken["prompt_mask"].bool(), completions.prompt_mask)
    rollout = our_rollout(trainer, completions, taken)
    assert rollout.old_logprobs is not None and rollout.ref_logprobs is not None
    assert_same_scores(rollout.old_logprobs, taken["old_per_token_logps"], mask)
    assert_same_scores(rollout.ref_logprobs, taken["ref_per_token_logps"], mask)

    move(trainer.model, 0.03, seed=6)
    now = score(trainer.model, completions, SAMPLING, entropy=True)
    assert now.entropy is not None
    logprobs, entropy = their_scores(trainer, taken)
    assert_same_scores(now.logprobs, logprobs, mask)
    assert_same_scores(now.entropy, entropy, mask)
    assert masked_sum((now.logprobs - paled(trainer.model, completions)).abs(), mask) > 0.1, "pixels are not felt"
    assert masked_sum((now.logprobs - rollout.old_logprobs).abs(), mask) > 0.1, "ratios are 1"

    theirs = backward(trainer.model, [trainer._compute_loss(trainer.model, taken)])
    every = torch.arange(len(completions))
    for parts in ([every], [every[::2], every[1::2]], [every[4:6], every[:3], every[6:], every[3:4]]):
        assert_same_step(our_step(trainer, our_grpo({"beta": 0.1}), rollout, parts), theirs)


@pytest.mark.parametrize("kind", HELD)
def test_rloo(sides_of: Callable[[str], Sides], kind: str) -> None:
    """Advantages, whose rewards have the KL of what is seen taken off, and the step in any micro-batches."""
    sides = sides_of(kind)
    completions = drawn(sides)
    rule_nothing_out(sides.toy.policy)
    trainer = rloo_trainer(sides, completions)

    taken = their_rollout(trainer)
    assert torch.equal(taken["prompt_ids"], completions.prompt_ids)
    module = our_rloo({"beta": 0.1, "epsilon": 0.5}, group_size=GROUP)
    known = our_rollout(trainer, completions, taken)
    batch = PromptBatch([""] * len(SEEN), [[0]] * len(SEEN), {}, [*range(len(SEEN))], [0] * len(SEEN))
    scores = module.reward_functions.score([""] * len(completions), [""] * len(completions), {})
    rollout, _ = module.advantages(Scored(batch, completions, scores), known.old_logprobs, known.ref_logprobs)
    torch.testing.assert_close(rollout.advantages, taken["advantages"], atol=1e-5, rtol=1e-5)

    move(trainer.model, 0.01, seed=6)
    theirs = backward(trainer.model, [trainer._compute_loss(trainer.model, taken)])
    every = torch.arange(len(completions))
    for parts in ([every], [every[4:6], every[:3], every[6:], every[3:4]]):
        size = float(rollout.advantages.abs().mean())  # of the terms of the loss, which cancel
        assert_same_step(our_step(trainer, module, rollout, parts), theirs, size=size)


def paled(policy: Any, completions: Completions) -> Tensor:
    """Log-probs of a policy that is shown half of the contrast."""
    vision = completions.vision
    assert vision is not None
    pale = [
        each and replace(each, inputs={**each.inputs, "pixel_values": 0.5 * each.inputs["pixel_values"]})
        for each in vision.prompts
    ]
    return score(policy, replace(completions, vision=Vision(pale, vision.index)), SAMPLING).logprobs


def their_scores(trainer: Any, taken: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, of what TRL's rollout carries of the images."""
    ids = torch.cat([taken["prompt_ids"], taken["completion_ids"]], 1)
    mask = torch.cat([taken["prompt_mask"], taken["completion_mask"]], 1)
    names = ("pixel_values", "num_images", "num_tiles", "pixel_attention_mask", "image_grid_thw", "image_sizes")
    seen = {name: taken[name] for name in (*names, "token_type_ids", "mm_token_type_ids") if name in taken}
    width = taken["completion_ids"].shape[1]
    logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, width, compute_entropy=True, **seen
    )
    return logprobs, entropy


# ---------------------------------------------------------------------- data sets


def batch_of(sides: Sides, data: Any, rows: Sequence[int]) -> Any:
    """Ours, of these rows of a step of all rows."""
    data.prepare(sides.toy.model.tokenizer, processor=sides.toy.model.processor)
    train = data.corpus.train
    return train.batch(rows, rows, train.totals(range(len(train)), 1), step=0, slot=0)


def settings(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rows": rows, "max_length": None, "val_fraction": 0, "batch_size": 1, "shuffle": False}


def assert_same_metrics(mine: Outcome, other: Outcome, size: float = 0.0) -> None:
    assert mine.metrics.keys() == other.metrics.keys()
    for name, values in other.metrics.items():
        assert mine.metrics[name] == pytest.approx(values, rel=1e-5, abs=1e-6 + size), name


@in_turn(kind=HELD, learn=["completion", "all"])
def test_sft(sides_of: Callable[[str], Sides], kind: str, learn: Any) -> None:
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    sides = sides_of(kind)
    rule_nothing_out(sides.toy.policy)
    rows = rows_of("completion")
    only = learn == "completion"
    trainer = sides.trainer(SFTTrainer, SFTConfig, rows, max_length=None, completion_only_loss=only)
    batch = trainer.data_collator([dict(row) for row in rows])
    placeholders = torch.tensor(sides.toy.model.processor.placeholders)  # pyright: ignore
    batch["labels"][torch.isin(batch["labels"], placeholders)] = -100  # TRL learns them too where it learns the prompt
    theirs = oracle_sft.theirs(trainer, [batch], loss="nll", aux=0)

    data = SupervisedDataModule(learn=learn, **settings(rows))
    mine = oracle_sft.ours(trainer, [batch_of(sides, data, range(len(rows)))], loss="nll", aux=0)
    assert_same_step(mine, theirs)
    assert_same_metrics(mine, theirs)


MPO = {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
"""2411.10442, as its models were trained."""


@pytest.mark.parametrize("kind", HELD)
def test_dpo(sides_of: Callable[[str], Sides], kind: str) -> None:
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    sides = sides_of(kind)
    rule_nothing_out(sides.toy.policy)
    rows = rows_of("chosen", "rejected")
    trainer = sides.trainer(DPOTrainer, DPOConfig, rows, max_length=None)
    move(trainer.model, 0.03, seed=5)
    batch = batch_of(sides, PreferenceDataModule(**settings(rows)), range(len(rows)))
    for losses in ({}, MPO):
        theirs = oracle_dpo.theirs(trainer, losses)
        module = oracle_dpo.our_module(losses, lora=False)
        module.policy, module.reference_policy = trainer.model, trainer.ref_model
        loss, metrics = module.loss(batch)
        mine = backward(trainer.model, [loss])
        mine.metrics = {name: [(top / bottom).item()] for name, (top, bottom) in metrics.items()}
        assert_same_step(mine, theirs)
        size = max(abs(theirs.metrics[f"logps/{side}"][0]) for side in ("chosen", "rejected"))
        assert_same_metrics(mine, theirs, size=3e-7 * module.beta * size)
