"""Rewards for answers to mathematical questions: by exact numbers and tidied LaTeX, or by math-verify.

`math_answer` compares exact numbers where both sides are numbers, else normalised LaTeX. `math_accuracy` uses
the math-verify package, which also compares symbols, sets, intervals and matrices.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import threading
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import BackendError
from lit_rl.ops.ranges import AtLeastOne
from lit_rl.rewards.contract import Completion, text_of
from lit_rl.rewards.text_rewards import answer_text, golden_answers, refuse_empty_answers, warn_of_missing_answers

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)

# The exponent is short on purpose: Fraction("1e999999999") would fill the memory.
_UNSIGNED = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
_RATIO = re.compile(rf"([-+]?{_UNSIGNED})(?:/({_UNSIGNED}))?")
_FRAC = re.compile(rf"([-+]?)(\d*)\\frac\{{([-+]?{_UNSIGNED})\}}\{{([-+]?{_UNSIGNED})\}}")

_VULGAR = "[¼-¾⅐-⅞↉]"
"""Fractions that are one character."""

_MIXED = re.compile(r"\s*([-+−]?\d+\s+\d+/\d+)\s*\.?\s*")
"""An answer that is a mixed number such as 2 1/2. In running text, question 7 9/10 is the points of a question."""

_CHECKED_ANSWERS = 1000
"""Different answers that are checked before a run begins, at a tenth of a millisecond each."""

# In running text a minus after a word, a digit or a bracket is a dash or a subtraction; a final point ends a sentence.
_IN_TEXT = re.compile(
    r"(?:(?<![\w)\]}])[-−])?"
    rf"(?:\\[dtc]?frac\{{\d+\}}\{{\d+\}}|\d*{_VULGAR}"
    r"|\$?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?(?:/\d+)?)"
)

_TEXT = r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}"
_RULES = [
    (re.compile(r"\\[$%!,;: ]|\\(?:left|right)(?![a-zA-Z])|\^\{?\\circ\}?|[$€£¥%°~]"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(_VULGAR), lambda one: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", one[0]).split("⁄"))),
    (re.compile(r"^\s*([-+−]?\d+)\s+(\d+)/(\d+)\s*$"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))"), r"\\frac{\1\2}{\3\4}"),
    (re.compile("−"), "-"),
    (re.compile(rf"(?<=\S)\s*{_TEXT}(?:\^\{{?\d\}}?)?[\s.]*$"), ""),  # a unit; an answer that is only a word stays
    (re.compile(_TEXT), r"\1"),
    (re.compile(r"\s"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"^[a-zA-Z]=|\.$"), ""),
]


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}``, braces nested to any depth; None where there is none.

    One pass, so a completion of ten thousand open boxes costs no more than any other.
    """
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # where the content of an open box starts; None for any other brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.startswith("\\boxed"):
            opened.append(match.end())
        elif token == "{":
            opened.append(None)
        elif token == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[slice(*last)]


def final_answer(text: str) -> str | None:
    """Return the final answer of a text: its last box, else itself if it is a mixed number, else its last number,
    else None."""
    box = boxed(text)
    if box is not None:
        return box
    if mixed := _MIXED.fullmatch(text):
        return mixed[1]
    numbers = _IN_TEXT.findall(text)
    return numbers[-1] if numbers else None


def normalise(text: str) -> str:
    r"""Return one spelling for answers that differ in layout only: spaces, ``$``, ``%``, degrees, thousands
    separators, ``\left``, ``\dfrac``, ``½``, a mixed number such as ``2 1/2``, a trailing ``\text{unit}``, a leading
    ``x =``, a final point."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def number(text: str) -> Fraction | None:
    r"""Return the exact value of a normalised integer, decimal, ratio, ``\frac`` or mixed number; None for anything
    else."""
    try:
        if match := _RATIO.fullmatch(text):
            return Fraction(match[1]) / Fraction(match[2] or 1)
        if match := _FRAC.fullmatch(text):
            value = int(match[2] or 0) + Fraction(match[3]) / Fraction(match[4])
            return -value if match[1] == "-" else value
    except (ZeroDivisionError, ValueError):  # ValueError: more digits than Python converts
        return None
    return None


def same_answer(given: str, gold: str) -> bool:
    """Tell whether two answers are equal: as exact numbers where both are numbers (``0.5`` is ``1/2``, ``0.333`` is
    not ``1/3``), else as normalised text."""
    given, gold = normalise(given), normalise(gold)
    left, right = number(given), number(gold)
    return given == gold if left is None or right is None else left == right


def golden_part(answer: str) -> str:
    """Return the part of an `answer` column that a completion has to equal.

    It is the text after the last ``####``, which GSM8K puts before the answer of a worked solution, and of that the
    last box, if there is one.
    """
    answer = answer.rpartition("####")[2]
    box = boxed(answer)
    return (answer if box is None else box).strip()


def math_answer(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Return 1 where the final answer of the completion equals the `answer` column (see `golden_part`); else 0.

    0 also where the completion has neither box nor number; None where the answer is None or NaN.

    Before a run begins, a warning names answers that are no numbers: a completion has to put these in a box.

    Raises:
        RewardError: an answer is empty.
    """
    gold = golden_answers(answer, lambda text: normalise(golden_part(text)))
    return [None if a is None else _score(text_of(c), a) for c, a in zip(completions, gold, strict=True)]


def _score(text: str, gold: str) -> float:
    answer = final_answer(text)
    return float(answer is not None and same_answer(answer, golden_part(gold)))


def _check_math_answers(columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
    """Refuse empty answers, and warn of those that are right in a box only, or never; see `LooksAtData`.

    Raises:
        RewardError: an answer is empty, or is no text and no number.
    """
    from lightning.pytorch.utilities import rank_zero_warn  # workers do without it

    refuse_empty_answers(columns, given)
    warn_of_missing_answers(columns)
    answers = [answer_text(answer) for answer in columns.get("answer", ())]
    different = [text for text in dict.fromkeys(answers) if text is not None]
    needs = {text: _required_form(text) for text in different[:_CHECKED_ANSWERS]}
    looked_at = sum(text is None or text in needs for text in answers)
    among = f"{looked_at} answers" if looked_at == len(answers) else f"the {looked_at} answers that were looked at"
    for what in dict.fromkeys(filter(None, needs.values())):
        rows = [row for row, text in enumerate(answers) if text is not None and needs.get(text) == what]
        rank_zero_warn(
            f"math_answer: {what} {len(rows)} of {among}; the first is {answers[rows[0]]!r:.80} of row {rows[0]}."
        )


def _required_form(answer: str) -> str:
    """Return the requirement on a completion that repeats an answer word for word; empty where there is none."""
    part = golden_part(answer)
    if _score(f": {part}.", answer):
        return ""
    if _score(rf"\boxed{{{part}}}", answer):
        return "only the same text in \\boxed{...} equals"
    return "no completion can equal"


math_answer.check_columns = _check_math_answers  # pyright: ignore[reportFunctionMemberAccess]


_PERCENT = re.compile(r"(?<!\\)%")
_ANCHOR = re.compile(r"\$|\\boxed|\\\[|\\\(")
_COMMAND = re.compile(r"\\(?:text[a-z]*|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_PARSED_ANSWERS = 50
"""Answers that are parsed before a run begins, at up to a tenth of a second each."""


@checked("")
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

    def __init__(self, timeout: AtLeastOne = 5) -> None:
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
        looked_at = [*texts][:_PARSED_ANSWERS]
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
    answer = text if inside is None else inside
    rest = _COMMAND.sub("", answer)
    if not re.search(r"[\d$\\]", rest) and _WORD.search(rest):
        return normalise(answer)
    if not _ANCHOR.search(text) and not _WORD.search(_COMMAND.sub("", text)):
        return parse(f"${text}$", parsing_timeout=limit) or parse(text, parsing_timeout=limit)
    return parse(text, parsing_timeout=limit)


def _tidied(text: str) -> str:
    """Return the text with hyphens for minus signs, LaTeX percent signs, and no escaped dollar signs."""
    return _PERCENT.sub(r"\\%", text.replace("−", "-").replace("\\$", ""))


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
    answer = parse(_tidied(text), extraction_config=[latex], extraction_mode="first_match", parsing_timeout=limit)
    return float(verify(gold, answer, timeout_seconds=limit))


@functools.cache
def _shared() -> MathAccuracy:
    return MathAccuracy()


def math_accuracy(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Score by `MathAccuracy` with its defaults. Named by path, it runs in a worker process and cannot block the
    training."""
    return _shared()(prompts, completions, answer)


def _check_verified_answers(columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
    _shared().check_columns(columns, given)


math_accuracy.check_columns = _check_verified_answers  # pyright: ignore[reportFunctionMemberAccess]
