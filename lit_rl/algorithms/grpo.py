"""GRPO: group-relative policy optimisation, arXiv:2402.03300 (DeepSeekMath), equation 3, in TRL 1.16's vetted setting.

For G completions of one prompt, each with a reward:

    advantage   A_i = (R_i - mean(R)) / (std(R) + 1e-4)
    ratio       r_it = exp(logprobs_it - old_logprobs_it)
    objective   - min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) + beta KL_it, averaged over tokens

Which advantage, loss, KL estimator and average is a choice of functions (`algo/advantage`, `algo/loss`, `algo/kl`,
`algo/reduction`); DAPO and Dr. GRPO are such choices (`algo=dapo`, `algo=dr_grpo`), not classes.

Left out here: dynamic sampling and overlong shaping (DAPO), engine-mismatch correction.
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
from lit_rl.ops.advantages import group_normalized
from lit_rl.ops.kl import corrected_k3
from lit_rl.ops.losses import clipped_policy_loss
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.reductions import StepTotals, token_mean
from lit_rl.rewards.base import Rewards, Scores
from lit_rl.rollout import Completions, Rollout, Sampling


@final
class GRPO(OnPolicyModule):
    """Group-relative policy optimisation.

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
        loss: `(logprobs, old_logprobs, advantages, mask) -> ((b, t), metrics)`.
        kl: `(logprobs, ref_logprobs, old_logprobs) -> (b, t)`.
        reduction: `(per_token, mask, totals) -> scalar`.
        group_size: Completions a prompt, 2 or more.
        beta: Weight of the KL term; 0 loads no reference.
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
        advantage: Callable = group_normalized,
        loss: Callable = clipped_policy_loss,
        kl: Callable = corrected_k3,
        reduction: Callable = token_mean,
        group_size: int = 8,
        beta: float = 0.0,
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
        self.advantage, self.policy_loss, self.kl, self.reduction = advantage, loss, kl, reduction
        self.beta, self.mask_truncated = beta, mask_truncated
        self.needs_reference = beta > 0

    def advantages(self, completions: Completions, scores: Scores) -> Rollout:
        advantages = self.over_all_ranks(self.advantage, scores.total, completions.group_id)
        mask = completions.response_mask
        return Rollout(
            completions=completions,
            rewards=scores.total.to(advantages.device),
            advantages=advantages,
            loss_mask=mask & completions.ended[:, None] if self.mask_truncated else mask,
            old_logprobs=None if self.ratio_is_one else self.old_logprobs(completions),
            ref_logprobs=self.ref_logprobs(completions) if self.beta else None,
        )

    def loss(self, rollout: Rollout, totals: StepTotals) -> tuple[Tensor, dict[str, Metric]]:
        mask = rollout.loss_mask
        logprobs, entropy = self.logprobs(rollout.completions)
        old_logprobs = logprobs.detach() if rollout.old_logprobs is None else rollout.old_logprobs

        per_token, metrics = self.policy_loss(logprobs, old_logprobs, rollout.advantages, mask)
        if rollout.ref_logprobs is not None:
            kl = self.kl(logprobs, rollout.ref_logprobs, old_logprobs)
            per_token = per_token + self.beta * kl
            metrics = {**metrics, "kl": (masked_sum(kl.detach(), mask), mask.sum())}

        metrics = {**metrics, "entropy": (masked_sum(entropy, mask), mask.sum())}
        return self.reduction(per_token, mask, totals), metrics
