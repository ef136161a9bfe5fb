"""`lit-rl doctor` of generators that decode with the policy itself. (vLLM: `tests/engines/test_doctor_engines.py`.)"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
from cli_helpers import Command, Outcome, contents, refused

from lit_rl.generation.native import NativeGenerator

CPU = ("doctor", "trainer.accelerator=cpu", "doctor.prompts=2", "doctor.completions=3")


def numbers(outcome: Outcome, row: str) -> list[float]:
    """The numbers of a row of the tables."""
    (line,) = [line for line in outcome.out.splitlines() if line.startswith(row)]
    return [float(word.rstrip("%")) for word in line[len(row) :].split()]


@pytest.mark.parametrize("generator", ["native", "hf", "hf_continuous"])
def test_a_generator_that_decodes_with_the_policy_is_exact(command: Command, cwd, generator):
    outcome = command(*CPU, f"generator={generator}")
    assert outcome.code == 0, outcome.err
    ours, coarse, after = numbers(outcome, "mean |difference|, nats")
    assert max(ours, after) < 1e-5 < 1e-3 < coarse, "a forward pass in bfloat16 is another one"
    assert numbers(outcome, "effective share of tokens")[0] == 1
    moved = re.search(r"SOUND: .*moved by ([\d.]+) nats", outcome.out)
    assert moved and float(moved[1]) >= 0.5
    assert "algo/correction=none" in outcome.out and "generator.dtype" not in outcome.out
    assert ("Decoded by operations on its weights" in outcome.out) == (generator == "native")
    assert "In training a prompt is computed once for all its samples." in outcome.out
    assert contents(cwd) == []


ONE_PATH = [
    "model.speedups.fused_head",
    "model.speedups.shared_prompts",
    "model.speedups.rows_by_length",
    "generator.speedups.grouped_cache",
]


@pytest.mark.parametrize(("switched_off", "rounding"), [(ONE_PATH, 5e-5), ([], 0.02)], ids=["one path", "default"])
def test_adapters_and_mixed_precision_follow_too(command: Command, switched_off: list[str], rounding: float):
    """Autocast keeps its copies of weights while it is open: the move has to be seen all the same.

    In bfloat16 two ways of computing the same round differently: sampling and scoring are equal where both go one way.
    """
    precision = ["model.lora.r=2", "trainer.precision=bf16-mixed"]
    outcome = command(*CPU, *precision, *(f"{key}=false" for key in switched_off))
    assert outcome.code == 0, outcome.err
    ours, exact, after = numbers(outcome, "mean |difference|, nats")
    assert max(ours, after) < rounding and 5e-5 < exact < 0.1


def test_weights_in_bfloat16_are_examined_as_they_are_trained(command: Command):
    outcome = command(*CPU, "trainer.precision=bf16-true")
    assert outcome.code == 0, outcome.err
    ours, after = numbers(outcome, "mean |difference|, nats")
    assert 0 < max(ours, after) < 0.05, "the cache of the generator rounds to bfloat16 what a forward pass does not"


def test_memory_is_that_of_the_planned_rollout(command: Command):
    planned = ["data.prompts_per_rollout=64", "algo.group_size=16", "data.max_prompt_tokens=100"]
    outcome = command(*CPU, *planned, "sampling.max_new_tokens=28")
    # 2 layers, 4 heads of 32, keys and values in float32: 2048 bytes a token.
    gib = 2048 * 64 * 16 * (100 + 28) / 2**30
    assert f"= {gib:.3g} GiB" in " ".join(outcome.out.split()), outcome.out


def test_settings_that_training_does_not_score_by_are_named(command: Command):
    outcome = command(*CPU, "sampling.logit_bias={20: 3.0}")
    assert outcome.code == 0, outcome.err
    ours, _, after = numbers(outcome, "mean |difference|, nats")
    assert ours > 1e-2 > 1e-5 > after
    assert "sampling.logit_bias" in outcome.out
    outcome = command(*CPU, "generator=hf", "+generator.generation_kwargs.no_repeat_ngram_size=1")
    assert outcome.code == 0, outcome.err
    ours, _, after = numbers(outcome, "mean |difference|, nats")
    assert ours > 1e-2 > 1e-5 > after, "it is drawn without it after the move"
    words = " ".join(outcome.out.split())
    assert "draws by generator.generation_kwargs.no_repeat_ngram_size and" in words and "correction weighs" in words
    assert command(*CPU, "sampling.temperature=0").code == 0


def stale(sync: Any) -> Any:
    """A copy of the first policy that came."""

    def kept(self: Any, policy: Any, version: int) -> None:
        sync(self, copy.deepcopy(policy) if self._policy is None else self._policy, version)

    return kept


def flattened(generate: Any) -> Any:
    """Log-probs of another distribution than that which was drawn from."""

    def other(self: Any, prompts: Any, sampling: Any) -> Any:
        out = generate(self, prompts, sampling)
        return dataclasses.replace(out, sampler_logprobs=out.sampler_logprobs * 0.9)

    return other


@pytest.mark.parametrize("verb, broken, version", [("sync", stale, 1), ("generate", flattened, 0)], ids=["old", "flat"])
def test_a_generator_that_does_not_hold_the_policy_ends_with_5(command: Command, monkeypatch, verb, broken, version):
    monkeypatch.setattr(NativeGenerator, verb, broken(getattr(NativeGenerator, verb)))
    outcome = command(*CPU)
    refused(outcome, 5, f"does not draw from policy version {version}", "allowed in float32: 0.001")
    assert "SOUND" not in outcome.out


def test_a_policy_that_cannot_move_proves_nothing(command: Command, monkeypatch):
    def frozen(model):
        policy = load(model)
        policy.requires_grad_(False)
        return policy

    from lit_rl.models import LanguageModel

    load = LanguageModel.load
    monkeypatch.setattr(LanguageModel, "load", frozen)
    refused(command(*CPU), 5, "too little to test whether the generator gets new weights")
