"""Online DPO against TRL 1.16: its own training step on completions and rewards that it is given, and ours on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle_trl import save_policy
from torch import Tensor

from lit_rl.algorithms import OnlineDPO
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.rollout import Completions, PromptBatch, Sampling, select
from lit_rl.models import LanguageModel
from lit_rl.models.references import AdapterBase, FrozenCopy
from lit_rl.ops import preference_losses
from lit_rl.rewards.weighted_rewards import Rewards

PROMPTS = ["ab", "cde", "f", "ghij"]
LENGTHS = (5, 3, 4, 4, 6, 2, 1, 6)  # of both completions of each prompt, one prompt after another
CUT = (2, 5)
REWARDS = (0.0, 1.0, 2.0, 0.5, -1.0, -3.0, 0.25, 0.5)
GIVEN: dict[str, Any] = {}


def by_prompt(rewards: tuple[float, ...]) -> list[float]:
    """TRL's order of rows: the first completion of every prompt, then the second of every prompt."""
    return [*rewards[0::2], *rewards[1::2]]


def given(completions: list[str], **columns: Any) -> list[float]:
    return GIVEN["rewards"]


@pytest.fixture(scope="module", params=["full", "lora"])
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    folder = tmp_path_factory.mktemp("online_dpo")
    tokenizer = save_policy(folder / "model")
    args = OnlineDPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(PROMPTS),
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"]) if request.param == "lora" else None
    made: Any = OnlineDPOTrainer(
        model=str(folder / "model"),
        args=args,
        reward_funcs=given,  # pyright: ignore
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        peft_config=lora,
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in made.model.parameters():
        if parameter.requires_grad:
            width = 0.1 if lora else 0.1 * parameter.detach().std()
            parameter.data += width * torch.randn(parameter.shape, generator=generator)
    yield made


def completions_of(trainer: Any, lengths: tuple[int, ...]) -> Completions:
    """Padded as our generators do; rows of a prompt are neighbours."""
    tokenizer = trainer.processing_class
    prompts = tokenizer([p for p in PROMPTS for _ in range(2)], return_tensors="pt", padding=True, padding_side="left")
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 200, mask.shape, generator=torch.Generator().manual_seed(3))
    ended = torch.tensor([row not in CUT for row in range(len(lengths))])
    last = torch.tensor(lengths) - 1
    ids[torch.arange(len(lengths)), last] = torch.where(
        ended, tokenizer.eos_token_id, ids.gather(1, last[:, None])[:, 0]
    )
    return Completions(
        prompt_ids=prompts["input_ids"],
        prompt_mask=prompts["attention_mask"].bool(),
        response_ids=ids.masked_fill(~mask, tokenizer.pad_token_id),
        response_mask=mask,
        sampler_logprobs=torch.zeros(mask.shape),
        ended=ended,
        group_id=torch.arange(len(PROMPTS)).repeat_interleave(2),
    )


def gradients(model: Any) -> Tensor:
    """Of what is trained, one after another; 0 where a parameter has none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
    model.zero_grad()
    return found


def theirs(trainer: Any, completions: Completions, settings: dict[str, Any]) -> tuple[float, Tensor, dict[str, float]]:
    rows = torch.tensor([*range(0, len(completions), 2), *range(1, len(completions), 2)])
    block = select(completions, rows)
    mask = block.response_mask.long()
    trainer._generate = lambda *_: (block.prompt_ids, block.prompt_mask.long(), block.response_ids, mask, None)
    trainer.args.loss_type, trainer._beta = settings["loss_type"], settings["beta"]
    trainer.args.missing_eos_penalty = settings.get("missing_eos_penalty")
    trainer.stats = {name: [] for name in trainer.stats}
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    loss = trainer.training_step(trainer.model, {"prompt": ["any"] * (len(rows) // 2)})
    stats = {name: values[-1] for name, values in trainer.stats.items()}
    return loss.item(), gradients(trainer.model), stats


def ours(
    trainer: Any, completions: Completions, settings: dict[str, Any], accumulate: int = 1
) -> tuple[float, Tensor, dict[str, float]]:
    tokenizer, lora = trainer.processing_class, trainer.ref_model is None
    module = OnlineDPO(
        LanguageModel("tiny"),
        Rewards(lambda completions, **_: GIVEN["ours"]),
        beta=settings["beta"],
        preference=getattr(preference_losses, settings["loss_type"]),
        missing_eos_penalty=settings.get("missing_eos_penalty"),
        reference=AdapterBase() if lora else FrozenCopy(),
        sampling=Sampling(max_new_tokens=8),
    )
    module.policy, module.reference_policy = trainer.model, trainer.ref_model
    batch = PromptBatch(PROMPTS, [tokenizer.encode(p) for p in PROMPTS], {}, list(range(4)), [0] * 4)
    with torch.no_grad():
        scored = Scored(batch, completions, module.reward(batch, completions))
        scored = module.judged(scored)
        drawn, _ = module.advantages(scored, None, module.reference_of(scored))
        rollout, _ = module.rollout_to_learn(drawn)
    plan = BatchPlan(len(PROMPTS), 2, minibatches=1, iterations=1, accumulate=accumulate, world_size=1)
    counts = step_counts(rollout, plan, seed=0, index=0)[0]
    module.policy.train()
    total, sums = 0.0, {}
    for rows in rows_of_slots(rollout, plan, seed=0, index=0):
        micro = micro_batch(rollout, rows)
        loss, metrics = module.loss(micro, module.token_scores(micro.completions), step_totals(counts, plan))
        loss.backward()
        total += loss.item()
        for name, (value, count) in metrics.items():  # pyright: ignore
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + value.item(), before[1] + count.item()
    return total, gradients(trainer.model), {name: value / count for name, (value, count) in sums.items()}


def both(trainer: Any, settings: dict[str, Any], *, rewards=REWARDS, lengths=LENGTHS, accumulate: int = 1) -> Any:
    GIVEN.update(rewards=by_prompt(rewards), ours=list(rewards))
    completions = completions_of(trainer, lengths)
    return ours(trainer, completions, settings, accumulate), theirs(trainer, completions, settings)


SETTINGS = {
    "sigmoid": {"loss_type": "sigmoid", "beta": 0.1},
    "ipo": {"loss_type": "ipo", "beta": 0.3},
    "penalty": {"loss_type": "sigmoid", "beta": 0.5, "missing_eos_penalty": 1.75},
}


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_loss_and_gradient(trainer: Any, settings: dict[str, Any], accumulate: int) -> None:
    mine, other = both(trainer, settings, accumulate=accumulate)
    assert mine[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    assert other[1].norm() > 1e-3
    assert (mine[1] - other[1]).norm() <= 1e-5 * other[1].norm() + 1e-7


def test_the_penalty_turns_a_pair_round(trainer: Any) -> None:
    one, two = (both(trainer, SETTINGS["sigmoid"] | {"missing_eos_penalty": p})[0] for p in (None, 1.75))
    assert (one[1] - two[1]).norm() > 0.1 * one[1].norm()


RENAMED = {"contain_eos_token": "val/contain_eos_token"}


def test_metrics(trainer: Any) -> None:
    mine, other = both(trainer, SETTINGS["penalty"], lengths=(4,) * 8)  # no padding, which TRL counts in some of them
    for name, value in mine[2].items():
        if name != "entropy":  # of a token; TRL's is the sequence's
            assert value == pytest.approx(other[2][RENAMED.get(name, name)], rel=1e-4, abs=1e-5), name
    assert {RENAMED.get(name, name) for name in mine[2]} | {"beta"} == {*other[2], "entropy"}


def test_trls_kl_counts_padding_and_ours_does_not(trainer: Any) -> None:
    mine, other = both(trainer, SETTINGS["sigmoid"])
    assert mine[2]["rewards/margins"] == pytest.approx(other[2]["rewards/margins"], rel=1e-4)
    assert abs(mine[2]["objective/kl"] - other[2]["objective/kl"]) > 1e-3


def test_a_tie_teaches_trl_that_the_first_is_better_and_us_nothing(trainer: Any) -> None:
    """What we learn of a batch with two ties is what TRL learns of a batch of the other two pairs."""
    tied = (0.0, 1.0, 0.5, 0.5, -1.0, -3.0, 2.0, 2.0)
    mine, other = both(trainer, SETTINGS["sigmoid"], rewards=tied, accumulate=2)
    assert (mine[1] - other[1]).norm() > 1e-2 * other[1].norm()
    decided = [0, 1, 4, 5]
    GIVEN.update(rewards=by_prompt(tuple(tied[row] for row in decided)))
    alone = theirs(trainer, select(completions_of(trainer, LENGTHS), torch.tensor(decided)), SETTINGS["sigmoid"])
    assert mine[0] == pytest.approx(alone[0], rel=1e-5)
    assert (mine[1] - alone[1]).norm() <= 1e-5 * alone[1].norm() + 1e-7
