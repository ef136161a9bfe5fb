"""Runs that a server teaches: of two processes, a server that is lost, and going on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from runs_helpers import SMALL, assert_same_run, rows
from standin_server import standing_in
from standin_teacher import ModelAsTeacher

from lit_rl.models import LanguageModel

pytestmark = [pytest.mark.dist, pytest.mark.all]


@contextmanager
def teaching(folder: Path | None = None) -> Iterator[tuple[ModelAsTeacher, str]]:
    """A stand-in server of another model than the policy."""
    model = LanguageModel("tiny")
    teacher, generator = model.load(), torch.Generator().manual_seed(1)
    for parameter in teacher.parameters():
        parameter.data += 0.1 * parameter.detach().std() * torch.randn(parameter.shape, generator=generator)
    served = ModelAsTeacher(teacher, lambda text: model.tokenizer(text, add_special_tokens=False)["input_ids"])
    with standing_in(served) as server:
        yield served, f"{server.url}/v1"


def words(url: str, *more: str) -> list[str]:
    return [*SMALL, "algo/teacher=server", f"algo.teacher.base_url={url}", "trainer.accelerator=cpu", *more]


def test_two_processes_ask_for_their_own_rows_and_a_lost_server_ends_both_saved(process, tmp_path):
    two = ["trainer.devices=2", "trainer.max_steps=4", "algo.teacher.attempts=1", "algo/distillation=top_k"]
    two += ["algo.distillation.top_k=5"]

    def ended(run_dir: Path, *more: str) -> tuple[int, str]:
        child = process(*words(url, *two, *more), f"run_dir={run_dir}")
        output, _ = child.communicate(timeout=200)
        return child.returncode, output

    with teaching() as (served, url):
        code, output = ended(tmp_path / "whole")
        assert code == 0, output
        asked = len(served.rows)
        assert asked == 1 + 4 * 16  # the probe of rank 0, and each row once
        served.fails_from = asked + 1 + 2 * 16 + 8  # in the third rollout
        code, output = ended(tmp_path / "run")
        assert code == 5, output
        assert "500" in output and "ckpt_path=last" in output
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002.ckpt"]
        served.fails_from = float("inf")
        code, output = ended(tmp_path / "run", "ckpt_path=last")
        assert code == 0, output
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    said = [row for row in rows(tmp_path / "run") if "train/teacher/divergence" in row]
    assert len(said) == 4
    assert all(0 < row["train/teacher/mass"] <= 1.0 and row["train/teacher/silent"] == 0.0 for row in said)
    assert all(0 <= row["train/teacher/overlap"] <= 1.0 for row in said)


def test_a_column_of_the_data_names_the_teacher(train, tmp_path, capfd):
    data = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i}+1=", "answer": str(i + 1), "source": "x" if i % 2 else "math"} for i in range(16)]
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with teaching() as (served, url):
        run = [
            *SMALL[2:], "data=jsonl", f"data.path={data}", "data.val_fraction=0",
            "trainer.max_steps=1", "trainer.accelerator=cpu",
            "algo/advantage=none", "algo/teacher=by_column", "algo.teacher.column=source",
            "+algo/teacher@algo.teacher.teachers.math=server", f"algo.teacher.teachers.math.base_url={url}",
        ]  # fmt: skip
        assert train(*run, f"run_dir={tmp_path / 'refused'}") == 3
        assert "source='x'" in capfd.readouterr().err
        x = ["+algo/teacher@algo.teacher.teachers.x=model", "algo.teacher.teachers.x.model.name=digits"]
        assert train(*run, *x, f"run_dir={tmp_path / 'other'}") == 2  # another vocabulary
        x = ["+algo/teacher@algo.teacher.teachers.x=server", f"algo.teacher.teachers.x.base_url={url}"]
        assert train(*run, *x, f"run_dir={tmp_path / 'run'}") == 0, capfd.readouterr().err
    (row,) = [row for row in rows(tmp_path / "run") if "train/teacher/kl" in row]
    assert row["train/teacher/rows/math"] + row["train/teacher/rows/x"] == pytest.approx(1)
    assert len(served.rows) >= 16
