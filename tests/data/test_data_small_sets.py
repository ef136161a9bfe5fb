"""Sizes and splits that nobody typed fit what is left of the rows, whatever they come from; what was done is said."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.order import fit_step_rows
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.splits import hold_out
from lit_rl.models import LanguageModel


@pytest.fixture(scope="module")
def tiny():
    return LanguageModel("tiny").tokenizer


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    logging.getLogger("lightning.pytorch").propagate = True
    return lambda: [record.getMessage() for record in caplog.records]


def questions(count, **more):
    return [{"prompt": f"{n}+1=", "answer": str(n + 1), **more} for n in range(count)]


@given(rows=st.integers(0, 120), unit=st.integers(1, 50))
def test_the_step_is_the_largest_multiple_that_the_rows_fill(rows, unit):
    fits = fit_step_rows(rows, 32, unit)
    if fits is None:
        assert rows < unit or (rows >= 32 and 32 % unit == 0)
    else:
        assert fits % unit == 0 and fits <= rows
        assert fits == unit > 32 or (fits <= 32 and fits + unit > min(rows, 32))


@pytest.mark.parametrize(
    ("made", "key", "size"),
    [
        (lambda: RolloutDataModule(questions(4)), "prompts_per_rollout", 3),
        (lambda: RolloutDataModule(questions(40)), "prompts_per_rollout", 32),
        (lambda: RolloutDataModule([*questions(3), {"prompt": " "}], val_fraction=0), "prompts_per_rollout", 3),
        (lambda: RolloutDataModule(questions(3), prompts_per_rollout=2), "prompts_per_rollout", 2),
        (lambda: SupervisedDataModule([{"text": str(n)} for n in range(5)], val_fraction=0), "batch_size", 5),
        (
            lambda: SupervisedDataModule([{"text": "a"}] * 3 + [{"text": ""}], val_fraction=0, max_dropped=1),
            "batch_size",
            3,
        ),
        (
            lambda: PreferenceDataModule([{"prompt": str(n), "chosen": "a", "rejected": "b"} for n in range(4)]),
            "batch_size",
            3,
        ),
    ],
)
def test_a_step_takes_what_filters_and_the_split_leave(tiny, made, key, size):
    data = made()
    data.prepare(tiny)
    assert getattr(data, key) == size
    data.prepare(tiny)
    assert getattr(data, key) == size


@pytest.mark.parametrize(
    ("ranks", "rows", "size"), [(1, 100, 32), (2, 100, 32), (3, 100, 30), (3, 20, 18), (3, 2, 32), (40, 100, 40)]
)
def test_ranks_share_a_step_that_nobody_sized(ranks, rows, size):
    data: Any = RolloutDataModule(questions(2))
    data.trainer = SimpleNamespace(
        lightning_module=SimpleNamespace(parts_of_step=1),
        distributed_sampler_kwargs={"rank": 0, "num_replicas": ranks},
    )
    data.fit_step_to(rows)
    assert data.prompts_per_rollout == size


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_and_several_sources_fit(tiny, tmp_path, suffix):
    import pandas as pd

    table, path = pd.DataFrame(questions(3)), tmp_path / f"mine.{suffix}"
    {
        "jsonl": lambda: table.to_json(path, orient="records", lines=True),
        "json": lambda: table.to_json(path, orient="records"),
        "csv": lambda: table.to_csv(path, index=False),
        "parquet": lambda: table.to_parquet(path),
    }[suffix]()
    one = RolloutDataModule(path=str(path), val_fraction=0)
    several = RolloutDataModule(sources=[{"path": str(path)}, {"path": str(path)}], val_fraction=0)
    for data, size in ((one, 3), (several, 6)):
        data.prepare(tiny)
        assert data.prompts_per_rollout == size


def test_a_stream_takes_steps_of_what_its_first_window_has(tiny, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n' * 5 + '{"text": ""}\n')
    data = SupervisedDataModule(path=str(path), stream_buffer=6, val_fraction=0, max_dropped=1)
    data.prepare(tiny)
    assert data.batch_size == 5
    assert data._windows is not None
    window = data._windows.at(data._windows.start)
    assert (len(window.data), window.end.steps, window.end.left_over) == (5, 1, 0)


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("count", [2, 20])
def test_of_rows_with_one_prompt_a_share_of_the_rows_is_held_out(fraction, count):
    rows = [("play", n) for n in range(count)]
    (train,), val = hold_out([rows], fraction, 0, lambda row: row[0])
    assert sorted(train + val) == rows
    assert len(val) == min(max(1, round(count * fraction)), count - 1)


@given(
    prompts=st.lists(st.integers(0, 5), min_size=1, max_size=30), fraction=st.floats(0.01, 0.99), cut=st.integers(0, 30)
)
def test_a_split_leaves_something_and_keeps_equal_prompts_together_where_there_are_two(prompts, fraction, cut):
    rows = list(enumerate(prompts))
    sources, val = hold_out([rows[:cut], rows[cut:]], fraction, 0, lambda row: str(row[1]))
    train = [row for source in sources for row in source]
    assert sorted(train + val) == rows and train
    assert val or len(rows) == 1
    if len(set(prompts)) > 1:
        assert not {prompt for _, prompt in train} & {prompt for _, prompt in val}


def test_constant_prompts_train_and_the_split_says_what_it_did(tiny, said):
    data = RolloutDataModule([{"prompt": "play", "seed": n} for n in range(40)])
    data.prepare(tiny)
    assert (sum(data.sets.sizes), data.report["val"]["kept"]) == (38, 2)
    assert "All rows have one prompt, so rows are held out and not prompts: 2 of them." in said()


def test_a_single_row_is_trained_on(tiny, said):
    data = SupervisedDataModule([{"text": "a"}])
    data.prepare(tiny)
    assert (data.batch_size, data.loss_names) == (1, [])
    assert "There is no validation: there is one row, and it is trained on." in said()


def test_more_rows_than_the_share_are_said(tiny, said):
    data = RolloutDataModule([{"prompt": str(n % 2), "answer": str(n)} for n in range(40)])
    data.prepare(tiny)
    assert any("val: 20 rows are held out, more than data.val_fraction=0.05 of them" in line for line in said())


def test_rows_that_are_left_out_or_cut_are_said_in_one_line_with_their_reasons(tiny, said):
    rows = [*questions(4), {"prompt": ""}, {"prompt": "9" * 99}, {"prompt": 3}]
    data = RolloutDataModule(rows, val_fraction=0, max_prompt_tokens=9, on_bad_row="skip")
    data.prepare(tiny)
    (line,) = [line for line in said() if line.startswith("train:")]
    assert line.startswith(
        "train: 4 of 7 rows are left: 1 not sound (data.on_bad_row=skip), 1 empty, 1 too long (data.max"
    )
    data = SupervisedDataModule([{"text": "1 2 3 4 5 6"}] * 2, val_fraction=0, max_length=4)
    data.prepare(tiny)
    assert any(line.startswith("train: 2 of 2 rows are left: 2 cut; the longest has") for line in said())


def test_nothing_is_said_of_rows_that_are_all_there(tiny, said):
    RolloutDataModule(questions(40), val_fraction=0).prepare(tiny)
    assert not [line for line in said() if line.startswith(("train:", "val:", "data."))]
