"""What every on-policy algorithm shares: the rollout clock and its records.

One rollout lasts R batches of Lightning's loop (`slots_per_rollout`). The data module yields the same prompts R times,
tagged `slot`; slot 0 takes the rollout, and each `training_step` learns from one micro-batch of it. So everything that
Lightning's automatic optimisation does (accumulation, clipping, precision, schedules, `max_steps`) means what it says,
and `global_step` counts optimizer steps. Reading one algorithm's file shows every term of its objective: none is here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms import checks, state
from lit_rl.algorithms.batching import BatchPlan
from lit_rl.algorithms.evaluation import prefixed
from lit_rl.algorithms.generating import GeneratingModule
from lit_rl.algorithms.micro_batches import frozen_logprobs, micro_batch, step_totals
from lit_rl.algorithms.statistics import Averages, Metric, rollout_metrics
from lit_rl.algorithms.tables import sample_table
from lit_rl.errors import ConfigError, RewardError
from lit_rl.generation.collect import response_ids
from lit_rl.models.forward import token_logprobs
from lit_rl.ops.reductions import StepTotals
from lit_rl.rewards.base import Scores
from lit_rl.rollout import Completions, PromptBatch, Rollout

MAX_UNSCORED = 8
"""Rollouts in a row without any reward after which a run ends."""


class OnPolicyModule(GeneratingModule, ABC):
    """Abstract. Subclasses are final: they say what an advantage and a loss are, and override nothing that has a body.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        minibatches: Optimizer steps per pass over a rollout.
        iterations: Passes over a rollout.
        split_groups: Slices that every group is cut into, where a whole group is too large for a micro-batch.
        shared: What every `GeneratingModule` takes.
    """

    def __init__(
        self,
        model: Any,
        reward: Any,
        *,
        minibatches: int,
        iterations: int,
        split_groups: int,
        **shared: Any,
    ) -> None:
        super().__init__(model, reward, **shared)
        self.minibatches, self.iterations, self.split_groups = minibatches, iterations, split_groups
        checks.sampling(type(self).__name__, self.sampling, self.group_size)

        self.plan: BatchPlan | None = None
        self.rollout: Rollout | None = None
        self.samples: dict[str, list[Any]] = {}
        """The last rollout as a table of text and numbers, for callbacks; empty after a resume until the next one."""
        self._slot, self._totals, self._tokens_seen = -1, torch.zeros(0), 0
        self._averages, self._stats = Averages(), {}
        self._opened, self._unscored = time.perf_counter(), 0

    # ------------------------------------------------------------------ what an algorithm is

    @abstractmethod
    def advantages(self, completions: Completions, scores: Scores) -> Rollout:
        """Credit: from scored completions to a rollout that the loss can learn from. Runs without gradient."""

    @abstractmethod
    def loss(self, rollout: Rollout, totals: StepTotals) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's share of the objective (shares of a step sum to it), and its metrics as pairs."""

    # ------------------------------------------------------------------ generate -> reward -> advantages -> loss

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        if batch.slot == 0:
            with self.rollout_context():
                completions = self.generate(batch)
                scores = self.reward(batch, completions)
                self.rollout = self.advantages(completions, scores)
            self._open(batch, self.rollout, scores)
        self._slot = batch.slot

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        assert self.rollout is not None and self.plan is not None
        micro = micro_batch(self.rollout, self.plan, slot=batch.slot, seed=self.seed, index=batch.rollout)
        sequences, tokens = self._totals[batch.slot // self.plan.accumulate]
        loss, metrics = self.loss(micro, StepTotals(sequences.float(), tokens.float()))
        shares = self.plan.accumulate * self.plan.world_size
        self._averages.add({"loss": (loss, loss.new_tensor(1 / shares)), **metrics})
        # Lightning divides by the accumulated batches and averages over ranks; the loss already has its denominator.
        return loss * shares

    # ------------------------------------------------------------------ what advantages and losses are made with

    @property
    def ratio_is_one(self) -> bool:
        """One optimizer step a rollout: the policy that learns is the one that sampled."""
        return self.minibatches * self.iterations == 1

    def logprobs(self, completions: Completions) -> tuple[Tensor, Tensor]:
        """Log-probs `(b, t)` of the response under the policy, with gradient, and entropies `(b, t)`, without."""
        return token_logprobs(self.policy, completions, temperature=self.sampling.temperature)

    def old_logprobs(self, completions: Completions) -> Tensor:
        """`(b, t)` under the policy now, without gradient: to be taken when the rollout is."""
        return self._frozen(self.policy, completions)

    def ref_logprobs(self, completions: Completions) -> Tensor:
        """`(b, t)` under the reference, without gradient."""
        with self.reference.scoring(self.policy, self.reference_policy) as scorer:
            return self._frozen(scorer, completions)

    def _frozen(self, model: Any, completions: Completions) -> Tensor:
        # No more rows at once than a micro-batch has: scoring must not need more memory than learning.
        parts = self.minibatches * (self.plan.accumulate if self.plan else 1)
        rows = max(1, len(completions) // parts)
        return frozen_logprobs(model, completions, temperature=self.sampling.temperature, rows_at_once=rows)

    def over_all_ranks(self, estimator: Any, rewards: Tensor, group_id: Tensor) -> Tensor:
        """Apply `estimator(rewards (n,), group_id (n,)) -> (n,)` to the rows of every rank; returns our `(b,)`."""
        rewards = rewards.to(group_id.device)
        if self.world_size == 1:
            return estimator(rewards, group_id)
        everyone = estimator(self.all_gather(rewards).flatten(), self.all_gather(group_id).flatten())  # pyright: ignore
        return everyone[self.global_rank * len(rewards) :][: len(rewards)]

    # ------------------------------------------------------------------ records

    def setup(self, stage: str) -> None:
        """Check everything that can be known before weights are loaded."""
        self.plan = checks.against_data(self, stage)

    @property
    def slots_per_rollout(self) -> int:
        """Micro-batches a rollout lasts: what the data module repeats its batches by."""
        return self.iterations * self.minibatches * self.trainer.accumulate_grad_batches

    def _open(self, batch: PromptBatch, rollout: Rollout, scores: Scores) -> None:
        if self.plan is None:
            raise ConfigError("The module was not set up: call trainer.fit(module, datamodule=RolloutDataModule(...)).")
        completions = rollout.completions
        self._totals = step_totals(rollout, self.plan, seed=self.seed, index=batch.rollout)
        everyone = {
            name: self._everyones(column)
            for name, column in {
                "values": scores.values,
                "rewards": scores.total,
                "group_id": completions.group_id,
                "lengths": completions.lengths,
                "ended": completions.ended,
            }.items()
        }
        self._count_unscored(everyone["rewards"])
        tokens = int(everyone["lengths"].sum())
        self._tokens_seen += tokens
        self._stats = rollout_metrics(scores.names, **everyone) | scores.metrics
        self._stats |= {"num_tokens": float(self._tokens_seen), "rollout_tokens": float(tokens)}
        texts = self.tokenizer.batch_decode(response_ids(completions), skip_special_tokens=True)
        self.samples = sample_table(self.step, batch, texts, completions, scores, rollout.advantages)
        self._opened = time.perf_counter()

    def _count_unscored(self, rewards: Tensor) -> None:
        """A rollout that no reward applies to teaches nothing; many in a row are a mistake."""
        self._unscored = self._unscored + 1 if bool(rewards.isnan().all()) else 0
        if self._unscored == MAX_UNSCORED:
            names = ", ".join(self.reward_functions.names)
            raise RewardError(
                f"{names} returned None for every completion of {MAX_UNSCORED} rollouts in a row, so there is nothing "
                "to learn from. Look at samples/ and at the columns that the functions decide by."
            )

    def _everyones(self, column: Tensor) -> Tensor:
        column = column.to(self.device)
        return self.all_gather(column).flatten(0, 1) if self.world_size > 1 else column  # pyright: ignore

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """One optimizer step; after a rollout's last one, its metrics are logged, before any callback can save."""

        def without_gradient() -> Any:
            """Nothing to learn from: no moment and no weight decay may move a weight either."""
            result = optimizer_closure() if optimizer_closure else None
            optimizer.zero_grad()
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, without_gradient if self._unscored else optimizer_closure)
        self._averages.add({"grad_norm": (self.grad_norm, torch.ones_like(self.grad_norm))})
        if self.plan is not None and self._slot == self.plan.slots - 1:
            self._close(self.step + 1)

    def _close(self, step: int) -> None:
        """Log what the rollout and its updates were like, under the number of the optimizer step that ended it."""
        seconds = {**self._seconds, "update": time.perf_counter() - self._opened}
        stats = dict(self._stats)
        tokens = stats.pop("rollout_tokens")
        averages = self._averages.reduce(self.device)
        learning_rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        metrics = prefixed({**stats, **averages, "lr": learning_rate}, "train")
        metrics |= {f"time/{phase}": value for phase, value in seconds.items()}
        metrics["tokens_per_second"] = tokens / max(1e-9, sum(seconds.values()))
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        if every and step // every > (step - self.minibatches * self.iterations) // every:
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step=step)
        self.log_dict(metrics, logger=False, batch_size=1, rank_zero_only=False)

    def rank_state(self) -> dict[str, Any]:
        counts = {"tokens_seen": self._tokens_seen, "unscored": self._unscored}
        if self.plan is None or self.rollout is None or self._slot == self.plan.slots - 1:
            return counts  # between two rollouts there is nothing half-used
        return counts | {
            "rollout": state.to_plain(self.rollout),
            "slot": self._slot,
            "totals": state.to_plain(self._totals),
            "averages": state.to_plain(self._averages.sums),
            "stats": dict(self._stats),
            "seconds": dict(self._seconds),
        }

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        self._tokens_seen, self._unscored = saved["tokens_seen"], saved["unscored"]
        if "rollout" in saved:
            device = self.trainer.strategy.root_device  # the module itself is moved there only later
            self.rollout = state.rollout_of(saved["rollout"], device)
            self._slot, self._stats, self._seconds = saved["slot"], saved["stats"], saved["seconds"]
            self._totals = saved["totals"].to(device)
            self._averages.sums = state.to_device(saved["averages"], device)
