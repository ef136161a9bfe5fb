"""Packing loses no token, overfills no row, and lets no piece be predicted from the one before it."""

from __future__ import annotations

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.data_utils import _pack_bfd

from lit_rl.core.errors import ConfigError
from lit_rl.data.encode import PackedPiece, pack, pack_examples
from lit_rl.data.example_set import Encoded, Example

LENGTHS = st.lists(st.integers(0, 12), max_size=40)


def text(start: int, length: int, prompt: int = 0) -> Encoded:
    ids = list(range(start, start + length))
    return Encoded(ids, [i > 0 and i >= prompt for i in range(length)], min(prompt, length))


@settings(deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(12, 30))
def test_best_fit_keeps_texts_whole_and_rows_within_capacity(lengths, capacity):
    rows = pack(lengths, capacity, "best_fit")
    pieces = [piece for row in rows for piece in row]
    assert sorted(pieces) == [PackedPiece(i, 0, n) for i, n in enumerate(lengths) if n]
    fill = [sum(piece.stop for piece in row) for row in rows]
    assert all(0 < tokens <= capacity for tokens in fill)
    assert all(one + other > capacity for i, one in enumerate(fill) for other in fill[:i]), "no two rows fit into one"
    assert all(row == sorted(row) for row in rows) and rows == sorted(rows), "in the order of the data"


@settings(deadline=None)
@given(lengths=LENGTHS.filter(any), capacity=st.integers(12, 30))
def test_best_fit_needs_as_many_rows_as_trl(lengths, capacity):
    table = pyarrow.table({"input_ids": pyarrow.array([[0] * n for n in lengths], pyarrow.list_(pyarrow.int64()))})
    assert len(pack(lengths, capacity, "best_fit")) == len(_pack_bfd(table, capacity))


@settings(deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(1, 30))
def test_wrapped_is_the_concatenation_cut(lengths, capacity):
    rows = pack(lengths, capacity, "wrapped")
    tokens = [(p.text, i) for row in rows for p in row for i in range(p.start, p.stop)]
    assert tokens == [(text, i) for text, length in enumerate(lengths) for i in range(length)]
    fill = [sum(p.stop - p.start for p in row) for row in rows]
    assert all(n == capacity for n in fill[:-1]) and (not fill or 0 < fill[-1] <= capacity)


def test_a_known_packing():
    # 6 alone leaves 4, which 4 fills; 5 leaves 5, into which 3 and 2 go.
    assert pack([3, 6, 2, 5, 4], 10, "best_fit") == [
        [PackedPiece(0, 0, 3), PackedPiece(2, 0, 2), PackedPiece(3, 0, 5)],
        [PackedPiece(1, 0, 6), PackedPiece(4, 0, 4)],
    ]
    assert pack([3, 6, 2], 5, "wrapped") == [
        [PackedPiece(0, 0, 3), PackedPiece(1, 0, 2)],
        [PackedPiece(1, 2, 6), PackedPiece(2, 0, 1)],
        [PackedPiece(2, 1, 2)],
    ]


def test_no_piece_begins_with_a_learned_token():
    examples = [Example((text(0, 3),), "f[0]"), Example((text(10, 6, prompt=4),), "f[1]")]
    assert pack_examples(examples, 9, "best_fit") == [[text(0, 3), text(10, 6, prompt=4)]]
    first, second = pack_examples(examples, 7, "wrapped")
    assert first == [text(0, 3), Encoded([10, 11, 12, 13], [False] * 4, 4)]
    assert second == [Encoded([14, 15], [False, True], 0)], "14 was learned, and its context is gone"


@settings(deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(2, 30))
def test_only_the_first_tokens_of_second_parts_are_no_longer_learned(lengths, capacity):
    examples = [Example((text(100 * i, n),), "f") for i, n in enumerate(lengths)]
    pieces = [piece for row in pack_examples(examples, capacity, "wrapped") for piece in row]
    assert [i for piece in pieces for i in piece.ids] == [i for e in examples for i in e.texts[0].ids]
    lost = sum(sum(e.texts[0].learned) for e in examples) - sum(sum(piece.learned) for piece in pieces)
    assert lost == len(pieces) - sum(n > 0 for n in lengths)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ConfigError, match=r"data\.packing=best_fit .* text 1 has 9.*max_length=8"):
        pack([3, 9], 8, "best_fit")
    with pytest.raises(ConfigError, match=r"data\.max_length=0"):
        pack([3], 0, "wrapped")
