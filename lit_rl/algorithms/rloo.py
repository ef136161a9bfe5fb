"""RLOO: REINFORCE leave-one-out, arXiv:2402.14740 (Back to Basics), in TRL 1.16's vetted setting.

For G completions of one prompt, each with a reward:

    reward      R_i <- R_i - beta sum_t (old_logprobs_it - ref_logprobs_it)          the sequence's k1 KL
    advantage   A_i = R_i - mean of the other G - 1 rewards
    ratio       r_i = exp(sum_t (logprobs_it - old_logprobs_it))                     of the whole sequence
    objective   - min(r_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) A_i), averaged over sequences

With one optimizer step a rollout the ratio is 1 and this is the paper's estimator.

Left out here: reward clipping, and other averages than over sequences (the ratio is the sequence's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

from lit_rl.algorithms import checks
from lit_rl.algorithms.evaluation import Evaluation
from lit_rl.algorithms.on_policy import OnPolicyModule
from lit_rl.algorithms.optimizers import OptimizerFactory
from lit_rl.algorithms.schedules import Schedule
from lit_rl.algorithms.statistics import Metric
from lit_rl.errors import in_range
from lit_rl.generation.base import Generator
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.reference import Reference
from lit_rl.ops.advantages import leave_one_out
from lit_rl.ops.kl import k1
from lit_rl.ops.losses import sequence_clipped_loss
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.reductions import StepTotals, sequence_mean
from lit_rl.rewards.base import Rewards, Scores
from lit_rl.rollout import Completions, Rollout, Sampling


@final
class RLOO(OnPolicyModule):
    """REINFORCE leave-one-out.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        generator: Draws the completions. None is the in-process decode loop.
        sampling: How training completions are drawn.
        reference: What the KL is measured against, loaded only where `beta` > 0. None chooses by the policy.
        optimizer: Makes the optimizer. None is AdamW at a learning rate of 1e-6.
        scheduler: Makes the learning-rate schedule. None is linear to zero.
        evaluation: How validation samples.
        advantage: `(rewards (n,), group_id (n,)) -> (n,)`.
        loss: `(logprobs, old_logprobs, advantages, mask) -> ((b,), metrics)`: one value a sequence.
        group_size: Completions a prompt, 2 or more.
        beta: Weight of the KL in the reward; 0 loads no reference.
        minibatches: Optimizer steps per pass over a rollout.
        iterations: Passes over a rollout.
        mask_truncated: Leave completions that `max_new_tokens` cut out of the loss.
        split_groups: Slices that every group is cut into, where a whole group is too large for a micro-batch.
        seed: Of the samples and of the order of groups.
    """

    def __init__(
        self,
        model: LanguageModel | str,
        reward: Rewards | Callable,
        *,
        generator: Generator | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        reference: Reference | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: Schedule | None = None,
        evaluation: Evaluation = Evaluation(),  # noqa: B008 (frozen)
        advantage: Callable = leave_one_out,
        loss: Callable = sequence_clipped_loss,
        group_size: int = 2,
        beta: float = 0.05,
        minibatches: int = 1,
        iterations: int = 1,
        mask_truncated: bool = False,
        split_groups: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model,
            reward,
            generator=generator,
            sampling=sampling,
            reference=reference,
            optimizer=optimizer,
            scheduler=scheduler,
            evaluation=evaluation,
            group_size=group_size,
            minibatches=minibatches,
            iterations=iterations,
            split_groups=split_groups,
            seed=seed,
        )
        in_range("algo.beta", beta, low=0)
        checks.clipping(loss)
        self.advantage, self.policy_loss = advantage, loss
        self.beta, self.mask_truncated = beta, mask_truncated
        self.needs_reference = beta > 0

    def advantages(self, completions: Completions, scores: Scores) -> Rollout:
        mask = completions.response_mask
        rewards = scores.total.to(mask.device)
        old_logprobs = ref_logprobs = None
        if not self.ratio_is_one:
            old_logprobs = self.old_logprobs(completions)
        if self.beta:
            old_logprobs = self.old_logprobs(completions) if old_logprobs is None else old_logprobs
            ref_logprobs = self.ref_logprobs(completions)
            rewards = rewards - self.beta * masked_sum(k1(old_logprobs, ref_logprobs, old_logprobs), mask, dim=1)
        return Rollout(
            completions=completions,
            rewards=rewards,
            advantages=self.over_all_ranks(self.advantage, rewards, completions.group_id),
            loss_mask=mask & completions.ended[:, None] if self.mask_truncated else mask,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
        )

    def loss(self, rollout: Rollout, totals: StepTotals) -> tuple[Tensor, dict[str, Metric]]:
        mask = rollout.loss_mask
        logprobs, entropy = self.logprobs(rollout.completions)
        old_logprobs = logprobs.detach() if rollout.old_logprobs is None else rollout.old_logprobs

        per_sequence, metrics = self.policy_loss(logprobs, old_logprobs, rollout.advantages, mask)
        if rollout.ref_logprobs is not None:
            kl = masked_sum(k1(old_logprobs, rollout.ref_logprobs, old_logprobs), mask)
            metrics = {**metrics, "kl": (kl, mask.sum())}

        metrics = {**metrics, "entropy": (masked_sum(entropy, mask), mask.sum())}
        return sequence_mean(per_sequence[:, None], mask.any(1, keepdim=True), totals), metrics
