"""The rewards of a task of verifiers as a reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rl.errors import ConfigError, RewardError, in_range
from lit_rl.own_loop import awaited
from lit_rl.rewards.completion import Completion
from lit_rl.tasksets import COLUMN, SCORES, Scores, TaskRow, TaskSet, obstacles, score


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

    replaces_column = COLUMN
    """The column of a task, which the samples replace by its scores."""

    def __init__(self, max_concurrent: int = 32) -> None:
        in_range("max_concurrent", max_concurrent, low=1)
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
        if SCORES in given or COLUMN not in columns:
            return
        first = dict[TaskSet, TaskRow]()
        for row in map(_read, filter(None, columns[COLUMN])):
            first.setdefault(row.taskset, row)
        for taskset, row in first.items():
            if found := obstacles(row):
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
        verifiers_scores: Sequence[Scores | None] | None = None,
    ) -> list[float | None]:
        scores = verifiers_scores
        if scores is None:
            rows = [None if text is None else _read(text) for text in verifiers]
            scores = awaited(self._scored(rows, prompts, completions))
        for each in scores:
            for name, value in {} if each is None else {**each["metrics"], **each["rewards"]}.items():
                log_metric(f"verifiers/{name}", value)
        log_extra(COLUMN, [None if each is None else json.dumps(each) for each in scores])
        return [None if each is None else each["reward"] for each in scores]

    async def _scored(
        self, rows: Sequence[TaskRow | None], prompts: Sequence[Any], completions: Sequence[Completion]
    ) -> list[Scores | None]:
        gate = asyncio.Semaphore(self.max_concurrent)

        async def scored(row: TaskRow | None, prompt: Any, completion: Completion) -> Scores | None:
            if row is None:
                return None
            async with gate:
                return await score(row, _messages(prompt, "user"), _messages(completion, "assistant"))

        return await asyncio.gather(*map(scored, rows, prompts, completions))


def _messages(said: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)


def _read(text: Any) -> TaskRow:
    try:
        return TaskRow.read(text)
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(
            f"The column {COLUMN!r} has {text!r:.80}, which names no task. reward=verifiers scores rows of "
            "data=verifiers."
        ) from error
