"""Nash-MD: learning from preferences as the equilibrium of a game, arXiv:2312.00886.

For a prompt, y is a completion of the policy and y' one of the geometric mixture of policy and reference:

    opponent       pi'(v) in proportion to pi(v)^(1 - c) pi_ref(v)^c, token by token; c is mixture_coef
    preference     P, the judge's probability that y beats y'
    objective      mean over judged y of sum_t [beta k_t - (P - 1/2)] log pi(y_t),  k_t = log pi(y_t) - log pi_ref(y_t)

k_t has no gradient: the first part is the policy gradient of the KL, with each token's own KL as its cost, the second
that of the preference, with the advantage P - 1/2. A tie still has its KL; a pair without a verdict is in neither the
sum nor the mean.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lit_rl.algorithms.checks import preference_checks
from lit_rl.algorithms.families.judged import JudgedModule
from lit_rl.algorithms.rollouts.scored import Scored, generate_opponent_pairs, policy_rows
from lit_rl.core.rollout import Completions, PromptBatch, Rollout, select
from lit_rl.generation.decoding import GeometricMixture
from lit_rl.models.forward import TokenScores
from lit_rl.ops.reductions import Metrics, StepTokens, StepTotals, masked_sum, mean_entropy, mean_of
from lit_rl.settings.algorithms import NashMDConfig
from lit_rl.settings.base import takes


class NashMD(JudgedModule):
    """Nash mirror descent: a prompt has a completion of the policy, which is learned from, and one of the mixture."""

    needs_reference = True
    opponent_writes = True

    @takes(NashMDConfig)
    def __init__(self, settings: NashMDConfig) -> None:
        super().__init__(config=settings)
        self.mixture_coef = settings.mixture_coef
        preference_checks.check_two_policies(type(self).__name__, self.group_size, self.reference)
        preference_checks.check_native_generator(self.generator)

    # ------------------------------------------------------------------ generate -> judge

    def draw_rollout(self, batch: PromptBatch) -> Completions:
        """Generate a completion of the policy and one of the mixture for each prompt."""
        scoring = partial(self.reference.scoring, self.policy, self.reference_policy)
        mixture = GeometricMixture(self.policy, scoring, self.at_epoch(self.mixture_coef))
        own = self.own_completions(batch)
        return generate_opponent_pairs(
            self.source, self.request(batch, group_size=1), own, mixture, self.reference_policy
        )

    def advantages(
        self, scored: Scored, old: Tensor | None = None, ref: Tensor | None = None
    ) -> tuple[Rollout, Metrics]:
        wins = self.wins(scored)[:, 0]
        judged = ~wins.isnan()
        learned = torch.stack([judged, torch.zeros_like(judged)], 1).flatten()
        rollout = self.as_rollout(
            scored,
            advantages=torch.stack([wins.nan_to_num(0.5) - 0.5, torch.zeros_like(wins)], 1).flatten(),
            loss_mask=scored.completions.response_mask & learned[:, None],
            ref_logprobs=ref,
        )
        policy_rewards, opponent_rewards = rollout.rewards[0::2], rollout.rewards[1::2]
        margins, ended = policy_rewards - opponent_rewards, scored.completions.ended.float()
        every = torch.ones_like(judged)
        return rollout, {
            "rewards/probabilities": mean_of(wins, judged),
            "rewards/accuracies": mean_of((wins > 0.5).float(), judged),
            "rewards/chosen": mean_of(policy_rewards, ~policy_rewards.isnan()),
            "rewards/rejected": mean_of(opponent_rewards, ~opponent_rewards.isnan()),
            "rewards/margins": mean_of(margins, ~margins.isnan()),
            "model_contain_eos_token": mean_of(ended[0::2], every),
            "ref_contain_eos_token": mean_of(ended[1::2], every),
        }

    def reference_of(self, scored: Scored) -> Tensor:
        return self.reference_in(policy_rows(scored.completions), scored.completions)

    def rollout_to_learn(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """Keep the policy's own completions: the opponent's are not learned from."""
        return select(rollout, policy_rows(rollout.completions)), {}

    # ------------------------------------------------------------------ loss

    def loss(
        self, rollout: Rollout, scores: TokenScores, totals: StepTotals, step: StepTokens | None = None
    ) -> tuple[Tensor, Metrics]:
        assert rollout.ref_logprobs is not None and rollout.advantages is not None
        beta, mask = self.at_epoch(self.beta), rollout.loss_mask
        kl = (scores.logprobs.detach() - rollout.ref_logprobs).masked_fill(~rollout.completions.response_mask, 0.0)
        kl_part = masked_sum(beta * kl * scores.logprobs, mask, 1)
        preference_part = rollout.advantages * masked_sum(scores.logprobs, mask, 1)
        judged = torch.as_tensor(totals.unmasked_sequences, device=mask.device).clamp(min=1)
        loss = (kl_part - preference_part).sum() / judged
        metrics = self._metrics(rollout, scores.logprobs, kl, beta)
        metrics |= mean_entropy(scores.entropy, rollout.completions.response_mask)
        return loss, metrics | {
            "loss/kl": mean_of(kl_part, mask.any(1)),
            "loss/score": mean_of(-preference_part, mask.any(1)),
        }

    @torch.no_grad()
    def _metrics(self, rollout: Rollout, logprobs: Tensor, kl: Tensor, beta: float) -> Metrics:
        """Return metrics of the policy's completions under TRL's names, without padding."""
        mask, rewards = rollout.completions.response_mask, rollout.rewards
        every, scored = torch.ones_like(rewards, dtype=torch.bool), ~rewards.isnan()
        kl_of_rows = masked_sum(kl, mask, 1)
        return {
            "objective/kl": mean_of(kl_of_rows, every),
            "objective/entropy": mean_of(-masked_sum(logprobs, mask, 1), every),
            "objective/non_score_reward": mean_of(-beta * kl_of_rows, every),
            "objective/rlhf_reward": mean_of(rewards - beta * kl_of_rows, scored),
        }

    def coefficients(self) -> dict[str, float]:
        return super().coefficients() | {"mixture_coef": self.at_epoch(self.mixture_coef)}
