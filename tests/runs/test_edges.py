"""What goes wrong around a run, and must not go wrong silently."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import lightning as L
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs_helpers import SMALL, newest, rows
from safetensors.torch import load_file

from lit_rl.algorithms.evaluation.validation import EvaluationRows
from lit_rl.callbacks.display import console_table, escape_control, html_table, printable
from lit_rl.callbacks.loggers import TENSORBOARD_CELL, WriteFailures, log_tables, table_rows
from lit_rl.callbacks.output_files import _column_of_one_type
from lit_rl.callbacks.samples import Samples


@pytest.fixture
def nothing(tmp_path):
    (tmp_path / "nothing.py").write_text(
        "def never(prompts, completions, **columns):\n    return [None] * len(completions)\n"
    )
    return ["reward=function", f"reward.fn={tmp_path}/nothing.py:never"]


@pytest.mark.all
def test_rollouts_without_any_reward_move_no_weight_and_are_counted(nothing, train, tmp_path, tiny_dir):
    run = tmp_path / "run"
    assert train(*SMALL, *nothing, "trainer.max_steps=3", "optimizer.weight_decay=0.1", f"run_dir={run}") == 0
    trained, shipped = load_file(run / "hf" / "model.safetensors"), load_file(tiny_dir / "model.safetensors")
    assert all(torch.equal(trained[name], shipped[name]) for name in trained)
    assert [row["train/completions/unscored"] for row in rows(run) if "train/reward" in row] == [16.0] * 3
    assert "NaN" not in (run / "summary.json").read_text()  # which JSON has not


def test_many_rollouts_without_any_reward_end_the_run(nothing, train, tmp_path, capsys):
    assert train(*SMALL, *nothing, f"run_dir={tmp_path / 'run'}") == 4
    assert "never returned None for every completion of 8 rollouts" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.partial-*"))


@pytest.mark.all
def test_a_checkpoint_of_another_run_is_never_mixed_into_a_finished_one(train, tmp_path, capsys):
    for name in ("a", "b"):
        assert train(*SMALL, "trainer.max_steps=1", f"run_dir={tmp_path / name}") == 0
    before = (tmp_path / "a" / "metrics.jsonl").read_text()
    theirs = tmp_path / "b" / "checkpoints" / "step_00000001.ckpt"
    assert train(*SMALL, "trainer.max_steps=2", f"run_dir={tmp_path / 'a'}", f"ckpt_path={theirs}") == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == before
    # into a folder of its own it goes on from there
    assert train(*SMALL, "trainer.max_steps=2", f"run_dir={tmp_path / 'c'}", f"ckpt_path={theirs}") == 0
    assert newest(tmp_path / "c")["global_step"] == 2 and (tmp_path / "a" / "metrics.jsonl").read_text() == before


@pytest.mark.all
def test_tasks_write_beside_the_run_and_nothing_when_dry(train, tmp_path):
    run = tmp_path / "run"
    assert train(*SMALL, "trainer.max_steps=1", f"run_dir={run}") == 0
    before = (run / "metrics.jsonl").read_text(), (run / "summary.json").read_text()
    assert train(*SMALL, "task=eval", f"run_dir={run}", "ckpt_path=last", "trainer.fast_dev_run=true") == 0
    assert not list(run.glob("eval_*"))
    for task in ("eval", "test", "predict"):
        assert train(*SMALL, f"task={task}", f"run_dir={run}", "ckpt_path=last") == 0
    lines = [json.loads(line) for line in next(run.glob("predict_*/predictions.jsonl")).read_text().splitlines()]
    assert len(lines) == 2 and {"prompt", "completion", "reward", "answer"} <= lines[0].keys()
    for task in ("eval", "test"):
        (folder,) = run.glob(f"{task}_*")
        summary = json.loads((folder / "summary.json").read_text())
        assert any(name.endswith("/reward") for name in summary["metrics"]) and list((folder / "samples").iterdir())
    assert before == ((run / "metrics.jsonl").read_text(), (run / "summary.json").read_text())


def test_evaluation_lengths_are_checked_before_weights_are_loaded(train, tmp_path, capsys, tiny_dir):
    weightless = tmp_path / "weightless"
    shutil.copytree(tiny_dir, weightless)
    (weightless / "model.safetensors").unlink()
    assert train(*SMALL, f"model.name={weightless}", "eval.max_new_tokens=100000", f"run_dir={tmp_path / 'run'}") == 2
    error = capsys.readouterr().err
    assert "eval.max_new_tokens=100000" in error and "512" in error


@pytest.mark.all
def test_value_clipping_still_reports_the_norm(train, tmp_path):
    run = tmp_path / "run"
    clip = ["trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_val=0.001", "algo.group_size=8"]
    assert train(*SMALL, *clip, "trainer.max_steps=4", f"run_dir={run}") == 0
    assert max(row["train/grad_norm"] for row in rows(run) if "train/reward" in row) > 0.1


def test_an_unscored_completion_is_no_failure_in_pass_at_k():
    totals = torch.tensor([[1.0, float("nan")], [0.0, 1.0], [float("nan"), float("nan")]], dtype=torch.float64)
    assert EvaluationRows()._pass_at_k(totals) == {"pass@1": 0.75, "pass@2": 1.0}


@pytest.mark.parametrize(
    "values", [[10**30, 1], ["\ud800", "a"], [True, 0.5], [1, "a"], [{"role": "user"}], [[1, 2], [3]], [None, None]]
)
def test_any_column_of_samples_can_be_written(values, tmp_path):
    stored = _column_of_one_type(values)
    pyarrow.parquet.write_table(pyarrow.table({"column": stored}), tmp_path / "a.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pydict()["column"] == stored


def test_plain_columns_are_stored_as_they_are():
    for values in ([1, 2, None], [0.5, 1.5], ["a", None], [True, False]):
        assert _column_of_one_type(values) is values


class FakeTableLogger(L.pytorch.loggers.logger.Logger):
    """Stands for W&B's, which needs an account or its own server process: it keeps what `log_table` is given."""

    name, version = "fake", 0

    def __init__(self):
        super().__init__()
        self.tables = {}

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, params, *args, **kwargs): ...

    def log_table(self, key, columns, data, step):
        self.tables[key, step] = (columns, data)


def test_loggers_that_take_tables_get_one(capsys):
    table = {
        "prompt": ["a", "a", "b"],
        "completion": ["\x1b[31mred", "x", "y" * 5000],
        "reward": [1.0, 0.0, float("nan")],
        "advantage": [1.0, -1.0, 0.0],
    }
    logger = FakeTableLogger()
    rows = Samples(print=5)._pick(table)
    console_table("title", rows)
    broken, unwritten = SimpleNamespace(log_table=None), WriteFailures("Samples")
    with pytest.warns(UserWarning, match="Samples failed in the table 'samples' for SimpleNamespace"):
        log_tables(SimpleNamespace(loggers=[broken, logger]), "samples", table, 7, rows, unwritten)
    columns, data = logger.tables["samples", 7]
    assert columns == ["prompt", "completion", "reward", "advantage"]
    assert [row[1] for row in data] == ["\\x1b[31mred", "x", "y" * 5000], "every row, uncut"
    assert "\x1b[31mred" not in capsys.readouterr().out


@given(st.text(max_size=40), st.integers(2, 30))
def test_a_cell_is_cut_after_its_control_characters_are_escaped(text, longest):
    whole = escape_control(text)
    cut = whole if len(whole) <= longest else f"{whole[: longest // 2]} ... {whole[-longest // 2 :]}"
    assert printable(text, longest) == cut


def test_tensorboard_gets_every_row_with_its_long_cells_cut_in_the_middle():
    tests = [["x" * 20_000] * 10, "first" + "\x07" * 500_000 + "last", "short"]
    table = {"prompt": ["a", "b", "c"], "completion": ["y" * TENSORBOARD_CELL] * 3, "tests": tests}
    said: dict[str, str] = {}
    board = SimpleNamespace(
        experiment=SimpleNamespace(add_text=lambda key, text, global_step: said.update({key: text}))
    )
    log_tables(SimpleNamespace(loggers=[board]), "samples", table, 7, [], WriteFailures("Samples"))
    assert len(said["samples"]) < 7 * (TENSORBOARD_CELL + 100) and said["samples"].count("y" * TENSORBOARD_CELL) == 3
    assert "`first\\x07" in said["samples"] and "\\x07last`" in said["samples"] and "`short`" in said["samples"]
    assert table_rows(table)[0]["tests"] == str(tests[0]), "other loggers have them whole"


def test_tables_escape_what_a_model_wrote_and_live_with_unscored_rows(capsys):
    table = [
        {"prompt": "p", "completion": "<script>[bold]\x07", "reward": r, "advantage": 0.0} for r in (1.0, float("nan"))
    ]
    html = html_table(table)
    assert "<script>" not in html and "&lt;script&gt;" in html
    console_table("title", table)
    assert "[bold]" in capsys.readouterr().out and printable("a\x00b") == "a\\x00b"


@pytest.mark.all
def test_no_progress_bar_and_no_checkpoints_mean_what_they_say(train, tmp_path, capsys):
    run = tmp_path / "run"
    quiet = ["trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false"]
    assert train(*SMALL, *quiet, "trainer.max_steps=1", f"run_dir={run}") == 0
    output = capsys.readouterr().out
    assert "step 1/1" not in output and "Batches" not in output
    assert not (run / "checkpoints").exists() and (run / "hf" / "config.json").exists()


@pytest.mark.all
def test_a_run_without_validation_says_so_once_and_in_its_own_words(process, tmp_path):
    words = [*SMALL, "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}"]
    child = process(*words, "data.task.val_rows=0")
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 0, output
    assert output.count("There is no validation: data.task.val_rows=0.") == 1
    assert "Total length" not in output and not any("val/reward" in row for row in rows(tmp_path / "run"))
