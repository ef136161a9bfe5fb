"""What a run writes down of rollouts and of optimizer steps. Nothing here feeds a gradient."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_rl.algorithms.evaluation.statistics import Averages, input_tokens, rollout_metrics
from lit_rl.algorithms.evaluation.tables import sample_table
from lit_rl.algorithms.evaluation.token_columns import token_columns
from lit_rl.algorithms.evaluation.validation import prefixed
from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.rollouts.episodes import metrics_of
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.errors import RewardError
from lit_rl.examples import Totals
from lit_rl.generation.collect import texts_of
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.repetition import repeated_share
from lit_rl.ops.step import Metrics
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Rollout

MAX_UNSCORED = 8
"""Rollouts in a row without any reward after which a run ends."""


class Records:
    """The metrics of the rollout at hand: opened with it, added to at every micro-batch, closed after its last step."""

    def __init__(self) -> None:
        self.averages = Averages()
        self.samples: dict[str, list[Any]] = {}
        self.noted: dict[str, list[Any]] = {}
        """Of each row of the rollout at hand the reward of each function, the data's columns and what rewards noted,
        where these are plain; also after a resume in the middle of it."""
        self.unscored = 0
        self._stats: dict[str, float] = {}
        self._tokens_seen = 0
        self._input_tokens_seen = 0
        self._opened = time.perf_counter()

    def add(self, metrics: Metrics) -> None:
        """Of a micro-batch, or of the rollout."""
        self.averages.add(metrics)

    def open(
        self, scored: Scored, rollout: Rollout, *, step: int, sampled_tokens: int, tokenizer: Any, ranks: Ranks
    ) -> None:
        """Take down what the rollout is like that was drawn, over all ranks.

        Args:
            scored: As it was drawn.
            rollout: With its credit.
            step: Optimizer steps taken.
            sampled_tokens: Tokens that this rank has drawn for it, also those that nothing is learned from.
            tokenizer: Of the policy.
            ranks: A collective.

        Raises:
            RewardError: no reward applied to any completion, for too many rollouts in a row.
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
        self._input_tokens_seen += sum(ranks.counts(input_tokens(host)))
        self._stats = rollout_metrics(scores.names, **of_all)
        self._stats |= {"num_tokens": float(self._tokens_seen), "rollout_tokens": float(tokens)}
        self._stats["num_input_tokens_seen"] = float(self._input_tokens_seen)
        self.add(_logged_by_rewards(scores, ranks))
        if completions.episodes is not None:
            self.add(metrics_of(completions.episodes, ranks))
        if completions.kept_logmass is not None:
            mask = completions.response_mask
            kept = masked_sum(completions.kept_logmass.exp(), mask)
            self.add({"sampling/kept_mass": (kept, mask.sum())})
        repeated, long_enough = repeated_share(completions.response_ids, completions.response_mask)
        self.add({"completions/repetition": (repeated.sum(), long_enough.sum())})
        texts = texts_of(host, tokenizer)
        self.samples = sample_table(step, scored.batch, texts, host, scores, _one_a_row(rollout))
        if completions.episodes is not None:
            self.samples |= token_columns(completions, rollout, tokenizer)
        self.noted = _noted(self.samples, {*scored.batch.columns, *scores.extras})
        self._opened = time.perf_counter()

    def stepped(self, grad_norm: Tensor, *, skipped: bool) -> None:
        """An optimizer step is taken, with a gradient of this norm, or `skipped` because the norm was not finite."""
        self.add(step_metrics(grad_norm, skipped=skipped))

    def _count_unscored(self, names: Sequence[str], rewards: Tensor) -> None:
        """A rollout that no reward applies to teaches nothing; many in a row are a mistake."""
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
        rates: Mapping[str, float],
        kept: bool = False,
    ) -> dict[str, float]:
        """What the rollout and its updates were like, over all ranks.

        Args:
            ranks: A collective.
            seconds: Of generation and of rewards.
            within: Of what lies within these: an engine's update, waiting for environments.
            coefficients: Numbers in force that are no constants of the run.
            rates: Learning rates of the last step.
            kept: Whether the rollout is in use still: its averages stay for the line behind its last step.
        """
        stats = dict(self._stats)
        tokens = stats.pop("rollout_tokens")
        means = {**stats, **_reduced(self.averages, ranks, kept=kept), **coefficients, **rates}
        # Only now has a GPU done what it was given: averages are numbers of the last step too.
        phases = {**seconds, "update": time.perf_counter() - self._opened}
        metrics = prefixed(means, "train")
        metrics |= {f"time/{phase}": value for phase, value in {**phases, **within}.items()}
        metrics["tokens_per_second"] = tokens / max(1e-9, sum(phases.values()))
        return metrics

    @property
    def rollout_tokens(self) -> float:
        """Tokens that all ranks have drawn for the rollout at hand."""
        return self._stats["rollout_tokens"]

    def counts(self) -> dict[str, Any]:
        """What outlives a rollout, for a checkpoint."""
        seen = {"tokens_seen": self._tokens_seen, "input_tokens_seen": self._input_tokens_seen}
        return seen | {"unscored": self.unscored}

    def load_counts(self, saved: dict[str, Any]) -> None:
        """The counterpart of `counts`."""
        self._tokens_seen, self.unscored = saved["tokens_seen"], saved["unscored"]
        self._input_tokens_seen = saved.get("input_tokens_seen", 0)  # earlier versions did not count them

    def half_used(self) -> dict[str, Any]:
        """What belongs to the rollout at hand, for a checkpoint."""
        return {"averages": self.averages.state(), "stats": dict(self._stats), "noted": self.noted}

    def load_half_used(self, saved: dict[str, Any], device: torch.device) -> None:
        """The counterpart of `half_used`."""
        self.averages.load_state(saved["averages"], device)
        self._stats = saved["stats"]
        self.noted = saved.get("noted", {})  # earlier versions kept none
        self._opened = time.perf_counter()  # the seconds of this process alone are known


_PLAIN = {bool, int, float, str, type(None)}


def _noted(samples: Mapping[str, list[Any]], names: Collection[str]) -> dict[str, list[Any]]:
    """Rewards and columns of these names, where a checkpoint can hold all of their values."""
    return {
        name: values
        for name, values in samples.items()
        if (name.startswith("rewards/") or name in names) and {type(value) for value in values} <= _PLAIN
    }


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

    def close(self, grad_norm: Tensor, *, skipped: bool) -> None:
        """An optimizer step is taken, with a gradient of this norm, or `skipped` because the norm was not finite."""
        self.add(step_metrics(grad_norm, skipped=skipped))
        self._seconds += time.perf_counter() - self._opened

    def line(
        self,
        ranks: Ranks,
        coefficients: Mapping[str, float],
        rates: Mapping[str, float],
        generated_in: float,
        *,
        kept: bool = False,
    ) -> dict[str, float]:
        """The metrics of the steps since the last line, and a new beginning. A collective.

        Args:
            ranks: Whose steps they are.
            coefficients: Numbers in force at the last step that are no constants of the run.
            rates: Learning rates of the last step.
            generated_in: Seconds in which a model wrote what was learned from; 0 where none did.
            kept: Whether the averages stay, for the line that is due later.
        """
        asked = time.perf_counter()
        means = {**_reduced(self.averages, ranks, kept=kept), **coefficients, **rates}
        self._seconds += time.perf_counter() - asked  # what a GPU was given is done then
        metrics = prefixed(means | {"num_tokens": float(self._tokens_seen)}, "train")
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


def _reduced(averages: Averages, ranks: Ranks, *, kept: bool) -> dict[str, float]:
    """The averages as numbers; `kept`, they go on as if nobody had looked. A collective."""
    return (copy.copy(averages) if kept else averages).reduce(ranks)


def step_metrics(grad_norm: Tensor, *, skipped: bool) -> Metrics:
    """The metrics of an optimizer step: the norm of its gradient, and the share of steps that were left out."""
    one, nothing = torch.ones_like(grad_norm), torch.zeros_like(grad_norm)
    norm = (nothing, nothing) if skipped else (grad_norm, one)
    return {"grad_norm": norm, "skipped_steps": (one if skipped else nothing, one)}


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Of the optimizer's parameter groups: `lr` of the first, `lr_<name>` of the others."""
    first, *others = optimizer.param_groups
    return {"lr": first["lr"]} | {f"lr_{group['name']}": group["lr"] for group in others}


def _one_a_row(rollout: Rollout) -> Tensor | None:
    """What a table shows as the advantage of a row: the mean of its loss tokens; of pairs the verdict, 1, -1 or 0."""
    advantages = rollout.verdicts if rollout.advantages is None else rollout.advantages
    if advantages is None or advantages.ndim == 1:
        return advantages
    return (advantages * rollout.loss_mask).sum(1) / rollout.loss_mask.sum(1).clamp(min=1)


def _logged_by_rewards(scores: Scores, ranks: Ranks) -> Metrics:
    """What rewards gave to `log_metric`: a mean over everything logged on every rank."""
    return {
        name: (torch.full((), float(total), device=ranks.device), torch.full((), float(count), device=ranks.device))
        for name, (total, count) in scores.metrics.items()
    }
