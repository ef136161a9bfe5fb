"""The objective that the critic-free methods and PPO's actor share, with each term a separate choice.

With rewards R_i of rows i, log-probs lp_it of tokens under the policy now, old_it when the rollout was taken, ref_it
under the reference, sampler_it as the engine reported them, and the loss mask m_it:

    rewards      R_i <- clip(norm(shape(R_i)));  r_it = R_i at the last token - reward_beta reward_kl(old_it, ref_it)
    advantages   A   =  clip(whiten(advantage(R, r, ...)))
    weights      u_it = weight_norm(correction(old_it, sampler_it)), m_it <- m_it and rejection(old_it, sampler_it)
    teacher      A_it <- A_it + coef (log T_it - old_it), or D_it = coef * divergence from T at the token
    tokens       l_it = loss(lp_it, old_it, A) off_policy_mask_i selection_it u_it + beta kl(lp_it, ref_it, old_it)
                 + D_it
    objective    reduction(l, m) - entropy coefficient * mean entropy + router_aux_loss_coef * router loss
                 + ptx_coef * mean of ptx_loss(log-probs of supervised text)
                 + echo_coef * mean of - lp_it over the tokens that tools or an environment wrote

In the last four lines `loss` and `reduction` are on by default, and `correction` for a separate engine (vLLM).
`PolicyGradient.advantages` computes the first three lines, `taught` the fourth, and `PolicyGradient.loss` the others.
Weights that need the log-probs of the training's own forward pass, and `weight_norm`, are computed in `loss`
(`EngineCorrection`).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_rl.algorithms.checks import argument_checks, policy_gradient_checks
from lit_rl.algorithms.checks.memory import TEACHERS_TOKENS, AuxiliaryTexts
from lit_rl.algorithms.checks.micro_batching import check_whole_groups
from lit_rl.algorithms.checks.model_sizes import StepFacts, frozen_bytes, largest_example
from lit_rl.algorithms.checks.policy_gradient_checks import check_lag, check_sampling
from lit_rl.algorithms.checks.strategy_checks import Feature
from lit_rl.algorithms.chosen_functions import (
    check_gradient,
    check_loss_output,
    check_shape,
    copies_for,
    multiplies_weights,
    name_of,
    parameters,
    reads_column,
    unwrap,
)
from lit_rl.algorithms.evaluation.validation import MOST_ROWS
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.optim.strategies import shards_weights
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.terms.credit import AdvantageClip, CreditAssignment, Roles, TurnRewardWarning, Whitening
from lit_rl.algorithms.terms.groups import check_group_has_spread
from lit_rl.algorithms.terms.optimal_value import OptimalValue
from lit_rl.algorithms.terms.regularizers import (
    EntropyBonus,
    FixedKL,
    KLPenalty,
    ReferenceKL,
)
from lit_rl.algorithms.terms.supervised import SupervisedTerm
from lit_rl.algorithms.terms.teachers import Distillation, StudentFacts, TeacherRequest, check_pair
from lit_rl.algorithms.terms.token_weights import EngineCorrection, OffPolicyMask, TokenSelection, step_tokens
from lit_rl.core.errors import ConfigError
from lit_rl.core.progress_bar import delayed_progress
from lit_rl.core.rollout import Completions, Rollout
from lit_rl.data.encode import Encoder
from lit_rl.data.loaders import EvalLoader
from lit_rl.data.row_visuals import MAX_IMAGE_PIXELS
from lit_rl.models.forward import TokenScores, score
from lit_rl.models.modes import drops_out
from lit_rl.models.references import Scorer
from lit_rl.ops.advantages import no_advantage
from lit_rl.ops.imitation import cross_entropy
from lit_rl.ops.reductions import Metrics, StepTokens, StepTotals, masked_sum
from lit_rl.settings.algorithms import PolicyGradientConfig
from lit_rl.settings.base import takes

INITIAL = -(2**20)
"""Rollout number of the completions of the initial policy: they share their noise with no rollout and no validation."""


class PolicyGradient(OnPolicyModule, ABC):
    """Abstract base of policy-gradient methods: subclasses set the terms that are on by default, and add their own."""

    @takes(PolicyGradientConfig)
    def __init__(self, settings: PolicyGradientConfig) -> None:
        argument_checks.check_environment(settings.env)
        super().__init__(config=settings)
        roles = None if settings.role is None else Roles(settings.role)
        self.credit = CreditAssignment(settings.shaping, settings.reward_norm, settings.reward_clip, roles)
        self.turn_rewards = TurnRewardWarning(settings.advantage)
        self.kl = ReferenceKL(
            in_reward=KLPenalty("algo.reward_beta", settings.reward_beta, settings.reward_kl),
            in_loss=KLPenalty("algo.beta", settings.beta, settings.kl),
            control=FixedKL() if settings.kl_control is None else settings.kl_control,
        )
        self.advantage, self.advantage_clip = settings.advantage, AdvantageClip(settings.advantage_clip)
        self.whitening = Whitening(settings.whitening, of=name_of(settings.advantage))
        self.engine_correction = EngineCorrection(
            settings.correction, settings.rejection, settings.weight_norm, exact=self.generator.exact
        )
        self.policy_loss, self.reduction = settings.loss, settings.reduction
        self.off_policy = OffPolicyMask(settings.off_policy_threshold)
        self.selection = TokenSelection(settings.selection)
        self.entropy = None if settings.entropy is None else EntropyBonus(settings.entropy)
        self.router_aux_loss_coef, self.mask_truncated = settings.router_aux_loss_coef, settings.mask_truncated
        self.replay, self.env, self.echo_coef = settings.replay, settings.env, settings.echo_coef
        decay = settings.ptx_decay_steps, settings.ptx_final_coef
        self.supervised = SupervisedTerm(settings.ptx, settings.ptx_coef, settings.ptx_loss, *decay)
        self.learns_text = settings.ptx is not None
        self.distillation: Distillation | None = None
        alone = unwrap(settings.advantage) is no_advantage
        check_pair(settings.teacher, settings.distillation, alone=alone)
        if settings.teacher is not None:
            self.distillation = Distillation(settings.teacher, settings.distillation, alone=alone)
        self.needs_teacher = self.distillation is not None
        self.teacher_policy: Scorer | None = None
        self._loss_reads = tuple(name for name in ("weights", "step") if reads_column(settings.loss, name))
        if "group_id" in parameters(settings.loss):  # asked for by name: it makes micro-batches of whole groups
            self._loss_reads, self.compares_in_step = (*self._loss_reads, "group_id"), True
        self._check_terms()
        self.needs_ref_logprobs = self.kl.needs_reference
        teacher_reads = settings.teacher is not None and settings.teacher.reads_reference
        self.needs_reference = self.kl.needs_reference or teacher_reads
        self.needs_greedy_rewards = "greedy_rewards" in parameters(settings.advantage)
        self.needs_gradient_norms = "gradient_norms" in parameters(settings.advantage)
        reads_step = reads_column(settings.loss, "step") or self.selection.needs_step
        self.needs_step = reads_step or (settings.selection is not None and settings.entropy is not None)
        made_of_old = self.kl.needs_old_logprobs, self.engine_correction.needs_old_logprobs, self.needs_gradient_norms
        made_of_old = *made_of_old, self.distillation is not None and self.distillation.form.in_advantages
        self._reads_old_logprobs = not self.ratio_is_one or settings.replay is not None or any(made_of_old)
        self._loss_multiplies_weights = multiplies_weights(settings.loss)
        self.skip_zero_advantages = settings.skip_zero_advantages
        self._zero_advantages_teach_nothing = policy_gradient_checks.can_skip_zero_advantages(
            settings.loss, settings.reduction
        )

    @property
    def beta(self) -> float:
        """Weight of the KL in the loss."""
        return self.kl.in_loss.weight

    @property
    def reward_beta(self) -> float:
        """Weight of the KL in the reward."""
        return self.kl.in_reward.weight

    # ------------------------------------------------------------------ advantages

    def advantages(
        self, scored: Scored, old: Tensor | None = None, ref: Tensor | None = None
    ) -> tuple[Rollout, Metrics]:
        completions, sampled = scored.completions, scored.completions.response_mask
        self.turn_rewards.check(scored)
        credit = self.credit(scored, tokenizer=self.model.tokenizer, ranks=self.ranks)
        credit, distances = self.kl.take_off_rewards(credit, old, ref, sampled)
        advantages = self.ranks.apply(self.advantage, credit.columns(completions))
        check_shape("advantage", advantages, (len(sampled),), tuple(sampled.shape))
        advantages = self.whitening(advantages, credit.rewards, completions, self.ranks)
        rollout = Rollout(
            completions=replace(completions, episodes=None),
            rewards=credit.rewards,
            advantages=self.advantage_clip(advantages),
            loss_mask=self.loss_mask(scored),
            old_logprobs=old,
            ref_logprobs=ref if self.beta else None,
            kl_factor=self.kl.control.factor,
        )
        self.kl.update(old, ref, sampled, self.ranks)
        rollout, weighing = self.engine_correction.at_rollout(rollout, self.global_step)
        if self.credit.roles is not None:
            distances = distances | self.credit.roles.metrics(scored, getattr(self.advantage, "baseline", None))
        return rollout, distances | weighing

    def taught(self, scored: Scored, rollout: Rollout) -> tuple[Rollout, Metrics]:
        assert self.distillation is not None
        request = TeacherRequest(
            scored,
            top=self.distillation.form.top,
            sampling=self.sampling,
            policy=self.policy,
            held=self.teacher_policy,
            reference=lambda: self.reference.scoring(self.policy, self.reference_policy),
            encoder=lambda: self._encoder,
            source=self.interaction,
            options=self.forward_options,
            rows_at_once=self.rows_at_once(scored.completions),
            top_of=self.distillation.form.top_of,
        )
        scores, metrics = self.distillation.teacher.score(request)
        rollout, of_term = self.distillation.at_rollout(rollout, scores)
        return rollout, metrics | of_term | request.overlap(scores)

    def loss_mask(self, scored: Scored) -> Tensor:
        """Return the sampled tokens, bool `(b, t)`, without rows that are left out, or masked as truncated."""
        mask = scored.completions.response_mask
        if self.mask_truncated:
            mask = mask & scored.completions.ended[:, None]
        return mask if scored.kept is None else mask & scored.kept[:, None]

    def rollout_to_learn(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        return (rollout, {}) if self.replay is None else self.replay(rollout, seed=self.seed, ranks=self.ranks)

    def features(self) -> Iterator[Feature]:
        yield from super().features()
        if self.replay is not None:
            yield Feature("replay", "algo/replay", "Set algo/replay=none")
        if self.learns_text:
            yield Feature("supervised text", "algo.ptx", "Leave it out")
        if self.distillation is not None:
            yield Feature("teacher", "algo/teacher", "Set algo/teacher=none")

    def compares_completions(self) -> bool:
        """Tell whether the advantage needs several completions of one prompt."""
        return policy_gradient_checks.compares_within_groups(self.advantage)

    @property
    def needs_old_logprobs(self) -> bool:
        """True if old log-probs are computed: where the ratio can differ from 1, or a term reads them.

        The engine correction alone can use the training's own forward pass, unless that has dropout: then it is of
        another policy than the one that sampled.
        """
        engine_meets_dropout = (
            self.engine_correction.measures_mismatch and self.policy is not None and drops_out(self.policy)
        )
        return self._reads_old_logprobs or engine_meets_dropout

    # ------------------------------------------------------------------ loss

    def loss(
        self, rollout: Rollout, scores: TokenScores, totals: StepTotals, step: StepTokens | None = None
    ) -> tuple[Tensor, Metrics]:
        assert rollout.advantages is not None
        mask, logprobs, entropy = rollout.loss_mask, scores.logprobs, scores.entropy
        old = logprobs.detach() if rollout.old_logprobs is None else rollout.old_logprobs
        behaviour = rollout.completions.sampler_logprobs if self.engine_correction.correction is not None else old

        weights, weighing = self.engine_correction.in_loss(rollout, logprobs, totals)
        copied = weights if weights is None else copies_for(self.policy_loss, weights)[0]
        offered = {"weights": copied, "step": step, "group_id": rollout.completions.group_id}
        read = {name: offered[name] for name in self._loss_reads}
        columns = copies_for(self.policy_loss, logprobs, old, rollout.advantages, mask)
        tokens, metrics = check_loss_output(self.policy_loss(*columns, **read), logprobs, self.policy_loss)
        tokens, off_policy = self.off_policy(tokens, logprobs, behaviour, rollout.advantages, mask)
        selected = self.selection(entropy, mask, step)
        tokens = tokens * selected
        if weights is not None and not self._loss_multiplies_weights:
            tokens = tokens * weights
        tokens, distances = self.kl.add_to_loss(tokens, rollout, logprobs, old)
        if self.distillation is not None:
            tokens, taught = self.distillation.add_to_loss(tokens, rollout, scores, old)
            metrics = metrics | taught

        objective = self.reduction(*copies_for(self.reduction, tokens, mask), totals)
        check_shape("reduction", objective, ())
        metrics = metrics | weighing | off_policy | distances
        if entropy is not None:
            metrics |= {"entropy": (masked_sum(entropy.detach(), mask), mask.sum())}
        one = torch.ones((), device=objective.device)
        if self.entropy is not None:
            assert entropy is not None
            metrics |= {"policy_loss": (objective.detach(), one / totals.micro_batches)}
            objective = objective - self.entropy(entropy, selected, self.selection.count(selected, totals, step))
        if self.router_aux_loss_coef:
            assert scores.aux_loss is not None
            # Balance is a property of a batch: the router's loss is computed and averaged by micro-batches.
            objective = objective + self.router_aux_loss_coef * scores.aux_loss / totals.micro_batches
            metrics |= {"aux_loss": (scores.aux_loss.detach(), one)}
        if self.echo_coef:
            observed = rollout.completions.observed & mask.any(1, keepdim=True)
            surprise = masked_sum(cross_entropy(logprobs), observed)
            objective = objective + self.echo_coef * surprise / torch.as_tensor(totals.observed_tokens).clamp(min=1)
            metrics |= {"echo_loss": (surprise.detach(), observed.sum())}
        check_gradient(objective, logprobs)
        return objective, metrics

    @property
    def shares_prompts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if prompts may be shared: not with a router's loss, which reads the tokens of prompts row by row."""
        return self.router_aux_loss_coef == 0

    def token_scores(self, completions: Completions, **further: Any) -> TokenScores:
        read = completions.with_observations if self.echo_coef else completions
        return score(self.policy, read, self.sampling, **self.score_terms, **further)

    @property
    def score_terms(self) -> dict[str, Any]:
        """Arguments of `score`: the outputs that the objective needs besides log-probs, and the forward options."""
        wanted = {
            "entropy": self.log_entropy or self.selection.choose is not None,
            "entropy_gradient": self.entropy is not None,
            "router_aux": self.router_aux_loss_coef > 0,
        }
        return wanted | {"options": self.forward_options}

    def look_ahead(self, micro_batches: Sequence[Rollout]) -> StepTokens | None:
        options = self.forward_options
        return step_tokens(self.policy, micro_batches, self.sampling, options, self.selection, self.ranks)

    def rows_that_teach(self, rollout: Rollout) -> Tensor | None:
        """Return the rows with a nonzero advantage at some loss token, if only the policy loss is learned; else None.

        A subclass with its own loss may learn from every row, so all are computed. So are they if the loss measures the
        mismatch between engine and policy.
        """
        measured_in_loss = self.engine_correction.measures_mismatch and rollout.old_logprobs is None
        in_loss = self.distillation is not None and not self.distillation.form.in_advantages
        others = (
            self.beta,
            self.entropy,
            self.router_aux_loss_coef,
            self.selection.choose,
            self.needs_step,
            self.echo_coef,
            in_loss,
        )
        only_this_loss = self._zero_advantages_teach_nothing and type(self).loss is PolicyGradient.loss
        if any(others) or measured_in_loss or not (self.skip_zero_advantages and only_this_loss):
            return None
        assert rollout.advantages is not None
        advantages = rollout.advantages if rollout.advantages.ndim == 2 else rollout.advantages[:, None]
        return ((advantages != 0) & rollout.loss_mask).any(1)

    def supervised_share(self, slot: int) -> tuple[Tensor, Metrics]:
        assert self.plan is not None
        part = slot % self.plan.accumulate * self.plan.world_size + self.ranks.rank
        return self.supervised.share(
            self.policy,
            step=self.global_step,
            seed=self.seed,
            part=part,
            parts=self.plan.accumulate * self.plan.world_size,
            device=self.device,
            options=self.forward_options,
            sharded=shards_weights(self.trainer.strategy),
        )

    @property
    def _encoder(self) -> Encoder:
        """The tokeniser of the supervised text, with the chat template settings of the run's prompts."""
        kwargs = getattr(self._row_options, "chat_template_kwargs", {})
        return Encoder(self.tokenizer, kwargs, processor=self.model.processor, eos_ids=self.model.eos_ids)

    @property
    def _row_options(self) -> Any:
        """The settings by which the run's rows are read; None in a data module of yours that has none."""
        return getattr(getattr(self.trainer_or_none, "datamodule", None), "options", None)

    def on_train_start(self) -> None:
        super().on_train_start()
        if isinstance(self.advantage, OptimalValue) and not self.advantage.is_estimated:
            rank_zero_info(self.advantage.learn(self._initial_rewards(self.advantage.samples)))

    def _initial_rewards(self, samples: int) -> dict[int, list[float]]:
        """Return rewards of `samples` completions of each training row by the policy now, from all ranks."""
        data: Any = self.trainer.datamodule  # pyright: ignore
        mine: dict[int, list[float]] = {}
        ranks = {"rank": self.ranks.rank, "world_size": self.ranks.world_size}
        loader = EvalLoader(data.train_prompts, batch_size=data.val_batch_size, **ranks)
        for batch in delayed_progress(loader, "Completions for the values of prompts", "batches"):
            _, scores = self.draw_aside(replace(batch, rollout=INITIAL), self.sampling, samples)
            mine |= zip(batch.rows, scores.total.reshape(len(batch), samples).tolist())
        self.generator.rest()
        return {row: rewards for part in self.ranks.objects(mine) for row, rewards in part.items()}

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.distillation is not None and stage == "fit":
            self.distillation.teacher.check_data(self.trainer.datamodule)  # pyright: ignore
            self.distillation.teacher.start(self.distillation.form.top)

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        of_teacher = set() if self.distillation is None else self.distillation.teacher.columns_read(columns)
        of_roles = set() if self.credit.roles is None else {self.credit.roles.column}
        return super().columns_read(columns) | of_teacher | of_roles

    def companions(self, policy: nn.Module) -> dict[str, Any]:
        """Return the teacher's module, which no checkpoint contains, like a reference."""
        found = super().companions(policy)
        if self.distillation is not None:
            found |= self.distillation.teacher.companions(policy)
        return found

    def step_facts(self) -> StepFacts:
        facts, step, texts = super().step_facts(), self.micro_batches.step, self.supervised.texts
        if self.distillation is not None:
            seconds = {name: frozen_bytes(each) for name, each in self.distillation.teacher.frozen_models.items()}
            rows = self.trainer.datamodule.prompts_per_rollout * self.group_size // self.ranks.world_size  # pyright: ignore
            positions = rows * self.longest_response(self.sampling)
            of_rollout = {TEACHERS_TOKENS: positions * self.distillation.form.top * 12}  # an id and a log-prob each
            facts = replace(facts, frozen={**facts.frozen, **seconds, **of_rollout})
        if texts is None or step is None:
            return facts
        auxiliary = AuxiliaryTexts(texts.batch_size, step.units * step.rows * self.ranks.world_size, texts.max_tokens)
        largest, processor = self.supervised.largest, self.model.processor
        shown = None if largest is None or processor is None else largest_example([largest], processor)
        return replace(facts, auxiliary=auxiliary, auxiliary_images=shown)

    # ------------------------------------------------------------------ between steps

    def after_micro_batch(self, rollout: Rollout, scores: TokenScores, step: StepTokens | None = None) -> None:
        if self.entropy is not None:
            assert scores.entropy is not None
            self.entropy.observe(scores.entropy, self.selection(scores.entropy, rollout.loss_mask, step))

    def after_step(self) -> None:
        super().after_step()
        if self.entropy is not None:
            self.entropy.update(self.ranks, skipped=self.broken_steps.last)

    def coefficients(self) -> dict[str, float]:
        found = self.kl.coefficients()
        if self.entropy is not None:
            found["entropy_coef"] = self.entropy.control.coefficient
        if self.supervised.decay_steps is not None:
            found["ptx_coef"] = self.supervised.weight(self.global_step)
        return found

    # ------------------------------------------------------------------ validation

    def objective_of(self, scored: Scored) -> Iterator[Metrics]:
        """Yield the loss of the batch as an optimizer step of its own, and the clipped shares, by micro-batches.

        Nothing where the loss would not be that of the training: for completions of another distribution, for single
        ones that an estimator compares, or with a greedy completion, a teacher or a value of the training's rows.
        """
        drawn = replace(self.evaluation.sampling(self.sampling), max_new_tokens=self.sampling.max_new_tokens)
        groups, size = len(scored.batch), scored.group_size
        compared_alone = size < 2 and self.compares_completions()
        without = self.needs_greedy_rewards or self.needs_teacher or "data_row" in parameters(self.advantage)
        if drawn != self.sampling or compared_alone or without:
            return
        learning = {name: self._stateful().get(name) for name in ("kl_control", "reward_norm", "advantage")}
        before = [(term, term.state()) for term in learning.values() if term is not None]
        scored, rollout, _ = self.credited(scored)
        for term, state in before:  # a validation changes no training
            term.load_state(state)
        fitting = (n for n in range(1, groups) if groups % n == 0 and groups // n * size <= MOST_ROWS)
        parts, ranks = next(fitting, groups), self.ranks.world_size
        plan = BatchPlan(groups * ranks, size, minibatches=1, iterations=1, accumulate=parts, world_size=ranks)
        totals = step_totals(step_counts(rollout, plan, seed=0, index=0, ranks=self.ranks)[0], plan)
        micro_batches = [micro_batch(rollout, rows) for rows in rows_of_slots(rollout, plan, seed=0, index=0)]
        step = self.look_ahead(micro_batches) if self.needs_step else None
        for micro in micro_batches:
            loss, metrics = self.loss(micro, self.token_scores(micro.completions), totals, step)
            yield {
                "loss": (loss * groups, loss.new_tensor(groups / parts / ranks)),
                **{name: metric for name, metric in metrics.items() if "clip" in name},
            }

    # ------------------------------------------------------------------ checkpoints

    def rank_state(self) -> dict[str, Any]:
        return super().rank_state() | {"terms": {name: term.state() for name, term in self._stateful().items()}}

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        super().load_rank_state(saved)
        for name, term in self._stateful().items():
            term.load_state(checkpoints.saved_by_term(saved["terms"], name, type(term).__name__))
        if self.replay is not None:
            self.replay.restore_pixels(self.vision_lookup(), self.processor)

    def merge_rank_states(self, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
        terms = dict(saved[0]["terms"])  # states are equal on all ranks, but for the replay buffers
        if self.replay is not None and "replay" in terms:
            kept = [each["terms"]["replay"] for each in saved]
            terms["replay"] = self.replay.redistribute(kept, self.ranks.rank, self.ranks.world_size)
        return super().merge_rank_states(saved) | {"terms": terms}

    def _stateful(self) -> dict[str, Any]:
        terms = {
            "kl_control": self.kl.control,
            "reward_norm": self.credit.norm,
            "advantage": self.advantage if hasattr(self.advantage, "load_state") else None,
            "entropy": self.entropy and self.entropy.control,
            "groups": self.groups,
            "replay": self.replay,
        }
        return {name: term for name, term in terms.items() if term is not None}

    # ------------------------------------------------------------------ checks

    def _check_data(self, data: Any, stage: str) -> None:
        super()._check_data(data, stage)
        if self.supervised.texts is not None and stage == "fit":
            # Now: a bad file ends the run before any weight is loaded, and the memory plan counts the images.
            self.supervised.start(self._encoder, getattr(self._row_options, "max_image_pixels", MAX_IMAGE_PIXELS))
        if self.echo_coef and self.model.sees:
            raise ConfigError(
                f"algo.echo_coef={self.echo_coef}: {self.model.name!r} is a model over images, and what an environment "
                "shows may be one, which no token predicts. Leave it out, or take a model over text."
            )
        if self.credit.roles is not None and stage == "fit":
            of_episodes = () if self.env is None else self.env.columns
            self.credit.roles.check(data.columns_of_sets()[0], [name for name in of_episodes if name != "episodes"])

    def needs_whole_groups(self) -> Iterator[str]:
        yield from super().needs_whole_groups()
        if self.replay is not None:
            yield "algo/replay=buffer"
        if self.distillation is not None and self.distillation.teacher.reads_siblings:
            yield "algo.teacher.context"

    def _check_terms(self) -> None:
        """Refuse incompatible terms before anything is loaded; each term has already checked its own settings."""
        name, weighted = type(self).__name__, self.engine_correction.correction is not None
        policy_gradient_checks.require_rewards(name, self.reward_functions.names)
        check_sampling(self.sampling, self.generator, weighted=weighted)
        policy_gradient_checks.check_observations(self.echo_coef, self.env, self.sampling)
        teaches = self.distillation is not None
        policy_gradient_checks.check_branches(self.env, echo_coef=self.echo_coef, teaches=teaches)
        check_lag(self.generator, weighted=weighted)
        self.check_advantage()
        if self.distillation is not None:
            form, names = self.distillation.form, self.reward_functions.names
            top_of = form.top_of if form.top else None
            facts = StudentFacts(self.model, self.sampling, self.env, names, self.group_size, top_of)
            self.distillation.check(facts)
        policy_gradient_checks.check_ranges(self.policy_loss, "algo.loss")
        if self.compares_in_step:
            check_whole_groups(f"algo/loss={name_of(self.policy_loss)}", self.micro_batches.split_groups)
        policy_gradient_checks.check_declared_weights(self.policy_loss)
        policy_gradient_checks.check_term_settings(
            self.policy_loss, self.selection.choose, self.engine_correction, self.credit.shaping
        )
        policy_gradient_checks.check_group_size(name, self.group_size, compares_completions=self.compares_completions)
        policy_gradient_checks.check_greedy_rewards(self.advantage, self.reward_functions.comparing)
        if self.groups is not None:
            self.groups.check_fits(self.group_size, compares_completions=self.compares_completions)
            self.groups.check_rewards(self.reward_functions.names, self.reward_functions.of_length)
        if self.replay is not None:
            check_group_has_spread("algo/replay=buffer", self.group_size)
        policy_gradient_checks.check_controller(self.kl.control, self.beta, self.reward_beta)
        policy_gradient_checks.check_engine_weights(
            self.engine_correction, multiplied_by_loss=multiplies_weights(self.policy_loss)
        )

    def check_advantage(self) -> None:
        """Refuse an estimator that `advantages` cannot call, or that ignores a transformation of the rewards."""
        policy_gradient_checks.require_estimator(self.advantage, such_as="group_normalized")
        policy_gradient_checks.check_row_estimator(self.advantage, type(self).__name__)
        policy_gradient_checks.check_estimator_inputs(self.advantage, self.credit, self.reward_beta, self.whitening)
        policy_gradient_checks.check_role_is_read(self.advantage, self.credit.roles)
        policy_gradient_checks.check_norms_are_known(self.advantage, self.sampling)
