"""Several texts in one row, so that no padding is computed."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lit_rl.data.offline.example import Encoded, Example
from lit_rl.errors import ConfigError, in_range

Packing = Literal["none", "best_fit", "wrapped"]
PACKING = ("none", "best_fit", "wrapped")


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a text."""

    text: int
    start: int
    stop: int


def pack(lengths: Sequence[int], capacity: int, how: Literal["best_fit", "wrapped"]) -> list[list[Piece]]:
    """Return rows of pieces that hold every token once, at most `capacity` tokens a row. Deterministic in the lengths.

    `best_fit` splits no text: from the longest to the shortest, each goes into the fullest row that has room for it
    (best-fit decreasing, as in 2404.10830), in O(n log n). Rows stand in the order of their first text, and texts in a
    row in their own. `wrapped` puts the texts one after another and cuts after every `capacity` tokens; only the last
    row may be short. Texts without tokens are in no row.

    Args:
        lengths: Tokens of each text.
        capacity: Tokens of a row, at least 1.
        how: One of the two.

    Raises:
        ConfigError: `capacity` is below 1, or `best_fit` has a text that is longer.
    """
    in_range("data.max_length", capacity, low=1)
    return _best_fit(lengths, capacity) if how == "best_fit" else _wrapped(lengths, capacity)


def packed(examples: Sequence[Example], capacity: int, how: Literal["best_fit", "wrapped"]) -> list[list[Encoded]]:
    """Return the texts of the examples as pieces in rows; see `pack`.

    Pieces of a row must not see each other, so no piece's first token is learned. That holds for the second part of a
    text that `wrapped` cuts as well: it goes on without what stood before.

    Args:
        examples: Each has one text.
        capacity: Tokens of a row.
        how: `best_fit` or `wrapped`.

    Raises:
        ConfigError: as `pack`.
    """
    texts = [text for example in examples for text in example.texts]
    rows = pack([len(text) for text in texts], capacity, how)
    return [[_piece(texts[piece.text], piece.start, piece.stop) for piece in row] for row in rows]


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[Piece]]:
    rows: list[list[int]] = []
    # Rows by their free tokens (`room`), and the values of it that occur, sorted.
    by_room: dict[int, deque[int]] = {}
    rooms: list[int] = []
    for text in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[text]
        if length > capacity:
            raise ConfigError(
                f"data.packing=best_fit splits no text, and text {text} has {length} tokens where a row has "
                f"data.max_length={capacity}: raise it, set data.overlong to truncate or drop, or data.packing=wrapped."
            )
        if not length:
            continue
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = by_room[room].popleft()
            if not by_room[room]:
                del by_room[room], rooms[place]
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(text)
        room -= length
        if room:
            if room not in by_room:
                by_room[room] = deque()
                bisect.insort(rooms, room)
            by_room[room].append(row)
    ordered = sorted(sorted(row) for row in rows)
    return [[Piece(text, 0, lengths[text]) for text in row] for row in ordered]


def _wrapped(lengths: Sequence[int], capacity: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    room = 0
    for text, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                rows.append([])
                room = capacity
            stop = min(length, start + room)
            rows[-1].append(Piece(text, start, stop))
            room -= stop - start
            start = stop
    return rows


def _piece(text: Encoded, start: int, stop: int) -> Encoded:
    learned = [i > 0 and flag for i, flag in enumerate(text.learned[start:stop])]
    return Encoded(text.ids[start:stop], learned, min(max(0, text.prompt_tokens - start), stop - start))
