"""The records of rollouts and optimizer steps: metrics and sample tables for the log. Nothing here feeds a gradient.

Micro-batches and optimizer steps add to averages (`StepRecords`). `RolloutRecords` closes them once a rollout, with the
statistics of its completions and rewards; `OfflineRecords` once a log line of a method that learns from a data set.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import (
    Averages,
    prefixed,
    repeated_share,
    rollout_metrics,
    sample_table,
    token_columns,
)
from lit_rl.algorithms.rollouts.episode_outcomes import episode_metrics
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.errors import RewardError
from lit_rl.core.examples import Totals
from lit_rl.core.rollout import Rollout
from lit_rl.generation.collect import texts_of
from lit_rl.ops.reductions import Metrics, masked_sum

MAX_UNSCORED = 8
"""The number of consecutive rollouts without any reward after which a run ends."""

_PLAIN_TYPES = {bool, int, float, str, type(None)}
"""Types of values that a checkpoint can contain."""


class StepRecords:
    """Averages over micro-batches and optimizer steps."""

    def __init__(self) -> None:
        self.averages = Averages()
        self._tokens_seen = 0
        self._opened = time.perf_counter()
        self._rates: dict[str, float] = {}
        """Learning rates of the last step: `lr` of the first parameter group, `lr_<name>` of the others."""

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of a micro-batch, or of a rollout."""
        self.averages.add(metrics)

    def add_step(self, grad_norm: Tensor, optimizer: Optimizer, *, skipped: bool) -> None:
        """Record an optimizer step with this gradient norm, or one that was `skipped` because it was not finite."""
        first, *others = optimizer.param_groups
        self._rates = {"lr": first["lr"]} | {f"lr_{group['name']}": group["lr"] for group in others}
        one, nothing = torch.ones_like(grad_norm), torch.zeros_like(grad_norm)
        norm = (nothing, nothing) if skipped else (grad_norm, one)
        self.add({"grad_norm": norm, "skipped_steps": (one if skipped else nothing, one)})

    def _means(self, ranks: Ranks, *, kept: bool) -> dict[str, float]:
        """Reduce the averages to numbers; with `kept`, the averages themselves stay as they are. A collective."""
        return (copy.copy(self.averages) if kept else self.averages).reduce(ranks)


class RolloutRecords(StepRecords):
    """The metrics of the current rollout: opened with it, extended by each micro-batch, closed after its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[str, list[Any]] = {}
        self.plain_columns: dict[str, list[Any]] = {}
        """The reward of each function, the data's columns and notes of rewards for each row of the current rollout, if
        their values are plain Python; also after a resume in the middle of the rollout."""
        self.unscored = 0
        self._stats: dict[str, float] = {}
        self._input_tokens_seen = 0

    def open(
        self, scored: Scored, rollout: Rollout, *, step: int, sampled_tokens: int, tokenizer: Any, ranks: Ranks
    ) -> None:
        """Record the statistics and samples of a new rollout, over all ranks. A collective.

        Args:
            scored: The rollout as it was drawn.
            rollout: The rollout with its advantages.
            step: Optimizer steps taken.
            sampled_tokens: Tokens that this rank sampled for it, including those that are not learned from.
            tokenizer: The policy's tokenizer.
            ranks: The ranks of the run.

        Raises:
            RewardError: no reward applied to any completion, for too many consecutive rollouts.
        """
        completions, scores, host = scored.completions, scored.scores, scored.completions.on_host
        columns = {
            "values": scores.values,
            "rewards": scores.total,
            "group_id": host.group_id,
            "lengths": host.lengths,
            "ended": host.ended,
        }
        of_all = ranks.gather_to_host(columns)
        self._count_unscored(scores.names, of_all["rewards"])
        tokens = sum(ranks.counts(sampled_tokens))
        self._tokens_seen += tokens
        read = int(host.prompt_mask.sum() + host.response_mask.sum())  # as TRL counts: a prompt once a completion
        self._input_tokens_seen += sum(ranks.counts(read))
        self._stats = rollout_metrics(scores.names, **of_all)
        self._stats |= {"num_tokens": float(self._tokens_seen), "rollout_tokens": float(tokens)}
        self._stats["num_input_tokens_seen"] = float(self._input_tokens_seen)
        number = partial(torch.full, (), device=ranks.device)
        logged = scores.metrics.items()  # by rewards, with `log_metric`
        self.add({name: (number(float(total)), number(float(count))) for name, (total, count) in logged})
        if completions.episodes is not None:
            self.add(episode_metrics(completions.episodes, ranks))
        if completions.kept_logmass is not None:
            mask = completions.response_mask
            kept = masked_sum(completions.kept_logmass.exp(), mask)
            self.add({"sampling/kept_mass": (kept, mask.sum())})
        repeated, long_enough = repeated_share(completions.response_ids, completions.response_mask)
        self.add({"completions/repetition": (repeated.sum(), long_enough.sum())})
        texts = texts_of(host, tokenizer)
        self.samples = sample_table(step, scored.batch, texts, host, scores, _advantage_of_rows(rollout))
        if completions.episodes is not None:
            self.samples |= token_columns(completions, rollout, tokenizer)
        named = {*scored.batch.columns, *scores.extras}
        self.plain_columns = {
            name: values
            for name, values in self.samples.items()
            if (name.startswith("rewards/") or name in named) and {type(value) for value in values} <= _PLAIN_TYPES
        }
        self._opened = time.perf_counter()

    def _count_unscored(self, names: Sequence[str], rewards: Tensor) -> None:
        """Count rollouts without any reward, and end the run after too many in a row."""
        self.unscored = self.unscored + 1 if bool(rewards.isnan().all()) else 0
        if self.unscored == MAX_UNSCORED:
            raise RewardError(
                f"{', '.join(names)} returned None for every completion of {MAX_UNSCORED} rollouts in a row, so there "
                "is nothing to learn from. Look at samples/ and at the columns that the functions decide by."
            )

    def close(
        self,
        ranks: Ranks,
        *,
        seconds: Mapping[str, float],
        within: Mapping[str, float],
        coefficients: Mapping[str, float],
        kept: bool = False,
    ) -> dict[str, float]:
        """Return the metrics of the rollout and its updates, over all ranks. A collective.

        Args:
            ranks: The ranks of the run.
            seconds: Seconds of generation and of rewards.
            within: Seconds of parts of these phases: an engine's update, waiting for environments.
            coefficients: Current values of coefficients that change during the run.
            kept: Whether the rollout is still in use: its averages are kept for the log line after its last step.
        """
        stats = dict(self._stats)
        tokens = stats.pop("rollout_tokens")
        means = {**stats, **self._means(ranks, kept=kept), **coefficients, **self._rates}
        # Reading the averages has waited for the GPU, so the seconds of the update are complete.
        phases = {**seconds, "update": time.perf_counter() - self._opened}
        metrics = prefixed(means, "train")
        metrics |= {f"time/{phase}": value for phase, value in {**phases, **within}.items()}
        metrics["tokens_per_second"] = tokens / max(1e-9, sum(phases.values()))
        return metrics

    @property
    def rollout_tokens(self) -> float:
        """Tokens that all ranks sampled for the current rollout."""
        return self._stats["rollout_tokens"]

    def counts(self) -> dict[str, Any]:
        """Return the counts over the whole run, for a checkpoint."""
        seen = {"tokens_seen": self._tokens_seen, "input_tokens_seen": self._input_tokens_seen}
        return seen | {"unscored": self.unscored}

    def load_counts(self, saved: dict[str, Any]) -> None:
        """Restore what `counts` returned."""
        self._tokens_seen, self.unscored = saved["tokens_seen"], saved["unscored"]
        self._input_tokens_seen = saved["input_tokens_seen"]

    def half_used(self) -> dict[str, Any]:
        """Return the state of the current rollout, for a checkpoint."""
        return {"averages": self.averages.state(), "stats": dict(self._stats), "columns": self.plain_columns}

    def load_half_used(self, saved: dict[str, Any], device: torch.device) -> None:
        """Restore what `half_used` returned."""
        self.averages.load_state(saved["averages"], device)
        self._stats, self.plain_columns = saved["stats"], saved["columns"]
        self._opened = time.perf_counter()  # seconds before the resume are not known


class OfflineRecords(StepRecords):
    """Averages over the optimizer steps since the last line of the log."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens = 0
        self._seconds = 0.0

    def open(self, totals: Totals) -> None:
        """Record the start of an optimizer step."""
        self._tokens += totals.attended
        self._tokens_seen += totals.attended
        self._opened = time.perf_counter()

    def add_step(self, grad_norm: Tensor, optimizer: Optimizer, *, skipped: bool) -> None:
        super().add_step(grad_norm, optimizer, skipped=skipped)
        self._seconds += time.perf_counter() - self._opened

    def line(
        self,
        ranks: Ranks,
        coefficients: Mapping[str, float],
        generated_in: float,
        *,
        kept: bool = False,
    ) -> dict[str, float]:
        """Return the metrics of the steps since the last log line, and start anew. A collective.

        Args:
            ranks: The ranks of the run.
            coefficients: Values at the last step of coefficients that change during the run.
            generated_in: Seconds of generating texts to learn from; 0 if none were generated.
            kept: Whether the averages are kept for a later log line.
        """
        asked = time.perf_counter()
        means = {**self._means(ranks, kept=kept), **coefficients, **self._rates}
        self._seconds += time.perf_counter() - asked  # reading the averages has waited for the GPU
        metrics = prefixed(means | {"num_tokens": float(self._tokens_seen)}, "train")
        metrics |= {"time/update": self._seconds} | ({"time/generate": generated_in} if generated_in else {})
        metrics["tokens_per_second"] = self._tokens / max(1e-9, self._seconds + generated_in)
        self._tokens, self._seconds = 0, 0.0
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint between two steps."""
        return {"tokens_seen": self._tokens_seen, "averages": self.averages.state()}

    def load_state(self, saved: dict[str, Any], device: torch.device) -> None:
        """Restore what `state` returned. Speeds count tokens and seconds since the resume."""
        self._tokens_seen = saved["tokens_seen"]
        self.averages.load_state(saved["averages"], device)


def _advantage_of_rows(rollout: Rollout) -> Tensor | None:
    """Return each row's advantage for the sample table: the mean over its loss tokens; for pairs the verdict."""
    advantages = rollout.verdicts if rollout.advantages is None else rollout.advantages
    if advantages is None or advantages.ndim == 1:
        return advantages
    return (advantages * rollout.loss_mask).sum(1) / rollout.loss_mask.sum(1).clamp(min=1)
