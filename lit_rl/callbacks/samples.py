"""What the policy writes, for people: a table on the console, a parquet file a rollout, text in TensorBoard and W&B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import WandbLogger

from lit_rl.algorithms.evaluation.token_columns import PREFIX
from lit_rl.callbacks.conversation import conversation_of
from lit_rl.callbacks.due import Due
from lit_rl.callbacks.kept_images import arrow_images, image_features
from lit_rl.callbacks.pictures import Pictures
from lit_rl.callbacks.text import console_table, markdown_table, printable
from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.errors import in_range

_IN_LOGGERS = 50
"""Optimizer steps between two tables in loggers, where nothing else is said."""


class Samples(L.Callback):
    """Writes every rollout of rank 0 to `samples/` in the Trainer's `default_root_dir`, and shows a few rows at times.

    Images are shown small, on the console by their names. In the files they are columns of `datasets.Image`.
    A file or a table that cannot be written is warned of, and the run goes on (`unwritten`).

    Args:
        print: Rows shown at a time; 0 shows none.
        unique: Show at most one completion of a prompt.
        every: Optimizer steps between two tables on the console and in loggers: there is one for step 0, and for the
            first rollout that begins at or after each multiple of it. None is 50 in loggers; on the console the first
            rollout, the first of the second half, and the last. The parquet files are written for every rollout.
    """

    def __init__(self, print: int = 4, unique: bool = True, every: int | None = None) -> None:
        in_range("callbacks.samples.print", print, low=0)
        self.print, self.unique, self.every = print, unique, every
        self._due = Due("callbacks.samples.every", _IN_LOGGERS if every is None else every)
        self._unshown: tuple[int, dict[str, list[Any]]] | None = None
        self._evaluated: dict[int, dict[str, list[Any]]] = {}
        self.unwritten = Unwritten("Samples")

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._due.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due.last = state_dict["last"]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        table = pl_module.samples
        if batch.slot != 0 or not table or not trainer.is_global_zero or trainer.fast_dev_run:  # pyright: ignore
            return
        step = table["step"][0]
        self._write(trainer, table, f"step_{step:08d}")
        before = self._due.last
        due = self._due.at(step)
        if due:
            with self.unwritten.spared("a table for loggers"):
                if rows := self._pick(table):
                    _log(trainer, rows, step)
        if self.every is None:
            middle = trainer.estimated_stepping_batches / 2
            due = before is None or before < middle <= step
            self._unshown = None if due else (step, table)
        if due:
            self._print(step, table)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._unshown is not None:
            self._print(*self._unshown)
            self._unshown = None

    def _print(self, step: int, table: dict[str, list[Any]]) -> None:
        with self.unwritten.spared("a table on the console"):
            if rows := self._pick(table):
                console_table(f"rollout at step {step}", rows)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._evaluated = {}

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not outputs:
            return  # a loss was measured, nothing was written
        kept = self._evaluated.setdefault(dataloader_idx, {})
        before = len(kept.get("prompt", ()))
        for name in dict.fromkeys([*kept, *outputs]):  # what an episode shows is a column of the batches that show any
            missing = [None] * len(outputs["prompt"])
            kept.setdefault(name, [None] * before).extend(outputs.get(name, missing))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking or trainer.fast_dev_run:  # pyright: ignore
            return
        for index, table in self._evaluated.items():
            name = trainer.datamodule.val_names[index].replace("/", "_")  # pyright: ignore
            temperature = f"_t{pl_module.evaluation.temperature:g}"
            suffix = f"_{name}" if name else ""
            self._write(trainer, table, f"val_{trainer.global_step:08d}{temperature}{suffix}")

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _folder(self, trainer: L.Trainer) -> Path:
        folder = Path(trainer.default_root_dir) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write(self, trainer: L.Trainer, table: dict[str, list[Any]], name: str) -> None:
        with self.unwritten.spared(f"samples/{name}.parquet"):
            target = self._folder(trainer) / f"{name}.parquet"
            partial = target.with_suffix(".partial")
            try:
                write_parquet(table, partial)
                partial.replace(target)
            except Exception:
                partial.unlink(missing_ok=True)
                raise

    def _pick(self, table: dict[str, list[Any]]) -> list[dict[str, Any]]:
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
            row |= {name: table[name][i] for name in ("completion", "reward", "advantage")}
            shown.append(row | ({"completion": conversation_of(table, i)} if "tokens/ids" in table else {}))
            if len(shown) == self.print:
                break
        return shown if self.print else []


def _log(trainer: L.Trainer, rows: list[dict[str, Any]], step: int) -> None:
    """The table in those loggers that take one."""
    for logger in trainer.loggers:
        experiment = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_text"):
            _to_tensorboard(experiment, rows, step)
        elif hasattr(logger, "log_table"):
            columns, cell = list(rows[0]), _cell if isinstance(logger, WandbLogger) else printable
            data = [[cell(row[name]) for name in columns] for row in rows]
            logger.log_table(key=f"samples/step_{step}", columns=columns, data=data)  # pyright: ignore


def _to_tensorboard(experiment: Any, rows: list[dict[str, Any]], step: int) -> None:
    """The table as text, and beside it the images of each row: `samples/image_1` those of the first, and so on."""
    experiment.add_text("samples", markdown_table(rows), global_step=step)
    for number, row in enumerate(rows, 1):
        strip = row["image"].strip() if "image" in row else None
        if strip is not None:
            experiment.add_image(f"samples/image_{number}", np.array(strip), global_step=step, dataformats="HWC")


def _cell(value: Any) -> Any:
    """What a table of W&B holds: text, or an image."""
    if not isinstance(value, Pictures):
        return printable(value)
    import wandb  # pyright: ignore[reportMissingImports]

    strip = value.strip()
    return None if strip is None else wandb.Image(strip, caption=printable(str(value)))


def write_parquet(table: dict[str, list[Any]], path: Path) -> None:
    """Write a table of samples. Equal bytes of images are in the file once."""
    import pyarrow
    import pyarrow.parquet

    images = {key: found for key, values in table.items() if (found := arrow_images(values)) is not None}
    columns = {
        key: images[key] if key in images else _storable(values, lists=key.startswith(PREFIX))
        for key, values in table.items()
    }
    written = pyarrow.table(columns)
    if not images:
        pyarrow.parquet.write_table(written, path)
    else:  # by default a dictionary of values ends at 1 MiB, and what follows is written out row by row
        pyarrow.parquet.write_table(image_features(written, list(images)), path, dictionary_pagesize_limit=1 << 30)


def _storable(values: list[Any], *, lists: bool = False) -> list[Any]:
    """A column of one type: numbers as they are, everything else as text (messages as JSON), or as `lists`."""
    import pyarrow

    try:
        kind = pyarrow.array(values).type
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        kind = None  # mixed kinds, a number of more than 64 bits, half a surrogate pair
    if kind is None or (pyarrow.types.is_nested(kind) and not lists):
        return [json.dumps(value, default=str) for value in values]
    return values
