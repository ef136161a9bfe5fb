"""The files of `samples/` in a data set of the Hugging Face hub, while the run goes on and at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.callbacks.sample_files import SAMPLE_FILES
from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.errors import ConfigError, in_range

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
"""README.md of a data set that has none."""


class HubSamples(L.Callback):
    """Sends the parquet files of `samples/` in the Trainer's `default_root_dir` to a data set of the Hugging Face hub,
    into a folder `<parent>_<name>` of the run's: every few minutes, and when a training or a validation ends.

    Rank 0 sends what is new, and removes what is no longer there, such as files that were joined; files of others stay.
    A push that fails is warned of, and the run goes on (`unwritten`); the next one sends what it did not. Where failed
    pushes have cost more than 30 seconds, no more are tried. The hub's client takes `HF_TOKEN`.

    Args:
        repo: The data set, `user/name`; it is made where it is not there. null sends nothing.
        private: Whether a data set that is made new is private.
        minutes: Between two pushes while the run trains, above 0; they are looked for after each optimizer step.

    Raises:
        ConfigError: `minutes` is not above 0, or the hub has no such names as `repo`.
    """

    def __init__(self, repo: str | None = None, private: bool = True, minutes: float = 10.0) -> None:
        in_range("callbacks.hub_samples.minutes", minutes, low=0, open_low=True)
        if repo is not None:
            _check_name(repo)
        self.repo, self.private, self.minutes = repo, private, minutes
        self.unwritten = Unwritten("HubSamples")
        self._sent: dict[str, tuple[int, int]] | None = None
        """Size and time of each file that the hub has; None before the first push."""
        self._last = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if time.monotonic() - self._last >= 60 * self.minutes:
            self._push(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._push(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception):  # a signal waits for no hub
            self._push(trainer)

    def _push(self, trainer: L.Trainer) -> None:
        wanted = self.repo is not None and trainer.is_global_zero and not trainer.fast_dev_run  # pyright: ignore
        if wanted and not self.unwritten.left_out:
            with self.unwritten.spared(f"sending samples to {self.repo}"):
                self._send(Path(trainer.default_root_dir).resolve(), trainer.global_step)
        self._last = time.monotonic()

    def _send(self, run_dir: Path, step: int) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        folder = f"{run_dir.parent.name}_{run_dir.name}"  # jobs of sweeps are called 0, 1, ...
        files = {path.name: path for pattern in SAMPLE_FILES for path in (run_dir / "samples").glob(pattern)}
        there = {name: (path.stat().st_size, path.stat().st_mtime_ns) for name, path in files.items()}
        if not files or there == self._sent:
            return
        assert self.repo is not None
        api, operations = HfApi(), []
        sent = self._sent
        if sent is None:
            api.create_repo(self.repo, repo_type="dataset", private=self.private, exist_ok=True)
            held = api.list_repo_files(self.repo, repo_type="dataset")
            sent = dict.fromkeys(_of_the_run(held, folder), (-1, -1))
            if "README.md" not in held:
                operations.append(CommitOperationAdd("README.md", CARD.encode()))
        new = sorted(name for name in there if there[name] != sent.get(name))
        operations += [CommitOperationAdd(f"{folder}/{name}", files[name]) for name in new]
        operations += [CommitOperationDelete(f"{folder}/{name}") for name in sorted(sent.keys() - there.keys())]
        self._sent = None  # what a commit that fails left there is asked for again
        api.create_commit(self.repo, operations, repo_type="dataset", commit_message=f"lit_rl, {folder}, step {step}")
        self._sent = there


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo.count("/") != 1:
        raise ConfigError(f"callbacks.hub_samples.repo={repo!r} has no owner. Write user/name.")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(
            f"callbacks.hub_samples.repo={repo!r} is no name of the hub: {error} Write user/name."
        ) from error


def _of_the_run(held: Sequence[str], run: str) -> list[str]:
    """The names of the files of samples in the folder of a run."""
    names = [path.removeprefix(f"{run}/") for path in held if path.startswith(f"{run}/")]
    return [name for name in names if any(fnmatch(name, pattern) for pattern in SAMPLE_FILES)]
