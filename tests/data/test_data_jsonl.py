from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data.readers import rows_of_lines
from lit_rl.data.sources import load_rows

FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def write(path: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path.write_bytes(end.join(lines))
    return path


def sound(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows with their lines, up to the first bad one, which is raised."""
    for number, row in rows_of_lines(path):
        if isinstance(row, DataError):
            raise row
        yield number, row


def sorted_out(path: Path) -> tuple[list[Any], int]:
    """The sound rows with their lines, and the number of the others."""
    rows = list(rows_of_lines(path))
    kept = [pair for pair in rows if not isinstance(pair[1], DataError)]
    return kept, len(rows) - len(kept)


@FUZZ
@given(
    rows=st.lists(st.dictionaries(TEXT, VALUES, max_size=4), max_size=6),
    ascii_only=st.booleans(),
    bom=st.booleans(),
    crlf=st.booleans(),
    blanks=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_what_is_written_is_read_with_its_line_numbers(tmp_path, rows, ascii_only, bom, crlf, blanks):
    lines, numbers = [], []
    for row, blank in zip(rows, blanks):
        lines.extend([b"  "] * blank)
        lines.append(json.dumps(row, ensure_ascii=ascii_only).encode())
        numbers.append(len(lines))
    path = write(tmp_path / "x.jsonl", *lines, end=b"\r\n" if crlf else b"\n")
    if bom:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(sound(path)) == list(zip(numbers, rows))


@FUZZ
@given(data=st.binary(max_size=80) | st.lists(st.sampled_from([*b'{}[]":,\n\r1eNa"a"\\u0']), max_size=40).map(bytes))
def test_any_bytes_are_read_or_refused_and_skip_counts_what_error_refuses(tmp_path, data):
    path = write(tmp_path / "x.jsonl", data)
    try:
        kept, skipped = sorted_out(path)
    except DataError as error:  # the first bytes are those of another kind of file: it is refused whole
        assert "Its name says" in str(error)
        return
    assert all(isinstance(row, dict) for _, row in kept)
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert len(kept) + skipped == sum(bool(line.strip()) for line in lines)
    if skipped:
        with pytest.raises(DataError):
            list(sound(path))
    else:
        assert list(sound(path)) == kept


BAD = {
    "trailing comma": (b'{"a": 1,}', "not valid JSON"),
    "cut off": (b'{"a": "b', "not valid JSON"),
    "two objects": (b'{"a": 1} {"a": 2}', "not valid JSON"),
    "array": (b"[1, 2]", "found an array"),
    "text": (b'"a"', "found a string"),
    "null": (b"null", "found null"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "infinity": (b'{"a": -Infinity}', "-Infinity"),
    "float overflow": (b'{"a": 1e999}', "too large"),
    "latin-1": (b'{"a": "\xe9"}', "UTF-8 at byte 8"),
    "a key twice": (b'{"c": 1, "b": {"d": 1, "d": 2}, "c": 1}', "duplicate key 'c'"),
    "too deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
    "huge integer": (b'{"a": ' + b"9" * 5000 + b"}", "4300"),
}


@pytest.mark.parametrize("line, reason", BAD.values(), ids=list(BAD))
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, reason):
    path = write(tmp_path / "x.jsonl", b'{"a": 0}', b"", line, b'{"a": 3}')
    reader = sound(path)
    assert next(reader) == (1, {"a": 0})
    with pytest.raises(DataError, match=r"x\.jsonl:3: ") as caught:
        next(reader)
    assert reason in str(caught.value)
    assert sorted_out(path) == ([(1, {"a": 0}), (4, {"a": 3})], 1)
    rows = load_rows(path, on_bad_row="skip")
    assert ([*rows], rows.skipped, rows.where(1)) == ([{"a": 0}, {"a": 3}], 1, f"{path}:4")


def test_of_two_equal_keys_deep_in_a_row_the_last_one_counts(tmp_path):
    path = write(tmp_path / "x.jsonl", b'{"a": {"c": 1, "d": [{"e": 1, "e": 2}], "c": 3}}')
    assert list(sound(path)) == [(1, {"a": {"c": 3, "d": [{"e": 2}]}})]


def test_a_message_shows_80_characters_and_nothing_a_terminal_obeys(tmp_path):
    path = write(tmp_path / "x.jsonl", b"\x1b[2J" + b"x" * 76 + b"YYYY")
    with pytest.raises(DataError) as caught:
        list(sound(path))
    message = str(caught.value)
    assert "\x1b" not in message and message.endswith("\\x1b[2J" + "x" * 76)


def test_separators_inside_strings_do_not_end_a_line(tmp_path):
    row = {"a": "one\u2028two\u2029three\x85four\x0bfive"}
    path = write(tmp_path / "x.jsonl", json.dumps(row, ensure_ascii=False).encode())
    assert list(sound(path)) == [(1, row)]


def test_memory_is_bounded_by_the_longest_line(tmp_path):
    path = write(tmp_path / "x.jsonl", *[b'{"a": "' + b"x" * 1_000_000 + b'"}'] * 30)
    tracemalloc.start()
    try:
        assert sum(len(row["a"]) for _, row in sound(path)) == 30_000_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


def test_what_cannot_be_opened_and_unknown_policies_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        list(sound(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.on_bad_row='skipp'.*error, skip.*'skip'"):
        load_rows(tmp_path / "x.jsonl", on_bad_row="skipp")  # pyright: ignore[reportArgumentType]
