"""What every on-policy algorithm shares: the rollout clock.

One rollout lasts R batches of Lightning's loop (`slots_per_rollout`). The data module yields the same prompts R times,
tagged `slot`; slot 0 takes the rollout, and each `training_step` learns from one micro-batch of it. So everything that
Lightning's automatic optimisation does (accumulation, clipping, precision, schedules, `max_steps`) means what it says,
and `global_step` counts optimizer steps. No term of an objective is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms import ranks as over_ranks
from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.preflight import on_policy as checks
from lit_rl.algorithms.records import Records, Scored
from lit_rl.algorithms.rollouts import drawing, state
from lit_rl.algorithms.rollouts.micro_batches import frozen_logprobs, micro_batch, step_counts, totals_of
from lit_rl.algorithms.rollouts.plan import BatchPlan
from lit_rl.algorithms.terms.groups import GroupSelection
from lit_rl.algorithms.terms.look_ahead import look_ahead
from lit_rl.errors import ConfigError
from lit_rl.models.policy.forward import TokenScores, score
from lit_rl.ops.reductions import StepTotals
from lit_rl.ops.step import Metrics, StepTokens
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch, Rollout


class OnPolicyModule(GeneratingModule, ABC):
    """Abstract: subclasses say what an advantage and a loss are.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        group_size: Completions a prompt; 2 or more where the advantage compares completions of one prompt.
        minibatches: Optimizer steps per pass over a rollout.
        iterations: Passes over a rollout.
        split_groups: Slices that every group is cut into, where a whole group is too large for a micro-batch.
        groups: Which groups, or members of groups, are learned from. None: all.
        shared: What every `GeneratingModule` takes.
    """

    def __init__(
        self,
        model: Any,
        reward: Any,
        *,
        group_size: int = 8,
        minibatches: int = 1,
        iterations: int = 1,
        split_groups: int = 1,
        groups: GroupSelection | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, reward, **shared)
        self.minibatches, self.iterations, self.split_groups = minibatches, iterations, split_groups
        self.group_size, self.groups = group_size, groups
        self.plan: BatchPlan | None = None
        self.rollout: Rollout | None = None
        self.scored: Scored | None = None
        self._slot, self._counts = -1, torch.zeros(0)
        self._step_tokens: StepTokens | None = None
        self._records = Records()

    # ------------------------------------------------------------------ what an algorithm is

    @abstractmethod
    def advantages(
        self,
        completions: Completions,
        scores: Scores,
        *,
        kept: Tensor | None = None,
        greedy_rewards: Tensor | None = None,
    ) -> Rollout:
        """Credit: from scored completions to a rollout that the loss can learn from. Runs without gradient.

        Args:
            completions: `b` of them.
            scores: What the rewards said.
            kept: Bool `(b,)`: the rows that are learned from. None: all.
            greedy_rewards: Float `(b,)`: the reward of the greedy completion of each row's prompt, where
                `needs_greedy_rewards`.
        """

    @abstractmethod
    def loss(self, rollout: Rollout, totals: StepTotals, step: StepTokens | None = None) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the objective (shares of a step sum to it), and its metrics.

        Args:
            rollout: The micro-batch.
            totals: What the optimizer step counts.
            step: The loss tokens of the whole step, where `needs_step`. None: this micro-batch is all of it.
        """

    needs_greedy_rewards = False
    """Whether `advantages` compares with the greedy completion of each prompt."""

    needs_step = False
    """Whether a term of `loss` is defined over all tokens of an optimizer step."""

    def replaced(self, rollout: Rollout) -> Rollout:
        """What is learned from, made of the rollout that was drawn."""
        return rollout

    def after_step(self) -> None:
        """Called after each optimizer step: what changes between steps changes here."""
        if self.needs_reference:
            self.reference.update(self.policy, self.reference_policy, self.step + 1)

    def coefficients(self) -> dict[str, float]:
        """Numbers in force that are no constants of the run, for the log."""
        return {}

    # ------------------------------------------------------------------ generate -> reward -> advantages -> loss

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        if batch.slot == 0:
            self._seconds, self._sampled = {"generate": 0.0, "reward": 0.0}, 0
            with self.rollout_context():
                scored, drawn = drawing.taken(self, batch)
            self.rest()
            self.record(drawing.proof_of(self))
            self._open(scored, drawn)
        self._slot = batch.slot

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        assert self.rollout is not None and self.plan is not None
        step, number = divmod(batch.slot, self.plan.accumulate)
        micro = self.of_step(self._micro_batch(batch), self._counts[step])
        if self.needs_step and number == 0 and self.plan.accumulate * self.plan.world_size > 1:
            whole = [self._micro_batch(batch, ahead) for ahead in range(self.plan.accumulate)]
            self._step_tokens = look_ahead(self, whole)
        loss, metrics = self.loss(micro, totals_of(self._counts[step], self.plan), self._step_tokens)
        shares = self.plan.accumulate * self.plan.world_size
        self._records.add({"loss": (loss, loss.new_tensor(1 / shares)), **metrics})
        # Lightning divides by the accumulated batches and averages over ranks; the loss already has its denominator.
        return loss * shares

    def _micro_batch(self, batch: PromptBatch, ahead: int = 0) -> Rollout:
        assert self.rollout is not None and self.plan is not None
        return micro_batch(self.rollout, self.plan, slot=batch.slot + ahead, seed=self.seed, index=batch.rollout)

    def of_step(self, micro: Rollout, counts: Tensor) -> Rollout:
        """The micro-batch as one of a step that counts `counts`, a row of `step_counts`."""
        return micro

    def acting(self, entropy: Tensor, mask: Tensor, step: StepTokens | None) -> Tensor:
        """Bool `(b, t)`: the loss tokens that the policy loss acts on."""
        return mask

    # ------------------------------------------------------------------ what advantages and losses are made with

    @property
    def ratio_is_one(self) -> bool:
        """One optimizer step a rollout: the policy that learns is the one that sampled."""
        return self.minibatches * self.iterations == 1

    def token_scores(self, completions: Completions, **terms: bool) -> TokenScores:
        """Log-probs `(b, t)` of the response under the policy, with gradient, and entropies `(b, t)`."""
        return score(self.policy, completions, self.sampling, **terms)

    def old_logprobs(self, completions: Completions) -> Tensor:
        """`(b, t)` under the policy now, without gradient: to be taken when the rollout is."""
        return self._frozen(self.policy, completions)

    def ref_logprobs(self, completions: Completions) -> Tensor:
        """`(b, t)` under the reference, without gradient."""
        with self.reference.scoring(self.policy, self.reference_policy) as scorer:
            return self._frozen(scorer, completions)

    def _frozen(self, model: Any, completions: Completions) -> Tensor:
        return frozen_logprobs(model, completions, sampling=self.sampling, rows_at_once=self.rows_at_once(completions))

    def rows_at_once(self, completions: Completions) -> int:
        """As many rows as a micro-batch has: scoring must not need more memory than learning."""
        parts = self.minibatches * (self.plan.accumulate if self.plan else 1)
        return max(1, len(completions) // parts)

    over_all_ranks = over_ranks.over_all_ranks
    everyones = over_ranks.everyones

    def counts_of_ranks(self, count: int) -> list[int]:
        """The numbers that every rank gives, in the order of ranks. A collective."""
        return self.everyones(torch.tensor([count])).tolist() if self.trainer_or_none else [count]

    def record(self, metrics: Metrics) -> None:
        """Add metrics of the rollout at hand."""
        self._records.add(metrics)

    # ------------------------------------------------------------------ the clock

    def setup(self, stage: str) -> None:
        """Check everything that can be known before weights are loaded."""
        self.plan = checks.against_data(self, stage)

    @property
    def slots_per_rollout(self) -> int:
        """Micro-batches a rollout lasts: what the data module repeats its batches by."""
        return self.iterations * self.minibatches * self.trainer.accumulate_grad_batches

    @property
    def samples(self) -> dict[str, list[Any]]:
        """The last rollout as a table of text and numbers, for callbacks; empty after a resume until the next one."""
        return self._records.samples

    def _open(self, scored: Scored, drawn: Rollout) -> None:
        if self.plan is None:
            raise ConfigError("The module was not set up: call trainer.fit(module, datamodule=RolloutDataModule(...)).")
        self._records.open(self, scored, drawn)
        self.scored, self.rollout = scored, self.replaced(drawn)
        self._counts = step_counts(self.rollout, self.plan, seed=self.seed, index=scored.batch.rollout)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """One optimizer step; after a rollout's last one, its metrics are logged, before any callback can save."""

        def without_gradient() -> Any:
            """Nothing to learn from: no moment and no weight decay may move a weight either."""
            result = optimizer_closure() if optimizer_closure else None
            optimizer.zero_grad()
            return result

        closure = without_gradient if self._records.unscored else optimizer_closure
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self._records.stepped(self)
        self.after_step()
        if self.plan is not None and self._slot == self.plan.slots - 1:
            self._records.close(self, self.step + 1, self._seconds)

    def step_batch(self) -> dict[str, Any]:
        assert self.rollout is not None
        return {"slot": self._slot, "rollout": state.to_plain(self.rollout)}

    def rank_state(self) -> dict[str, Any]:
        counts = self._records.counts() | drawing.state_of(self)
        if self.plan is None or self.rollout is None or self._slot == self.plan.slots - 1:
            return counts  # between two rollouts there is nothing half-used
        mine = {"slot": self._slot, "seconds": dict(self._seconds)}
        mine |= {"rollout": state.to_plain(self.rollout), "totals": state.to_plain(self._counts)}
        return counts | self._records.half_used() | mine

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        self._records.load_counts(saved)
        device = self.trainer.strategy.root_device  # the module itself is moved there only later
        drawing.load_state(self, saved, device)
        if "rollout" in saved:
            self.rollout = state.rollout_of(saved["rollout"], device)
            self._records.load_half_used(saved, device)
            self._slot, self._seconds = saved["slot"], saved["seconds"]
            self._counts = saved["totals"].to(device)
