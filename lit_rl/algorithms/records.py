"""What a run writes down of a rollout and of the updates made with it. Nothing here feeds a gradient."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rl.algorithms.evaluation.statistics import Averages, rollout_metrics
from lit_rl.algorithms.evaluation.tables import sample_table
from lit_rl.algorithms.evaluation.validation import prefixed
from lit_rl.algorithms.rollouts import state
from lit_rl.errors import RewardError
from lit_rl.generation.collect import response_ids
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.step import Metrics
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch, Rollout

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.on_policy import OnPolicyModule

MAX_UNSCORED = 8
"""Rollouts in a row without any reward after which a run ends."""


@dataclass(frozen=True)
class Scored:
    """What the advantages of a rollout were estimated from, for callbacks."""

    batch: PromptBatch
    completions: Completions
    scores: Scores
    greedy_rewards: Tensor | None


class Records:
    """The metrics of the rollout at hand: opened with it, added to at every micro-batch, logged after its last step."""

    def __init__(self) -> None:
        self.averages = Averages()
        self.samples: dict[str, list[Any]] = {}
        self.unscored = 0
        self._stats: dict[str, float] = {}
        self._tokens_seen = 0
        self._opened = time.perf_counter()

    def add(self, metrics: Metrics) -> None:
        """Of a micro-batch, or of the rollout."""
        self.averages.add(metrics)

    def open(self, module: OnPolicyModule, scored: Scored, rollout: Rollout) -> None:
        """Take down what the rollout is like that was drawn, over all ranks."""
        completions, scores = scored.completions, scored.scores
        columns = {
            "values": scores.values,
            "rewards": scores.total,
            "group_id": completions.group_id,
            "lengths": completions.lengths,
            "ended": completions.ended,
        }
        everyone = {name: module.everyones(column) for name, column in columns.items()}
        self._count_unscored(module, everyone["rewards"])
        tokens = int(module.everyones(torch.tensor([module.sampled_tokens])).sum())
        self._tokens_seen += tokens
        self._stats = rollout_metrics(scores.names, **everyone)
        self._stats |= {"num_tokens": float(self._tokens_seen), "rollout_tokens": float(tokens)}
        self.averages.add(_logged_by_rewards(scores, module.device))
        if completions.kept_logmass is not None:
            mask = completions.response_mask
            kept = masked_sum(completions.kept_logmass.exp(), mask)
            self.averages.add({"sampling/kept_mass": (kept, mask.sum())})
        texts = module.tokenizer.batch_decode(response_ids(completions), skip_special_tokens=True)
        advantages = rollout.advantages
        if advantages.ndim == 2:  # a table has one number a row
            advantages = (advantages * rollout.loss_mask).sum(1) / rollout.loss_mask.sum(1).clamp(min=1)
        self.samples = sample_table(module.step, scored.batch, texts, completions, scores, advantages)
        self._opened = time.perf_counter()

    def stepped(self, module: OnPolicyModule) -> None:
        """Take down what an optimizer step was like."""
        one, nothing = torch.ones_like(module.grad_norm), torch.zeros_like(module.grad_norm)
        broken = module.broken_steps.last
        norm = (nothing, nothing) if broken else (module.grad_norm, one)
        self.averages.add({"grad_norm": norm, "skipped_steps": (one if broken else nothing, one)})

    def _count_unscored(self, module: OnPolicyModule, rewards: Tensor) -> None:
        """A rollout that no reward applies to teaches nothing; many in a row are a mistake."""
        self.unscored = self.unscored + 1 if bool(rewards.isnan().all()) else 0
        if self.unscored == MAX_UNSCORED:
            names = ", ".join(module.reward_functions.names)
            raise RewardError(
                f"{names} returned None for every completion of {MAX_UNSCORED} rollouts in a row, so there is nothing "
                "to learn from. Look at samples/ and at the columns that the functions decide by."
            )

    def close(self, module: OnPolicyModule, step: int, seconds: dict[str, float]) -> None:
        """Log what the rollout and its updates were like, under the number of the optimizer step that ended it."""
        seconds = {**seconds, "update": time.perf_counter() - self._opened}
        stats = dict(self._stats)
        tokens = stats.pop("rollout_tokens")
        averages = self.averages.reduce(module.device)
        groups = module.trainer.optimizers[0].param_groups
        rates = {"lr": groups[0]["lr"]} | {f"lr_{group['name']}": group["lr"] for group in groups[1:]}
        metrics = prefixed({**stats, **averages, **module.coefficients(), **rates}, "train")
        of_engine = getattr(module.generator, "seconds", {})  # parts of the time that generation took
        metrics |= {f"time/{phase}": value for phase, value in {**seconds, **of_engine}.items()}
        metrics["tokens_per_second"] = tokens / max(1e-9, sum(seconds.values()))
        trainer: Any = module.trainer
        every = trainer.log_every_n_steps
        if every and step // every > (step - module.minibatches * module.iterations) // every:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
        module.log_dict(metrics, logger=False, batch_size=1, rank_zero_only=False)

    def counts(self) -> dict[str, Any]:
        """What outlives a rollout, for a checkpoint."""
        return {"tokens_seen": self._tokens_seen, "unscored": self.unscored}

    def load_counts(self, saved: dict[str, Any]) -> None:
        self._tokens_seen, self.unscored = saved["tokens_seen"], saved["unscored"]

    def half_used(self) -> dict[str, Any]:
        """What belongs to the rollout at hand, for a checkpoint."""
        return {
            "averages": state.to_plain(self.averages.sums),
            "extremes": state.to_plain(self.averages.highest),
            "moments": state.to_plain(self.averages.moments),
            "stats": dict(self._stats),
        }

    def load_half_used(self, saved: dict[str, Any], device: torch.device) -> None:
        self.averages.sums = state.to_device(saved["averages"], device)
        self.averages.highest = state.to_device(saved["extremes"], device)
        self.averages.moments = state.to_device(saved["moments"], device)
        self._stats = saved["stats"]


def _logged_by_rewards(scores: Scores, device: torch.device) -> Metrics:
    """What rewards gave to `log_metric`: a mean over everything logged on every rank."""
    return {
        name: (torch.tensor(total, device=device), torch.tensor(float(count), device=device))
        for name, (total, count) in scores.metrics.items()
    }
