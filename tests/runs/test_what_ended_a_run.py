"""What is left of a run that failed: an exit code, one message, and error.json, which the next attempt removes."""

from __future__ import annotations

import builtins
import errno
import json
import mmap
import os
import re
import resource
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from failing_callbacks import Failing
from runs_helpers import SMALL, newest, rows, whole_step

from lit_rl import GRPO, AdamW, RolloutDataModule, Sampling
from lit_rl.algorithms.optim.broken_steps import LIMIT
from lit_rl.cli.messages import as_lit_rl_error, exit_code_of
from lit_rl.core.durable_files import PARTIAL
from lit_rl.core.errors import BackendError
from lit_rl.core.signals import ExitBySignal
from lit_rl.reports import run_files
from lit_rl.reports.run_page import status_of
from lit_rl.runs import train as train_command
from lit_rl.runs.run_dir import RunDir

pytestmark = pytest.mark.all

REWARD = """
def once(completions):
    once.calls = getattr(once, "calls", 0) + 1
    {}
    return [1.0] * len(completions)
"""


def test_an_error_is_written_down_until_the_run_goes_on(train, tmp_path: Path) -> None:
    folder, reward = tmp_path / "run", tmp_path / "mine.py"
    reward.write_text(REWARD.format("assert once.calls < 4, 'sk-abcdefghijklmnopqrstuvwxyz'"))
    every = ["reward=function", f"reward.fn={reward}:once", "callbacks.checkpoint.every_n_train_steps=1"]
    run = [*SMALL, "trainer.max_steps=6", "trainer.limit_val_batches=0", *every, f"run_dir={folder}"]
    assert train(*run) == 4
    said = json.loads((folder / "error.json").read_text())
    assert (said["error"], said["exit_code"], said["rank"]) == ("RewardError", 4, 0)
    assert whole_step(folder) == said["step"] > 0
    assert "Traceback" in said["traceback"] and "mine.py" in said["traceback"]
    assert "sk-abc" not in (folder / "error.json").read_text(), "secrets are redacted"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 4, said["step"])
    assert "before" in summary and "command" in summary, "beside what it said before"
    page = (folder / "report.html").read_text()
    assert 'class="failed"' in page and "RewardError" in page and "sk-abc" not in page
    reward.write_text(REWARD.format("pass"))
    assert train(*run, "ckpt_path=last") == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and "exit_code" not in summary
    assert not (folder / "error.json").exists() and 'class="failed"' not in (folder / "report.html").read_text()


def test_a_summary_that_cannot_be_written_hides_nothing(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what the message of an error alone tells, such as the system's own of a full disk, is its exit code there."""
    folder, reward, write = tmp_path / "run", tmp_path / "mine.py", RunDir.write_summary
    reward.write_text(REWARD.format("pass"))
    run = [*SMALL, "trainer.max_steps=1", "trainer.limit_val_batches=0", f"reward.fn={reward}:once", "reward=function"]
    full = OSError(errno.ENOSPC, "No space left on device", "hf")
    monkeypatch.setattr(train_command, "export", lambda *given: (_ for _ in ()).throw(full))
    assert train(*run, f"run_dir={folder}") == 7
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 7, 1)
    capsys.readouterr()

    def no_more(run_dir: RunDir, summary: dict[str, object]) -> None:
        if summary["status"] == "failed":
            raise full
        write(run_dir, summary)

    monkeypatch.setattr(RunDir, "write_summary", no_more)
    assert train(*run, f"run_dir={folder}", "ckpt_path=last") == 7
    assert json.loads((folder / "summary.json").read_text())["status"] == "running"
    assert "No space left on device" in capsys.readouterr().err
    error = folder / "error.json"
    assert json.loads(error.read_text())["exit_code"] == 7
    error.unlink()
    write(RunDir(folder), summary)
    assert status_of(run_files.RunFiles.of(folder)) == "failed", "also where there was no room for error.json"


def test_losses_that_are_no_numbers_end_the_command_with_the_code_of_numbers(
    process, train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three good steps, then as many broken ones as end a run; where the loss is mended, the run goes on."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    folder = tmp_path / "run"
    run = [*SMALL, "trainer.max_steps=9", "trainer.limit_val_batches=0", "allow_targets=[breaking_losses]"]
    run += [f"run_dir={folder}", "callbacks.checkpoint.every_n_train_steps=1"]
    monkeypatch.setenv("GOOD", "3")
    child = process(*run, "algo.loss._target_=breaking_losses.breaks_after")
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 6 and "Traceback" not in said, said
    assert f"Optimizer step {3 + LIMIT} is skipped, as the norm of its gradient is nan." in said
    assert f"It is the {LIMIT}th in a row" in said and "Lower optimizer.lr" in said
    error = json.loads((folder / "error.json").read_text())
    assert (error["error"], error["exit_code"], error["step"]) == ("NumericError", 6, 2 + LIMIT)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 6, 2 + LIMIT)
    assert not (folder / "hf").exists() and not list(folder.rglob(f"*{PARTIAL}*"))
    assert torch.load(folder / "bad_batch.pt", weights_only=True)["step"] == 3 + LIMIT
    weights = newest(folder)["state_dict"].values()
    assert all(bool(tensor.isfinite().all()) for tensor in weights)
    assert train(*run, "ckpt_path=last") == 0
    assert not (folder / "error.json").exists() and (folder / "hf").is_dir()


def test_a_page_that_cannot_be_written_ends_no_run(train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "report.html" / "mine").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("{algo: 1, data: 1, run_dir: 1, task: fit, trainer: 1}")  # a run's
    assert train(*SMALL, "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}") == 0
    assert "not written   report.html (StorageError: " in capsys.readouterr().out


def test_memory_that_runs_out_is_told_with_what_was_planned(
    train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel gives this process no more than so much."""
    status = Path("/proc/self/status").read_text()
    size = int(re.findall(r"VmSize:\s+(\d+) kB", status)[0]) * 1024
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    words = ["algo=sft", "data.batch_size=4096", "trainer.accumulate_grad_batches=1", "trainer.max_steps=1"]
    resource.setrlimit(resource.RLIMIT_AS, (size + 400_000_000, most))
    try:
        code = train(*words, "logger=none", "trainer.limit_val_batches=0", f"run_dir={tmp_path / 'run'}")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
    said = capsys.readouterr().err
    assert code == 8 and "Traceback" not in said, said
    assert re.search(r"Memory ran out: .*can't allocate memory.* Planned were 1\.\d+ GiB of .*activations", said)
    assert "Set one of: algo.micro_batch_size=2048 (it was 4096); model.gradient_checkpointing=true" in said


REFUSED = {
    "PyTorch": lambda: torch.empty(2**50, dtype=torch.uint8),
    "NumPy": lambda: np.empty(2**55, dtype=np.uint8),
    "the system": lambda: mmap.mmap(-1, 2**55),
}


@pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED)
def test_memory_that_cannot_be_had_is_known_by_whoever_says_so(ask) -> None:
    with pytest.raises((RuntimeError, MemoryError, OSError)) as refusal:
        ask()
    assert exit_code_of(refusal.value) == 8


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("the device has no room"), 8),
        (MemoryError(), 8),
        *((RuntimeError(said), 8) for said in ("CUBLAS_STATUS_ALLOC_FAILED", "could not create a memory object")),
        *((RuntimeError(said), 8) for said in ("could not create a primitive", "std::bad_alloc")),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: a"),
            8,
        ),
        (RuntimeError("unable to mmap 64 bytes from file </x>: Cannot allocate memory (12)"), 8),
        (RuntimeError("could not create a primitive descriptor for the convolution primitive"), 1),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 1),
        (RuntimeError("the device has no room"), 1),
    ],
    ids=str,
)
def test_memory_that_ran_out_is_known_by_the_class_of_the_error_or_by_its_words(error: Exception, code: int) -> None:
    """PyTorch's own class of it is a RuntimeError, which oneDNN and PyTorch raise for anything else too."""
    assert exit_code_of(error) == code
    assert code == 1 or str(error) in str(as_lit_rl_error(error))


@pytest.mark.parametrize(
    ("words", "step", "many"),
    [
        pytest.param(["trainer.limit_val_batches=0"], 2, 16, id="rollout"),
        pytest.param(["trainer.val_check_interval=2"], 2, 2, id="validation"),
        pytest.param(["task=eval", "generator.batch_size=2"], None, 2, id="eval"),
    ],
)
def test_memory_that_runs_out_in_a_decoding_names_what_is_decoded_at_once(
    train,
    tmp_path: Path,
    monkeypatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    step: int | None,
    many: int,
) -> None:
    """A training has saved what it has learned."""
    words = [*words, "generator._target_=failing_generators.FindsNoMemory", "allow_targets=[failing_generators]"]
    monkeypatch.setenv("FAILS_AT_STEP", str(step or 0))
    assert train(*SMALL, *words, f"run_dir={tmp_path / 'run'}") == 8
    said = capsys.readouterr().err
    assert re.search(rf"while completions were decoded, {many} at once: .*can't allocate memory.* Planned were ", said)
    assert "weights" in said and "key-value cache" in said and ("optimizer " in said) == (step is not None), said
    assert f"Set one of: generator.batch_size={many // 2} (it was {many};" in said
    assert step is None or whole_step(tmp_path / "run") == step


def test_memory_that_runs_out_in_a_validation_names_its_rows_and_the_models(
    train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["algo=dpo", "data.val_batch_size=6", "logger=none", "allow_targets=[hanging_callbacks]"]
    words += ["+callbacks.mine._target_=hanging_callbacks.FindsNoMemory", "trainer.max_steps=1"]
    assert train(*words, f"run_dir={tmp_path / 'run'}") == 8
    said = capsys.readouterr().err
    assert re.search(
        r"while rows were scored, 6 a batch: .*can't allocate memory.* Models take .*weights .*reference", said
    )
    assert "optimizer " not in said and "Set one of: data.val_batch_size=3 (it was 6); shorter" in said


def test_lit_rl_fit_tells_what_was_planned_too(train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model=SFT --model.model=tiny --model.sampling.max_new_tokens=6 --data.batch_size=64"
    words += " --data.task=lit_rl.data.tasks.AdditionText --trainer.max_steps=1 --trainer.limit_val_batches=0"
    words += " --trainer.logger=false --trainer.enable_checkpointing=false --trainer.accelerator=cpu"
    words += " --allow_targets=[hanging_callbacks] --trainer.callbacks=hanging_callbacks.FindsNoMemory"
    assert train("fit", *words.split(), f"--trainer.default_root_dir={tmp_path / 'run'}") == 8
    said = capsys.readouterr().err
    assert re.search(
        r"can't allocate memory.* Planned were .* of .*weights .*optimizer .*activations", said, re.DOTALL
    ), said
    assert "Set one of: algo.micro_batch_size=32 (it was 64)" in said and "Traceback" not in said


FAILS = ["+callbacks.bad._target_=failing_callbacks.Failing", "allow_targets=[failing_callbacks]"]
STEPS = ["trainer.max_steps=4", "trainer.val_check_interval=2"]


@pytest.mark.parametrize("hook", ["on_train_end", "teardown", "on_save_checkpoint", "the last validation"])
def test_what_was_learned_outlives_an_error_behind_the_last_step(train, tmp_path, capsys, hook) -> None:
    """Of a callback of the user's: the model is written, and the checkpoint, if need be without that callback."""
    folder = tmp_path / "run"
    bad = [*FAILS, f"+callbacks.bad.hook={hook}"]
    if hook == "the last validation":
        bad = ["+callbacks.bad._target_=failing_callbacks.FailingAtTheEnd", FAILS[1]]
    assert train(*SMALL, *STEPS, *bad, f"run_dir={folder}") == 1
    said = capsys.readouterr().err
    assert "ValueError: mine in" in said and "Nothing that was learned in 4 steps is lost" in said
    assert [path.name for path in (folder / "checkpoints").glob("*.ckpt")] == ["step_00000004.ckpt"]
    assert json.loads((folder / "summary.json").read_text())["hf_step"] == 4
    if hook == "on_train_end":
        kept = (folder / "hf" / "model.safetensors").read_bytes()
        assert train(*SMALL, *STEPS, f"run_dir={tmp_path / 'whole'}") == 0
        assert kept == (tmp_path / "whole" / "hf" / "model.safetensors").read_bytes()


def test_a_run_goes_on_from_the_step_behind_which_a_callback_failed(train, tmp_path) -> None:
    """With the weights and the record of a run in which nothing failed; nothing was due to be saved before.

    Of other hooks: `test_in_python_too_a_run_goes_on_from_where_an_error_ended_it`.
    """
    folder, whole, hook, step = tmp_path / "run", tmp_path / "whole", "on_validation_end", 2
    run = [*SMALL, *STEPS, "callbacks.checkpoint.every_seconds=1000"]
    assert train(*run, *FAILS, f"+callbacks.bad.hook={hook}", f"+callbacks.bad.step={step}", f"run_dir={folder}") == 1
    assert [path.name for path in (folder / "checkpoints").glob("*.ckpt")] == [f"step_{step:08d}.ckpt"]
    assert train(*run, f"run_dir={folder}", "ckpt_path=last") == 0 and train(*run, f"run_dir={whole}") == 0
    assert rows(folder) == rows(whole)
    first, second = ((each / "hf" / "model.safetensors").read_bytes() for each in (folder, whole))
    assert first == second


@pytest.mark.parametrize(("error", "code", "words"), [("ValueError", 1, "mine in"), ("no memory", 8, "Planned were ")])
def test_the_model_is_kept_where_a_callback_fails_within_a_step(train, tmp_path, capsys, error, code, words) -> None:
    """What is counted within a step belongs to no checkpoint; the weights are those of the steps before."""
    folder = tmp_path / "run"
    bad = [*FAILS, "+callbacks.bad.hook=on_before_optimizer_step", "+callbacks.bad.step=2"]
    bad += [f"+callbacks.bad.error={error}", "callbacks.checkpoint.every_seconds=1000"]
    assert train(*SMALL, *STEPS, *bad, f"run_dir={folder}") == code
    said = capsys.readouterr().err
    assert "The weights of 2 steps are kept as the model" in said and "no checkpoint of that step is" in said
    assert words in said and not list((folder / "checkpoints").glob("*"))
    assert json.loads((folder / "summary.json").read_text())["hf_step"] == 2
    assert (folder / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("hook", "error", "code", "said"),
    [
        ("on_train_batch_end", "SystemExit", 1, "The training ended at step 2 by SystemExit(None), raised in"),
        ("on_train_batch_end", "SystemExit", 3, "The training ended at step 2 by SystemExit(3), raised in"),
        ("on_train_batch_end", "KeyboardInterrupt", 130, "The training ended at step 2 by KeyboardInterrupt, raised"),
        ("on_train_batch_start", "StopIteration", 1, "that the training calls (a callback, a loss, a logger) raised"),
    ],
)
def test_an_exit_in_the_middle_is_an_error_and_is_saved(train, tmp_path, capsys, hook, error, code, said) -> None:
    """Lightning ends an epoch at a StopIteration as if there were no more data, and `sys.exit()` would end with 0."""
    bad = [*FAILS, f"+callbacks.bad.hook={hook}", "+callbacks.bad.step=2", f"+callbacks.bad.error={error}"]
    bad += ["+callbacks.bad.code=3"] if code == 3 else []
    folder, every = tmp_path / "run", "callbacks.checkpoint.every_seconds=1000"
    assert train(*SMALL, *STEPS, *bad, every, f"run_dir={folder}") == code
    assert said in capsys.readouterr().err
    assert [path.name for path in (folder / "checkpoints").glob("*.ckpt")] == ["step_00000002.ckpt"]
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert (folder / "error.json").exists()


def fitted(folder: Path, *callbacks: L.Callback, resume: Path | None = None) -> dict[str, torch.Tensor]:
    """The weights that a Trainer leaves which has nothing of ours."""
    module = GRPO("tiny", lambda completions, **_: [float(len(set(text))) for text in completions], group_size=2,
                  sampling=Sampling(max_new_tokens=3), optimizer=AdamW(lr=0.01))  # fmt: skip
    rows = [{"prompt": f"{n}+1="} for n in range(8)]
    how = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=3, default_root_dir=folder, val_check_interval=1, callbacks=[*callbacks], **how)
    data = RolloutDataModule(rows=rows, prompts_per_rollout=2, val_fraction=0.2)
    trainer.fit(module, data, ckpt_path=resume)
    return {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return fitted(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("on_train_batch_start", "ValueError"),
        ("on_train_batch_end", "SystemExit"),
        ("on_validation_end", "KeyboardInterrupt"),
        ("on_validation_batch_end", "StopIteration"),
        ("on_save_checkpoint", "ValueError"),
        ("on_train_end", "ValueError"),
        ("on_exception", "ValueError"),
        ("on_train_epoch_start", "StopIteration"),
    ],
)
def test_in_python_too_a_run_goes_on_from_where_an_error_ended_it(
    undisturbed: dict[str, torch.Tensor], tmp_path: Path, hook: str, error: str
) -> None:
    """With a Trainer of Lightning's alone: the module brings along what saves. A StopIteration is told, too."""
    step = 0 if hook == "on_train_epoch_start" else 1
    ends = {"StopIteration": RuntimeError, "KeyboardInterrupt": SystemExit}.get(error, getattr(builtins, error))
    first = [Failing("on_train_batch_start", 1)] if hook == "on_exception" else []
    with pytest.raises(ends):
        fitted(tmp_path / "run", Failing(hook, step, error), *first)
    if not step:
        return
    (path,) = (tmp_path / "run").rglob("step_*.ckpt")
    again = fitted(tmp_path / "again", resume=path)
    assert all(torch.equal(again[name], tensor) for name, tensor in undisturbed.items())


def test_weights_that_may_be_half_moved_are_not_saved(train, tmp_path, monkeypatch) -> None:
    def half(self, closure=None):
        closure()
        raise ValueError("in the middle of a step")

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    assert train(*SMALL, *STEPS, f"run_dir={tmp_path / 'run'}") == 1
    assert not list((tmp_path / "run").glob("checkpoints/*.ckpt")) and not (tmp_path / "run" / "hf").exists()


def test_a_monitor_that_is_no_metric_is_told_before_the_first_step(train, tmp_path, capsys) -> None:
    """What the validation before the training logs is what those in it log."""
    monitor = ["+schemas@callbacks.early_stopping=EarlyStopping", "callbacks.early_stopping.monitor=val/rewrd"]
    assert train(*SMALL, *STEPS, *monitor, f"run_dir={tmp_path / 'run'}") == 2
    assert "Did you mean 'val/reward'" in capsys.readouterr().err
    late = [*monitor[:1], "callbacks.early_stopping.monitor=val/reward", "trainer.max_steps=3"]
    assert train(*SMALL, *late, f"run_dir={tmp_path / 'run'}") == 2
    assert "before the first validation, which comes after 8" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_ctrl_c_once_more_writes_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning makes an exit of it, and the run an error: nobody waits for that."""
    kept: list[Any] = []
    monkeypatch.setattr(train_command, "save_after_error", lambda *given: kept.append(given))

    def ended_by(came: type[BaseException]) -> None:
        try:
            try:
                raise came
            except KeyboardInterrupt:
                raise SystemExit(1) from None
        except SystemExit as exit_:
            raise BackendError("ended") from exit_

    for came, times in ((ExitBySignal, 0), (KeyboardInterrupt, 1)):
        with pytest.raises(BackendError), train_command._saving_after_error(None, {}):  # pyright: ignore
            ended_by(came)
        assert len(kept) == times
