from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lit_rl.core.errors import BackendError, ConfigError, DataError
from lit_rl.data.sources import load_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "02", "level": 1, "tags": ["a", "b"], "meta": {"x": 1.5}},
    {"prompt": 'quote " comma, tab\t', "answer": "", "level": 2, "tags": [], "meta": {"x": None}},
    {"prompt": "two\nlines \u2028 \u05d0 \U0001f600", "answer": "x", "level": None, "tags": None, "meta": None},
]
TEXT_ROWS = [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def write_jsonl(path: Path, rows=ROWS) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return path


def write_named_array(path: Path) -> Path:
    path.write_text('{"data": [\n' + ",\n".join(json.dumps(row) for row in ROWS) + "\n]}", "utf-8")
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=2), "utf-8")
    return path


def write_columns(path: Path) -> Path:
    """As pandas' `to_dict("list")` has it."""
    path.write_text(json.dumps({key: [row.get(key) for row in ROWS] for key in ROWS[0]}), "utf-8")
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def write_table(path: Path, delimiter: str) -> Path:
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(TEXT_ROWS)
    return path


def save_set(path: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


def save_dict(path: Path) -> Path:
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(str(path))
    return path


def fill_folder(path: Path) -> Path:
    path.mkdir()
    write_jsonl(path / "train.jsonl")
    write_jsonl(path / "test.jsonl", ROWS[:1])
    return path


WRITERS = {
    "a.jsonl": (write_jsonl, None, ROWS),
    "a.ndjson": (write_jsonl, None, ROWS),
    "array.json": (write_json, None, ROWS),
    "named.json": (write_named_array, None, ROWS),
    "columns.json": (write_columns, None, ROWS),
    "lines.json": (write_jsonl, None, ROWS),
    "a.parquet": (write_parquet, None, ROWS),
    "a.csv": (lambda path: write_table(path, ","), None, TEXT_ROWS),
    "a.tsv": (lambda path: write_table(path, "\t"), None, TEXT_ROWS),
    "saved": (save_set, None, ROWS),
    "saved_dict": (save_dict, "train", ROWS),
    "saved_dict_test": (save_dict, "test", ROWS[:1]),
    "folder": (fill_folder, "train", ROWS),
    "folder_slice": (fill_folder, "train[:2]", ROWS[:2]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_source_gives_the_same_rows(tmp_path, name):
    write, split, expected = WRITERS[name]
    rows = load_rows(write(tmp_path / name), split=split)
    assert list(rows) == expected
    assert len({rows.where(i) for i in range(len(rows))}) == len(expected)


def test_a_path_may_be_a_text_and_hold_spaces_and_signs(tmp_path):
    assert list(load_rows(str(write_jsonl(tmp_path / "a b=ü'.jsonl")))) == ROWS


def test_rows_know_their_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\nbroken\n\n{"a": 2}\n')
    rows = load_rows(path, on_bad_row="skip")
    assert [rows.where(i) for i in range(2)] == [f"{path}:2", f"{path}:5"]
    assert rows.skipped == 1
    array = tmp_path / "a.json"
    array.write_text('[{"a": 1}, 3, {"a": 2}]')
    rows = load_rows(array, on_bad_row="skip")
    assert [rows.where(i) for i in range(2)] == [f"{array}[0]", f"{array}[2]"]


def test_columns_of_different_kinds_in_different_lines_are_no_error_of_the_reader(tmp_path):
    mixed = [{"a": [1]}, {"a": {"b": 1}}, {"a": "x"}, {"c": 1}]
    assert list(load_rows(write_jsonl(tmp_path / "a.jsonl", mixed))) == mixed


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
BAD_FILES = {
    "cells.csv": (b"a,b\n1,2\n1,2,3\n", r"cells\.csv:3: 3 cells under 2"),
    "twice.csv": (b"a,a\n1,2\n", "duplicate column names: a, a"),
    "quote.csv": (b'a,b\n1,2\n1,"2\n1,2\n', r"quote\.csv:3: the row that begins here cannot be read"),
    "latin.csv": (b"a\n\xe9\n", "cannot be read.*save it as UTF-8"),
    "semicolons.csv": (b"prompt;answer\n1;2\n", r"csv:1: the header is one column, prompt;answer.* divided by ';'"),
    "tabs.csv": (b"prompt\tanswer\n1\t2\n", r"csv:1: .* divided by '\\t', and \.csv"),
    "commas.tsv": (b"prompt,answer\n1,2\n", r"tsv:1: .* divided by ',', and \.tsv"),
    "wide.csv": ("a,b\n1,2\n".encode("utf-16"), "is UTF-16: save it as UTF-8"),
    "wide.jsonl": ('{"a": 1}\n'.encode("utf-16"), "is UTF-16: save it as UTF-8"),
    "packed.jsonl": (gzip.compress(b'{"a": 1}\n'), "is packed by gzip: unpack it first"),
    "packed.jsonl.gz": (gzip.compress(b'{"a": 1}\n'), r"unknown kind of file '\.gz'.*Unpack it first"),
    "table.json": (b"PAR1\x15\x04\x15", r"is parquet: name it \.parquet"),
    "array.json": (b'[{"a": 1}, 7]', r"array\.json\[1\]: .*found 7"),
    "pretty.jsonl": (b'{\n "a": 1\n}', r"pretty\.jsonl:1: not valid JSON .*one object a line.*Name one value .*\.json"),
    "array.jsonl": (b'[{"a": 1}]', r"array\.jsonl:1: expected a JSON object.*Name one value .*array\.json:"),
    "pointer.jsonl": (POINTER, "is a pointer of Git LFS.*git lfs pull"),
    "pointer.json": (POINTER, "is a pointer of Git LFS.*git lfs pull"),
    "pointer.csv": (POINTER, "is a pointer of Git LFS.*git lfs pull"),
    "pointer.parquet": (POINTER, "is a pointer of Git LFS.*git lfs pull"),
    "page.jsonl": (b"\n<!DOCTYPE html>\n<html>", "is a web page: download the file itself"),
    "page.parquet": (b"<html>", "is a web page: download the file itself"),
    "tables.json": (b'{"train": [{"a": 1}], "test": [{"a": 2}]}', "several tables: train, test"),
    "twice.json": (b'[{"a": 1}, {"a": 1, "b": 2, "a": 3}]', r"twice\.json\[1\]: duplicate key 'a'"),
    "tables_twice.json": (b'{"data": [{"a": 1}],\n"data": [{"a": 2}]}', "duplicate key 'data'"),
    "number.json": (b"[\n1\n]", r"number\.json\[0\]: expected an object"),
    "cut.json": (b'[{"a": 1}, {"a"', r"not valid JSON .*column 16"),
    "cut_lines.json": (b'{"a": [\n{"a": 1}\n', r"cut_lines\.json:1: not valid JSON .*on_bad_row=skip"),
    "cut_line.json": (b'{"a": "b\n\n{"a": 1}\n{"a": 2}', r"cut_line\.json:1: not valid JSON .*on_bad_row=skip"),
    "cut_end.json": (b'{"data": [\n{"a": 1},\n{"a": 2}', r"cut_end\.json: not valid JSON .*array of objects"),
    "nan.json": (b'[{"a": NaN}]', "NaN"),
    "not.parquet": (b"PAR1 not at all", "cannot be read as parquet"),
    "empty.jsonl": (b"", "no rows"),
    "blank.json": (b"\n \n", "no rows"),
    "header.csv": (b"a,b\n", "no rows"),
    "none.json": (b"[]", "no rows"),
    "notes.txt": (b"hello", r"'\.txt'; allowed are \.jsonl"),
}


def test_a_bad_file_is_refused_by_name(tmp_path):
    for name, (content, message) in BAD_FILES.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            load_rows(tmp_path / name)
        assert name in str(caught.value)


@pytest.mark.parametrize("name, kept", [("cells.csv", 1), ("array.json", 1), ("twice.json", 1)])
def test_skip_counts_what_error_refuses(tmp_path, name, kept):
    (tmp_path / name).write_bytes(BAD_FILES[name][0])
    rows = load_rows(tmp_path / name, on_bad_row="skip")
    assert (len(rows), rows.skipped) == (kept, 1)


def test_all_rows_skipped_is_no_data(tmp_path):
    (tmp_path / "a.jsonl").write_text("x\ny\n")
    with pytest.raises(DataError, match=r"no rows \(2 bad rows were left out\)"):
        load_rows(tmp_path / "a.jsonl", on_bad_row="skip")


def test_a_missing_file_names_its_neighbour_and_never_goes_to_the_hub(tmp_path):
    write_jsonl(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"no such file.*Did you mean 'train\.jsonl'\?"):
        load_rows(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"folder .*nowhere does not exist"):
        load_rows(tmp_path / "nowhere" / "train.jsonl")
    with pytest.raises(DataError, match="no such file"):
        load_rows("absent_file.jsonl")


def test_splits_must_exist_and_be_named_where_there_are_several(tmp_path):
    path = save_dict(tmp_path / "saved")
    with pytest.raises(DataError, match=r"splits train, test, but data\.split is not set"):
        load_rows(path)
    with pytest.raises(DataError, match=r"data\.split='tset'.*Did you mean 'test'"):
        load_rows(path, split="tset")
    with pytest.raises(DataError, match="cannot be read as a data set"):
        load_rows(fill_folder(tmp_path / "folder"), split="validation")


def test_a_pipe_is_told_to_become_a_file(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl is a pipe"):
        load_rows(tmp_path / "a.jsonl")


def test_a_split_or_name_for_what_has_none_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"data\.split='train'"):
        load_rows(path, split="train")
    with pytest.raises(ConfigError, match=r"data\.name='main'"):
        load_rows(path, name="main")
    saved = save_set(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"data\.split"):
        load_rows(saved, split="train")
    with pytest.raises(ConfigError, match=r"data\.name"):
        load_rows(saved, name="main")


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read as a data set"):
        load_rows(tmp_path)


def test_an_unreachable_hub_is_the_environments_fault(monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(BackendError, match="offline.*hf download --repo-type dataset owner/absent") as caught:
        load_rows("owner/absent", split="train")
    assert caught.value.exit_code == 8
