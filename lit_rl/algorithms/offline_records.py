"""What a run that learns from a data set writes down of its steps. Nothing here feeds a gradient."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.evaluation.statistics import Averages
from lit_rl.algorithms.evaluation.validation import prefixed
from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.records import of_step
from lit_rl.examples import Totals
from lit_rl.ops.step import Metrics


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

    def close(self, grad_norm: Tensor, *, left_out: bool) -> None:
        """An optimizer step is taken, with a gradient of this norm, or was left out because that is not finite."""
        self.averages.add(of_step(grad_norm, left_out=left_out))
        self._seconds += time.perf_counter() - self._opened

    def line(self, ranks: Ranks, settings: Mapping[str, float], generated_in: float) -> dict[str, float]:
        """The metrics of the steps since the last line, and a new beginning. A collective.

        Args:
            ranks: Whose steps they are.
            settings: Numbers in force at the last step, such as the learning rate.
            generated_in: Seconds in which a model wrote what was learned from; 0 where none did.
        """
        metrics = prefixed({**self.averages.reduce(ranks), **settings, "num_tokens": float(self._tokens_seen)}, "train")
        metrics |= {"time/update": self._seconds} | ({"time/generate": generated_in} if generated_in else {})
        metrics["tokens_per_second"] = self._tokens / max(1e-9, self._seconds + generated_in)
        self._tokens, self._seconds = 0, 0.0
        return metrics

    def state(self) -> dict[str, Any]:
        """For a checkpoint, which is taken between two steps."""
        return {"tokens_seen": self._tokens_seen, "averages": self.averages.state()}

    def load_state(self, saved: dict[str, Any], device: torch.device) -> None:
        """The counterpart of `state`. Speed is that of the tokens and seconds since the resume."""
        self._tokens_seen = saved["tokens_seen"]
        self.averages.load_state(saved["averages"], device)
