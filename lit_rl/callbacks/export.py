"""Exports of the policy as a Hugging Face folder, while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.errors import in_range
from lit_rl.models.export.names import ModelName
from lit_rl.models.policy.sharding import full_state_dict


class Export(L.Callback):
    """Exports of the policy every N steps, as the end of a run writes `hf/`: for transformers and vLLM, verified.

    An export that cannot be written is warned of, and the run goes on (`unwritten`).

    Args:
        folder: The folder of the exports, one subfolder each: `step_00000100`.
        every: Optimizer steps between two of them, at least 1. null writes none.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, folder: str, every: int | None = None) -> None:
        if every is not None:
            in_range("callbacks.export.every", every, low=1)
        self.folder, self.every = Path(folder), every
        self.unwritten = Unwritten("Export")
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped, self._step = trainer.global_step > self._step, trainer.global_step
        due = self.every is not None and stepped and self._step % self.every == 0
        if not due or trainer.fast_dev_run:  # pyright: ignore
            return
        weights = full_state_dict(pl_module.policy)  # a collective
        if trainer.is_global_zero:
            name = f"step_{self._step:08d}"
            with self.unwritten.spared(f"an export of {name}"):
                pl_module.export(
                    weights, self.folder / name, unfinished_card(trainer, pl_module, f", step {self._step}")
                )
        trainer.strategy.barrier()


def unfinished_card(trainer: L.Trainer, pl_module: Any, what: str) -> dict[str, Any]:
    """Return the facts for a model card before the run is over.

    Args:
        what: The end of its title, after the model and the algorithm.
    """
    base, algorithm = pl_module.model.name, type(pl_module).__name__.lower()
    title = f"{ModelName.of(base)} trained with {algorithm}{what}"
    facts = {"base_model": base, "algorithm": algorithm, "title": title}
    form = getattr(trainer.datamodule, "prompt_form", None)  # pyright: ignore
    facts |= {"dataset": data} if (data := _named(trainer.datamodule)) else {}  # pyright: ignore
    facts |= {"command": pl_module.command} if getattr(pl_module, "command", "") else {}
    return facts | ({"prompts": form} if form else {})


def _named(data: Any) -> str:
    """Return the name of the rows: their paths, or the task that made them; empty where they have none."""
    task = getattr(data, "task", None)
    paths = [str(source.path) for source in getattr(data, "sources", ())]
    return ", ".join(paths) or (type(task).__name__.lower() if task is not None else "")
