"""The record of a run, tied to its checkpoints: a resumed run's files equal those of an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from lit_rl.callbacks.output_files import ALARMS, SAMPLE_FILES, restore_sample_files
from lit_rl.callbacks.preference_sets import SETS
from lit_rl.callbacks.saved_rollouts import ROLLOUT_FILES

RECORD_FILES = (
    "metrics.jsonl",
    ALARMS,
    "events.out.tfevents.[0-9]*",
    *(f"samples/{name}" for name in SAMPLE_FILES),
    f"rollouts/{ROLLOUT_FILES}",
    *(f"datasets/{name}.jsonl" for name in SETS),
    "csv/metrics.csv",
    "csv/samples*.csv",
    "csv/val_samples*.csv",
)
"""Patterns of all files that a run appends to or adds while it trains. Nothing else is ever truncated or removed: a run
directory may hold files of the user's."""


class Record(L.Callback):
    """The sizes of the record's files in every checkpoint, to which a resume truncates them.

    Args:
        run_dir: The run directory. A checkpoint of another run truncates nothing here.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self.began = False
        """True where the run trains, or has found nothing left to train: until then it may still be refused."""
        self._to_cut: tuple[dict[str, int], set[Path]] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "sizes": {str(path.relative_to(self.run_dir)): path.stat().st_size for path in record_files(self.run_dir)}
        }

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # TensorBoard's writer works in a thread: once flushed, the sizes are those of all that was logged so far.
        for logger in trainer.loggers:
            flush = getattr(getattr(logger, "experiment", None), "flush", None)
            if flush is not None:
                flush()
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        noted = checkpoint["callbacks"].get(self.state_key)
        ours = trainer.ckpt_path is not None and self.run_dir.resolve() in Path(trainer.ckpt_path).resolve().parents
        if noted is not None and ours:
            self._to_cut = noted["sizes"], set(record_files(self.run_dir))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Truncate the record, once the whole checkpoint is loaded: changed data are refused last."""
        self.began = True
        if self._to_cut is not None:
            self._cut(*self._to_cut)
            self._to_cut = None
            trainer.strategy.barrier("record")  # no rank adds to it before

    on_fit_end = on_train_start  # where nothing was left to train

    @rank_zero_only
    def _cut(self, sizes: dict[str, int], there: set[Path]) -> None:
        """Truncate or remove the files that were `there`: a logger may have begun others since."""
        samples = self.run_dir / "samples"
        restore_sample_files(samples, {Path(name).name for name in sizes if Path(name).parent.name == samples.name})
        for path in record_files(self.run_dir):
            if path.parent == samples or path not in there:
                continue  # sample files are whole, and may have been joined
            size = sizes.get(str(path.relative_to(self.run_dir)))
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                with path.open("r+b") as file:
                    file.truncate(size)


def record_files(run_dir: Path) -> list[Path]:
    """Return the files of a folder that match `RECORD_FILES`."""
    return sorted(path for pattern in RECORD_FILES for path in run_dir.glob(pattern) if path.is_file())
