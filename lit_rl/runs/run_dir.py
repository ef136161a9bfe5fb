"""The run directory: what a start may write there, what is undone when it fails, and the checkpoints in it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_rl.callbacks.alarms import BEFORE_ALARM_FOLDER
from lit_rl.callbacks.checkpoint_io import newest_whole
from lit_rl.callbacks.record import RECORD_FILES, record_files
from lit_rl.core.durable_files import PARTIAL, flush, replacing, write_new
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.models.verified_folder import unpublished_folders
from lit_rl.reports.run_files import (
    REPORT_FILE,
    RunFiles,
    RunPaths,
    check_not_a_file,
    folder_taken_error,
    with_version_line,
)
from lit_rl.reports.secrets import redact
from lit_rl.runs.run_lock import LOCK_FILE, RunLock

StartKind = Literal["new", "anew", "resumed"]
"""Start of a run in its folder: in an empty one; in place of a run that died before its first checkpoint; or from a
checkpoint."""

HF_STEPS = "hf_steps"
"""Folder of the exports that `callbacks.export` writes: `step_00000100`."""

AVERAGES = ("hf_ema", "hf_bema", "hf_merged")
"""Folders of averaged policies."""

REPLACED = (
    "summary.json",
    "error.json",
    REPORT_FILE,
    "checkpoints/*.ckpt",
    f"checkpoints/{BEFORE_ALARM_FOLDER}/*.ckpt",
    "hf",
    *AVERAGES,
    f"{HF_STEPS}/step_*",
    "bad_batch*.pt",
    *RECORD_FILES,
)
"""Names that a run writes, and would replace or add to, beside config.yaml."""


@dataclass(frozen=True)
class FilesBefore:
    """The files of a run before a start that may be refused."""

    contents: Mapping[Path, bytes | None]
    """Contents of the files that a start writes anew; None where there is none."""
    sizes: Mapping[Path, int]
    """Sizes of the record's files, to which a start adds."""


@dataclass(frozen=True)
class RunDir(RunPaths):
    """The folder of a run that starts, resumes or has ended: its files, and the ones that may be written."""

    def read(self) -> RunFiles:
        """Return what the files of the run say by now."""
        return RunFiles(self.path)

    def read_summary(self) -> dict[str, Any]:
        """Return the summary; empty where there is none. Nothing depends on a damaged one: it is written anew, with a
        warning."""
        run = self.read()
        summary = run.summary
        for sentence in run.unread_of(self.summary_file):
            warnings.warn(f"{self.path}/{sentence} What it said is lost, and it is written anew.", stacklevel=2)
        return summary

    def write_summary(self, summary: dict[str, Any]) -> None:
        _replace(self.summary_file, json.dumps(nan_to_null(summary), indent=2, allow_nan=False) + "\n")

    def write_config(self, text: str) -> None:
        _replace(self.config_file, with_version_line(text))

    def write_error(self, what: dict[str, Any]) -> dict[str, Any] | None:
        """Write the error that ended the run. Of several ranks the first one writes it: the others fail because of it.

        Returns:
            The error that another rank wrote before; None where this is the first.
        """
        with contextlib.suppress(OSError, ValueError):  # nothing may hide the error itself
            try:
                write_new(self.error_file, json.dumps(redact(what), indent=2) + "\n")
            except FileExistsError:
                return json.loads(self.error_file.read_text())
        return None

    def open(self, start: StartKind, lock: RunLock | None = None) -> RunLock:
        """Make the folder, or refuse it: another run's results, and the user's files, are never mixed with this run's.

        Args:
            start: Kind of start.
            lock: Lock of the folder, where it is held already.

        Returns:
            The lock that keeps other runs out, until it is released.

        Raises:
            StorageError: it is a file, cannot be written, or is in use.
            ConfigError: it holds a run and this is not its continuation; or files that no run wrote, under names that
                this one would write.
        """
        check_not_a_file(self.path)
        with contextlib.ExitStack() as undo:
            if lock is None and self.read().holds_a_run:  # before anything is said of a run that still goes on
                lock = undo.enter_context(contextlib.closing(RunLock(self.path)))
            self._check_free(start)
            self.make()
            lock = lock or RunLock(self.path)
            undo.pop_all()
        if self.read().holds_a_run:
            self.error_file.unlink(missing_ok=True)  # of the attempt before
        return lock

    def _check_free(self, start: StartKind) -> None:
        # A folder is a run's by its config.yaml, or by a checkpoint.
        users_files: list[Path] = []
        if self.path.is_dir() and not self.read().holds_a_run:
            users_files += [self.config_file] if self.config_file.exists() else []
            replaced = () if start == "resumed" else REPLACED
            users_files += [path for name in replaced for path in sorted(self.path.glob(name))]
        if users_files:
            raise ConfigError(
                f"run_dir={self.path} contains {users_files[0].relative_to(self.path)}, which this run would "
                "replace and no run wrote: the folder has no config.yaml of a run. Use another run_dir, best a new "
                "folder."
            )
        finished = start == "new" and self.read().finished
        if start == "new" and (finished or any(self.checkpoints.glob("*.ckpt")) or self.metrics.exists()):
            state = "a finished run" if finished else "a run that did not finish"
            raise folder_taken_error(self.path, state)

    def make(self) -> None:
        """Make the folder if it is missing.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise StorageError(
                f"run_dir={self.path} cannot be written ({error.strerror}). Take another run_dir."
            ) from error

    def missing_folders(self) -> list[Path]:
        """Return the folders that `open` will make, the innermost first."""
        return [path for path in (self.path, *self.path.parents) if not path.exists()]

    def would_keep(self, made: Sequence[Path], kept_for: str) -> bool:
        """Tell whether `withdraw`, with the same arguments, would leave the folder as it is."""
        if self.path not in made:
            return True
        if not os.path.isdir(self.path):  # the Path's own raises where a name is too long
            return False
        logged = self.metrics.is_file() and f'"{kept_for}' in self.metrics.read_text()
        return logged or any(self.checkpoints.glob("*")) or any(self.path.glob("bad_batch*.pt"))

    def withdraw(self, made: Sequence[Path], kept_for: str) -> None:
        """Remove the folder of a start that failed before it had anything to keep, if this start made the folder.

        Args:
            made: Folders that were `missing_folders` before.
            kept_for: The folder stays if a metric was logged whose name begins so; "" is any.
        """
        if self.would_keep(made, kept_for):
            return
        if not os.path.isdir(self.path):  # those above it were made, and it could not be
            return _remove_empty(made)
        hparams = self.path / "hparams.yaml"  # of Lightning's logger for TensorBoard
        ours = (self.config_file, self.summary_file, self.error_file, self.page, *record_files(self.path))
        for path in (self.path / LOCK_FILE, *ours, hparams):
            path.unlink(missing_ok=True)
        inside = sorted((path for path in self.path.rglob("*") if path.is_dir()), reverse=True)
        _remove_empty([*inside, *made])

    def snapshot(self) -> FilesBefore:
        """Return the files before a start resumes the run, for `restore`."""
        ours = (self.config_file, self.summary_file, self.error_file, self.page)
        written = (*ours, self.path / "csv" / "metrics.csv")
        return FilesBefore(
            {path: path.read_bytes() if path.is_file() else None for path in written},
            {path: path.stat().st_size for path in record_files(self.path)},
        )

    def restore(self, before: FilesBefore) -> None:
        """Restore the files after a start that was refused before it resumed the run."""
        for path, data in before.contents.items():
            if data is None:
                path.unlink(missing_ok=True)
            elif not path.is_file() or path.read_bytes() != data:
                _replace(path, data)
        for path in record_files(self.path):
            if path not in before.sizes:
                path.unlink()
            elif path.stat().st_size > before.sizes[path]:
                os.truncate(path, before.sizes[path])

    @property
    def steps(self) -> int:
        """Optimizer steps of the run that has ended here; 0 where none has."""
        return int(self.read_summary().get("steps", 0))

    def remove_partial(self) -> None:
        """Remove a partial checkpoint or export that a process left when it died. Called by one process, before it
        trains."""
        for path in self.checkpoints.glob(f"*.ckpt{PARTIAL}[0-9]*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        steps = self.path / HF_STEPS
        averages = [self.path / name for name in AVERAGES]
        begun = {found[1] for path in steps.glob(".step_*") if (found := re.match(r"\.(step_\d{8})", path.name))}
        for target in (self.hf, *averages, *(steps / name for name in sorted(begun))):
            for path in unpublished_folders(target):
                shutil.rmtree(path)

    def clear_record(self) -> None:
        """Remove the record of a run that died before its first checkpoint: the next one starts from nothing."""
        run = self.read()
        if run.holds_a_run and not run.finished:
            for path in record_files(self.path):
                path.unlink()
            self.summary_file.unlink(missing_ok=True)

    def last_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint; None where there is none."""
        return self.newest_checkpoint()[0]

    def newest_checkpoint(self) -> tuple[Path | None, list[Path]]:
        """Return the newest whole checkpoint, None where there is none; and the damaged ones that are newer."""
        return newest_whole(list(self.checkpoints.glob("*.ckpt")))


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove the folders that are empty, the innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it holds something, or is not there
            folder.rmdir()


def nan_to_null(node: Any) -> Any:
    """Return the tree with null for NaN and infinity, which JSON lacks."""
    if isinstance(node, dict):
        return {key: nan_to_null(value) for key, value in node.items()}
    if isinstance(node, list):
        return [nan_to_null(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def _replace(path: Path, content: str | bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(partial)
