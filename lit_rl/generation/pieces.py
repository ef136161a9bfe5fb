"""The text of each token, for display. No training data is ever made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""The text of bytes that are no whole character."""


def pieces_of(rows: Sequence[Sequence[int]], tokenizer: Any) -> list[list[str]]:
    """Return the text of every token, special tokens by their names; the pieces of a row add up to its text.

    A character of several tokens stands at the last of them, and the others are empty.

    Args:
        rows: Token ids.
        tokenizer: Decodes them.
    """
    ids = sorted({int(each) for row in rows for each in row})
    alone = dict(zip(ids, _alone(ids, tokenizer)))
    return [_joined([int(each) for each in row], alone, tokenizer) for row in rows]


def _alone(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the text of each token, decoded behind a letter: some tokenizers drop the space that a text begins
    with."""
    (letter,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    before = _decoded([[letter]], tokenizer)[0]
    texts = _decoded([[letter, each] for each in ids], tokenizer)
    behind = [text.removeprefix(before) if text.startswith(before) else None for text in texts]
    plain = _decoded([[each] for each in ids], tokenizer) if None in behind else behind
    return [str(one if one is not None else other) for one, other in zip(behind, plain)]


def _joined(row: list[int], alone: dict[int, str], tokenizer: Any) -> list[str]:
    pieces = [alone[each] for each in row]
    start = 0
    while start < len(row):
        if UNFINISHED in pieces[start]:
            end = _end_of_character(row, start, tokenizer)
            if end - start > 1:
                text = _decoded([row[start:end]], tokenizer)[0]
                pieces[start:end] = [*[""] * (end - start - 1), text]
            start = end
        else:
            start += 1
    return pieces


LONGEST = 4
"""Most bytes of a character in UTF-8, and so most tokens of one."""


def _end_of_character(row: list[int], start: int, tokenizer: Any) -> int:
    """Return the end of the tokens that spell whole characters; the end of the first one where they spell none."""
    ends = range(start + 2, min(len(row), start + LONGEST) + 1)
    texts = _decoded([row[start:end] for end in ends], tokenizer)
    return next((end for end, text in zip(ends, texts) if UNFINISHED not in text), start + 1)


def _decoded(rows: list[list[int]], tokenizer: Any) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
