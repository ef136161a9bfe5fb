"""Rewards that come with the task: the environment's, reasoning-gym's scorers, the rewards of verifiers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.event_loops import run_coroutine
from lit_rl.core.task_sets import (
    REASONING_GYM_COLUMN,
    VERIFIERS_COLUMN,
    VERIFIERS_SCORES,
    ReasoningGymProblem,
    TaskRow,
    TaskSet,
    VerifiersScores,
    obstacles_to_scoring,
    score_completion,
)
from lit_rl.ops.ranges import AtLeastOne
from lit_rl.rewards.contract import Completion, text_of


def environment(episodes: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the reward by each episode's environment: its ``get_reward()``, else the sum over its turns, else None.

    Args:
        episodes: The fields of `lit_rl.core.episode.Episode`. They are there where something answers the policy
            (``env=``).
    """
    return [episode["reward"] for episode in episodes]


def environment_turns(episodes: Sequence[Mapping[str, Any]]) -> list[float | list[tuple[int, float]] | None]:
    """Return the environment's reward with each turn credited by its own: ``(turn, value)`` for each.

    The difference between ``get_reward()`` and the sum over turns is credited to the last turn: both functions give
    every episode the same total. Estimators that read rewards of tokens credit
    turns separately (``algo/advantage=centered_return_to_go``, PPO's ``gae``); others see the sum.
    """
    rewards: list[float | list[tuple[int, float]] | None] = []
    for episode in episodes:
        by_turn = {turn: value for turn, value in enumerate(episode["turn_rewards"]) if value is not None}
        if by_turn and (rest := episode["reward"] - sum(by_turn.values())):
            last = episode["turns"] - 1
            by_turn[last] = by_turn.get(last, 0.0) + rest
        rewards.append(sorted(by_turn.items()) if by_turn else episode["reward"])
    return rewards


class ReasoningGymScore:
    """The score of an answer by its problem's own generator, in [0, 1], for rows of the task `ReasoningGym`.

    Many generators give a part of 1 to an answer with the right one inside. A scorer that raises on an answer, as some
    do on an invalid answer, gives 0. A row whose column is None has no problem, and is not scored: in mixed data
    another reward does.

    Args:
        tag: The answer is the text between the last `<tag>` and `</tag>`; without them the completion is worth 0.
            None: it is the whole completion, without white space around it.
    """

    def __init__(self, tag: str | None = None) -> None:
        self.tag = tag

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Completion], reasoning_gym: Sequence[str | None], **_: Any
    ) -> list[float | None]:
        scorers: dict[str, Callable[[str], float]] = {}
        for source in {source for source in reasoning_gym if source is not None}:  # a group shares one
            try:
                problem = ReasoningGymProblem.read(source)
            except (TypeError, ValueError) as error:
                raise RewardError(
                    f"The column {REASONING_GYM_COLUMN!r} has {source!r:.80}, which names no problem. "
                    "reward=reasoning_gym scores rows of data=reasoning_gym."
                ) from error
            scorers[source] = problem.scorer()
        answers = (self._answer(text_of(completion)) for completion in completions)
        return [
            None if source is None else self._scored(scorers[source], answer)
            for source, answer in zip(reasoning_gym, answers, strict=True)
        ]

    def _scored(self, scorer: Callable[[str], float], answer: str | None) -> float:
        if answer is None:
            return 0.0
        try:
            return scorer(answer)
        except Exception:  # the scorer of any generator, on any text
            return 0.0

    def _answer(self, text: str) -> str | None:
        if self.tag is None:
            return text.strip()
        _, opened, rest = text.rpartition(f"<{self.tag}>")
        inside, closed, _ = rest.partition(f"</{self.tag}>")
        return inside.strip() if opened and closed else None


class ReasoningGymExact(ReasoningGymScore):
    """1 where a problem's own generator accepts the answer as right, else 0.

    Rewards for a part of the answer, or for one with other words around it, can be earned without a right one, and a
    policy learns to: this rewards the whole answer only. The scorers of some generators give up to a hundredth less
    than 1 to their own answer, so more than 0.99 is right.

    Args:
        tag: See `ReasoningGymScore`.
    """

    def _scored(self, scorer: Callable[[str], float], answer: str | None) -> float:
        return float(super()._scored(scorer, answer) > 0.99)


@checked("")
class VerifiersScore:
    """The weighted sum of a task's own `@reward` methods and judges for a completion, for rows of `VerifiersTasks`.

    They score a trace that holds the messages of the prompt and of the completion: no tokens, no usage, and no
    runtime. Where a harness has played the task (`lit_rl.generation.VerifiersHarness`), the reward is the
    task's own there, and None where the episode failed. It is None too where a row has no task. Every reward, before
    its weight, and every metric is logged as `verifiers/<name>`.

    Scorers are awaited in the thread that asks. Those of verifiers limit math-verify's time by signals, which only the
    main thread gets: elsewhere it raises, and they take that for a wrong answer.

    Args:
        max_concurrent: Completions whose scorers are awaited at the same time.

    Raises:
        ConfigError: `max_concurrent` is below 1.
    """

    replaces_column = VERIFIERS_COLUMN
    """The column of a task, which the samples replace by its scores."""

    def __init__(self, max_concurrent: AtLeastOne = 32) -> None:
        self.max_concurrent = max_concurrent

    def check_columns(self, columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
        """Refuse tasks that cannot be scored from a completion alone.

        Args:
            columns: Of the data.
            given: Further arguments of rewards by name, from episodes.

        Raises:
            RewardError: a row holds no task.
            ConfigError: names the set and the parts that need more than a completion.
        """
        if VERIFIERS_SCORES in given or VERIFIERS_COLUMN not in columns:
            return
        first = dict[TaskSet, TaskRow]()
        for row in map(_task_row_of, filter(None, columns[VERIFIERS_COLUMN])):
            first.setdefault(row.taskset, row)
        for taskset, row in first.items():
            if found := obstacles_to_scoring(row):
                raise ConfigError(
                    f"reward=verifiers cannot score tasks of {taskset.id!r} by what the policy wrote alone: "
                    f"{'; '.join(found)}. Let a harness of verifiers play them: env=rollout_func with "
                    "lit_rl.generation.VerifiersHarness."
                )

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        verifiers: Sequence[str | None],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, list[Any]], None],
        verifiers_scores: Sequence[VerifiersScores | None] | None = None,
    ) -> list[float | None]:
        scores = verifiers_scores
        if scores is None:
            rows = [None if text is None else _task_row_of(text) for text in verifiers]
            scores = run_coroutine(self._scored(rows, prompts, completions))
        for each in scores:
            for name, value in {} if each is None else {**each["metrics"], **each["rewards"]}.items():
                log_metric(f"verifiers/{name}", value)
        log_extra(VERIFIERS_COLUMN, [None if each is None else json.dumps(each) for each in scores])
        return [None if each is None else each["reward"] for each in scores]

    async def _scored(
        self, rows: Sequence[TaskRow | None], prompts: Sequence[Any], completions: Sequence[Completion]
    ) -> list[VerifiersScores | None]:
        gate = asyncio.Semaphore(self.max_concurrent)

        async def scored(row: TaskRow | None, prompt: Any, completion: Completion) -> VerifiersScores | None:
            if row is None:
                return None
            async with gate:
                return await score_completion(row, _messages(prompt, "user"), _messages(completion, "assistant"))

        return await asyncio.gather(*map(scored, rows, prompts, completions))


def _messages(texts: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": texts}] if isinstance(texts, str) else list(texts)


def _task_row_of(text: Any) -> TaskRow:
    try:
        return TaskRow.read(text)
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(
            f"The column {VERIFIERS_COLUMN!r} has {text!r:.80}, which names no task. reward=verifiers scores rows of "
            "data=verifiers."
        ) from error
