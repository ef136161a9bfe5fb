"""PPO: proximal policy optimisation with a critic, arXiv:1707.06347, as in InstructGPT (2203.02155) and TRL up to 0.26.

For every response token t of a row, with values V_t of the critic when the rollout was taken:

    token rewards  r_t = R at the last token - reward_beta (old_logprobs_t - ref_logprobs_t)
    advantage      A_t = sum_l (gamma lam)^l delta_{t+l},  delta_t = r_t + gamma V_{t+1} - V_t   (1506.02438, eq. 16)
    returns        G_t = A_t + V_t, from the advantages before they are whitened
    policy         - min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
    critic         max((V - G)^2, (clip(V, V_old - value_clip, V_old + value_clip) - G)^2) / 2
    objective      policy + vf_coef critic + ptx_coef cross-entropy of supervised text, each averaged over its tokens

One optimizer trains both, in two parameter groups. All further terms of the policy, off by default, are in
`lit_rl.algorithms.families.policy_gradient`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_rl.algorithms.checks import policy_gradient_checks
from lit_rl.algorithms.checks.model_sizes import StepFacts
from lit_rl.algorithms.checks.strategy_checks import Feature
from lit_rl.algorithms.chosen_functions import arguments_for
from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.optim.schedules import After, FromTorch, Schedule, as_schedule
from lit_rl.algorithms.rollouts.rollout_plan import without_gradient
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.terms.credit import Credit, turns_of
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, PromptBatch, Rollout
from lit_rl.core.transfers import to_device
from lit_rl.models.critics import AdapterCritic, Critic, SeparateCritic, SharedTrunk
from lit_rl.models.forward import TokenScores
from lit_rl.models.scoring import RewardAdapter
from lit_rl.ops.policy_losses import MAX_LOG_RATIO, token_ratio
from lit_rl.ops.reductions import Metrics, StepTokens, StepTotals, Summed, masked_moments, masked_sum, token_mean
from lit_rl.ops.returns import clipped_value_loss, value_sums
from lit_rl.rewards.weighted_rewards import Scores
from lit_rl.settings.algorithms import PPOConfig
from lit_rl.settings.base import takes

_TRL_NAMES = {
    "policy/approxkl_avg": "approx_kl",
    "policy/clipfrac_avg": "clip_ratio/region_mean",
    "policy/entropy_avg": "entropy",
    "value/ratio": "ratio_mean",
}
"""Names of TRL's PPO for the policy's metrics."""


class PPO(PolicyGradient):
    """Proximal policy optimisation with a critic."""

    @takes(PPOConfig)
    def __init__(self, settings: PPOConfig) -> None:
        super().__init__(config=settings)
        self.needs_greedy_rewards = False  # the critic is what an advantage is compared with
        self.value_clip, self.vf_coef = settings.value_clip, settings.vf_coef
        self.value_function: Critic = SeparateCritic() if settings.critic is None else settings.critic
        self.critic: Any = None
        self.critic_lr, self.critic_warmup = settings.critic_lr, settings.critic_warmup
        of_critic = (
            None if settings.critic_scheduler is None else as_schedule(settings.critic_scheduler, "critic_scheduler")
        )
        self.critic_scheduler: Schedule | FromTorch | None = of_critic
        self.adapter = None if settings.reward_adapter is None else RewardAdapter(settings.reward_adapter)
        self.reward_adapter: Any = None
        self._check()

    # ------------------------------------------------------------------ advantages

    def reward(self, batch: PromptBatch, completions: Completions) -> Scores:
        scores = super().reward(batch, completions)
        if self.adapter is None:
            return scores
        values = self.adapter.rewards(self.policy, self.reward_adapter, completions)
        if completions.episodes is not None:
            failed = torch.tensor([episode.failed for episode in completions.episodes], device=values.device)
            values = values.masked_fill(failed, torch.nan)
        return with_reward_function(scores, "reward_adapter", values)

    def advantages(
        self, scored: Scored, old: Tensor | None = None, ref: Tensor | None = None
    ) -> tuple[Rollout, Metrics]:
        completions, sampled = scored.completions, scored.completions.response_mask
        credit = self.credit(scored, tokenizer=self.model.tokenizer, ranks=self.ranks)
        credit, distances = self.kl.take_off_rewards(credit, old, ref, sampled)
        values = self.values(completions)
        learned = sampled & ~credit.rewards.isnan()[:, None]
        turns = arguments_for(self.advantage, {"turn": turns_of(completions)})
        advantages, returns = self.advantage(credit.token_rewards, values, learned, **turns)
        advantages = self.whitening(advantages, credit.rewards, completions, self.ranks)
        rollout = Rollout(
            completions=completions,
            rewards=credit.rewards,
            advantages=self.advantage_clip(advantages),
            loss_mask=self.loss_mask(scored) & learned,
            old_logprobs=old,
            ref_logprobs=ref if self.beta else None,
            old_values=values,
            returns=returns,
            kl_factor=self.kl.control.factor,
        )
        self.kl.update(old, ref, sampled, self.ranks)
        rollout, weighing = self.engine_correction.at_rollout(rollout, self.global_step)
        return rollout, distances | weighing | _rollout_metrics(scored, credit, old, ref, self.ranks.world_size)

    @torch.no_grad()
    def values(self, completions: Completions) -> Tensor:
        """Return the critic's values `(b, t)` without gradient. Called when the rollout is taken."""

        def of_rows(part: Completions) -> Tensor:
            return self.value_function.values(self.policy, self.critic, part)

        return without_gradient(self.policy, completions, of_rows, rows_at_once=self.rows_at_once(completions))

    def compares_completions(self) -> bool:
        """Return False: the critic is the baseline."""
        return False

    @property
    def needs_old_logprobs(self) -> bool:
        return super().needs_old_logprobs or self.needs_reference  # objective/kl is between the two

    # ------------------------------------------------------------------ loss

    def token_scores(self, completions: Completions, **further: Any) -> TokenScores:
        read = completions.with_observations if self.echo_coef else completions
        scores, values = self.value_function.scores_and_values(
            self.policy, self.critic, read, self.sampling, **self.score_terms, **further
        )
        return replace(scores, values=values)

    def loss(
        self, rollout: Rollout, scores: TokenScores, totals: StepTotals, step: StepTokens | None = None
    ) -> tuple[Tensor, Metrics]:
        assert rollout.old_values is not None and rollout.returns is not None and scores.values is not None
        mask = rollout.loss_mask
        policy, metrics = super().loss(rollout, scores, totals, step)
        if self.global_step < self.critic_warmup:
            policy = policy * 0.0
        per_token, value_metrics = clipped_value_loss(
            scores.values, rollout.old_values, rollout.returns, mask, clip=self.value_clip
        )
        critic = token_mean(per_token, mask, totals)
        share = torch.ones((), device=critic.device) / totals.micro_batches
        now = scores.logprobs.detach()
        old = now if rollout.old_logprobs is None else rollout.old_logprobs
        ratios = token_ratio(now, old, mask).clamp(max=MAX_LOG_RATIO).exp()
        sums = {
            "value/explained_variance": Summed(value_sums(scores.values, rollout.returns, mask), "explained_variance"),
            "value/ratio_var": Summed(masked_moments(ratios, mask), "variance"),
        }
        losses = {"loss/policy_avg": (policy.detach(), share), "loss/value_avg": (critic.detach(), share)}
        renamed = {trl_name: metrics[name] for trl_name, name in _TRL_NAMES.items() if name in metrics}
        return policy + self.vf_coef * critic, metrics | value_metrics | renamed | losses | sums

    # ------------------------------------------------------------------ two parameter groups

    trained_beside = ("critic",)

    def companions(self, policy: nn.Module) -> dict[str, Any]:
        critic = super().companions(policy) | {"critic": self.value_function.module(policy)}
        return critic if self.adapter is None else critic | {"reward_adapter": self.adapter.module(policy)}

    @property
    def shares_prompts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if prompts may be shared: not with a head on the policy's trunk, which reads whole rows."""
        return super().shares_prompts and not isinstance(self.value_function, SharedTrunk)

    def step_facts(self) -> StepFacts:
        return replace(super().step_facts(), critic=self.value_function)

    def parameter_groups(self) -> list[dict[str, Any]]:
        critic: dict[str, Any] = {"params": self.value_function.parameters(self.policy, self.critic), "name": "critic"}
        return [*super().parameter_groups(), critic if self.critic_lr is None else critic | {"lr": self.critic_lr}]

    def schedules(self) -> list[Schedule | FromTorch]:
        (policy,) = super().schedules()
        critic = self.critic_scheduler or policy
        return [After(self.critic_warmup, policy) if self.critic_warmup else policy, critic]

    # ------------------------------------------------------------------ checks

    def features(self) -> Iterator[Feature]:
        yield from super().features()
        if isinstance(self.value_function, AdapterCritic):
            yield Feature("adapter critic", "algo/critic=adapter", "Take algo/critic=separate or shared_trunk")
        if self.adapter is not None:
            yield Feature("reward adapter", "algo.reward_adapter", "Leave it out")
        if self.critic_warmup:
            yield Feature("critic warmup", "algo.critic_warmup", "Set it to 0")

    def check_advantage(self) -> None:
        policy_gradient_checks.require_estimator(self.advantage, such_as="gae")
        policy_gradient_checks.check_token_estimator(self.advantage, self.whitening)
        policy_gradient_checks.check_role_is_read(self.advantage, self.credit.roles)

    def _check(self) -> None:
        self.value_function.check(self.model)
        if self.adapter is not None:
            self.adapter.check(self.model)
            if self.env is not None and self.env.max_branches > 1:
                raise ConfigError(
                    f"algo.reward_adapter scores one text at its last token, and with env.max_branches="
                    f"{self.env.max_branches} an episode may have several. Leave one of the two out."
                )


def with_reward_function(scores: Scores, name: str, values: Tensor) -> Scores:
    """Add a reward function of weight 1 to the scores; it applies to every completion whose value is not NaN."""
    column = values.detach().float().cpu()
    return replace(
        scores,
        names=(*scores.names, name),
        values=torch.cat([scores.values, column[:, None]], dim=1),
        total=torch.where(column.isnan(), scores.total, scores.total.nan_to_num(0.0) + column),
        weights=F.pad(scores.weights, (0, 1), value=1.0),
    )


def _rollout_metrics(
    scored: Scored, credit: Credit, old: Tensor | None, ref: Tensor | None, world_size: int
) -> Metrics:
    """Return `objective/*` of the rollout, without rows that have no reward and metrics whose log-probs are missing."""
    device, mask = credit.rewards.device, scored.completions.response_mask
    has_reward = ~credit.rewards.isnan()
    count, total = has_reward.sum().double(), to_device(scored.scores.total, device)
    per_row = {
        "objective/scores": total,
        "objective/rlhf_reward": credit.rewards,
        "objective/non_score_reward": credit.rewards - total,
    }
    if old is not None:
        per_row["objective/entropy"] = -masked_sum(old, mask, dim=1)
        if ref is not None:
            per_row["objective/kl"] = masked_sum(old - ref, mask, dim=1)
    metrics: Metrics = {name: (masked_sum(values, has_reward).double(), count) for name, values in per_row.items()}
    ended = scored.completions.ended.sum().double()
    return metrics | {"value/num_eos_tokens": (ended, torch.ones_like(ended) / world_size)}
