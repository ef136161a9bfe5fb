"""Rewards that read the text of a completion: equality with an answer, format, length in characters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Number
from typing import Any, TypeVar

import numpy as np

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.ops.ranges import AtLeastOne
from lit_rl.rewards.contract import Completion, text_of

_Function = TypeVar("_Function", bound=Callable[..., Any])

# No tag inside a block, so that a second <think> or <answer> does not pass as text.
THINK_ANSWER = r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*"


def answer_text(answer: Any) -> str | None:
    """Return the `answer` column as text without outer blanks; None and NaN are None.

    A whole float or Decimal loses its ``.0``: tables with gaps turn integers into floats on the way here.

    Raises:
        RewardError: the answer is neither text nor a number.
    """
    if isinstance(answer, np.floating):
        answer = float(str(answer))  # the shortest digits that name it: 0.1, also in float32
    elif getattr(answer, "ndim", None) == 0:
        answer = answer.item()
    if answer is None or (isinstance(answer, Number) and answer != answer):
        return None
    if isinstance(answer, float | Decimal) and math.isfinite(answer):
        return str(int(answer)) if answer == int(answer) else format(Decimal(str(answer)).normalize(), "f")
    if not isinstance(answer, str | Number):
        raise RewardError(f"answer={answer!r:.80} is a {type(answer).__name__}; allowed are text, a number or None.")
    return str(answer).strip()


def golden_answers(answers: Sequence[Any], tidy: Callable[[str], str] = str) -> list[str | None]:
    """Return the `answer` column as texts that completions are compared with.

    Args:
        answers: Of each completion.
        tidy: Normalises an answer for comparison.

    Raises:
        RewardError: an answer is empty, which an empty completion would equal, or is neither text nor number.
    """
    golden = [answer_text(value) for value in answers]
    for place, text in enumerate(golden):
        if text is not None and not tidy(text):
            raise RewardError(
                f"answer {place} is empty ({answers[place]!r:.80}): whoever says nothing would be right. Fill it in, "
                "remove the row, or make it None (null in JSON) for a row that this reward is not to score."
            )
    return golden


def refuse_empty_answers(columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
    """Refuse rows with an empty answer before a run begins; see `LooksAtData`.

    Raises:
        RewardError: names the number of rows, and the first of them.
    """
    answers = columns.get("answer", ())
    empty = [row for row, answer in enumerate(answers) if isinstance(answer, str) and not answer.strip()]
    if empty:
        raise RewardError(
            f"the column 'answer' is empty in {len(empty)} of {len(answers)} rows, the first of which is row "
            f"{empty[0]}: a completion that says nothing would be right there. Fill it in, remove the rows, or make "
            "it null (in JSON) where the reward is not to score: an empty cell of a CSV file is an empty text."
        )


def warn_of_missing_answers(columns: Mapping[str, Sequence[Any]]) -> None:
    """Warn of rows without an answer, which rewards that compare with it do not score."""
    from lightning.pytorch.utilities import rank_zero_warn  # workers do without it

    answers = columns.get("answer", ())
    missing = [row for row, answer in enumerate(answers) if answer is None or answer != answer]
    if missing:
        rank_zero_warn(
            f"The column 'answer' holds nothing in {len(missing)} of {len(answers)} rows, the first of which is row "
            f"{missing[0]}: rewards that compare with it do not score them."
        )


def _check_answer_column(columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
    refuse_empty_answers(columns, given)
    warn_of_missing_answers(columns)


def compares_answers(function: _Function) -> _Function:
    """Let a reward function that compares with the `answer` column look at the data before a run begins."""
    function.check_columns = _check_answer_column  # pyright: ignore[reportFunctionMemberAccess]
    return function


@compares_answers
def exact_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Return 1 where the completion is the answer, blanks at both ends aside; else 0. None where the answer is None or
    NaN.

    Raises:
        RewardError: an answer is empty.
    """
    gold = golden_answers(answer)
    return [None if a is None else float(text_of(c).strip() == a) for c, a in zip(completions, gold, strict=True)]


@compares_answers
def contains(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Return 1 where the completion contains the answer; else 0. None where the answer is None or NaN.

    Raises:
        RewardError: an answer is empty, so that every completion would contain it.
    """
    gold = golden_answers(answer)
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


@checked("")
class Length:
    """1 up to a length, falling in a straight line to 0 at twice that length.

    Args:
        max_characters: The longest completion that still scores 1, in characters.
    """

    measures_length = True

    def __init__(self, max_characters: AtLeastOne) -> None:
        self.max_characters = max_characters

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **_: Any) -> list[float]:
        lengths = [len(text_of(completion)) for completion in completions]
        return [min(1.0, max(0.0, 2 - length / self.max_characters)) for length in lengths]


_OPEN, _CLOSE = "<think>", "</think>"


def reasoning_format(prompts: Sequence[Any], completions: Sequence[Completion], **_: Any) -> list[float]:
    """Return 1 where the completion starts with ``<think>``, opens no second one and closes it; else 0.

    The reply after ``</think>`` may be anything, nothing included. For an ``<answer>`` block too, take `RegexFormat`.
    """
    texts = [text_of(completion) for completion in completions]
    return [float(text.startswith(_OPEN) and _OPEN not in text[len(_OPEN) :] and _CLOSE in text) for text in texts]


def without_thoughts(text: str) -> str:
    """Return what stands behind the last ``</think>`` and before a ``<think>`` that is left open, without outer blanks.

    A chat template may have opened the thought before the completion begins. Other marks of thoughts are left.
    """
    return text.rpartition(_CLOSE)[2].partition(_OPEN)[0].strip()
