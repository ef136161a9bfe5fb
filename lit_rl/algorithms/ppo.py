"""PPO: proximal policy optimisation with a critic, arXiv:1707.06347, as in InstructGPT (2203.02155) and TRL up to 0.26.

For every response token t of a row, with values V_t of the critic when the rollout was taken:

    token rewards  r_t = R at the last token - reward_beta (old_logprobs_t - ref_logprobs_t)
    advantage      A_t = sum_l (gamma lam)^l delta_{t+l},  delta_t = r_t + gamma V_{t+1} - V_t   (1506.02438, eq. 16)
    returns        G_t = A_t + V_t, from the advantages before they are whitened
    policy         - min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
    critic         max((V - G)^2, (clip(V, V_old - value_clip, V_old + value_clip) - G)^2) / 2
    objective      policy + vf_coef critic + ptx_coef cross-entropy of supervised text, each averaged over its tokens

One optimizer trains both, in two parameter groups. Every further term of the policy, off by default, stands in
`lit_rl.algorithms.families.policy_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from lit_rl.algorithms.families.objective import policy_objective
from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.optim.schedules import After, Schedule
from lit_rl.algorithms.ppo_parts import (
    frozen_values,
    objective_metrics,
    policy_metrics,
    ptx_share,
    ratio_moments,
    with_values,
)
from lit_rl.algorithms.preflight import estimators as estimator_checks
from lit_rl.algorithms.preflight import on_policy as checks
from lit_rl.algorithms.terms.credit import Credit
from lit_rl.data.supervised import SupervisedText
from lit_rl.errors import ConfigError, in_range
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.scoring.critic import Critic, SeparateCritic
from lit_rl.models.scoring.reward_adapter import RewardAdapter
from lit_rl.ops.advantages import whiten_tokens
from lit_rl.ops.masking import variance
from lit_rl.ops.reductions import StepTotals, token_mean
from lit_rl.ops.returns import gae
from lit_rl.ops.step import Metrics, StepTokens
from lit_rl.ops.values import clipped_value_loss, explained_variance, value_sums
from lit_rl.rewards.sums.weighted import Rewards, Scores
from lit_rl.rollout import Completions, PromptBatch, Rollout


@final
class PPO(PolicyGradient):
    """Proximal policy optimisation with a critic.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        critic: What predicts returns. None is a model of its own that starts as a copy of the policy.
        critic_lr: Learning rate of the critic. None: the optimizer's.
        critic_scheduler: Schedule of the critic's learning rate. None: the policy's.
        critic_warmup: Optimizer steps in which only the critic learns.
        advantage: `(token_rewards, values, mask) -> (advantages, returns)`, all `(b, t)`.
        value_clip: How far a value may move from the rollout's in one step. None: as far as it likes.
        vf_coef: Weight of the critic's loss.
        ptx: Supervised text that is learned beside the rollouts. None: none.
        ptx_coef: Weight of the supervised loss.
        reward_adapter: A reward model that is an adapter on the policy's base, by folder or hub id. Its score is added
            to the rewards as the function `reward_adapter`. None: there is none.
        reward_beta: Weight of the KL in the reward.
        group_size: Completions a prompt, 1 or more.
        iterations: Passes over a rollout.
        whitening: Brings the advantages to mean 0 and variance 1 over the tokens of every rank. None: it does not.
        terms: Everything else that a `PolicyGradient` takes.
    """

    def __init__(
        self,
        model: LanguageModel | str,
        reward: Rewards | Callable,
        *,
        critic: Critic | None = None,
        critic_lr: float | None = None,
        critic_scheduler: Schedule | None = None,
        critic_warmup: int = 0,
        advantage: Callable = gae,
        whitening: Callable | None = whiten_tokens,
        value_clip: float | None = 0.2,
        vf_coef: float = 0.1,
        ptx: SupervisedText | None = None,
        ptx_coef: float = 0.0,
        reward_adapter: str | None = None,
        reward_beta: float = 0.05,
        group_size: int = 1,
        iterations: int = 4,
        **terms: Any,
    ) -> None:
        super().__init__(
            model,
            reward,
            reward_beta=reward_beta,
            group_size=group_size,
            iterations=iterations,
            whitening=whitening,
            **terms,
        )
        self.value_function: Critic = SeparateCritic() if critic is None else critic
        self.value_function.check(self.model)
        self.adapter = None if reward_adapter is None else RewardAdapter(reward_adapter)
        if self.adapter is not None:
            self.adapter.check(self.model)
        self.reward_adapter: Any = None
        self.critic: Any = None
        self.critic_lr, self.critic_scheduler, self.critic_warmup = critic_lr, critic_scheduler, critic_warmup
        self.gae = advantage
        self.value_clip, self.vf_coef, self.ptx, self.ptx_coef = value_clip, vf_coef, ptx, ptx_coef
        in_range("algo.critic_warmup", critic_warmup, low=0)
        in_range("algo.vf_coef", vf_coef, low=0)
        in_range("algo.ptx_coef", ptx_coef, low=0)
        for key, value in {"critic_lr": critic_lr, "value_clip": value_clip}.items():
            if value is not None:
                in_range(f"algo.{key}", value, low=0, open_low=True)
        estimator_checks.check_of_tokens(advantage, whitening)
        row = torch.zeros(1, 2)
        checks.settings("advantage", lambda: advantage(row, row, torch.ones(1, 2, dtype=torch.bool)))
        if (ptx is None) != (ptx_coef == 0):
            raise ConfigError(
                f"algo.ptx_coef={ptx_coef} and algo.ptx.path={None if ptx is None else ptx.path}: supervised text is "
                "learned only where both are set, the weight above 0."
            )
        self._value_sums = torch.zeros(5, dtype=torch.float64)
        self._ratio_moments = torch.zeros(3, dtype=torch.float64)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.ptx is not None and stage == "fit":
            assert self.ptx.rows  # read now: a bad file ends the run before any weight is loaded

    @property
    def compares_completions(self) -> bool:
        return False  # with the critic

    @property
    def needs_old_logprobs(self) -> bool:
        return super().needs_old_logprobs or self.needs_reference  # objective/kl is between the two

    trained_beside = ("critic",)

    # ------------------------------------------------------------------ advantages

    def reward(self, batch: PromptBatch, completions: Completions) -> Scores:
        scores = super().reward(batch, completions)
        if self.adapter is None:
            return scores
        return with_values(
            scores, "reward_adapter", self.adapter.rewards(self.policy, self.reward_adapter, completions)
        )

    def estimate(self, rollout: Rollout, scores: Scores, credit: Credit, greedy_rewards: Tensor | None) -> Rollout:
        completions = rollout.completions
        values = frozen_values(self, completions)
        mask = completions.response_mask & ~credit.rewards.isnan()[:, None]
        advantages, returns = self.gae(credit.token_rewards, values, mask)
        self.record(objective_metrics(self, completions, scores, credit))
        return replace(
            rollout, advantages=advantages, old_values=values, returns=returns, loss_mask=rollout.loss_mask & mask
        )

    # ------------------------------------------------------------------ loss

    def loss(self, rollout: Rollout, totals: StepTotals, step: StepTokens | None = None) -> tuple[Tensor, Metrics]:
        assert rollout.old_values is not None and rollout.returns is not None
        mask = rollout.loss_mask
        scores, values = self.value_function.scores_and_values(
            self.policy, self.critic, rollout.completions, self.sampling, **self.score_terms
        )
        policy, metrics = policy_objective(self, rollout, scores, totals, step)
        if self.step < self.critic_warmup:
            policy = policy * 0.0
        per_token, value_metrics = clipped_value_loss(
            values, rollout.old_values, rollout.returns, mask, clip=self.value_clip
        )
        critic = token_mean(per_token, mask, totals)
        self._value_sums = self._value_sums.to(values.device) + value_sums(values, rollout.returns, mask)
        shares = torch.ones((), device=critic.device) / totals.micro_batches
        self._ratio_moments = self._ratio_moments.to(values.device) + ratio_moments(scores.logprobs, rollout)
        losses = {"loss/policy_avg": (policy.detach(), shares), "loss/value_avg": (critic.detach(), shares)}
        return policy + self.vf_coef * critic, metrics | value_metrics | policy_metrics(metrics) | losses

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.ptx is None or not self.ptx_coef:
            return loss
        share, metrics = ptx_share(self, batch)
        self.record(metrics)
        return loss + self.ptx_coef * share

    # ------------------------------------------------------------------ two parameter groups

    def companions(self, policy: nn.Module) -> dict[str, nn.Module]:
        critic = {"critic": self.value_function.module(policy)}
        return critic if self.adapter is None else critic | {"reward_adapter": self.adapter.module(policy)}

    def parameter_groups(self) -> list[dict[str, Any]]:
        critic: dict[str, Any] = {"params": self.value_function.parameters(self.policy, self.critic), "name": "critic"}
        return [*super().parameter_groups(), critic if self.critic_lr is None else critic | {"lr": self.critic_lr}]

    def schedules(self) -> list[Schedule]:
        (policy,) = super().schedules()
        critic = self.critic_scheduler or policy
        return [After(self.critic_warmup, policy) if self.critic_warmup else policy, critic]

    def coefficients(self) -> dict[str, float]:
        values, ratios = (self.everyones(mine[None]).sum(0) for mine in (self._value_sums, self._ratio_moments))
        self._value_sums, self._ratio_moments = torch.zeros_like(self._value_sums), torch.zeros_like(ratios)
        found = {"value/explained_variance": explained_variance(values), "value/ratio_var": variance(ratios)}
        return super().coefficients() | {name: float(value) for name, value in found.items()}

    def rank_state(self) -> dict[str, Any]:
        sums = {"value_sums": self._value_sums.cpu(), "ratio_moments": self._ratio_moments.cpu()}
        return super().rank_state() | sums

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        super().load_rank_state(saved)
        device = self.trainer.strategy.root_device
        self._value_sums, self._ratio_moments = saved["value_sums"].to(device), saved["ratio_moments"].to(device)
