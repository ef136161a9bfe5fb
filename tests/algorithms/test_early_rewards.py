"""Rewards while generation goes on: the run is the same, and the first call comes before the last token is drawn."""

from __future__ import annotations

import dataclasses
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_rollouts import EachBatch, trainer

from lit_rl.algorithms import GRPO, AdamW, Evaluation
from lit_rl.algorithms.rollouts.phase_costs import is_speed
from lit_rl.algorithms.terms.groups import DynamicSampling
from lit_rl.core.errors import RewardError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.native import NativeGenerator
from lit_rl.rewards import Rewards

SHORT = Sampling(max_new_tokens=6)


class Watched(NativeGenerator):
    """Notes in what order rows are over and rewards are asked for; goes on once the first row is being scored."""

    def __init__(self, called: threading.Event, events: list[str]) -> None:
        super().__init__()
        self.called, self.events, self.lengths = called, events, list[int]()

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        tell = prompts.on_finished

        def over(row: int, token_ids: list[int]) -> None:
            assert tell is not None
            tell(row, token_ids)
            assert self.called.wait(60), "nobody asks about a row that is over"
            self.events.append("over")
            self.lengths.append(len(token_ids))

        return super().generate(dataclasses.replace(prompts, on_finished=over if tell else None), sampling)


def module_of(reward: Any, **settings: Any) -> GRPO:
    return GRPO("tiny", reward, group_size=4, sampling=SHORT, optimizer=AdamW(lr=2e-3), **settings)


def data() -> RolloutDataModule:
    return RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=4)


def trained(module: Any, folder: Path, **settings: Any) -> tuple[list[Any], dict[str, float]]:
    """The samples of each rollout, and what was logged at the end, validation included."""
    seen = EachBatch(lambda module: {name: list(values) for name, values in module.samples.items()})
    runner = trainer(folder, max_steps=3, callbacks=[seen], **settings)
    runner.fit(module, datamodule=data())
    runner.limit_val_batches = 1.0
    logged = dict(runner.callback_metrics)
    runner.validate(module, datamodule=data(), verbose=False)
    logged |= runner.callback_metrics
    return seen.seen, {name: float(value) for name, value in logged.items() if not is_speed(name)}


def slow(events: list[str], called: threading.Event) -> Callable[..., Any]:
    async def judged(
        completion: str, answer: str, log_metric: Callable[..., None], log_extra: Callable[..., None]
    ) -> float:
        events.append("called")
        called.set()
        log_metric("characters", len(completion))
        log_extra("reversed", completion[::-1])
        return len(set(completion) & set(answer)) - 0.1 * len(completion)

    return judged


def right(completions: list[str], answer: list[str]) -> list[float]:
    return [float(completion.strip() == str(expected)) for completion, expected in zip(completions, answer)]


right.independent_rows = True


@pytest.mark.parametrize("groups", [lambda: None, DynamicSampling], ids=["all", "dynamic"])
def test_a_run_is_the_same_and_scores_while_it_writes(tmp_path: Path, groups: Callable[[], Any]) -> None:
    called, events = threading.Event(), list[str]()
    functions = {
        "judged": slow(events, called),
        "right": right,
        "length": lambda completions: [len(c) for c in completions],
    }
    generator = Watched(called, events)
    early = module_of(Rewards(functions), generator=generator, groups=groups())
    seen = trained(early, tmp_path)
    assert events[:2] == ["called", "over"], "a row was over before the first was asked about"
    assert generator.lengths[0] < max(generator.lengths[:16]), "of no row a token was still to come"

    late = module_of(Rewards(functions, while_generating=False), groups=groups())
    assert seen == trained(late, tmp_path)
    for name, weight in early.policy.named_parameters():
        assert torch.equal(weight, late.policy.get_parameter(name)), name


def test_an_error_ends_the_run_as_it_did(tmp_path: Path) -> None:
    async def raises(completion: str) -> float:
        raise ValueError("no")

    said = []
    for while_generating in (True, False):
        with pytest.raises(RewardError) as caught:
            trained(module_of(Rewards(raises, while_generating=while_generating, max_concurrent=1)), tmp_path)
        said.append(str(caught.value))
    assert said[0] == said[1] and "completion 0" in said[0]


def test_completions_that_nobody_scores_are_not_scored(tmp_path: Path) -> None:
    events: list[str] = []
    module = module_of(Rewards(slow(events, threading.Event())), evaluation=Evaluation(limit=2))
    module.configure_model()
    loader = data()
    loader.prepare(module.tokenizer)
    batch = loader.peek(4)
    module.generate(batch)
    assert events == []
    completions = module.draw(batch, score_early=True)
    copied = pickle.loads(pickle.dumps(module._early))
    assert copied.take(batch) is None
    scores = module.reward(batch, completions)
    assert events == ["called"] * len(completions) and len(scores.total) == len(completions)


@pytest.mark.all
def test_what_a_reward_draws_is_the_same_in_equal_runs(tmp_path: Path) -> None:
    """Each rollout draws other numbers, whatever the global generators were like."""

    def lottery(completions: list[str], log_extra: Callable[..., None]) -> list[float]:
        tickets = [random.random() + torch.rand(()).item() for _ in completions]
        log_extra("ticket", tickets)
        return tickets

    def tickets(steps: list[dict[str, list[Any]]]) -> list[list[float]]:
        return [table["ticket"] for table in steps]

    whole, logged = trained(module_of(Rewards(lottery)), tmp_path)
    random.seed(5)
    torch.manual_seed(5)
    again, logged_again = trained(module_of(Rewards(lottery)), tmp_path)
    assert tickets(whole) == tickets(again) and logged == logged_again
    assert len({ticket for step in tickets(whole) for ticket in step}) == 3 * 16
