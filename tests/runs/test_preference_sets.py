"""Data sets made of rollouts: what is in them, that they load, and that a resumed run's are the uninterrupted one's."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs_helpers import SMALL

from lit_rl.callbacks import PreferenceSets
from lit_rl.callbacks.preference_sets import append_bytes
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.rollout import PromptBatch
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.models import LanguageModel

NAMES = ("pairs", "ranked", "verdicts")


def module(
    *groups: list[tuple[str, float]], prompts: Any = None, ended: Any = None, columns: Any = None
) -> SimpleNamespace:
    """What the callback reads of an algorithm whose last rollout had these completions and rewards."""
    prompts = prompts or [f"{i}+{i}=" for i in range(len(groups))]
    columns = columns or {"answer": [str(2 * i) for i in range(len(groups))]}
    flat = [member for group in groups for member in group]
    batch = PromptBatch(prompts, [[1]] * len(groups), columns, range(len(groups)), [0] * len(groups))
    samples = {
        "step": [7] * len(flat),
        "completion": [text for text, _ in flat],
        "reward": [reward for _, reward in flat],
        "ended": ended or [True] * len(flat),
    }
    return SimpleNamespace(
        scored=SimpleNamespace(batch=batch), samples=samples, tokenizer=LanguageModel("tiny").tokenizer, group_size=4
    )


def both(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["chosen"], row["rejected"]) for row in rows]


def test_best_against_worst_and_pairs_by_distance():
    rows = PreferenceSets(ranked_per_group=3).rows(
        module([("a", 0.5), ("b", 1.0), ("c", 0.0), ("d", 1.0)], [("e", 1.0), ("f", 1.0), ("g", 1.0), ("h", 1.0)])
    )
    assert rows["pairs"] == [
        {
            "prompt": "0+0=",
            "answer": "0",
            "chosen": "b",
            "rejected": "c",
            "chosen_reward": 1.0,
            "rejected_reward": 0.0,
            "step": 7,
        }
    ]
    assert both(rows["ranked"]) == [("b", "c"), ("d", "c"), ("a", "c")]  # apart by 1, 1, 0.5 (as b, a and d, a are)
    assert [(row["completion"], row["label"]) for row in rows["verdicts"]] == [
        *zip("abcd", (True, True, False, True)),
        *zip("efgh", (True,) * 4),
    ]


def test_margin_and_threshold():
    rollout = module([("a", 0.4), ("b", 0.0), ("c", 1.0), ("d", 0.9)])
    rows = PreferenceSets(margin=0.6, threshold=0.95, ranked_per_group=100).rows(rollout)
    assert both(rows["ranked"]) == [("c", "b"), ("d", "b"), ("c", "a")]
    assert [row["label"] for row in rows["verdicts"]] == [False, False, True, False]
    assert PreferenceSets(margin=1.1).rows(rollout)["pairs"] == []


def test_what_no_data_module_reads_and_what_was_cut():
    members = [("nul\0", 5.0), (" \n", -5.0), ("unscored", math.nan), ("cut", 2.0), ("good", 1.0), ("bad", 0.0)]
    rows = PreferenceSets().rows(module(members, ended=[True, True, True, False, True, True]))
    assert both(rows["pairs"]) == [("good", "bad")]
    assert [(row["completion"], row["label"]) for row in rows["verdicts"]] == [
        ("cut", False),
        ("good", True),
        ("bad", False),
    ]
    members = [("cut", 0.0), ("good", 1.0)]  # as the worse one it is of use
    rows = PreferenceSets(sets=["pairs"]).rows(module(members, ended=[False, True]))
    assert both(rows["pairs"]) == [("good", "cut")]
    assert PreferenceSets(sets=["pairs"]).rows(module([("same", 0.0), ("same", 1.0)]))["pairs"] == []


def test_messages_stay_messages_and_control_tokens_stay_out():
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    members = [("2<|im_end|>", 1.0), ("2", 0.9), ("3", 0.0)]
    columns = {"answer": ["2"], "label": [True], "margin": [3.0], "chosen": ["x"], "text": ["y"], "input_ids": [[1]]}
    rows = PreferenceSets().rows(module(members, prompts=[prompt], columns=columns))
    assert both(rows["pairs"]) == [("2", "3")]
    assert rows["pairs"][0]["prompt"] == prompt
    own = set(rows["pairs"][0]) - {"prompt", "chosen", "rejected", "chosen_reward", "rejected_reward", "step"}
    assert own == {"answer"}  # what would say that the row is something else is left out


def trainer(folder: Path) -> Any:
    return SimpleNamespace(
        default_root_dir=str(folder), fast_dev_run=False, world_size=1, is_global_zero=True, strategy=None
    )


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "datasets" / f"{name}.jsonl").read_text().splitlines()]


def test_no_row_comes_twice_and_the_files_are_bounded(tmp_path):
    first = module([("a", 1.0), ("b", 0.0), ("a", 1.0), ("c", 0.5)])
    callback, run = PreferenceSets(max_rows=4), trainer(tmp_path)
    callback.on_train_start(run, None)
    begin = SimpleNamespace(slot=0)
    for _ in range(2):
        callback.on_train_batch_end(run, first, None, begin, 0)
    callback.on_train_batch_end(run, module([("z", 1.0), ("y", 0.0)]), None, SimpleNamespace(slot=1), 1)  # no rollout
    assert [len(lines(tmp_path, name)) for name in NAMES] == [1, 3, 3]
    again = PreferenceSets(max_rows=4)  # as after a resume: what is known stands in the file
    again.on_train_start(run, None)
    with pytest.warns(UserWarning, match="max_rows=4"):
        again.on_train_batch_end(run, module([("a", 1.0), ("d", 0.0), ("e", 0.0)]), None, begin, 0)
    assert [row["completion"] for row in lines(tmp_path, "verdicts")] == ["a", "b", "c", "d"]
    assert both(lines(tmp_path, "pairs")) == [("a", "b"), ("a", "d")]


def test_an_append_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "datasets" / "pairs.jsonl"
    append_bytes(path, b"one\n")

    class Full:
        """A file on a disk that takes three bytes more."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            return self.file.write(data[:3])

    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: Full(real(self, *a, **k)))
    with pytest.raises(StorageError, match="no space"):
        append_bytes(path, b"two two\n")
    monkeypatch.undo()
    assert path.read_bytes() == b"one\n"
    path.write_bytes(b'{"prompt"')
    with pytest.raises(StorageError, match="damaged"):
        PreferenceSets().on_train_start(trainer(tmp_path), None)


def test_algorithms_that_give_none():
    with pytest.raises(ConfigError, match="generates none"):
        PreferenceSets().setup(trainer(Path()), SimpleNamespace(), "fit")
    """XPO's second completion is its opponent's."""
    ours: Any = SimpleNamespace(scored=None, opponent_writes=True, group_size=2)
    for one in (SimpleNamespace(scored=None, group_size=1), ours):
        with pytest.raises(ConfigError, match=r"sets=\[verdicts\]"):
            PreferenceSets().setup(trainer(Path()), one, "fit")
        PreferenceSets(sets=["verdicts"]).setup(trainer(Path()), one, "fit")


RUN = [*SMALL, "callbacks=preference_sets", "trainer.max_steps=8", "algo.minibatches=2", "eval.limit=1"]
"""Eight optimizer steps on four rollouts."""


@pytest.mark.all
def test_a_runs_files_load(train, tmp_path):
    whole = tmp_path / "whole"
    assert train(*RUN, f"run_dir={whole}") == 0
    assert {row["step"] for row in lines(whole, "verdicts")} == {0, 2, 4, 6}
    tokenizer = LanguageModel("tiny").tokenizer
    kinds = {"pairs": "pairs", "ranked": "pairs", "verdicts": "verdicts"}
    for name, kind in kinds.items():
        path = whole / "datasets" / f"{name}.jsonl"
        data = PreferenceDataModule(path=os.fspath(path), batch_size=1, val_fraction=0.0)
        data.prepare(tokenizer, kind)
        counts = data.report["train"]
        assert counts["kept"] == counts["rows"] == len(lines(whole, name)) > 0
        assert "answer" in data.corpus.train.prompts.columns


@pytest.mark.dist
@pytest.mark.all
def test_the_rows_of_two_processes_are_those_of_one(process, train, tmp_path):
    overrides = [*SMALL, "callbacks=preference_sets", "trainer.accelerator=cpu", "trainer.max_steps=1"]
    assert train(*overrides, f"run_dir={tmp_path / 'one'}") == 0
    both_ranks = process(*overrides, f"run_dir={tmp_path / 'two'}", "trainer.devices=2")
    said, _ = both_ranks.communicate(timeout=300)
    assert both_ranks.returncode == 0, said
    for name in NAMES:
        one, two = (sorted(map(str, lines(tmp_path / run, name))) for run in ("one", "two"))
        assert one == two
