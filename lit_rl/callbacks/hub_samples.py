"""Uploads of `samples/` to a data set of the Hugging Face hub, during the run and at its end.

One push at a time runs beside the training (`HubPushes`), in a thread that no exit waits for.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.callbacks.graceful_stop import GracefulStop
from lit_rl.callbacks.loggers import WriteFailures
from lit_rl.callbacks.output_files import SAMPLE_FILES
from lit_rl.core import machine
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.core.progress_bar import delayed_progress
from lit_rl.ops.ranges import Positive


class HubPushes:
    """The pushes of one callback, one at a time.

    `HfApi.run_as_future` is not used: at its exit Python waits for that pool without a timeout, and the hub's client
    waits for an answer without one.

    Args:
        what: The activity, for a warning and a progress bar: "sending samples to user/name".
        unwritten: Recorder of failures, called in the thread of the training.
    """

    def __init__(self, what: str, unwritten: WriteFailures) -> None:
        self.what, self.unwritten = what, unwritten
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._then: Callable[[bool], None] = lambda done: None

    def start(self, push: Callable[[], object], then: Callable[[bool], None]) -> None:
        """Begin a push; none may be in progress.

        Args:
            push: Function for a thread of its own; it reads only what nobody else writes.
            then: Callback that `busy` or `wait` calls when the push is over, with whether it succeeded.
        """
        assert self._thread is None

        def run() -> None:
            try:
                push()
            except Exception as error:
                self._error = error

        self._error, self._then = None, then
        self._thread = threading.Thread(target=run, name="hub push", daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        """Tell whether a push is in progress, and record one that has ended."""
        if self._thread is None:
            return False
        if self._thread.is_alive():
            return True
        self._thread, error = None, self._error
        if error is not None:
            self.unwritten.note(self.what, error)
        self._then(error is None)
        return False

    def wait(self, until: float) -> bool:
        """Wait for the push in progress, under a progress bar; return whether it is over.

        Args:
            until: The end of the wait, by the clock `time.monotonic`.
        """
        seconds = max(0.0, until - time.monotonic())
        if self._thread is not None:
            for _ in delayed_progress(range(math.ceil(seconds)), f"{self.what}, at most", "s"):
                self._thread.join(min(1.0, max(0.0, until - time.monotonic())))
                if not self._thread.is_alive():
                    break
        return not self.busy()


CARD = """---
pretty_name: Completions of lit_rl
tags: [lit_rl, completions]
configs:
- {config_name: rollouts, data_files: "*/step_*.parquet"}
- {config_name: tokens, data_files: "*/tokens_*.parquet"}
- {config_name: validations, data_files: "*/val_*.parquet"}
---

# Completions of lit_rl

What language models wrote while lit_rl trained them: a folder for each run, with the files of its `samples/`.
"""
"""The README.md for a data set that has none."""

Files = dict[str, tuple[int, int]]
"""Size and modification time of files by name."""


@checked("callbacks.hub_samples")
class HubSamples(L.Callback):
    """Uploads of the parquet files of `samples/` in the Trainer's `default_root_dir` to the Hugging Face hub.

    They go to a data set, into a folder `<parent>_<name>` named after the run's: every few minutes, and when a training
    or a validation ends.

    Rank 0 copies new files and uploads the copy during the training, one push at a time. It removes files that no
    longer exist, such as those that were joined; files of others stay. The end of a training or a validation waits for
    its last push, `wait` seconds at most; a run that a signal ends waits for none, and the resumed run uploads what is
    missing. An unreachable hub is noticed within seconds, and not waited for. A push that fails is warned of, and the
    run goes on (`unwritten`); the next one uploads the rest. Once waits without an upload have cost more than 30
    seconds, nothing more is sent. The hub's client takes `HF_TOKEN`.

    Args:
        repo: The data set, `user/name`, created if missing. null sends nothing.
        private: Whether a newly created data set is private.
        minutes: Minutes between two pushes while the run trains, above 0; checked after each optimizer step.
        wait: Seconds that the end of a training or a validation waits for its last push, above 0.

    Raises:
        ConfigError: `minutes` or `wait` is not above 0, or `repo` is no valid name on the hub.
    """

    def __init__(
        self, repo: str | None = None, private: bool = True, minutes: Positive = 10.0, wait: Positive = 120.0
    ) -> None:
        if repo is not None:
            check_repository("callbacks.hub_samples.repo", repo)
        self.repo, self.private, self.minutes, self.wait = repo, private, minutes, wait
        self.unwritten = WriteFailures("HubSamples")
        self._pushes = HubPushes(f"sending samples to {repo}", self.unwritten)
        self._sent: Files | None = None
        """Files on the hub; None where that is not known: before the first push, and after one that failed."""
        self._last = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._sends(trainer) and not self._pushes.busy() and time.monotonic() - self._last >= 60 * self.minutes:
            self._push(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        stop = GracefulStop.of(trainer)
        if self._sends(trainer) and not (stop and stop.signum):
            self._push_the_last(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._sends(trainer) and isinstance(exception, Exception):  # a signal waits for no hub
            self._push_the_last(trainer)

    def _sends(self, trainer: L.Trainer) -> bool:
        wanted = self.repo is not None and trainer.is_global_zero and not trainer.fast_dev_run  # pyright: ignore
        return wanted and not self.unwritten.left_out

    def _push_the_last(self, trainer: L.Trainer) -> None:
        """Send new files after the push in progress, and wait for both."""
        until = time.monotonic() + self.wait
        if self._pushes.wait(until):
            self._push(trainer)
            if self._pushes.wait(until):
                return
        late = TimeoutError(f"it was not over after {self.wait:g} seconds (callbacks.hub_samples.wait)")
        self.unwritten.note(self._pushes.what, late, self.wait)

    def _push(self, trainer: L.Trainer) -> None:
        """Copy new files, and begin to send them; no push may be in progress."""
        self._last = time.monotonic()
        with self.unwritten.spared(self._pushes.what):
            run_dir = Path(trainer.default_root_dir).resolve()
            files = [path for pattern in SAMPLE_FILES for path in (run_dir / "samples").glob(pattern)]
            current = {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
            if not current or current == self._sent:
                return
            copy = tempfile.TemporaryDirectory(prefix="lit_rl_samples_", ignore_cleanup_errors=True)
            for name in sorted(current.keys() if self._sent is None else _changed_files(current, self._sent)):
                shutil.copyfile(run_dir / "samples" / name, Path(copy.name) / name)
            folder = f"{run_dir.parent.name}_{run_dir.name}"  # jobs of sweeps are called 0, 1, ...
            push = partial(
                self._send, copy, folder, f"lit_rl, {folder}, step {trainer.global_step}", current, self._sent
            )

            def over(done: bool) -> None:
                self._sent = current if done else None  # after a failed commit the hub is asked again for its files

            self._pushes.start(push, over)

    def _send(
        self, copy: tempfile.TemporaryDirectory[str], folder: str, message: str, current: Files, sent: Files | None
    ) -> None:
        """Commit the files of the copy, then remove it. Runs in a thread of its own."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        assert self.repo is not None
        api, operations = HfApi(), []
        with copy:
            if (why := machine.why_hub_is_unreachable()) is not None:
                raise ConnectionError(f"the hub was not asked: {why}")
            if sent is None:
                api.create_repo(self.repo, repo_type="dataset", private=self.private, exist_ok=True)
                held = api.list_repo_files(self.repo, repo_type="dataset")
                names = [path.removeprefix(f"{folder}/") for path in held if path.startswith(f"{folder}/")]
                names = [name for name in names if any(fnmatch(name, pattern) for pattern in SAMPLE_FILES)]
                sent = dict.fromkeys(names, (-1, -1))
                if "README.md" not in held:
                    operations.append(CommitOperationAdd("README.md", CARD.encode()))
            new, gone = _changed_files(current, sent), sorted(sent.keys() - current.keys())
            operations += [CommitOperationAdd(f"{folder}/{name}", Path(copy.name) / name) for name in new]
            operations += [CommitOperationDelete(f"{folder}/{name}") for name in gone]
            api.create_commit(self.repo, operations, repo_type="dataset", commit_message=message)


def _changed_files(current: Files, sent: Files) -> list[str]:
    return sorted(name for name in current if current[name] != sent.get(name))


def check_repository(key: str, repo: str) -> None:
    """Refuse what is no `user/name` on the hub.

    Raises:
        ConfigError: names the key.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo.count("/") != 1:
        raise ConfigError(f"{key}={repo!r} has no owner. Write user/name.")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{key}={repo!r} is not a valid name on the hub: {error} Write user/name.") from error
