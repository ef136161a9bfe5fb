"""The seconds of a step that `lit-rl plan` expects: of steps that were measured, a rollout's shared by its steps."""

from __future__ import annotations

import time

import lightning as L
import pytest

from lit_rl.algorithms import GRPO
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.rewards import exact_match
from lit_rl.runs.plan import ProbedStep, StepProbe, expected_step

PAUSE = 0.2
"""Seconds that the reward below takes at least."""


def slow(prompts, completions, answer, **_):
    time.sleep(PAUSE)
    return exact_match(prompts, completions, answer)


def probed(steps: int, **settings) -> StepProbe:
    module = GRPO("tiny", slow, group_size=4, sampling=Sampling(max_new_tokens=6), **settings)
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=2)
    probe = StepProbe(settings.get("iterations", 1))
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    L.Trainer(max_steps=steps, callbacks=[probe], accelerator="cpu", limit_val_batches=0, **quiet).fit(module, data)
    return probe


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_step_is_made_of_what_was_measured(iterations):
    began = time.perf_counter()
    probe = probed(4, iterations=iterations)
    took = time.perf_counter() - began
    assert len(probe.steps) == 4 and sum(step.whole for step in probe.steps) <= took
    for number, step in enumerate(probe.steps):
        assert bool(step.of_rollout) == (number % iterations == 0)
        if step.of_rollout:
            assert PAUSE <= step.of_rollout["reward"] <= step.whole
    one = expected_step(probe.steps, iterations)
    assert one.of_rollout["reward"] >= PAUSE / iterations
    assert one.whole == pytest.approx(one.rest + sum(one.of_rollout.values()))


def test_it_takes_more_steps_only_where_they_are_short(monkeypatch):
    assert len(probed(9).steps) == StepProbe.MOST
    monkeypatch.setattr(StepProbe, "ENOUGH", PAUSE)
    assert len(probed(9).steps) == 2
    monkeypatch.setattr(StepProbe, "LONG", PAUSE)
    assert len(probed(9).steps) == 1


def test_the_first_step_counts_where_it_is_all_there_is():
    first = ProbedStep(9.0, {"generate": 4.0, "reward": 1.0})
    assert expected_step([first], 1) == first
    assert expected_step([first], 4) == ProbedStep(4.0 + 5.0 / 4, {"generate": 1.0, "reward": 0.25})
    later = [ProbedStep(3.0, {"generate": 1.0, "reward": 0.5}), ProbedStep(4.5, {"generate": 2.0, "reward": 0.5})]
    assert expected_step([first, *later], 1) == ProbedStep(
        (1.5 + 2.0) / 2 + 1.5 + 0.5, {"generate": 1.5, "reward": 0.5}
    )
    assert expected_step([first, ProbedStep(2.0, {})], 2).whole == 2.0 + 5.0 / 2  # one rollout, of the first step
