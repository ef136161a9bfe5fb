"""Row functions for well-known data sets: the hub's row in, `{"prompt": messages, "answer": text}` out.

Use one as `data.map_row`. A row's other columns are left out, and the reference solution with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lit_rl.core.errors import DataError

BOXED = "Reason step by step, and put the final answer in \\boxed{}."
"""The system prompt of these recipes."""


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of openai/gsm8k (2110.14168): the answer is the text after `####`, without thousands separators.

    Raises:
        DataError: a column is missing, or the solution gives no final answer.
    """
    prompt, (_, answer) = _chat(_text(row, "question")), _solved(row)
    return {"prompt": prompt, "answer": answer}


def gsm8k_solution(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of openai/gsm8k with its solution as the completion, for SFT before GRPO on `gsm8k`.

    The solution is as it comes, without the notes for a calculator (`<<48/2=24>>`), and with the answer in the box that
    the system prompt asks for and the reward `math_answer` reads.

    Raises:
        DataError: a column is missing, or the solution gives no final answer.
    """
    steps, answer = _solved(row)
    text = f"{re.sub('<<[^<>]*>>', '', steps).strip()}\n\\boxed{{{answer}}}"
    prompt = _chat(_text(row, "question"))
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": text}], "answer": answer}


def _solved(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the steps before `####` in a solution of GSM8K, and the answer after it."""
    solution = _text(row, "answer")
    steps, marker, final = solution.rpartition("####")
    answer = final.strip().replace(",", "")
    if not marker or not answer:
        raise DataError(f"recipes.gsm8k: the column 'answer' has no final answer after '####': {solution[-80:]!r}")
    return steps, answer


def math(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of MATH (2103.03874; HuggingFaceH4/MATH-500, DigitalLearningGmbH/MATH-lighteval).

    The answer is the column `answer` where there is one, otherwise what the last `\\boxed{}` of the solution holds.

    Raises:
        DataError: a column is missing, or the solution has no closed `\\boxed{}`.
    """
    problem = _text(row, "problem")
    answer = row["answer"] if isinstance(row.get("answer"), str) else last_boxed(_text(row, "solution"))
    if not answer:
        raise DataError(f"recipes.math: the column 'solution' has no \\boxed{{}}: {str(row.get('solution'))[-80:]!r}")
    return {"prompt": _chat(problem), "answer": answer}


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` or `\fbox{...}` of a text, braces inside it included.

    `\boxed 5` holds what follows up to white space, `$`, a full stop or a comma at its end. None where there is none.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if rest.startswith(" ") and not rest.lstrip().startswith("{"):
        word = rest.lstrip().split("$")[0].split(maxsplit=1)
        return word[0].rstrip(".,") if word else None
    inside = _braced(rest.lstrip())
    return last_boxed(text[:start]) if inside is None else inside


def _braced(text: str) -> str | None:
    """Return the inside of the braces that the text opens with; None where it does not, or they are never closed."""
    if not text.startswith("{"):
        return None
    depth, escaped = 0, False
    for i, character in enumerate(text):
        # An escaped brace is a character of the answer, \{1, 2\}; one after an escaped backslash (a line break) is not.
        was_escaped, escaped = escaped, character == "\\" and not escaped
        if was_escaped:
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:i].strip()
    return None


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": BOXED}, {"role": "user", "content": question.strip()}]


def _text(row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row.get(column), str):
        raise DataError(f"the recipe needs a text column {column!r}; columns found: {', '.join(row) or 'none'}.")
    return row[column]
