"""Windows of a stream: every row once a pass, exact positions, and what is refused."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data import streams as windows_module
from lit_rl.data.encode import Encoder
from lit_rl.data.example_module import ExampleDataModule, PreferenceDataModule, SupervisedDataModule
from lit_rl.data.example_reader import ExampleReader
from lit_rl.data.loaders import ExampleLoader
from lit_rl.data.order import RolloutOrder
from lit_rl.data.splits import RowSource
from lit_rl.data.streams import RowStream, StreamLoader, Windows

TOKENIZER = make_tokenizer()


def row(name: str, i: int) -> dict[str, Any]:
    return {"prompt": f"{name}{i}:", "completion": "x" * (1 + i % 3)}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Files `20`, `23`, `7` of so many rows, whose prompts say which they are."""
    path = tmp_path_factory.mktemp("streams")
    for count in (7, 20, 23):
        write(path / f"{count}.jsonl", [row("abc"[count % 3], i) for i in range(count)])
    return path


def texts(**settings: Any) -> SupervisedDataModule:
    return SupervisedDataModule(**{"batch_size": 4, "stream_buffer": 8, "val_fraction": 0, **settings})


def windows_of(data: ExampleDataModule, kind: Any = "texts") -> Windows:
    """Those of a data module, as its Trainer's loader gets them."""
    data.prepare(TOKENIZER, kind)
    assert data._windows is not None
    return data._windows


def loader(windows: Windows, length: int = 30, **settings: Any) -> StreamLoader:
    return StreamLoader(windows, length=length, **{"group_by_length": True, **settings})


def told(batch: Any) -> tuple[Any, ...]:
    """All that a batch says: which texts, what is learned, and what its step counts."""
    tokens = batch.tokens
    parts = (tokens.input_ids, tokens.attention_mask, tokens.loss_mask)
    return batch.step, batch.slot, len(batch.whole), batch.totals, *(json.dumps(part.tolist()) for part in parts)


def prompts(batches: list[Any]) -> list[str]:
    found = []
    for batch in batches:
        for ids, mask in zip(batch.tokens.input_ids, batch.tokens.loss_mask):
            found.append(TOKENIZER.decode(ids[: int(mask.int().argmax())]))
    return found


# ---------------------------------------------------------------------------------------------------------- the rows


@given(buffer=st.integers(4, 45), count=st.sampled_from([7, 20, 23]), shuffle=st.booleans())
def test_every_row_comes_once_in_each_pass(folder, buffer, count, shuffle):
    """Windows laid end to end are the file again and again; a step takes rows of one window; each row is used once."""
    windows = windows_of(texts(path=str(folder / f"{count}.jsonl"), stream_buffer=buffer, batch_size=1))
    batches = list(loader(windows, 2 * count, shuffle=shuffle))
    seen = prompts(batches)
    name = "abc"[count % 3]
    for first in range(0, 2 * count, buffer):
        stretch = [f"{name}{i % count}:" for i in range(first, min(first + buffer, 2 * count))]
        window = seen[first : first + buffer]
        if len(window) == buffer:
            assert Counter(window) == Counter(stretch) and (shuffle or window == stretch)
    if buffer == count:
        assert Counter(seen[:count]) == Counter(seen[count:]) == dict.fromkeys(seen, 1)
    assert [batch.step for batch in batches] == list(range(2 * count))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_window_of_all_rows_is_the_whole_set_epoch_after_epoch(folder, shuffle, packing):
    common = {"path": str(folder / "23.jsonl"), "seed": 3, "packing": packing, "max_length": 24}
    windows = windows_of(texts(**common, stream_buffer=23))
    whole = texts(**common, stream_buffer=None)
    whole.prepare(TOKENIZER)
    data = whole.corpus.train
    epochs = ExampleLoader(data, RolloutOrder((len(data),), 4, 3, shuffle), accumulate=2, group_by_length=True)
    expected = [told(batch) for _ in range(3) for batch in epochs]
    assert len(expected) == 3 * 2 * (len(data) // 4)
    streamed = loader(windows, len(expected), seed=3, shuffle=shuffle, accumulate=2)
    assert [told(batch) for batch in streamed] == expected


def test_windows_are_shuffled_each_in_its_own_way_and_by_the_seed(folder):
    path = str(folder / "20.jsonl")
    orders = {
        seed: prompts(list(loader(windows_of(texts(path=path, stream_buffer=20)), 15, seed=seed))) for seed in (0, 1)
    }
    assert orders[0] != orders[1] and orders[0][:20] != orders[0][20:40]
    assert orders[0] == prompts(list(loader(windows_of(texts(path=path, stream_buffer=20)), 15, seed=0)))


def test_a_window_takes_of_each_source_its_share_by_weight_and_begins_a_short_one_again(folder):
    sources = [
        {"path": str(folder / "20.jsonl"), "weight": 3},
        {"path": str(folder / "7.jsonl"), "weight": 1},
    ]
    windows = windows_of(texts(sources=sources, stream_buffer=10, batch_size=5))
    assert windows.quotas in ([8, 2], [7, 3])
    batches = list(loader(windows, 8, shuffle=False))
    long, short = windows.quotas
    for number in range(4):
        window = prompts(batches[2 * number : 2 * number + 2])
        of_long = [name for name in window if name.startswith("c")]
        of_short = [name for name in window if name.startswith("b")]
        assert of_long == [f"c{i % 20}:" for i in range(number * long, (number + 1) * long)]
        assert of_short == [f"b{i % 7}:" for i in range(number * short, (number + 1) * short)]


def test_what_the_filters_take_is_counted_as_it_is_met(tmp_path):
    rows = [row("p", i) if i % 5 else {"prompt": f"p{i}:", "completion": " "} for i in range(40)]
    data = texts(path=write(tmp_path / "a.jsonl", rows), stream_buffer=10, max_dropped=0.2)
    windows = windows_of(data)
    met = data.report["train"]
    assert (met["rows"], met["empty"], met["kept"], met["left_over"]) == (10, 2, 8, 0)
    assert len(list(loader(windows, 5))) == 5
    met = data.report["train"]
    assert (met["rows"], met["empty"], met["kept"], met["left_over"], met["held_out"]) == (30, 6, 24, 0, 0)
    odd = texts(path=write(tmp_path / "b.jsonl", rows), stream_buffer=10, batch_size=3, max_dropped=0.2)
    assert len(list(loader(windows_of(odd), 5))) == 5
    assert odd.report["train"]["left_over"] == 6  # of each of three windows 8 - 2 x 3


def test_pairs_serve_verdicts_in_windows_too(tmp_path):
    rows = [{"prompt": f"p{i}:", "chosen": "yes", "rejected": "no"} for i in range(9)]
    data = PreferenceDataModule(path=write(tmp_path / "a.jsonl", rows), batch_size=4, stream_buffer=6, val_fraction=0)
    batches: list[Any] = list(loader(windows_of(data, "verdicts"), 3))
    assert [len(batch.rows) for batch in batches] == [4, 4, 4]
    assert Counter(prompts(batches)) == {f"p{i}:": 2 for i in range(6)}
    assert sum(int(batch.desirable.sum()) for batch in batches) == 6


# ---------------------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize("stop", range(1, 12))
def test_another_number_of_ranks_goes_on_with_the_next_whole_step(folder, stop):
    """One batch a step there, which two ranks share, and four here."""
    path = str(folder / "23.jsonl")
    theirs = loader(windows_of(texts(path=path)), 12, accumulate=1, world_size=2)
    for _, _ in zip(range(stop), theirs):
        pass
    ours, whole = (loader(windows_of(texts(path=path)), 48, accumulate=4) for _ in range(2))
    ours.load_state_dict(json.loads(json.dumps(theirs.state_dict())))
    assert [told(batch) for batch in ours] == [told(batch) for batch in whole][4 * stop :]


def test_the_run_can_be_made_longer_and_an_epoch_goes_on_where_the_last_one_stopped(folder):
    def fresh(length: int, **limit: Any) -> StreamLoader:
        return loader(windows_of(texts(path=str(folder / "23.jsonl"))), length, accumulate=2, **limit)

    seen = [told(batch) for batch in fresh(24)]
    short = fresh(10)
    begin = [told(batch) for batch in short]
    longer = fresh(24)
    longer.load_state_dict(short.state_dict())
    assert begin + [told(batch) for batch in longer] == seen
    # Lightning drops the iterator of an epoch of 3 batches inside a step; the next begins with a whole one.
    cut = fresh(24, limit=3)
    first = [told(batch) for _, batch in zip(range(3), cut)]
    state = cut.state_dict()
    second = [told(batch) for _, batch in zip(range(3), cut)]
    assert first == seen[:3] and second == seen[4:7]
    again = fresh(24, limit=3)
    again.load_state_dict(state)
    assert [told(batch) for _, batch in zip(range(3), again)] == second


def test_overfitting_sees_the_first_batches_again_and_again(folder):
    run = loader(windows_of(texts(path=str(folder / "20.jsonl"))), 30, shuffle=False, overfit=True, limit=3)
    epochs = [[told(batch) for _, batch in zip(range(3), run)] for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    again = loader(windows_of(texts(path=str(folder / "20.jsonl"))), 30, shuffle=False, overfit=True, limit=3)
    again.load_state_dict(run.state_dict())
    assert [told(batch) for _, batch in zip(range(3), again)] == epochs[0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_parts_of_two_ranks_make_the_step_of_one(folder, accumulate):
    def run(rank: int, world_size: int, slots: int) -> list[Any]:
        windows = windows_of(texts(path=str(folder / "23.jsonl")))
        return list(loader(windows, 9 * slots, accumulate=slots, rank=rank, world_size=world_size))

    ones, ranks = run(0, 1, 1), [run(rank, 2, accumulate) for rank in range(2)]
    for step, one in enumerate(ones):
        parts = [batch for rank in ranks for batch in rank[step * accumulate : (step + 1) * accumulate]]
        assert sorted(prompts(parts)) == sorted(prompts([one])) and {batch.step for batch in parts} == {step}
        assert {(b.totals.rows, b.totals.tokens, b.totals.shares) for b in parts} == {
            (one.totals.rows, one.totals.tokens, 2 * accumulate)
        }


def test_other_rows_are_refused_on_resume_unless_allowed(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [row("p", i) for i in range(30)]
    write(path, rows)
    run = loader(windows_of(texts(path=str(path))), 20)
    for _ in zip(range(5), run):
        pass
    state = run.state_dict()

    def resumed(**settings: Any) -> StreamLoader:
        allow = {"allow_changed": settings.pop("allow_changed", False)}
        again = loader(windows_of(texts(path=str(path), **settings)), 20, **allow)
        again.load_state_dict(state)
        return again

    resumed()
    for changed in ({"stream_buffer": 12}, {"batch_size": 8}):
        with pytest.raises(DataError, match="not the checkpoint's"):
            resumed(**changed)
    write(path, [*rows[:3], row("new", 0), *rows[4:]])  # before the window at hand: no batch to come depends on it
    resumed()
    write(path, [*rows[:20], row("new", 0), *rows[21:]])
    with pytest.raises(DataError, match="not the checkpoint's"):
        resumed()
    write(path, rows[1:])  # all rows moved
    with pytest.raises(DataError, match=r"not the checkpoint's.*data.allow_changed"):
        resumed()
    assert len(list(resumed(allow_changed=True))) == 15


def test_a_stream_and_a_whole_set_do_not_take_each_others_positions(folder):
    windows = windows_of(texts(path=str(folder / "20.jsonl")))
    whole = texts(path=str(folder / "20.jsonl"), stream_buffer=None)
    whole.prepare(TOKENIZER)
    epochs = ExampleLoader(whole.corpus.train, RolloutOrder((20,), 4), group_by_length=True)
    with pytest.raises(DataError, match=r"Remove data.stream_buffer"):
        loader(windows).load_state_dict(epochs.state_dict())
    with pytest.raises(DataError, match=r"Set data.stream_buffer to the value"):
        epochs.load_state_dict(loader(windows).state_dict())


# ---------------------------------------------------------------------------------------------------------- memory


def test_one_window_is_in_memory_at_a_time(folder, monkeypatch):
    """Examples of a window are gone before those of the next are made, also the first one that the module read."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = []
    make, read = windows_module.example_set, ExampleReader.read

    def watched_read(*args: Any) -> Any:
        most.append(len(alive))
        return read(*args)

    def watched_make(*args: Any) -> Any:
        data, sizes = make(*args)
        for example in data.examples:
            alive.add(example.texts[0])
        return data, sizes

    monkeypatch.setattr(ExampleReader, "read", watched_read)
    monkeypatch.setattr(windows_module, "example_set", watched_make)
    monkeypatch.setattr("lit_rl.data.example_set.Encoded.__hash__", lambda self: id(self), raising=False)
    data = texts(path=str(folder / "23.jsonl"))
    windows = windows_of(data)
    assert len(alive) == 8
    assert len(list(loader(windows, 20))) == 20
    assert len(most) == 10 and set(most) == {0} and len(alive) == 8


def test_the_first_window_is_there_again_for_who_asks(folder):
    data = texts(path=str(folder / "23.jsonl"))
    windows = windows_of(data)
    first = data.corpus.train.fingerprint
    assert data.corpus.train is data.corpus.train
    run = iter(loader(windows, 20))
    seen = [told(next(run)) for _ in range(7)]
    assert data.corpus.train.fingerprint == first and len(data.corpus.train) == 8
    seen += [told(batch) for batch in run]
    assert seen == [told(batch) for batch in loader(windows_of(data), 20)]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_validation_set_of_its_own_is_read_whole(folder):
    data = SupervisedDataModule(
        path=str(folder / "20.jsonl"), val_path=str(folder / "7.jsonl"), stream_buffer=8, batch_size=4
    )
    data.prepare(TOKENIZER)
    assert data.loss_names == [""] and len(data.corpus.val[""]) == 7 and data.report["val"]["overlap"] == 0
    assert data.longest_text == data.most_learned == 1024  # what may come, not what did


def test_a_source_without_a_row_in_a_window_is_refused(folder):
    sources = [{"path": str(folder / "20.jsonl"), "weight": 100}, {"path": str(folder / "7.jsonl"), "weight": 1}]
    with pytest.raises(ConfigError, match=r"data.sources\[1\].*data.stream_buffer"):
        texts(sources=sources).prepare(TOKENIZER)


def test_windows_that_do_not_fill_a_step_are_refused(tmp_path):
    blank = {"prompt": "p", "completion": ""}
    path = write(
        tmp_path / "a.jsonl", [*[row("p", i) for i in range(8)], *[blank] * 5, *[row("p", i) for i in range(3)]]
    )
    few = texts(path=path, max_dropped=1.0, batch_size=8)
    run = iter(loader(windows_of(few), 3))
    next(run)
    with pytest.raises(DataError, match=r"3 rows are left of window 2.*empty 5"):
        next(run)
    early = texts(path=write(tmp_path / "b.jsonl", [blank] * 5 + [row("p", i) for i in range(9)]), max_dropped=1.0)
    early.prepare(TOKENIZER, stage="predict")
    with pytest.raises(DataError, match="3 rows are left of the first window"):
        early.prepare(TOKENIZER)


def test_what_all_rows_of_a_source_share_is_asked_across_windows(tmp_path):
    """A format may not change between two windows, nor may rows that hold nothing pile up."""
    good = [row("p", i) for i in range(8)]
    other = texts(path=write(tmp_path / "a.jsonl", [*good, {"text": "t"}, *good]))
    with pytest.raises(DataError, match=r"a.jsonl:1 is prompt-completion.*a.jsonl:9 is language"):
        list(loader(windows_of(other), 10))
    resumed = loader(windows_of(texts(path=str(tmp_path / "a.jsonl"))), 10)
    state = resumed.state_dict()
    state["place"] |= {"number": 1, "marks": [[0, 8]]}
    with pytest.raises(DataError, match="Rows of several formats"):
        resumed.load_state_dict(state)
    dropped = [*good, *good, *[{"prompt": "p", "completion": ""}] * 4, *good]
    with pytest.raises(DataError, match=r"4 of 24 rows hold nothing.*data.max_dropped=0.1"):
        list(loader(windows_of(texts(path=write(tmp_path / "b.jsonl", dropped))), 10))


def test_a_bad_stretch_is_left_out_where_bad_rows_may_be(tmp_path):
    lines = [json.dumps(row("p", i)) for i in range(12)] + ["{"] * 4 + [json.dumps(row("p", i)) for i in range(12, 20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = texts(path=str(tmp_path / "a.jsonl"), on_bad_row="skip")
    assert len(list(loader(windows_of(data), 5))) == 5
    assert (data.report["train"]["bad"], data.report["train"]["rows"]) == (4, 24)
    with pytest.raises(DataError, match="a.jsonl:13"):
        list(loader(windows_of(texts(path=str(tmp_path / "a.jsonl"))), 5))


@pytest.mark.parametrize(
    "bad, words",
    [
        ('{"question": "p", "completion": 3}', r"short.jsonl:1.*completion is 3"),
        ("{", r"data.sources\[1\].*first window"),
    ],
    ids=["unsound", "unreadable"],
)
def test_a_source_may_have_nothing_to_give_for_a_window(tmp_path, bad, words):
    """Two rows of it a window: those of the second are bad, and the steps are of the other source. Not so at first."""
    lines = [json.dumps({"question": f"s{i}:", "completion": "x"}) for i in range(4)]
    other = write(tmp_path / "other.jsonl", [{"question": f"o{i}:", "completion": "x"} for i in range(20)])

    def run(*short: str) -> list[Any]:
        (tmp_path / "short.jsonl").write_text("\n".join(short))
        sources = [{"path": other, "weight": 6}, {"path": str(tmp_path / "short.jsonl"), "weight": 2}]
        data = texts(sources=sources, on_bad_row="skip", rename={"question": "prompt"})
        return list(loader(windows_of(data), 5, shuffle=False))

    seen = prompts(run(*lines[:2], bad, bad, *lines[2:]))
    assert [name for name in seen if name.startswith("s")] == ["s0:", "s1:", "s2:", "s3:"]
    assert Counter(seen[8:12]) == Counter(f"o{i}:" for i in range(6, 10))
    with pytest.raises(DataError, match=words):
        run(bad, bad, *lines)


def test_windows_need_no_data_module(folder):
    windows = Windows(
        [RowStream(RowSource(str(folder / "7.jsonl")))],
        7,
        (1.0,),
        Encoder(TOKENIZER),
        "texts",
        texts(path="x").options,
        7,
    )
    assert len(next(iter(loader(windows)))) == 7
    assert windows.formats == ("prompt-completion (text)",)
