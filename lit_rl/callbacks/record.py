"""What a run writes, tied to its checkpoints: a resumed run's record equals the uninterrupted one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from lit_rl.callbacks.file_names import ALARMS
from lit_rl.callbacks.preference_sets import SETS
from lit_rl.callbacks.rollouts import STEP_FILES
from lit_rl.callbacks.sample_files import SAMPLE_FILES, cut_back

FILES = (
    "metrics.jsonl",
    ALARMS,
    "events.out.tfevents.[0-9]*",
    *(f"samples/{name}" for name in SAMPLE_FILES),
    f"rollouts/{STEP_FILES}",
    *(f"datasets/{name}.jsonl" for name in SETS),
    "csv/metrics.csv",
    "csv/samples*.csv",
    "csv/val_samples*.csv",
)
"""Names of all that a run appends to or adds while it trains. Nothing else is ever cut back or removed: a run directory
may hold files of the user's."""


class Record(L.Callback):
    """Every checkpoint notes how long each file of the record was; resuming cuts them back to that.

    Args:
        run_dir: The run directory. A checkpoint of another run cuts nothing here.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sizes": {str(path.relative_to(self.run_dir)): path.stat().st_size for path in record_files(self.run_dir)}
        }

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # TensorBoard's writer works in a thread; flushed, the sizes are those of what was logged so far.
        for logger in trainer.loggers:
            flush = getattr(getattr(logger, "experiment", None), "flush", None)
            if flush is not None:
                flush()
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        noted = checkpoint["callbacks"].get(self.state_key)
        ours = trainer.ckpt_path is not None and self.run_dir.resolve() in Path(trainer.ckpt_path).resolve().parents
        if noted is not None and ours:
            self._cut(noted["sizes"])

    @rank_zero_only
    def _cut(self, sizes: dict[str, int]) -> None:
        samples = self.run_dir / "samples"
        cut_back(samples, {Path(name).name for name in sizes if Path(name).parent.name == samples.name})
        for path in record_files(self.run_dir):
            if path.parent == samples:
                continue  # whole files, which may have been joined
            size = sizes.get(str(path.relative_to(self.run_dir)))
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                with path.open("r+b") as file:
                    file.truncate(size)


def record_files(run_dir: Path) -> list[Path]:
    """The files of a folder that have a name in `FILES`."""
    return sorted(path for pattern in FILES for path in run_dir.glob(pattern) if path.is_file())
