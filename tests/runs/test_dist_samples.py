"""Samples of two processes are those of one: every row of both, once, and whose it is."""

from __future__ import annotations

import csv
from pathlib import Path

import dist_equal
import pytest
from lightning.pytorch.loggers import CSVLogger

from lit_rl.callbacks import Samples, TokenSamples
from lit_rl.callbacks.output_files import list_tables

pytestmark = [pytest.mark.dist, pytest.mark.all]


def run(folder: Path, devices: int) -> None:
    """Two rollouts of 16 completions, and a validation of 3 prompts, which do not divide over two processes."""
    few = ["data.task.max_operand=5", "data.task.val_rows=3", "data.prompts_per_rollout=4", "algo.group_size=4"]
    few += ["algo.skip_zero_advantages=false"]
    module, data = dist_equal.parts(*few)
    callbacks = [Samples(print=0, every=1), TokenSamples(completions=16 // devices, every=1)]
    logger = CSVLogger(folder, name="csv", version="")
    trainer = dist_equal.trainer(folder, devices, max_steps=2, callbacks=callbacks, logger=logger)
    trainer.fit(module, datamodule=data)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.strategy.barrier()


def main(folder: Path) -> None:
    run(folder, 2)


BY_TOKENS = ["tokens_00000000", "tokens_00000001"]


def test_rows_of_all_ranks_are_in_the_files(two_ranks: Path, tmp_path: Path) -> None:
    run(tmp_path, 1)
    one, two = (
        {each.name: each.read().to_pydict() for each in list_tables(f / "samples")}
        for f in (tmp_path, two_ranks / "samples")
    )
    assert list(one) == list(two) == ["step_00000000", "step_00000001", *BY_TOKENS, "val_00000002_t0"]
    for name in one:
        assert list(one[name]) == list(two[name])
        for column in ("step", "prompt", "completion", "reward", *(() if name in BY_TOKENS else ("answer",))):
            assert one[name][column] == two[name][column], (name, column)
    assert two["step_00000000"]["rank"] == [0] * 8 + [1] * 8 and set(one["step_00000000"]["rank"]) == {0}
    assert two["val_00000002_t0"]["rank"] == [0, 1, 0]
    for key, tables in {"samples": ["step_00000000", "step_00000001"], "val_samples_t0": ["val_00000002_t0"]}.items():
        with (two_ranks / "samples" / "csv" / f"{key}.csv").open(newline="") as file:  # what every logger is given
            logged = list(csv.DictReader(file))
        for column in ("step", "rank", "prompt", "completion"):
            assert [row[column] for row in logged] == [str(v) for name in tables for v in two[name][column]], column
    for name in BY_TOKENS:
        assert two[name]["rank"] == [0] * 8 + [1] * 8
        for column in ("ids", "learned", "advantages", "logprobs", "entropies"):
            for ours, theirs in zip(one[name][f"tokens/{column}"], two[name][f"tokens/{column}"]):
                assert ours == pytest.approx(theirs, abs=1e-4), (name, column)
