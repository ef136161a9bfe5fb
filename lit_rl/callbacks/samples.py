"""Samples of the policy's completions for people: a table on the console, parquet files, tables in loggers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.callbacks.conversation import conversation_of
from lit_rl.callbacks.due import Due
from lit_rl.callbacks.pictures import Pictures
from lit_rl.callbacks.sample_files import write_table
from lit_rl.callbacks.sample_rows import Table, of_a_set, of_all_ranks, stacked
from lit_rl.callbacks.text import console_table, in_file_name
from lit_rl.callbacks.tracker_tables import log_tables
from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.errors import in_range

_IN_LOGGERS = 50
"""Optimizer steps between two tables in loggers, by default."""


class Samples(L.Callback):
    """Samples of rollouts and validations: files in `samples/`, tables in loggers, and a few rows on the console.

    The files go to `samples/` in the Trainer's `default_root_dir`, with the rows of all ranks. A file is one rollout,
    or one validation of a set, and is written as soon as that is scored; once there are more than a hundred of a kind,
    the oldest hundred become one file, a row group each.

    Images are shown as thumbnails, on the console by their names. In the files they are columns of `datasets.Image`.
    A file or a table that cannot be written is warned of, and the run goes on (`unwritten`).

    Args:
        print: Rows shown on the console at a time, whose images TensorBoard gets; 0 shows none.
        unique: Show at most one completion of a prompt.
        every: Optimizer steps between two tables on the console and in loggers: there is one for step 0, and for the
            first rollout that begins at or after each multiple of it. None means 50 and the last rollout in loggers;
            on the console the first rollout, the first of the second half, and the last. Loggers get all rows, and
            every validation; the parquet files are written for every rollout.
    """

    def __init__(self, print: int = 4, unique: bool = True, every: int | None = None) -> None:
        in_range("callbacks.samples.print", print, low=0)
        self.print, self.unique, self.every = print, unique, every
        self._due = Due("callbacks.samples.every", _IN_LOGGERS if every is None else every)
        self._unshown: tuple[int, Table] | None = None
        """The newest rollout with its step, if it is to be shown at the end."""
        self._untracked: tuple[int, Table] | None = None
        """The same for loggers."""
        self._evaluated: dict[int, Table] = {}
        self._rows: dict[int, list[int | None]] = {}
        """The data set's row for each row of these tables."""
        self.unwritten = Unwritten("Samples")

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._due.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due.last = state_dict["last"]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.slot != 0 or not pl_module.samples or trainer.fast_dev_run:  # pyright: ignore
            return
        table = stacked(of_all_ranks(trainer, pl_module.samples, self.unwritten))
        if not table["step"]:
            return
        step = table["step"][0]
        self._write(trainer, table, f"step_{step:08d}")
        before = self._due.last
        due = self._due.at(step)
        if due:
            self._track(trainer, "samples", table, step)
        if self.every is None:
            self._untracked = None if due else (step, table)
            middle = trainer.estimated_stepping_batches / 2
            due = before is None or before < middle <= step
            self._unshown = None if due else (step, table)
        if due:
            self._print(step, table)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._unshown is not None:
            self._print(*self._unshown)
        if self._untracked is not None:
            step, table = self._untracked
            self._track(trainer, "samples", table, step)
        self._unshown = self._untracked = None

    def _print(self, step: int, table: Table) -> None:
        with self.unwritten.spared("a table on the console"):
            if rows := self._pick(table):
                console_table(f"rollout at step {step}", rows)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._evaluated, self._rows = {}, {}

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not outputs:
            return  # a loss was measured, nothing was generated
        kept = self._evaluated.setdefault(dataloader_idx, {})
        before, size = len(kept.get("prompt", ())), len(outputs["prompt"])
        rows = getattr(batch, "rows", None) or [None] * size
        self._rows.setdefault(dataloader_idx, []).extend(row for row in rows for _ in range(size // len(rows)))
        for name in dict.fromkeys([*kept, *outputs]):  # a batch may lack columns of images that episodes show
            kept.setdefault(name, [None] * before).extend(outputs.get(name, [None] * size))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or trainer.fast_dev_run:  # pyright: ignore
            return
        mine = {index: (table, self._rows[index]) for index, table in self._evaluated.items()}
        parts = of_all_ranks(trainer, mine, self.unwritten)
        for index in sorted({index for part in parts for index in part or ()}):
            table = of_a_set([part and part.get(index) for part in parts])
            name = in_file_name(trainer.datamodule.val_names[index])  # pyright: ignore
            temperature = f"_t{pl_module.evaluation.temperature:g}"
            suffix = f"_{name}" if name else ""
            self._write(trainer, table, f"val_{trainer.global_step:08d}{temperature}{suffix}")
            stage = "test" if trainer.testing else "val"
            self._track(trainer, f"{stage}_samples{temperature}{suffix}", table, trainer.global_step)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _folder(self, trainer: L.Trainer) -> Path:
        folder = Path(trainer.default_root_dir) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _track(self, trainer: L.Trainer, key: str, table: Table, step: int) -> None:
        if not trainer.loggers:
            return
        with self.unwritten.spared(f"the table {key!r} for loggers"):
            log_tables(trainer, key, table, step, self._pick(table), self.unwritten)

    def _write(self, trainer: L.Trainer, table: Table, name: str) -> None:
        with self.unwritten.spared(f"samples/{name}.parquet"):
            write_table(table, self._folder(trainer) / f"{name}.parquet")

    def _pick(self, table: Table) -> list[dict[str, Any]]:
        shown, seen = [], set()
        pictures = [Pictures.of(table, i) for i in range(len(table["prompt"]))]
        sees = any(each.refs for each in pictures)
        for i, prompt in enumerate(table["prompt"]):
            digests = [ref.digest for ref in pictures[i].refs]
            key = json.dumps([prompt, digests], sort_keys=True, default=str) if self.unique else i
            if key in seen:
                continue
            seen.add(key)
            row = {"prompt": prompt} | ({"image": pictures[i]} if sees else {})
            row |= {name: table[name][i] for name in ("completion", "reward", "advantage") if name in table}
            shown.append(row | ({"completion": conversation_of(table, i)} if "tokens/ids" in table else {}))
            if len(shown) == self.print:
                break
        return shown if self.print else []
