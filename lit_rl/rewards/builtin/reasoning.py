"""The scorers of reasoning-gym's generators as a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lit_rl.errors import RewardError
from lit_rl.reasoning import COLUMN, Problem
from lit_rl.rewards.completion import Completion, text_of


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
        problems = {source for source in reasoning_gym if source is not None}  # a group shares one
        scorers = {source: _scorer(source) for source in problems}
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


def _scorer(source: str) -> Callable[[str], float]:
    try:
        problem = Problem.read(source)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"The column {COLUMN!r} has {source!r:.80}, which names no problem. reward=reasoning_gym scores rows of "
            "data=reasoning_gym."
        ) from error
    return problem.scorer()
