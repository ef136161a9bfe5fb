"""A step takes what a small file has, where nobody said how many rows it takes."""

from __future__ import annotations

import pytest
from cli_helpers import refused, write_jsonl
from lit_rl.cli.small_files import step_of
from omegaconf import OmegaConf

PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "no"} for n in range(2)]
QUICK = ("trainer.accelerator=cpu", "logger=none", "run_dir=run", "trainer.max_steps=1")


def config(path, **data):
    own = {"path": str(path), "split": None, "map_row": None, "val_path": None, "val_split": None}
    own |= {"_target_": "lit_rl.data.datamodule.RolloutDataModule", "prompts_per_rollout": 32, "val_fraction": 0.05}
    rest = {"data": own | data}
    return OmegaConf.create({"task": "fit", "algo": {"minibatches": 1}, "trainer": {"devices": "auto"}} | rest)


@pytest.mark.parametrize(("rows", "algo"), [(PROMPTS, "grpo"), (PAIRS, "dpo")], ids=["prompts", "pairs"])
def test_two_rows_are_trained_on(command, cwd, rows, algo):
    path = write_jsonl(cwd / "mine.jsonl", rows)
    size, fits = ("data.prompts_per_rollout", 2) if algo == "grpo" else ("data.batch_size", 1)
    outcome = command("train", f"data.path={path}", f"algo={algo}", *QUICK)
    assert outcome.code == 0, outcome.err
    assert f"{size}={fits} ({path} has {len(rows)} rows, 1 of them held out for validation)" in outcome.out
    written = OmegaConf.load(cwd / "run" / "config.yaml")
    assert OmegaConf.select(written, size) == fits


def test_a_size_that_was_typed_stays(command, cwd):
    path = write_jsonl(cwd / "mine.jsonl", PROMPTS)
    outcome = command("train", f"data.path={path}", "data.prompts_per_rollout=32", *QUICK)
    refused(outcome, 3, "data.prompts_per_rollout=32, and 2 rows are left for training: rows 3, kept 2,", "2 or less")


@pytest.mark.parametrize(
    ("count", "data", "more", "fits"),
    [
        (3, {}, {}, 2),
        (3, {"val_fraction": 0.0}, {}, 3),
        (3, {"val_path": "held.jsonl"}, {}, 3),
        (8, {}, {"algo.minibatches": 2}, 6),
        (10, {}, {"algo.minibatches": 2, "trainer.devices": 2}, 8),
        (4, {}, {"trainer.devices": [0, 1]}, 2),
        (4, {}, {"trainer.devices": "2"}, 2),
        (4, {}, {"trainer.devices": "auto", "trainer.accelerator": "cpu"}, 3),
        (4, {"_target_": "mine.Data"}, {}, None),
        (33, {}, {}, 31),
        (34, {}, {}, None),
        (200, {}, {}, None),
        (1, {}, {}, None),
        (2, {}, {"algo.minibatches": 2}, None),
        (3, {"split": "train"}, {}, None),
    ],
)
def test_the_step_is_the_largest_that_the_rows_fill(tmp_path, count, data, more, fits):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"prompt": str(n)} for n in range(count)])
    made = config(path, **data)
    for key, value in more.items():
        OmegaConf.update(made, key, value)
    step = step_of(made, {"data.path"})
    assert (step and (step.key, step.rows)) == (("data.prompts_per_rollout", fits) if fits else None)


def test_a_launcher_says_how_many_share_a_step(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "mine.jsonl", PROMPTS + PROMPTS[:1])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    step = step_of(config(path), {"data.path"})
    assert step is not None and step.rows == 2


def test_a_data_module_of_ones_own_with_the_same_keys_is_let_alone():
    made = OmegaConf.create({"task": "fit", "data": {"_target_": "mine.Data", "path": "x", "batch_size": 32}})
    OmegaConf.set_struct(made, True)
    assert step_of(made, {"data.path"}) is None


def test_of_a_file_that_is_not_small_only_the_beginning_is_read(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "1"}\n' * 65 + "no row at all\n")
    assert step_of(config(path), {"data.path"}) is None
