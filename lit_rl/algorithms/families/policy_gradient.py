"""The objective that the critic-free methods and PPO's actor share, each of its terms a choice of its own.

With rewards R_i of rows i, log-probs lp_it of tokens under the policy now, old_it when the rollout was taken, ref_it
under the reference, sampler_it as the engine reported them, and the loss mask m_it:

    rewards      R_i <- clip(norm(shape(R_i)));  r_it = R_i at the last token - reward_beta reward_kl(old_it, ref_it)
    advantages   A   =  clip(advantage(R, r, ...))
    weights      u_it = weight_norm(correction(old_it, sampler_it)), m_it <- m_it and rejection(old_it, sampler_it)
    tokens       l_it = loss(lp_it, old_it, A) off_policy_mask_i selection_it u_it + beta kl(lp_it, ref_it, old_it)
    objective    reduction(l, m) - entropy coefficient * mean entropy + router_aux_loss_coef * router loss

Of the last three lines `loss` and `reduction` are on by default, and `correction` for an engine of its own (vLLM).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.families.objective import policy_objective
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.preflight import estimators as estimator_checks
from lit_rl.algorithms.preflight import on_policy as checks
from lit_rl.algorithms.ranks import named, parameters
from lit_rl.algorithms.terms.controllers import AdaptiveEntropy, AdaptiveKL, FixedEntropy, FixedKL
from lit_rl.algorithms.terms.credit import Credit, credit_of, greedy_baseline, whitened
from lit_rl.algorithms.terms.engine_correction import corrected, needs_a_pass, resolved
from lit_rl.algorithms.terms.replay import GroupReplay
from lit_rl.algorithms.terms.running_norm import RunningNorm
from lit_rl.errors import StorageError
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.ops.advantages import group_normalized
from lit_rl.ops.correction import auto_correction
from lit_rl.ops.kl import corrected_k3, k1
from lit_rl.ops.losses import clipped_policy_loss
from lit_rl.ops.mismatch import WeightTotals
from lit_rl.ops.reductions import StepTotals, token_mean
from lit_rl.ops.step import Metrics, StepTokens
from lit_rl.rewards.sums.weighted import Rewards, Scores
from lit_rl.rollout import Completions, Rollout


class PolicyGradient(OnPolicyModule, ABC):
    """Abstract: its subclasses say which terms are on by default, and what more they need.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        advantage: `(rewards (n,), group_id (n,), ...) -> (n,) or (n, t)`; it may also name `values`, `weights`,
            `lengths`, `greedy_rewards`, `token_rewards`, `mask`.
        loss: `(logprobs, old_logprobs, advantages, mask) -> ((b, t), metrics)`: the loss of each token.
        reduction: `(per_token, mask, totals) -> scalar`: which tokens and sequences the loss is averaged over.
        beta: Weight of the KL in the loss.
        kl: `(logprobs, ref_logprobs, old_logprobs) -> (b, t)`: the estimator of the KL in the loss.
        reward_beta: Weight of the KL in the reward.
        reward_kl: The estimator of the KL in the reward, taken when the rollout is.
        kl_control: What changes the weights of the KL during the run. None keeps them.
        whitening: `(advantages, ...) -> advantages`, to mean 0 and variance 1 over the rows or tokens of every rank; it
            names `scored` (rows) or `mask` (tokens; an advantage of a row then counts at each). None: no whitening.
        shaping: `(rewards, group_id, ...) -> rewards`: what is done to the rewards of rows first; it may also name
            `lengths` and `ended`.
        reward_norm: Running normalisation of the rewards, after the shaping.
        reward_clip: Lowest and highest reward of a row, after the normalisation, before the KL is taken off.
        advantage_clip: Largest size of an advantage.
        correction: `(old_logprobs, sampler_logprobs, mask) -> (b, t)`: weights against an engine that samples from a
            slightly other policy. `auto_correction` is truncated importance sampling by tokens where the generator is
            such an engine, and none where it decodes with the policy itself. None: no weights.
        rejection: `(old_logprobs, sampler_logprobs, mask) -> bool (b, t)`: tokens that stay in the loss.
        weight_norm: `(weights, totals) -> (b, t)`: the weights brought to mean 1 over the optimizer step.
        selection: `(entropy, mask, step) -> bool (b, t)`: tokens that the policy loss acts on.
        off_policy_threshold: Rows with a negative advantage that have moved further than this from the policy that
            sampled them, in nats a token, take no part in the policy loss (2512.02556, eq. 9). None: all do.
        entropy: Coefficient of the entropy bonus. None: no bonus.
        router_aux_loss_coef: Weight of the router's load-balancing loss of a mixture-of-experts model.
        mask_truncated: Leave completions that `max_new_tokens` cut out of the loss.
        replay: Groups without spread are replaced by good ones of earlier rollouts. None: they are not.
        shared: What every `OnPolicyModule` takes.
    """

    def __init__(
        self,
        model: LanguageModel | str,
        reward: Rewards | Callable,
        *,
        advantage: Callable = group_normalized,
        loss: Callable = clipped_policy_loss,
        reduction: Callable = token_mean,
        beta: float = 0.0,
        kl: Callable = corrected_k3,
        reward_beta: float = 0.0,
        reward_kl: Callable = k1,
        kl_control: FixedKL | AdaptiveKL | None = None,
        whitening: Callable | None = None,
        shaping: Callable | None = None,
        reward_norm: RunningNorm | None = None,
        reward_clip: tuple[float, float] | None = None,
        advantage_clip: float | None = None,
        correction: Callable | None = auto_correction,
        rejection: Callable | None = None,
        weight_norm: Callable | None = None,
        selection: Callable | None = None,
        off_policy_threshold: float | None = None,
        entropy: FixedEntropy | AdaptiveEntropy | None = None,
        router_aux_loss_coef: float = 0.0,
        mask_truncated: bool = False,
        replay: GroupReplay | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, reward, **shared)
        self.advantage, self.policy_loss, self.reduction = advantage, loss, reduction
        self.beta, self.kl, self.reward_beta, self.reward_kl = beta, kl, reward_beta, reward_kl
        self.kl_control = FixedKL() if kl_control is None else kl_control
        self.whitening, self.advantage_clip = whitening, advantage_clip
        self.shaping, self.reward_norm = shaping, reward_norm
        self.reward_clip = None if reward_clip is None else tuple(reward_clip)
        self.correction, self.rejection = resolved(correction, self.generator), rejection
        self.weight_norm, self.entropy = weight_norm, entropy
        self.selection, self.off_policy_threshold = selection, off_policy_threshold
        self.router_aux_loss_coef, self.mask_truncated, self.replay = router_aux_loss_coef, mask_truncated, replay
        checks.terms(self)

        self.needs_reference = beta > 0 or reward_beta > 0
        self.needs_greedy_rewards = "greedy_rewards" in parameters(advantage)
        taken = [loss] if selection is None else [loss, selection]
        of_the_step = any("step" in parameters(term) for term in taken)
        self.needs_step = of_the_step or (selection is not None and entropy is not None)
        self.kl_factor = 1.0
        self._entropy_of_step: list[Tensor] = []

    # ------------------------------------------------------------------ advantages

    def advantages(
        self,
        completions: Completions,
        scores: Scores,
        *,
        kept: Tensor | None = None,
        greedy_rewards: Tensor | None = None,
    ) -> Rollout:
        mask = completions.response_mask
        loss_mask = mask & completions.ended[:, None] if self.mask_truncated else mask
        if kept is not None:
            loss_mask = loss_mask & kept[:, None]
        credit = credit_of(self, completions, scores, kept)
        rollout = Rollout(
            completions=completions,
            rewards=credit.rewards,
            advantages=credit.rewards,  # until they are estimated
            loss_mask=loss_mask,
            old_logprobs=credit.old_logprobs,
            ref_logprobs=credit.ref_logprobs if self.beta else None,
        )
        rollout = self.estimate(rollout, scores, credit, greedy_rewards)
        rollout = whitened(self, rollout)
        if self.advantage_clip is not None:
            limit = self.advantage_clip
            rollout = replace(rollout, advantages=rollout.advantages.clamp(-limit, limit))
        return corrected(self, rollout)

    def replaced(self, rollout: Rollout) -> Rollout:
        return rollout if self.replay is None else self.replay(self, rollout)

    def estimate(self, rollout: Rollout, scores: Scores, credit: Credit, greedy_rewards: Tensor | None) -> Rollout:
        """The rollout with advantages `(b,)` or `(b, t)` by the chosen estimator, over the rows of every rank."""
        completions, device = rollout.completions, credit.rewards.device
        columns = {
            "rewards": credit.rewards,
            "group_id": completions.group_id,
            "values": scores.values.to(device).masked_fill(credit.rewards.isnan()[:, None], torch.nan),
            "weights": scores.weights.to(device),
            "lengths": completions.lengths,
            "token_rewards": credit.token_rewards,
            "mask": completions.response_mask,
            "step_ends": credit.step_ends,
        }
        if greedy_rewards is not None:
            columns["greedy_rewards"] = greedy_baseline(self, greedy_rewards)
        return replace(rollout, advantages=self.over_all_ranks(self.advantage, columns))

    @property
    def compares_completions(self) -> bool:
        """Whether an advantage needs several completions of one prompt."""
        return estimator_checks.compares_within_groups(self.advantage)

    @property
    def needs_old_logprobs(self) -> bool:
        """Taken anew only where the ratio can differ from 1, or a term is made of them; weights alone are `weighed`."""
        others = (self.reward_beta, self.rejection, self.weight_norm, self.replay, needs_a_pass(self))
        adaptive = isinstance(self.kl_control, AdaptiveKL)
        return not self.ratio_is_one or adaptive or any(others)

    # ------------------------------------------------------------------ loss

    def of_step(self, micro: Rollout, counts: Tensor) -> Rollout:
        if micro.weights is None or self.weight_norm is None:
            return micro
        _, tokens, sequences, token_weights, sequence_weights = counts.float().unbind()
        totals = WeightTotals(tokens, sequences, token_weights, sequence_weights)
        return replace(micro, weights=self.weight_norm(micro.weights, totals))

    def loss(self, rollout: Rollout, totals: StepTotals, step: StepTokens | None = None) -> tuple[Tensor, Metrics]:
        scores = self.token_scores(rollout.completions, **self.score_terms)
        return policy_objective(self, rollout, scores, totals, step)

    @property
    def score_terms(self) -> dict[str, bool]:
        """What the objective needs of the policy's forward pass beside log-probs."""
        return {"entropy_gradient": self.entropy is not None, "router_aux": self.router_aux_loss_coef > 0}

    def acting(self, entropy: Tensor, mask: Tensor, step: StepTokens | None) -> Tensor:
        if self.selection is None:
            return mask
        return mask & self.selection(entropy.detach(), mask, **named(self.selection, {"step": step}))

    def entropy_seen(self, total: Tensor, tokens: Tensor) -> None:
        """Keep what the controller of the entropy bonus is told after the optimizer step."""
        self._entropy_of_step.append(torch.stack([total, tokens.float()]))

    # ------------------------------------------------------------------ between steps

    def after_step(self) -> None:
        super().after_step()
        if self._entropy_of_step and self.entropy is not None and not self.broken_steps.last:
            mine = torch.stack(self._entropy_of_step).sum(0)
            total, tokens = self.everyones(mine[None]).sum(0).tolist()
            self.entropy.update(total / max(1.0, tokens))
        self._entropy_of_step = []

    def coefficients(self) -> dict[str, float]:
        found = super().coefficients()
        if isinstance(self.kl_control, AdaptiveKL):
            weights = {"kl_coef": self.beta, "reward_kl_coef": self.reward_beta}
            found |= {name: weight * self.kl_control.factor for name, weight in weights.items() if weight}
        if self.entropy is not None:
            found["entropy_coef"] = self.entropy.coefficient
        return found

    def rank_state(self) -> dict[str, Any]:
        terms = {name: term.state() for name, term in self._stateful().items()}
        return super().rank_state() | {"kl_factor": self.kl_factor, "terms": terms}

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        super().load_rank_state(saved)
        self.kl_factor = saved["kl_factor"]
        for name, term in self._stateful().items():
            try:
                term.load_state(saved["terms"][name])
            except KeyError as error:
                raise StorageError(
                    f"The checkpoint holds no state of algo.{name} as {type(term).__name__} needs it. Resume with the "
                    f"algo/{name} of the run's config.yaml."
                ) from error

    def _stateful(self) -> dict[str, Any]:
        names = ("kl_control", "reward_norm", "entropy", "groups", "replay")
        return {name: term for name in names if (term := getattr(self, name)) is not None}
