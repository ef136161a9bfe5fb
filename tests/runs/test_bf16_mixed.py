"""`trainer.precision=bf16-mixed`: forward passes in bfloat16; weights, log-probs and losses in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import dist_equal
import lightning as L
import pytest
import torch

from lit_rl.algorithms import DPO, GKD, KTO, SFT, AdamW, Constant, OnlineDPO, ProcessRewardModeling, RewardModeling
from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.data.example_module import PreferenceDataModule, StepwiseDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition, AdditionPairs, AdditionSteps, AdditionText
from lit_rl.models import LanguageModel
from lit_rl.models.forward import score, score_texts, text_logits
from lit_rl.ops.imitation import generalized_jsd

pytestmark = [pytest.mark.all, pytest.mark.xdist_group("bf16")]

STEPS = 8
SAMPLING = Sampling(max_new_tokens=4)
STUDENT = LanguageModel("tiny", init_kwargs={"num_hidden_layers": 1, "layer_types": ["full_attention"]})
HOW: dict[str, Any] = {"optimizer": AdamW(lr=3e-4), "scheduler": Constant()}
FIRST_LOSS = 0.01
"""How far the first loss may be from float32's, relative; bfloat16 keeps 8 bits, so a logit of 10 is 0.03 off."""


def varied(completions: list[str]) -> list[float]:
    return [float(sum(text.encode()) % 5) for text in completions]


def of_examples(kind: Any, task: Any) -> Any:
    return kind(rows=task(30, 0).train()[:8], batch_size=8, shuffle=False, val_fraction=0.0)


def prompts() -> RolloutDataModule:
    return RolloutDataModule(rows=Addition(30, 0).train()[:8], prompts_per_rollout=8, val_fraction=0.0)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sft": (lambda: SFT("tiny", sampling=SAMPLING, **HOW), lambda: of_examples(SupervisedDataModule, AdditionText)),
    "dpo": (lambda: DPO("tiny", sampling=SAMPLING, **HOW), lambda: of_examples(PreferenceDataModule, AdditionPairs)),
    "kto": (lambda: KTO("tiny", sampling=SAMPLING, **HOW), lambda: of_examples(PreferenceDataModule, AdditionPairs)),
    "reward-model": (lambda: RewardModeling("tiny", **HOW), lambda: of_examples(PreferenceDataModule, AdditionPairs)),
    "process-reward-model": (
        lambda: ProcessRewardModeling("tiny", **HOW), lambda: of_examples(StepwiseDataModule, AdditionSteps),
    ),
    "gkd": (
        lambda: GKD(STUDENT, teacher=LanguageModel("tiny"), on_policy_fraction=0.0, sampling=SAMPLING, **HOW),
        lambda: of_examples(SupervisedDataModule, AdditionText),
    ),
    "online-dpo": (lambda: OnlineDPO("tiny", varied, sampling=SAMPLING, **HOW), prompts),
}  # fmt: skip
FIRST = {"dpo": math.log(2), "kto": 0.5, "online-dpo": math.log(2)}
"""Where policy and reference are one, they are so in any precision, if both are scored in the same."""


class Look(L.Callback):
    """What was logged after every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **more: Any) -> None:
        self.seen.append({name.removeprefix("train/"): v for name, v in dist_equal.logged(trainer).items()})


def trained(module: Any, data: Any, precision: Any, folder: Path, steps: int = STEPS) -> list[dict[str, float]]:
    look = Look()
    dist_equal.trainer(folder, 1, max_steps=steps, precision=precision, callbacks=[look]).fit(module, datamodule=data)
    return look.seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`runs(name, precision)`: a module that learned one batch, and what was logged of every step."""

    @cache
    def run(name: str, precision: str) -> tuple[Any, list[dict[str, float]]]:
        module, data = (make() for make in CASES[name])
        return module, trained(module, data, precision, tmp_path_factory.mktemp("run"))

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_first_step_is_that_of_float32_within_what_bfloat16_keeps(name, runs):
    _, full = runs(name, "32-true")
    _, half = runs(name, "bf16-mixed")
    assert half[0]["loss"] == pytest.approx(full[0]["loss"], rel=FIRST_LOSS)
    assert half[0]["grad_norm"] == pytest.approx(full[0]["grad_norm"], rel=0.05)
    assert half[0].keys() == full[0].keys()
    if name in FIRST:
        assert half[0]["loss"] == pytest.approx(FIRST[name], rel=1e-6)
        assert half[0]["rewards/margins"] == 0.0
    else:
        assert half[0]["loss"] != full[0]["loss"], "nothing was computed in bfloat16"


@pytest.mark.parametrize("name", [name for name in CASES if name != "online-dpo"])
def test_weights_in_bfloat16_begin_as_float32_does_and_learn_as_much(name, runs):
    _, full = runs(name, "32-true")
    module, half = runs(name, "bf16-true")
    assert half[0]["loss"] == pytest.approx(FIRST.get(name, full[0]["loss"]), rel=FIRST_LOSS)
    assert half[0]["grad_norm"] == pytest.approx(full[0]["grad_norm"], rel=0.05)
    assert half[0]["loss"] - half[-1]["loss"] == pytest.approx(full[0]["loss"] - full[-1]["loss"], rel=0.1)
    assert torch.bfloat16 in {parameter.dtype for parameter in module.policy.parameters()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "online-dpo"])
def test_a_fixed_batch_is_learned(name, runs):
    _, seen = runs(name, "bf16-mixed")
    assert all(math.isfinite(step["loss"]) and step["skipped_steps"] == 0 for step in seen)
    assert seen[-1]["loss"] < 0.9 * seen[0]["loss"]
    for margin in ("rewards/margins", "margin"):
        if margin in seen[0]:
            assert seen[-1][margin] > seen[0][margin] + 0.1


def test_online_dpo_learns_the_pairs_of_a_rollout(tmp_path):
    module = OnlineDPO("tiny", varied, iterations=STEPS, sampling=SAMPLING, **HOW)
    seen = trained(module, prompts(), "bf16-mixed", tmp_path)[-1]
    assert math.isfinite(seen["loss"]) and seen["loss"] < 0.9 * math.log(2)  # of all passes over it, the first too
    assert seen["rewards/margins"] > 0.1 and seen["rewards/accuracies"] > 0.6


@pytest.mark.parametrize("name", CASES)
def test_weights_gradients_and_moments_stay_in_float32(name, runs):
    module, _ = runs(name, "bf16-mixed")
    assert {parameter.dtype for parameter in module.policy.parameters()} == {torch.float32}
    (optimizer,) = module.trainer.optimizers
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert moments and {moment.dtype for moment in moments} == {torch.float32}


def test_a_reference_that_is_computed_before_training_has_the_precision_of_the_run(tmp_path):
    """What a float32 run left in the same folder is not taken for it."""
    for precision in ("32-true", "bf16-mixed"):
        module = DPO(
            "tiny", sampling=SAMPLING, precompute_reference=True, reference_cache=str(tmp_path / "cache"), **HOW
        )
        first = trained(module, of_examples(PreferenceDataModule, AdditionPairs), precision, tmp_path, 1)[0]
        assert first["rewards/margins"] == 0.0 and first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert len(list((tmp_path / "cache").iterdir())) == 2


# ---------------------------------------------------------------- what is said of a token is float32


def texts() -> TokenBatch:
    ids = torch.tensor([LanguageModel("tiny").tokenizer.encode(text) for text in ("17+25=42", "90+10=10")])
    return TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(ids.shape[1]).expand(ids.shape) > 3)


def as_completions(tokens: TokenBatch) -> Completions:
    prompt, response = tokens.input_ids[:, :4], tokens.input_ids[:, 4:]
    every = torch.ones_like(response, dtype=torch.bool)
    return Completions(
        prompt_ids=prompt,
        prompt_mask=torch.ones_like(prompt, dtype=torch.bool),
        response_ids=response,
        response_mask=every,
        sampler_logprobs=torch.zeros(response.shape),
        ended=torch.ones(len(prompt), dtype=torch.bool),
        group_id=torch.arange(len(prompt)),
    )


@pytest.mark.parametrize("way", ["texts", "completions"])
@pytest.mark.parametrize("head", [torch.bfloat16, torch.float32], ids=["plain-head", "float32-head"])
def test_log_probs_are_those_of_the_logits_as_they_came_in_float32(way, head):
    """In bfloat16 a log-prob of -5 would be up to 0.02 off. `lm_head_fp32` has logits that are not rounded either."""
    model, tokens = LanguageModel("tiny", lm_head_fp32=head == torch.float32).load(), texts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=tokens.input_ids).logits[:, 3:-1].detach()
        scores = (
            score_texts(model, tokens, entropy=True)
            if way == "texts"
            else score(model, as_completions(tokens), Sampling(max_new_tokens=1), entropy=True)
        )
    logprobs, entropy = (part[:, -4:] for part in (scores.logprobs, scores.entropy))
    assert logits.dtype == head and logprobs.dtype == entropy.dtype == torch.float32
    expected = logits.double().log_softmax(-1)
    picked = expected.gather(-1, tokens.input_ids[:, 4:, None])[..., 0]
    torch.testing.assert_close(logprobs.double(), picked, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-6)
    scores.logprobs.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and grad.dtype == torch.float32 and grad.isfinite().all() for grad in gradients)


def test_the_divergence_of_a_student_is_taken_in_float32():
    student, teacher = STUDENT.load(), LanguageModel("tiny").load()
    tokens = texts()
    columns = torch.arange(3, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = (text_logits(model, tokens, columns, False)[0] for model in (student, teacher))
        divergence = generalized_jsd(ours, theirs, beta=0.5)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and divergence.dtype == torch.float32
    s, t = (logits.detach().double().softmax(-1) for logits in (ours, theirs))
    middle = (s + t) / 2
    expected = ((s * (s / middle).log()).sum(-1) + (t * (t / middle).log()).sum(-1)) / 2
    torch.testing.assert_close(divergence.detach().double(), expected, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- from the command line
