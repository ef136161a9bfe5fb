"""Teachers of a policy gradient: who scores the tokens that the policy has written, and how the policy learns of it.

A `RolloutTeacher` says once a rollout, outside of the gradient, how likely each sampled token is to it, and how likely
k tokens are at each position, its own likeliest or the policy's (`lit_rl.ops.distillation.TeacherScores`). That becomes
columns of the rollout, so the loss of a micro-batch, a checkpoint in the middle and a resume need no teacher. A
`DistillationForm` makes an advantage or a loss of them. Log-probs of teacher and policy are at the temperature of
`sampling`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from lit_rl.algorithms.chosen_functions import name_of, parameters
from lit_rl.algorithms.rollouts.rollout_plan import frozen_logprobs, without_gradient
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, Rollout, Sampling, select
from lit_rl.data.encode import Encoder
from lit_rl.environments.environment_base import EpisodeSource, Interactive
from lit_rl.models.forward import TokenScores, score
from lit_rl.models.frozen_teacher import Teacher, top_tokens
from lit_rl.models.language_model import ForwardOptions, LanguageModel
from lit_rl.models.references import Scorer
from lit_rl.ops.distillation import (
    TeacherScores,
    prefix_weights,
    sampled_kl,
    token_advantages,
    top_divergence,
    top_forward_kl,
    top_mass,
    top_overlap,
    with_tail,
)
from lit_rl.ops.engine_mismatch import token_truncate
from lit_rl.ops.kl import corrected_k3
from lit_rl.ops.ranges import AtLeastOne, NotNegative, Portion, Positive, Range
from lit_rl.ops.reductions import Metrics, mean_of

# ------------------------------------------------------------------ teachers


TopOf = Literal["teacher", "student"]
"""The owner of the k likeliest tokens over which teacher and policy are compared: the teacher, or the policy that took
the rollout."""

_ROWS_COMPARED = 8
"""Rows of each rank in the metric of overlap."""


@dataclass(frozen=True)
class TeacherRequest:
    """A rollout of `b` completions that a teacher is to score, and what it may score it with."""

    scored: Scored
    """Prompts, completions and their rewards."""
    top: int
    """Number of tokens at each position whose log-probs are asked for, beside the sampled one; 0 asks for none."""
    sampling: Sampling
    """Settings that drew the tokens: the teacher's temperature is theirs."""
    policy: nn.Module
    """The policy that drew them."""
    held: Scorer | None
    """The result of `RolloutTeacher.module`."""
    reference: Callable[[], AbstractContextManager[Scorer]]
    """Yields the module that computes the logits of `reference`, if the teacher `reads_reference`."""
    encoder: Callable[[], Encoder]
    """Makes the encoder of prompts, with the settings of the run's."""
    source: EpisodeSource | None
    """The source of the completions' episodes. None where nothing answers the policy."""
    options: ForwardOptions
    rows_at_once: int
    """Rows of a forward pass."""
    top_of: TopOf = "teacher"
    """The owner of the `top` tokens."""

    @property
    def completions(self) -> Completions:
        return self.scored.completions

    def scores_by(
        self, model: Scorer, completions: Completions, mask: Tensor, *, shared_tokens: int | None = None
    ) -> TeacherScores:
        """Return what a local model says of the response tokens.

        Args:
            model: The model, called like the policy.
            completions: The completions, perhaps behind other prompts.
            mask: Bool `(b, t)`: the tokens of which the teacher has an opinion.
            shared_tokens: Tokens, the first of the vocabulary, that may be among the likeliest. None: all.
        """
        scorer: nn.Module = model  # pyright: ignore[reportAssignmentType]
        rows, sampling = self.rows_at_once, self.sampling
        if self.top and self.top_of == "student":

            def of_students_tokens(part: Completions, ids: Tensor) -> Tensor:
                scores = score(scorer, part, sampling, further_ids=ids, options=self.options)
                assert scores.further is not None
                return torch.cat([scores.logprobs[..., None], scores.further], -1)

            ids = self._students_top(self.completions, shared_tokens)
            found = without_gradient(scorer, completions, of_students_tokens, ids, rows_at_once=rows)
            return TeacherScores(found[..., 0].contiguous(), mask, ids, found[..., 1:].contiguous())
        logprobs = frozen_logprobs(scorer, completions, sampling=sampling, options=self.options, rows_at_once=rows)
        if not self.top:
            return TeacherScores(logprobs, mask)

        def of_rows(part: Completions) -> Tensor:
            values, ids = top_tokens(scorer, part, self.top, self.sampling, tokens=shared_tokens)
            return torch.cat([values, ids.float()], -1)  # ids are exact below 2^24

        values, ids = without_gradient(scorer, completions, of_rows, rows_at_once=rows).chunk(2, -1)
        return TeacherScores(logprobs, mask, ids.long(), values.contiguous())

    def _students_top(self, completions: Completions, tokens: int | None = None) -> Tensor:
        """Return the policy's likeliest tokens `(b, t, k)`, of the first `tokens` of the vocabulary, or of all."""
        return without_gradient(
            self.policy,
            completions,
            lambda part: top_tokens(self.policy, part, self.top, self.sampling, tokens=tokens)[1].float(),
            rows_at_once=self.rows_at_once,
        ).long()

    def overlap(self, teacher: TeacherScores) -> Metrics:
        """Return the share of the teacher's likeliest tokens that are among the policy's, of this rank's first rows.

        It takes a pass over them, so a few stand for all; none where the teacher names no tokens, or is asked about
        those of the policy. Where it stays low, distillation does not succeed (2604.13016).
        """
        if teacher.top_ids is None or self.top_of == "student":
            return {}
        few = torch.arange(min(_ROWS_COMPARED, len(self.completions)))
        ids, mask = self._students_top(select(self.completions, few)), teacher.mask[: len(few)]
        return {"teacher/overlap": mean_of(top_overlap(ids, teacher.top_ids[: len(few)], mask), mask)}


@dataclass(frozen=True)
class StudentFacts:
    """Settings of a run, known before its data and weights are loaded, that a teacher may not fit."""

    model: LanguageModel
    sampling: Sampling
    env: Interactive | None
    reward_names: Sequence[str]
    group_size: int
    top_of: TopOf | None = None
    """The owner of the likeliest tokens that the teacher has to score. None: only the sampled tokens are read."""


class RolloutTeacher(ABC):
    """Abstract base of what scores the tokens of a rollout for distillation."""

    reads_reference = False
    """True if it scores with the run's `reference`, which is loaded then."""

    reads_siblings = False
    """True if it is shown other completions of a prompt, so that one rank must have all of them."""

    def check(self, student: StudentFacts) -> None:  # noqa: B027 (most take any)
        """Refuse a run that it cannot teach, before anything is loaded. Called once, by the algorithm.

        Raises:
            ConfigError: names the setting.
        """

    def check_data(self, data: Any) -> None:  # noqa: B027 (most read prompts alone)
        """Refuse a data module whose rows it cannot teach, before weights are loaded.

        Raises:
            ConfigError: names the setting.
        """

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        """Return the columns of the data, among these, that it may read."""
        return set()

    def start(self, top: int) -> None:  # noqa: B027 (most have nothing to ask)
        """Check once, before weights are loaded, that it can teach. Every rank calls it.

        Args:
            top: Likeliest tokens that it will be asked for at each position.

        Raises:
            GenerationError: a server does not answer.
            ConfigError: names the setting.
        """

    def module(self, policy: nn.Module) -> Scorer | None:
        """Return the frozen module to hold beside the policy; None if it holds none."""
        return None

    @property
    def frozen_models(self) -> dict[str, LanguageModel]:
        """The descriptions of second models on the policy's device, by name, for the memory plan."""
        return {}

    def companions(self, policy: nn.Module) -> dict[str, Scorer]:
        """Return all modules to hold beside the policy, by the attribute name that each shall have."""
        held = self.module(policy)
        return {} if held is None else {"teacher_policy": held}

    @abstractmethod
    def score(self, request: TeacherRequest) -> tuple[TeacherScores, Metrics]:
        """Return what it says of the sampled tokens, and metrics. Every rank calls it, for rows of its own."""


@checked("algo.teacher")
class ModelTeacher(RolloutTeacher):
    """A second local model of the policy's tokenizer, frozen; it is in no checkpoint.

    Args:
        model: The teacher: a description, or its name, folder or hub id, which gets the policy's dtype.
        device: "cpu" keeps it on the CPU; null places it like the policy.

    Raises:
        ConfigError: a setting that would train it.
    """

    def __init__(self, model: LanguageModel | str, device: Literal["cpu"] | None = None) -> None:
        self.model = model
        self.device: Literal["cpu"] | None = device
        self._held: Teacher | None = None

    @property
    def held(self) -> Teacher:
        """The teacher of this run's policy."""
        assert self._held is not None, "check comes first"
        return self._held

    def check(self, student: StudentFacts) -> None:
        self._held = Teacher(self.model, student.model, self.device, "algo.teacher.model", "algo.teacher.device")

    def check_data(self, data: Any) -> None:
        self.held.check_vocabulary()
        self.held.check_differs()

    @property
    def frozen_models(self) -> dict[str, LanguageModel]:
        return {} if self.device == "cpu" else {"teacher": self.held.model}

    def module(self, policy: nn.Module) -> Scorer:
        return self.held.module()

    def score(self, request: TeacherRequest) -> tuple[TeacherScores, Metrics]:
        completions = request.completions
        with self.held.scoring(request.policy, request.held) as model:
            shared = self.held.shared_tokens
            return request.scores_by(model, completions, completions.response_mask, shared_tokens=shared), {}


# ------------------------------------------------------------------ forms of distillation


class DistillationForm(ABC):
    """Abstract base of how a policy learns from what a teacher says.

    Args:
        coef: Weight beside the task's rewards, above 0.
    """

    top = 0
    """Number of tokens at each position that it compares, beside the sampled one."""

    top_of: TopOf = "teacher"
    """The owner of these tokens."""

    in_advantages = False
    """True if it is wholly in the advantages: it then reads the old log-probs when the rollout is taken."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def check(self, student: LanguageModel) -> None:  # noqa: B027 (most fit every model)
        """Refuse a policy that it does not fit. Raises ConfigError."""

    def with_advantages(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the teacher in its advantages."""
        return rollout

    @abstractmethod
    def losses(self, teacher: TeacherScores, scores: TokenScores, old: Tensor) -> tuple[Tensor, Metrics]:
        """Return the losses `(b, t)` of the tokens that the teacher has an opinion of, 0 elsewhere, and metrics.

        Args:
            teacher: What it says of a micro-batch.
            scores: The policy's scores now, with gradient.
            old: `(b, t)`: log-probs of the policy that took the rollout.
        """


@checked("algo.distillation")
class TeacherAdvantage(DistillationForm):
    """A policy gradient: ``coef (log T - log S)`` is added to the advantage of each token, in the clipped loss.

    S is the policy that took the rollout. It comes after whitening and clipping of the advantages, and needs no
    baseline: the expected gradient is that of the reverse KL(S || T) at each position.

    Args:
        coef: Weight beside the advantages of the rewards, above 0.
    """

    in_advantages = True

    def __init__(self, coef: Positive = 1.0) -> None:
        super().__init__(coef)

    def with_advantages(self, rollout: Rollout) -> Rollout:
        teacher, old, advantages = rollout.teacher, rollout.old_logprobs, rollout.advantages
        assert teacher is not None and old is not None and advantages is not None
        of_rewards = advantages if advantages.ndim == 2 else advantages[:, None]
        gap = token_advantages(teacher.log_probs, old, teacher.mask)
        return replace(rollout, advantages=of_rewards + self.coef * self.weighted(gap, teacher.mask))

    def weighted(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Return the log ratios `(b, t)`, each by the weight of its token."""
        return gap

    def losses(self, teacher: TeacherScores, scores: TokenScores, old: Tensor) -> tuple[Tensor, Metrics]:
        gap = token_advantages(teacher.log_probs, scores.logprobs, teacher.mask)
        return torch.zeros_like(gap), {"teacher/kl": mean_of(-gap, teacher.mask)}


@checked("algo.distillation")
class SampledKL(DistillationForm):
    """A loss: an estimate of the reverse KL(S || T) from the sampled tokens.

    Args:
        coef: Weight beside the loss of the rewards, above 0.
        estimator: `(logprobs, teacher_logprobs, old_logprobs) -> (b, t)`: an estimator of `algo/kl`. k1 has no gradient
            in expectation; k3's is that of the forward KL.
    """

    def __init__(self, coef: Positive = 1.0, estimator: Callable[..., Tensor] = corrected_k3) -> None:
        super().__init__(coef)
        self.estimator = estimator
        if "mask" in parameters(estimator):
            raise ConfigError(
                f"algo.distillation.estimator={name_of(estimator)} reads the mask of a row, and a teacher may have an "
                "opinion of some tokens only. Set algo/distillation/estimator=corrected_k3."
            )

    def losses(self, teacher: TeacherScores, scores: TokenScores, old: Tensor) -> tuple[Tensor, Metrics]:
        kl = sampled_kl(self.estimator, scores.logprobs, teacher.log_probs, old, teacher.mask)
        return self.coef * kl, {"teacher/kl": mean_of(kl, teacher.mask)}


RatioClip = Annotated[float, Range(1)]
"""A bound on an importance ratio that leaves a ratio of 1 as it is."""


class TopTokensLoss(DistillationForm):
    """Abstract base of losses over the k likeliest tokens at each position.

    Args:
        coef: Weight beside the loss of the rewards, above 0.
        top_k: Number of tokens, at least 1.
        ratio_clip: Bound on the ratio, at least 1. None: no ratio.
    """

    def __init__(self, coef: float, top_k: int, ratio_clip: float | None) -> None:
        super().__init__(coef)
        self.top, self.ratio_clip = top_k, ratio_clip

    def check(self, student: LanguageModel) -> None:
        tokens = len(student.tokenizer)
        if self.top > tokens:
            raise ConfigError(
                f"algo.distillation.top_k={self.top}: the tokenizer of {student.name!r} has {tokens} tokens. Set it to "
                f"{tokens} at most; 100 is usual."
            )

    @abstractmethod
    def divergence(self, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return the divergence `(b, t)` over the k tokens, from the log-probs of both `(b, t, k)`."""

    def losses(self, teacher: TeacherScores, scores: TokenScores, old: Tensor) -> tuple[Tensor, Metrics]:
        assert scores.further is not None and teacher.top_log_probs is not None
        mask = teacher.mask
        value = self.divergence(scores.further, teacher.top_log_probs, mask)
        loss = self.coef * value
        if self.ratio_clip is not None:
            loss = loss * token_truncate(scores.logprobs, old, mask, high=self.ratio_clip)
        return loss, {
            "teacher/divergence": mean_of(value, mask),
            "teacher/mass": mean_of(top_mass(teacher.top_log_probs, mask), mask),
            "teacher/student_mass": mean_of(top_mass(scores.further, mask), mask),
        }


@checked("algo.distillation")
class TopDivergence(TopTokensLoss):
    """A loss: the divergence of the policy from the teacher over the likeliest tokens of one of them.

    Args:
        coef: Weight beside the loss of the rewards, above 0.
        top_k: Number of likeliest tokens, at least 1.
        beta: The divergence, in [0, 1], as GKD's: 0 the forward KL(T || S), 1 the reverse KL(S || T), 0.5
            Jensen-Shannon's.
        support: What becomes of the mass of all other tokens: one more bucket (`with_tail`), or left out
            (`renormalized`).
        ratio_clip: The divergence at a token is multiplied by the ratio of the policy to the one that took the rollout,
            without gradient (1 with one optimizer step a rollout), and by this number at most, at least 1. null: it is
            not multiplied.
        top_k_of: Whose likeliest tokens: the `teacher`'s, or the `student`'s when the rollout was taken (TRL's, in SDPO
            and SDFT), which takes one more pass of the policy.
    """

    def __init__(
        self,
        coef: Positive = 1.0,
        top_k: AtLeastOne = 100,
        beta: Portion = 0.5,
        support: Callable[[Tensor], Tensor] = with_tail,
        ratio_clip: RatioClip | None = None,
        top_k_of: TopOf = "teacher",
    ) -> None:
        super().__init__(coef, top_k, ratio_clip)
        self.beta, self.support, self.top_of = beta, support, top_k_of

    def divergence(self, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        return top_divergence(logprobs, teacher_logprobs, mask, beta=self.beta, support=self.support)


@checked("algo.distillation")
class TopForwardKL(TopTokensLoss):
    """A loss: the forward KL over the teacher's likeliest tokens with the masses that they have, never below 0.

    verl's; see :func:`~lit_rl.ops.distillation.top_forward_kl`.

    Args:
        coef: Weight beside the loss of the rewards, above 0.
        top_k: Number of the teacher's likeliest tokens, at least 1. verl takes 32.
        ratio_clip: The divergence at a token is multiplied by the ratio of the policy to the one that took the rollout,
            without gradient (1 with one optimizer step a rollout), and by this number at most, at least 1. null: it is
            not multiplied.
    """

    def __init__(self, coef: Positive = 1.0, top_k: AtLeastOne = 32, ratio_clip: RatioClip | None = None) -> None:
        super().__init__(coef, top_k, ratio_clip)

    def divergence(self, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        return top_forward_kl(logprobs, teacher_logprobs, mask)


@checked("algo.distillation")
class PrefixWeightedAdvantage(TeacherAdvantage):
    """IW-OPD (2606.22600): ``coef w (log T - log S)`` is added to the advantage of each token, in the clipped loss.

    ``w = 1 + gamma (1 - share)``, where the share is how much of the row's ``sum |log T - log S|`` lies before the
    token: what follows once teacher and policy have come apart counts less.

    Args:
        coef: Weight beside the advantages of the rewards, above 0.
        gamma: Weight of the first token above that of the last, at least 0.
    """

    def __init__(self, coef: Positive = 1.0, gamma: NotNegative = 0.5) -> None:
        super().__init__(coef)
        self.gamma = gamma

    def weighted(self, gap: Tensor, mask: Tensor) -> Tensor:
        return gap * prefix_weights(gap, mask, self.gamma)


# ------------------------------------------------------------------ the term


class Distillation:
    """The term of an objective: a teacher, and the form in which the policy learns from it.

    Args:
        teacher: Who scores the tokens.
        form: How the policy learns. None: `TeacherAdvantage` of weight 1.
        alone: Whether nothing is learned from rewards: tokens without an opinion of the teacher are then no tokens of
            the loss, and count in no average.
    """

    def __init__(self, teacher: RolloutTeacher, form: DistillationForm | None, *, alone: bool) -> None:
        self.teacher, self.alone = teacher, alone
        self.form = TeacherAdvantage() if form is None else form

    def check(self, student: StudentFacts) -> None:
        """Refuse a run that does not fit, before anything is loaded.

        Raises:
            ConfigError: names the setting.
        """
        if self.form.top and (reshaped := student.sampling.reshaped):
            keys = ", ".join(f"sampling.{name}={getattr(student.sampling, name)}" for name in reshaped)
            raise ConfigError(
                f"{keys}: the likeliest tokens of teacher and policy are compared under softmax(logits / temperature) "
                "alone. Leave it out, or set algo/distillation=policy_gradient or reverse_kl."
            )
        self.form.check(student.model)
        self.teacher.check(student)

    def at_rollout(self, rollout: Rollout, teacher: TeacherScores) -> tuple[Rollout, Metrics]:
        """Return the rollout with what the teacher says of it, and metrics.

        Args:
            rollout: The rollout with its advantages.
            teacher: What the teacher says of all of its rows.
        """
        mask = teacher.mask & rollout.loss_mask
        rows = rollout.loss_mask.any(1)
        rollout = replace(
            rollout,
            teacher_logprobs=teacher.log_probs,
            teacher_mask=mask,
            teacher_top_ids=teacher.top_ids,
            teacher_top_logprobs=teacher.top_log_probs,
            loss_mask=mask if self.alone else rollout.loss_mask,
        )
        return self.form.with_advantages(rollout), {
            "teacher/log_prob": mean_of(teacher.log_probs, mask),
            "teacher/coverage": mean_of(mask.any(1), rows),
        }

    def add_to_loss(
        self, per_token: Tensor, rollout: Rollout, scores: TokenScores, old: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Add the loss of the form to the losses `(b, t)`, and return them with metrics.

        Args:
            per_token: Losses of a micro-batch.
            rollout: The micro-batch.
            scores: The policy's scores now, with gradient.
            old: `(b, t)`: log-probs of the policy that took the rollout.
        """
        assert rollout.teacher is not None
        losses, metrics = self.form.losses(rollout.teacher, scores, old)
        return (per_token if self.form.in_advantages else per_token + losses), metrics


def check_pair(teacher: RolloutTeacher | None, form: DistillationForm | None, *, alone: bool) -> None:
    """Refuse a form without a teacher, and advantages that learn nothing without one.

    Args:
        teacher: Who scores the tokens, if anybody.
        form: How the policy learns.
        alone: Whether nothing is learned from rewards.

    Raises:
        ConfigError: names the setting.
    """
    if teacher is not None:
        return
    if form is not None:
        raise ConfigError(
            f"algo/distillation: {type(form).__name__} is how the policy learns from a teacher, and there is none. Set "
            "algo/teacher (model, self, server, by_column), or leave it out."
        )
    if alone:
        raise ConfigError(
            "algo/advantage=none: nothing is learned from the rewards, and there is no teacher, so nothing would be "
            "learned at all. Set algo/teacher (model, self, server, by_column), or another algo/advantage, such as "
            "group_normalized."
        )
