"""What a run that learns from a data set writes down of its steps. Nothing here feeds a gradient."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from lit_rl.algorithms.evaluation.statistics import Averages
from lit_rl.algorithms.evaluation.validation import prefixed
from lit_rl.algorithms.rollouts import state
from lit_rl.examples import Totals
from lit_rl.ops.step import Metrics

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.offline import OfflineModule


class OfflineRecords:
    """Averages over the optimizer steps since the last line of the log."""

    def __init__(self) -> None:
        self.averages = Averages()
        self._tokens_seen = 0
        self._tokens = 0
        self._seconds = 0.0
        self._opened = time.perf_counter()

    def open(self, totals: Totals) -> None:
        """An optimizer step begins."""
        self._tokens += totals.attended
        self._tokens_seen += totals.attended
        self._opened = time.perf_counter()

    def add(self, metrics: Metrics) -> None:
        """Of a micro-batch."""
        self.averages.add(metrics)

    def close(self, module: OfflineModule, step: int) -> None:
        """An optimizer step is taken; every `trainer.log_every_n_steps` of them are logged as one line."""
        one, nothing = torch.ones_like(module.grad_norm), torch.zeros_like(module.grad_norm)
        broken = module.broken_steps.last
        norm = (nothing, nothing) if broken else (module.grad_norm, one)
        self.averages.add({"grad_norm": norm, "skipped_steps": (one if broken else nothing, one)})
        self._seconds += time.perf_counter() - self._opened
        trainer: Any = module.trainer
        every = trainer.log_every_n_steps
        if not every or step % every:
            return
        groups = trainer.optimizers[0].param_groups
        rates = {"lr": groups[0]["lr"]} | {f"lr_{group['name']}": group["lr"] for group in groups[1:]}
        found = self.averages.reduce(module.device) | module.coefficients() | rates
        metrics = prefixed({**found, "num_tokens": float(self._tokens_seen)}, "train")
        wrote = module.written_seconds()  # a method may let a model write what it learns from
        metrics |= {"time/update": self._seconds} | ({"time/generate": wrote} if wrote else {})
        metrics["tokens_per_second"] = self._tokens / max(1e-9, self._seconds + wrote)
        self._tokens, self._seconds = 0, 0.0
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        module.log_dict(metrics, logger=False, batch_size=1, rank_zero_only=False)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, which is taken between two steps."""
        return {
            "tokens_seen": self._tokens_seen,
            "averages": state.to_plain(self.averages.sums),
            "extremes": state.to_plain(self.averages.highest),
        }

    def load_state(self, saved: dict[str, Any], device: torch.device) -> None:
        self._tokens_seen = saved["tokens_seen"]  # speed is that of the tokens and seconds since the resume
        self.averages.sums = state.to_device(saved["averages"], device)
        self.averages.highest = state.to_device(saved["extremes"], device)
