"""Rewards that read plain text. Each is one line of arithmetic a completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lit_rl.errors import ConfigError, RewardError, in_range
from lit_rl.rewards.completion import Completion, text_of

# No tag inside a block, so that a second <think> or <answer> does not pass as text.
THINK_ANSWER = r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*"


def answer_text(answer: str | float | None) -> str | None:
    """The `answer` column as text without outer blanks; None stays None.

    A whole float loses its ``.0``: tables with gaps turn integers into floats on the way here.

    Raises:
        RewardError: the answer is neither text nor a number.
    """
    if answer is None:
        return None
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    if not isinstance(answer, str | int | float):
        raise RewardError(f"answer={answer!r:.80} is a {type(answer).__name__}; allowed are text, a number or None.")
    return str(answer).strip()


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1 where the completion is the answer, blanks at both ends aside; else 0. None where the answer is None."""
    gold = [answer_text(value) for value in answer]
    return [None if a is None else float(text_of(c).strip() == a) for c, a in zip(completions, gold, strict=True)]


def contains(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1 where the answer stands anywhere in the completion; else 0. None where the answer is None.

    Raises:
        RewardError: an answer is empty, so that every completion would contain it.
    """
    gold = [answer_text(value) for value in answer]
    if "" in gold:
        raise RewardError(f"answer {gold.index('')} is empty, which every completion contains. Use None to skip a row.")
    return [None if a is None else float(a in text_of(c)) for c, a in zip(completions, gold, strict=True)]


class RegexFormat:
    """1 where the whole completion matches a pattern, else 0.

    Args:
        pattern: Regular expression; ``.`` matches newlines too. Default: one ``<think>...</think>`` block, then one
            ``<answer>...</answer>`` block, and nothing else.
    """

    def __init__(self, pattern: str = THINK_ANSWER) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError, RecursionError) as error:
            raise ConfigError(f"pattern={pattern!r} is not a regular expression: {error}.") from error

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **_: Any) -> list[float]:
        return [float(self.pattern.fullmatch(text_of(completion)) is not None) for completion in completions]


class Length:
    """1 up to a length, falling in a straight line to 0 at twice that length.

    Args:
        max_characters: The longest completion that still scores 1, in characters.
    """

    def __init__(self, max_characters: int) -> None:
        in_range("max_characters", max_characters, low=1)
        self.max_characters = max_characters

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **_: Any) -> list[float]:
        lengths = [len(text_of(completion)) for completion in completions]
        return [min(1.0, max(0.0, 2 - length / self.max_characters)) for length in lengths]
