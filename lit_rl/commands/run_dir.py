"""The run directory: where everything that a run leaves behind stands."""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rl.callbacks.checkpoint_io import PARTIAL
from lit_rl.callbacks.record import record_files
from lit_rl.errors import ConfigError, StorageError

_SECRET_KEY = re.compile(r"(^|_)(token|api_key|apikey|secret|password|passwd|credential)s?$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|[0-9a-f]{40})\b|(?<=://)[^/@\s]+@")
_NOT_SECRET = {"eos_token", "pad_token", "revision"}


@dataclass(frozen=True)
class RunDir:
    """A folder and the names in it."""

    path: Path

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    def read_summary(self) -> dict[str, Any]:
        """What the summary says so far; empty where there is none."""
        if not self.summary.is_file():
            return {}
        try:
            return json.loads(self.summary.read_text())
        except json.JSONDecodeError as error:
            raise StorageError(f"{self.summary} is not JSON ({error}): remove it to go on.") from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        _replace(self.summary, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")

    def write_config(self, text: str) -> None:
        _replace(self.path / "config.yaml", text)

    @property
    def finished(self) -> bool:
        return self.read_summary().get("status") == "finished"

    def open(self, *, resume: bool) -> None:
        """Make the folder, or refuse it: another run's results are never mixed with this one's.

        Raises:
            StorageError: it is a file, or cannot be written.
            ConfigError: it holds a run and this is not its continuation.
        """
        if self.path.exists() and not self.path.is_dir():
            raise StorageError(f"run_dir={self.path} is a file; it must be a folder, or a name that is free.")
        if not resume and (self.finished or any(self.checkpoints.glob("*.ckpt")) or self.metrics.exists()):
            state = "a finished run" if self.finished else "a run that did not finish"
            raise ConfigError(
                f"run_dir={self.path} holds {state}. Continue it with ckpt_path=last, or take another run_dir."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise StorageError(
                f"run_dir={self.path} cannot be written ({error.strerror}). Take another run_dir."
            ) from error

    def remove_partial(self) -> None:
        """Remove what a process that died left of the checkpoint it was writing. For one process, before it trains."""
        for path in self.checkpoints.glob(f"*{PARTIAL}*"):
            path.unlink()

    def clear_record(self) -> None:
        """Remove what a run wrote that died before its first checkpoint: the next one starts from nothing."""
        if self.path.is_dir() and not self.finished:
            for path in record_files(self.path):
                path.unlink()
            self.summary.unlink(missing_ok=True)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole; None where there is none."""
        by_step = sorted(self.checkpoints.glob("*.ckpt"), key=_step, reverse=True)
        return next((path for path in by_step if is_whole(path)), None)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint file can be read to its end. For a sharded folder: whether its index is there."""
    if path.is_dir():
        return (path / "meta.pt").exists() or (path / "latest").exists()
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError):
        return False


def finite(node: Any) -> Any:
    """The tree with NaN and infinity, which JSON has not, as null."""
    if isinstance(node, dict):
        return {key: finite(value) for key, value in node.items()}
    if isinstance(node, list):
        return [finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def _step(path: Path) -> tuple[int, float]:
    numbers = re.findall(r"\d+", path.stem)
    return (int(numbers[-1]) if numbers else -1, path.stat().st_mtime)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def redact(node: Any, key: str = "") -> Any:
    """The tree with everything that is a secret by its name or its form replaced."""
    if isinstance(node, dict):
        return {name: redact(value, str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [redact(value, key) for value in node]
    if isinstance(node, str) and key not in _NOT_SECRET:
        if _SECRET_KEY.search(key) and node:
            return "<redacted>"
        return _SECRET_VALUE.sub("<redacted>", node)
    return node
