"""Answers to mathematical questions, compared by the math-verify package: symbols, sets, intervals and matrices too."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.errors import BackendError, in_range
from lit_rl.rewards.builtin.math import boxed, golden_part, normalise
from lit_rl.rewards.builtin.text import answer_text
from lit_rl.rewards.completion import Completion, text_of

_PERCENT = re.compile(r"(?<!\\)%")
_ANCHOR = re.compile(r"\$|\\boxed|\\\[|\\\(")
_COMMAND = re.compile(r"\\(?:text[a-z]*|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_LOOKED_AT = 50
"""Answers that are parsed before a run begins, at up to a tenth of a second each."""


class MathAccuracy:
    """1 where the completion's answer equals the `answer` column as mathematics, by math-verify; else 0.

    The completion's answer is its box (several boxes make one set), else the LaTeX that follows "the answer is"; a
    number in plain text is no answer. An `answer` that is a word (three letters or more, no digit) is compared as text
    with the last box. None where the `answer` is None, NaN or empty, or cannot be parsed.

    The time limit is a signal, which only the main thread gets: in another thread there is none, and one warning.

    Args:
        timeout: Whole seconds that parsing or comparing one completion may take; beyond, it is worth 0.

    Raises:
        BackendError: math-verify is not installed.
        ConfigError: ``timeout`` is below 1.
    """

    def __init__(self, timeout: int = 5) -> None:
        in_range("timeout", timeout, low=1)
        if importlib.util.find_spec("math_verify") is None:
            raise BackendError(
                "The reward MathAccuracy needs math-verify. Install it with: pip install 'lit-rl[math]'; or take "
                "reward=math_answer, which compares numbers exactly and other answers as tidied LaTeX."
            )
        self.timeout = timeout
        self._warned = False

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
    ) -> list[float | None]:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it writes a line for each answer that takes too long
        limit = self._limit()
        golds: dict[str, Any] = {}  # a group shares one answer
        scores: list[float | None] = []
        for completion, value in zip(completions, answer, strict=True):
            gold = answer_text(value)
            if gold is None:
                scores.append(None)
                continue
            if gold not in golds:
                golds[gold] = _gold(gold, limit)
            scores.append(_compare(golds[gold], text_of(completion), limit))
        return scores

    def check_columns(self, columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
        """Warn of the first answers that do not earn 1 themselves, in a box; see `LooksAtData`."""
        from lightning.pytorch.utilities import rank_zero_warn  # workers do without it

        texts = dict.fromkeys(filter(None, map(answer_text, columns.get("answer", ()))))
        looked_at = [*texts][:_LOOKED_AT]
        limit = self._limit()
        boxes = {text: rf"\boxed{{{golden_part(text)}}}" for text in looked_at}
        if lost := [text for text, box in boxes.items() if not _compare(_gold(text, limit), box, limit)]:
            rank_zero_warn(
                f"MathAccuracy: {len(lost)} of the first {len(looked_at)} answers do not earn 1 themselves, in a box: "
                f"math-verify cannot read them, or reads them as something else. The first is {lost[0]!r:.80}."
            )

    def _limit(self) -> Any:
        if threading.current_thread() is threading.main_thread():
            return self.timeout
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"MathAccuracy runs outside the main thread, where timeout={self.timeout} cannot be kept: an answer "
                "such as a tower of powers may take forever.",
                stacklevel=4,
            )
        return None


def _gold(text: str, limit: Any) -> str | list[Any]:
    """Return the reference for a completion: a word, or the answer as parsed by math-verify (empty: unreadable).

    An answer without dollar signs or a box is taken as LaTeX as a whole: math-verify alone would look for a number in
    it, and read 4 out of ``(3, 4)`` and 10 out of ``10^{20}``.
    """
    from math_verify import parse

    text = _tidied(text.rpartition("####")[2])
    if text.count("$") % 2:  # of an amount of money; LaTeX comes between two
        text = text.replace("$", "")
    inside = boxed(text)
    if _is_word(text if inside is None else inside):
        return normalise(text if inside is None else inside)
    if not _ANCHOR.search(text) and not _WORD.search(_COMMAND.sub("", text)):
        return parse(f"${text}$", parsing_timeout=limit) or parse(text, parsing_timeout=limit)
    return parse(text, parsing_timeout=limit)


def _tidied(text: str) -> str:
    """Return the text with hyphens for minus signs, LaTeX percent signs, and no escaped dollar signs."""
    return _PERCENT.sub(r"\\%", text.replace("−", "-").replace("\\$", ""))


def _is_word(text: str) -> bool:
    rest = _COMMAND.sub("", text)
    return not re.search(r"[\d$\\]", rest) and bool(_WORD.search(rest))


def _compare(gold: str | list[Any], text: str, limit: Any) -> float | None:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    if isinstance(gold, str):
        box = boxed(text)
        return float(box is not None and normalise(box) == gold)
    if not gold:
        return None
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),  # pyright: ignore[reportCallIssue]
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    given = parse(_tidied(text), extraction_config=[latex], extraction_mode="first_match", parsing_timeout=limit)
    return float(verify(gold, given, timeout_seconds=limit))


@functools.cache
def _shared() -> MathAccuracy:
    return MathAccuracy()


def math_accuracy(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Score by `MathAccuracy` with its defaults. Named by path, it runs in a worker process and cannot block the
    training."""
    return _shared()(prompts, completions, answer)


def _check_answers(columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
    _shared().check_columns(columns, given)


math_accuracy.check_columns = _check_answers  # pyright: ignore[reportFunctionMemberAccess]
