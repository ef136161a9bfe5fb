"""Checkpoints and exports on a disk that has no room: the kernel's own refusals, and what is left afterwards."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from pathlib import Path

import lightning as L
import pytest
import torch
from no_room import fill, no_file_above, small_disk
from runs_helpers import SMALL, whole_step

from lit_rl.callbacks import AtomicCheckpointIO, TimedCheckpoint, checkpoint_io
from lit_rl.cli.messages import as_lit_rl_error, exit_code_of
from lit_rl.core import durable_files
from lit_rl.core.durable_files import PARTIAL, check_free_space
from lit_rl.core.errors import StorageError
from lit_rl.runs.run_dir import RunDir

STATE = {"state_dict": {"weight": torch.arange(100_000.0)}}


@pytest.mark.parametrize("waits, saved", [((), False), ((0.0,), True)], ids=["full", "full for a moment"])
def test_a_full_disk_is_tried_again_and_what_was_saved_before_stays(
    waits: tuple[float, ...], saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(durable_files.RETRY_WAITS) == 30.0
    monkeypatch.setattr(durable_files, "RETRY_WAITS", waits)
    target, disk = tmp_path / "step.ckpt", AtomicCheckpointIO()
    disk.save_checkpoint({"state_dict": {}}, target)
    before = target.read_bytes()
    (tmp_path / f"step.ckpt{PARTIAL}{os.getpid()}").symlink_to("/dev/full")  # which is removed with the partial file
    if saved:
        with pytest.warns(UserWarning, match=r"finds no room: \[Errno 28\].* It is tried again in 0 s"):
            disk.save_checkpoint(STATE, target)
        assert torch.equal(disk.load_checkpoint(target)["state_dict"]["weight"], STATE["state_dict"]["weight"])
    else:
        with pytest.raises(StorageError, match=r"\[Errno 28\].*ckpt_path=last"):
            disk.save_checkpoint(STATE, target)
        assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


class FailingFile(io.FileIO):
    """Stands in for a file of a disk without quota, or of one that fails, which a test cannot have: every write ends
    with the error `number`."""

    number = 0

    def write(self, data: object) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.fixture(params=["EDQUOT", "EIO", "ESTALE"])
def number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the error with which writes of unfinished checkpoints end."""
    number = getattr(errno, request.param)
    opened = Path.open

    def open_failing(path: Path, mode: str = "r", *more: object, **others: object) -> object:
        if mode != "wb" or PARTIAL not in path.name:
            return opened(path, mode, *more, **others)  # pyright: ignore
        file = FailingFile(path, mode)
        file.number = number
        return file

    monkeypatch.setattr(Path, "open", open_failing)
    return number


def test_a_quota_is_a_full_disk_and_a_failing_disk_is_not_tried_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """What was saved before stays, and the message names the error."""
    monkeypatch.setattr(durable_files, "RETRY_WAITS", (0.0, 0.01))
    target, disk = tmp_path / "step.ckpt", AtomicCheckpointIO()
    with monkeypatch.context() as well:
        well.setattr(FailingFile, "write", io.FileIO.write)
        disk.save_checkpoint({"state_dict": {}}, target)
    before = target.read_bytes()
    with pytest.raises(StorageError, match=rf"\[Errno {number}\].* resume from the newest with ckpt_path=last") as full:
        disk.save_checkpoint(STATE, target)
    assert exit_code_of(full.value) == 7
    assert target.read_bytes() == before and list(tmp_path.iterdir()) == [target]
    tries = [each for each in recwarn if "finds no room" in str(each.message)]
    assert len(tries) == (2 if number == errno.EDQUOT else 0)


@pytest.mark.parametrize("said", ["{0}", "I/O error: {1} (os error {2})"], ids=["Python", "Rust"])
def test_an_error_of_the_disk_elsewhere_is_one_of_storage_too(number: int, said: str) -> None:
    failed = OSError(number, os.strerror(number), "runs/x/summary.json")
    error = failed if said == "{0}" else RuntimeError(said.format("", os.strerror(number), number))
    ours = as_lit_rl_error(error)
    assert isinstance(ours, StorageError) and ours.exit_code == 7
    assert os.strerror(number) in str(ours) and "ckpt_path=last" in str(ours)


@pytest.mark.all
@pytest.mark.parametrize("number", ["ESTALE"], indirect=True)
def test_a_run_whose_disk_fails_ends_with_the_code_of_storage_and_goes_on(
    train, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it writes its second checkpoint; the first one stays, and the run goes on from it."""
    write, run = FailingFile.write, tmp_path / "run"
    name = f"step_00000002.ckpt{PARTIAL}"
    monkeypatch.setattr(
        FailingFile, "write", lambda file, data: (write if name in str(file.name) else io.FileIO.write)(file, data)
    )
    words = [*SMALL, "trainer.max_steps=2", "callbacks.checkpoint.every_n_train_steps=1", f"run_dir={run}"]
    assert train(*words) == 7
    said = capsys.readouterr().err
    assert f"[Errno {number}] {os.strerror(number)}" in said and "Traceback" not in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000001.ckpt"]
    monkeypatch.setattr(FailingFile, "write", io.FileIO.write)
    assert train(*words, "ckpt_path=last") == 0


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_the_first_of_two_failures_is_written_whole_or_not_at_all(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves no empty `error.json`, which the next rank would take for the first one's word."""
    if not links:  # as a FAT disk says it
        monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(PermissionError(errno.EPERM, "link")))
    first = {"error": "RewardError", "message": "x" * 10_000}
    with no_file_above(4096):
        assert RunDir(tmp_path).write_error(first) is None
    assert not list(tmp_path.iterdir())
    assert RunDir(tmp_path).write_error(first) is None
    assert RunDir(tmp_path).write_error({"error": "BackendError"}) == first
    assert json.loads((tmp_path / "error.json").read_text()) == first
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize(("room", "links", "there"), [(0, True, False), (4096, True, True), (4096, False, False)])
def test_a_disk_that_is_all_but_full_has_a_whole_error_json_or_none(
    room: int, links: bool, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page is room for the file beside its real name, and without hard links for no second one."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(PermissionError(errno.EPERM, "link")))
    with small_disk(tmp_path / "disk", 1_000_000):
        run_dir, ballast = RunDir(tmp_path / "disk"), fill(tmp_path / "disk", room)
        assert run_dir.write_error({"error": "StorageError"}) is None
        assert set(run_dir.path.iterdir()) == ({run_dir.error_file, ballast} if there else {ballast})
        assert not there or json.loads(run_dir.error_file.read_text()) == {"error": "StorageError"}


def test_space_is_looked_for_before_any_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files, "RETRY_WAITS", ())
    huge = torch.empty(10**16, device="meta")
    said = r"it takes 40000000000\.0 MB, and \d+\.\d MB are free.* This run had saved no checkpoint before"
    with pytest.raises(StorageError, match=said):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {"a": [huge]}}, tmp_path / "a" / "step.ckpt")
    assert not list(tmp_path.glob("a/*"))
    check_free_space(tmp_path / "not" / "there", 1)
    assert checkpoint_io.checkpoint_size({"a": [torch.zeros(3), {"b": torch.zeros(2, dtype=torch.int8)}], "c": 1}) == 14


FILLS = """
from pathlib import Path

def score(completions):
    run = Path(__file__).parent / "disk" / "run"
    if any(run.glob("checkpoints/*.ckpt")) and not (run.parent / "ballast").exists():
        try:
            with (run.parent / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
    return [float(len(text)) for text in completions]
"""


@pytest.mark.all
@pytest.mark.parametrize(
    ("steps", "what"), [(2, "step_00000002.ckpt"), (1, "The export to")], ids=["checkpoint", "export"]
)
def test_a_disk_that_is_full_costs_nothing_that_was_saved(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int, what: str
) -> None:
    """What is scored behind the first step fills the disk: the second rollout, or the last validation. Once there is
    room again, the run ends as if nothing had been."""
    monkeypatch.setattr(durable_files, "RETRY_WAITS", (0.0,))
    (tmp_path / "fills.py").write_text(FILLS)
    run = tmp_path / "disk" / "run"
    words = [*SMALL, f"trainer.max_steps={steps}", "callbacks.checkpoint.every_n_train_steps=1", f"run_dir={run}"]
    words += ["reward=function", f"reward.fn={tmp_path / 'fills.py'}:score", "eval.temperature=1", "ckpt_path=last"]
    with small_disk(tmp_path / "disk", 32_000_000):
        with pytest.warns(UserWarning, match=rf"{what}.* finds no room: .* It is tried again in 0 s"):
            assert train(*words) == 7
        said = capsys.readouterr().err
        assert what in said and "ckpt_path=last" in said and "Traceback" not in said
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000001.ckpt"]
        assert whole_step(run) == 1
        assert not list(run.glob("*hf*"))
        (tmp_path / "disk" / "ballast").write_bytes(b"")
        assert train(*words) == 0
        assert (run / "hf" / "model.safetensors").exists()


@pytest.mark.all
def test_a_run_that_could_never_save_does_not_begin(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: (2**30, 2**30 - 4096, 4096))
    assert train(*SMALL, "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}") == 7
    assert "There is no room for a checkpoint" in capsys.readouterr().err


@pytest.mark.all
def test_a_rollout_that_cannot_be_written_is_warned_of_and_the_training_goes_on(
    train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk of its own lies at `rollouts/`, and is full. (Who resumes takes the half-used one of the checkpoint.)"""
    (run := tmp_path / "run").mkdir()
    with small_disk(run / "rollouts", 1_000_000):
        ballast = fill(run / "rollouts")
        words = ["trainer.max_steps=2", "trainer.limit_val_batches=0", "callbacks.samples.print=0", f"run_dir={run}"]
        with pytest.warns(UserWarning, match=r"rollouts/step_00000000\.pt: StorageError: .*No space"):
            assert train(*SMALL, *words) == 0
        assert list((run / "rollouts").iterdir()) == [ballast]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and "Rollouts, 2 calls failed" in summary["not_written"][0]


def test_before_the_first_step_there_is_room_for_two_checkpoints_and_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = L.LightningModule()
    module.trained, module.frozen = torch.nn.Linear(100, 10, bias=False), torch.nn.Linear(100, 10, bias=False)
    module.frozen.requires_grad_(False)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy.optimizers = [torch.optim.AdamW(module.trained.parameters())]
    least = 2 * (4000 + 8000) + 8000
    for free in (least, least - 1):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: (2**30, 2**30 - free, free))
        callback = TimedCheckpoint(dirpath=tmp_path / "checkpoints")
        with contextlib.nullcontext() if free == least else pytest.raises(StorageError, match="the one before it and"):
            callback.on_train_start(trainer, module)
