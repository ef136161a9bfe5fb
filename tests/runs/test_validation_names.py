"""A name of a validation is one decoding: in metrics.jsonl, in event files, and beside the samples that were scored."""

from __future__ import annotations

import json

import pyarrow.parquet
import pytest
from runs_helpers import SMALL, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SETTINGS = [*SMALL, "data.task.max_operand=9", "data.task.val_rows=24", "eval.limit=24", "trainer.max_steps=2"]


def test_what_the_eval_group_draws_and_what_the_training_draws_have_names_of_their_own(train, tmp_path):
    run = tmp_path / "run"
    every = "trainer.val_check_interval=1"  # one validation is in the middle of the run
    assert train(*SETTINGS, every, "logger=tensorboard", f"run_dir={run}") == 0
    scored = {
        (stage, step): sum(table) / len(table)
        for stage, temperature in (("val", "t0"), ("val_sampled", "t1"))
        for step in (0, 1, 2)
        if (path := run / "samples" / f"val_{step:08d}_{temperature}.parquet").is_file()
        for table in [pyarrow.parquet.read_table(path)["reward"].to_pylist()]
    }
    assert scored.keys() == {("val", 0), ("val", 1), ("val", 2), ("val_sampled", 0), ("val_sampled", 2)}
    assert scored["val", 0] != scored["val_sampled", 0], "these settings cannot tell the decodings apart"

    said = [(stage, row) for row in rows(run) for stage in ("val", "val_sampled") if f"{stage}/reward" in row]
    assert len(said) >= 5
    for stage, row in said:
        assert row[f"{stage}/reward"] == pytest.approx(scored[stage, row["step"]]), (stage, row["step"])

    drawn: dict[tuple[str, int], float] = {}
    for path in run.glob("events.*"):
        board = EventAccumulator(str(path))
        board.Reload()
        for stage in ("val", "val_sampled"):
            for event in board.Scalars(tag) if (tag := f"{stage}/reward") in board.Tags()["scalars"] else ():
                assert drawn.setdefault((stage, event.step), event.value) == event.value
    assert drawn == pytest.approx(scored)

    summary = json.loads((run / "summary.json").read_text())
    for when, step in (("before", 0), ("after", 2)):
        for decoding, stage in (("greedy", "val"), ("sampled at 1", "val_sampled")):
            assert summary[when][""][decoding]["reward"] == pytest.approx(scored[stage, step])
