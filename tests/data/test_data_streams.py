"""Sources read from any row on, again and again, and never whole."""

from __future__ import annotations

import json
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pytest
from warm import run

from lit_rl.core.errors import BackendError, ConfigError, DataError
from lit_rl.data.readers import parse_object
from lit_rl.data.sources import load_rows
from lit_rl.data.splits import RowSource, SourceColumns
from lit_rl.data.streams import RowStream, SourcePosition

ROWS = [{"prompt": f"p{i}", "text": f"é\n{i}"} for i in range(600)]
"""More than two batches of a columnar file."""


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write(kind: str, folder: Path) -> Path:
    data = datasets.Dataset.from_list(ROWS)
    path = folder / kind
    if kind.endswith((".jsonl", ".json")):
        write_jsonl(path, ROWS)
    elif kind.endswith(".parquet"):
        data.to_parquet(path, batch_size=100)  # six row groups
    elif kind.endswith(".csv"):
        data.to_csv(path, index=False)
    elif kind == "saved":
        data.save_to_disk(path)
    else:
        path.mkdir()
        for number in range(3):
            write_jsonl(path / f"part{number}.jsonl", ROWS[number * 200 : (number + 1) * 200])
    return path


def stream(path: Path | str, on_bad_row: Any = "error", **source: Any) -> RowStream:
    return RowStream(RowSource(str(path), **source), on_bad_row)


def test_a_streamed_source_has_columns_of_its_own(tmp_path):
    own = SourceColumns("data.sources[0]", rename={"prompt": "question"}, columns=["question"])
    rows, after = stream(write("a.jsonl", tmp_path), own=own).take(SourcePosition(0, 2), 3)
    assert list(rows) == [{"question": "p2"}, {"question": "p3"}, {"question": "p4"}] and after == SourcePosition(0, 5)
    assert rows.where(0).endswith("a.jsonl:3")


@pytest.mark.parametrize("kind", ["a.jsonl", "a.json", "a.parquet", "a.csv", "saved", "files"])
def test_every_kind_of_source_gives_the_rows_of_the_whole_from_any_row_on_without_an_end(kind, tmp_path):
    path = write(kind, tmp_path)
    whole = load_rows(path)
    for skip in (0, 1, 99, 100, 257, 599, 600):
        rows = stream(path)
        first, after = rows.take(SourcePosition(0, skip), 150)  # goes on with the open file ...
        second, end = rows.take(after, 450)
        again, _ = rows.take(after, 450)  # ... and opens it again
        saved = SourcePosition(*json.loads(json.dumps([*vars(after).values()])))
        resumed, _ = stream(path).take(saved, 450)
        expected = [i % 600 for i in range(skip, skip + 600)]
        assert [*first, *second] == [whole[i] for i in expected]
        assert list(again) == list(resumed) == list(second)
        assert [first.where(0), second.where(449)] == [whole.where(expected[0]), whole.where(expected[-1])]
        assert end == SourcePosition(int(skip > 0), skip or 600) and after.rows == (skip + 150 - 1) % 600 + 1


def test_a_bad_row_is_one_of_those_taken_and_named_or_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 0}\n\n[1]\n{"a": 1}\n{"a":\n{"a": 2}\n')
    rows, mark = stream(path, "skip").take(SourcePosition(), 4)
    assert (list(rows), rows.skipped, mark) == ([{"a": 0}, {"a": 1}], 2, SourcePosition(0, 4))
    assert [rows.where(0), rows.where(1)] == [f"{path}:1", f"{path}:4"]
    rows, mark = stream(path, "skip").take(mark, 2)
    assert (list(rows), mark) == ([{"a": 2}, {"a": 0}], SourcePosition(1, 1))
    strict = stream(path)
    _, mark = strict.take(SourcePosition(), 1)
    for _ in range(2):  # who asks again does not get the row after it
        with pytest.raises(DataError, match=r"a.jsonl:3: .*an array"):
            strict.take(mark, 1)
    table = tmp_path / "a.csv"
    table.write_text("a,b\n1,2\n3\n5,6\n")
    rows, mark = stream(table, "skip").take(SourcePosition(0, 1), 2)
    assert (list(rows), rows.skipped, mark) == ([{"a": "5", "b": "6"}], 1, SourcePosition(0, 3))
    with pytest.raises(DataError, match="a.csv:3: 1 cells under 2 column names"):
        stream(table).take(SourcePosition(), 3)


def test_lines_that_are_skipped_are_not_parsed(tmp_path, monkeypatch):
    parsed: list[bytes] = []
    monkeypatch.setattr("lit_rl.data.readers.parse_object", lambda line: parsed.append(line) or parse_object(line))
    rows, _ = stream(write_jsonl(tmp_path / "a.jsonl", ROWS)).take(SourcePosition(3, 400), 5)
    assert [row["prompt"] for row in rows] == ["p400", "p401", "p402", "p403", "p404"] and len(parsed) == 5


def test_row_groups_that_are_skipped_are_not_read(tmp_path, monkeypatch):
    import pyarrow.parquet

    asked: list[list[int]] = []
    read = pyarrow.parquet.ParquetFile.iter_batches

    def watched(self: Any, **how: Any) -> Any:
        asked.append(how["row_groups"])
        return read(self, **how)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", watched)
    stream(write("a.parquet", tmp_path)).take(SourcePosition(0, 250), 10)
    assert asked == [[2, 3, 4, 5]]


def test_a_place_in_a_folder_is_found_by_its_file_and_not_by_counting_the_rows_of_earlier_ones(tmp_path):
    path = write("files", tmp_path)
    _, mark = stream(path).take(SourcePosition(), 450)
    write_jsonl(path / "part0.jsonl", ROWS[:100])
    rows, _ = stream(path).take(mark, 150)
    assert list(rows) == ROWS[450:] and rows.where(0) == f"{path}[450]"
    counted, _ = stream(path).take(SourcePosition(0, 450), 50)  # without the state of the data set
    assert list(counted) == ROWS[550:]


def test_a_shuffle_buffer_of_the_users_data_set_loses_no_row_on_resume():
    data = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=100)
    whole = [row["prompt"] for row in data]
    first, mark = RowStream(data).take(SourcePosition(), 250)
    rest, _ = RowStream(data).take(mark, 350)
    assert [row["prompt"] for row in (*first, *rest)] == whole and mark.state is None


def test_a_pass_over_a_source_is_told_once(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("lit_rl.data.streams.rank_zero_info", told.append)
    rows = stream(write_jsonl(tmp_path / "a.jsonl", ROWS[:10]))
    _, mark = rows.take(SourcePosition(), 10)
    assert told == []
    rows.take(mark, 35)
    assert len(told) == 1 and "a.jsonl: read to its end" in told[0]


def test_a_stream_goes_to_another_process_without_its_open_file(tmp_path):
    rows = stream(write_jsonl(tmp_path / "a.jsonl", ROWS))
    _, mark = rows.take(SourcePosition(), 7)
    ours, theirs = rows.take(mark, 3)[0], pickle.loads(pickle.dumps(rows)).take(mark, 3)[0]
    assert list(ours) == list(theirs) == ROWS[7:10]


@pytest.mark.all
def test_files_that_are_still_open_when_python_ends_are_no_noise(tmp_path):
    code = (
        "import sys; from lit_rl.data.splits import RowSource; from lit_rl.data.streams import SourcePosition, "
        "RowStream\n"
        "kept = [RowStream(RowSource(path)) for path in sys.argv[1:]]\n"
        "for stream in kept: stream.take(SourcePosition(), 3)"
    )
    paths = [str(write(kind, tmp_path)) for kind in ("a.jsonl", "a.csv", "a.parquet", "saved", "files")]
    done = run([sys.executable, "-c", code, *paths], timeout=120)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_memory_is_that_of_the_rows_asked_for_however_long_the_file_is(suffix, tmp_path):
    """Python's own memory while 50 rows at a time are taken: of a 20 times longer file about that of the short one."""
    peaks = []
    for count in (2_000, 40_000):
        rows = [{"text": f"{i} " + "x" * 60} for i in range(count)]
        path = tmp_path / f"{count}.{suffix}"
        if suffix == "jsonl":
            write_jsonl(path, rows)
        else:
            data = datasets.Dataset.from_list(rows)
            data.to_csv(path, index=False) if suffix == "csv" else data.to_parquet(path, batch_size=1000)
        del rows
        source, mark = stream(path), SourcePosition()
        source.take(mark, 50)
        tracemalloc.start()
        for _ in range(count // 50):
            mark = source.take(mark, 50)[1]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert mark == SourcePosition(0, count)
    assert peaks[1] < 2 * peaks[0]
    assert peaks[1] < 40_000 * 60 / 4, "not a quarter of the texts of the file"


def test_what_cannot_be_read_bit_by_bit_says_what_to_do(tmp_path, monkeypatch):
    array = tmp_path / "a.json"
    array.write_text(' \n[{"a": 1}]')
    with pytest.raises(ConfigError, match=r"data.stream_buffer.*a.json.*\.jsonl"):
        stream(array)
    with pytest.raises(ConfigError, match=r"train\[:10\].*whole split"):
        stream(write("files", tmp_path), split="train[:10]")
    with pytest.raises(DataError, match="Did you mean 'a.json'"):
        stream(tmp_path / "b.json")
    with pytest.raises(ConfigError, match="data.split"):
        stream(write("a.jsonl", tmp_path), split="train")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no rows"):
        stream(tmp_path / "empty.jsonl").take(SourcePosition(), 1)
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        stream(tmp_path / "broken.parquet").take(SourcePosition(), 1)


def test_a_hub_id_is_streamed_and_its_failures_are_told(tmp_path, monkeypatch):
    asked: list[dict[str, Any]] = []
    kept = datasets.Dataset.from_list(ROWS[:20]).to_iterable_dataset(num_shards=4)

    def load(path: str, name: str | None, **how: Any) -> Any:
        asked.append({"path": path, "name": name, **how})
        return kept

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows, mark = stream("owner/set", split="train", name="main").take(SourcePosition(0, 15), 8)
    assert asked == [{"path": "owner/set", "name": "main", "split": "train", "streaming": True}]
    assert list(rows) == [*ROWS[15:20], *ROWS[:3]] and mark == SourcePosition(1, 3)
    assert rows.where(0) == "owner/set[train][15]"

    def lost(i: int) -> Any:
        raise (ConnectionError if i == 0 else ValueError)("gone")

    for kind, error in ((0, BackendError), (1, DataError)):
        kept = datasets.IterableDataset.from_generator(lambda kind=kind: iter([lost(kind)]))
        with pytest.raises(error, match="owner/set"):
            stream("owner/set").take(SourcePosition(), 1)
