"""Scores of a student's tokens by a teacher, and the formulas of distillation on policy: tensors in, tensors out.

A teacher gives its log-prob of each token that the student has sampled, and perhaps those of k tokens there, its own
likeliest or the student's (`TeacherScores`). Where it has no opinion its numbers may be anything, -inf and NaN too:
every function here replaces them before it computes, so that neither a value nor a gradient reads them, and gives 0
there (weights: 1).

Over k tokens the log-probs have a mass below 1. What becomes of the rest is a function of its own: `with_tail` makes it
one more bucket, `renormalized` leaves it out. Both, with :func:`top_divergence`, are those of TRL's
``sdpo/loss_utils.py`` over the student's top k, and of ``server_distillation`` over the teacher's;
:func:`top_forward_kl` keeps the masses as they are, which is verl's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rl.ops.imitation import divergence
from lit_rl.ops.logprobs import finite_logprobs

__all__ = ["renormalized", "with_tail"]

_SMALLEST_TAIL = 1e-7
"""The mass of a tail is at least this (TRL's bound): of 1 - mass float32 leaves nothing where k is the vocabulary."""


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's log-probs of a rollout's tokens, in nats, at the temperature of the rollout."""

    log_probs: Float[Tensor, "b t"]
    """Log-probs of the sampled tokens, in float32."""
    mask: Bool[Tensor, "b t"]
    """True where the teacher has an opinion; elsewhere the numbers may be anything."""
    top_ids: Int[Tensor, "b t k"] | None = None
    """Further tokens at each position: the teacher's likeliest, or the student's; None where there are none."""
    top_log_probs: Float[Tensor, "b t k"] | None = None
    """The teacher's log-probs of `top_ids`, in float32: logs of a mass that is at most 1 together."""


# ------------------------------------------------------------------ the sampled tokens


def token_advantages(
    teacher_logprobs: Float[Tensor, "b t"], logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Return ``log T - log S`` of the sampled tokens, without gradient, in nats; 0 outside the mask.

    As the advantage of a policy gradient it descends the reverse KL(S || T), each token by its own part ("On-Policy
    Distillation", Thinking Machines 2025); no baseline is needed.

    Args:
        teacher_logprobs: log T.
        logprobs: log S of the policy that sampled, or of the present one.
        mask: True where the teacher has an opinion.
    """
    return torch.where(mask, teacher_logprobs - logprobs, 0.0).detach()


def sampled_kl(
    kl: Callable[..., Tensor],
    logprobs: Float[Tensor, "b t"],
    teacher_logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, "b t"]:
    """Return an estimate of the reverse KL(S || T) from the sampled tokens, with gradient; 0 outside the mask.

    Args:
        kl: An estimator of :mod:`lit_rl.ops.kl` that takes no mask: k1, k2, k3 and those made of them.
        logprobs: log S, with gradient.
        teacher_logprobs: log T.
        old_logprobs: log S of the policy that sampled.
        mask: True where the teacher has an opinion.
    """
    neutral = logprobs.detach()
    estimate = kl(
        logprobs, torch.where(mask, teacher_logprobs, neutral).detach(), torch.where(mask, old_logprobs, neutral)
    )
    return torch.where(mask, estimate, 0.0)


def prefix_weights(
    advantages: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], gamma: float = 0.5
) -> Float[Tensor, "b t"]:
    """Return IW-OPD's weights ``1 + gamma (1 - sum_{s<t} |a_s| / sum_s |a_s|)`` (2606.22600); 1 outside the mask.

    They fall from ``1 + gamma`` at the first token to 1: the further student and teacher have already come apart, the
    less the teacher's opinion of what follows counts. A row on which both agree wholly has ``1 + gamma`` everywhere.

    Args:
        advantages: ``a = log T - log S`` of the sampled tokens (:func:`token_advantages`).
        mask: The tokens that are learned from.
        gamma: Above -1; 0 weighs all alike. The paper's is 0.5.
    """
    sizes = torch.where(mask, advantages.detach().abs(), 0.0)
    before = sizes.cumsum(1) - sizes
    # The smallest number above 0 only keeps 0 / 0 from being NaN: where the sum is 0, so are all of its parts.
    share = before / sizes.sum(1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
    return torch.where(mask, 1 + gamma * (1 - share), 1.0)


# ------------------------------------------------------------------ the top k


def with_tail(logprobs: Float[Tensor, "b t k"]) -> Float[Tensor, "b t j"]:
    """Return log-probs of k tokens and of all others together, one more entry, so that they sum to 1.

    Tokens outside the top k then cost what they have together, but not how they are distributed: a divergence over
    the k + 1 is at most that over the vocabulary. The mass of the tail is at least 1e-7.
    """
    mass = logprobs.logsumexp(-1, keepdim=True).clamp(max=-_SMALLEST_TAIL)
    return torch.cat([logprobs, (-torch.expm1(mass)).log()], dim=-1)


def renormalized(logprobs: Float[Tensor, "b t k"]) -> Float[Tensor, "b t j"]:
    """Return log-probs of k tokens given that it is one of them: the mass of all others is left out of account.

    A student whose likeliest token is not among them learns nothing of it, and k = 1 teaches nothing at all.
    """
    return logprobs - logprobs.logsumexp(-1, keepdim=True)


def top_divergence(
    logprobs: Float[Tensor, "b t k"],
    teacher_logprobs: Float[Tensor, "b t k"],
    mask: Bool[Tensor, "b t"],
    *,
    beta: float = 0.5,
    support: Callable[[Tensor], Tensor] = with_tail,
) -> Float[Tensor, "b t"]:
    """Return :func:`~lit_rl.ops.imitation.generalized_jsd` over k tokens, with the student's gradient; 0 outside.

    With either support and k = the vocabulary it is that over the vocabulary.

    Args:
        logprobs: The student's of k tokens, with gradient.
        teacher_logprobs: The teacher's of the same tokens.
        mask: True where the teacher has an opinion.
        beta: In [0, 1]: 0 is the forward KL(T || S), 1 the reverse KL(S || T), what is between a JSD.
        support: What is made of the mass outside the k tokens: :func:`with_tail` or :func:`renormalized`.

    Raises:
        ValueError: beta is out of range.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta} is out of range: allowed is [0, 1], from the forward to the reverse KL.")
    student, teacher = _neutral(logprobs, teacher_logprobs, mask)
    value = divergence(finite_logprobs(support(student)), finite_logprobs(support(teacher)), beta)
    return torch.where(mask, value, 0.0)


def top_forward_kl(
    logprobs: Float[Tensor, "b t k"], teacher_logprobs: Float[Tensor, "b t k"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Return ``max(0, sum_k T (log T - log S))`` over the teacher's top k, with gradient; 0 outside the mask.

    verl's: the masses stay as they are. As they are below 1, the sum falls below 0 where the student has more mass in
    the top k than the teacher; there it is cut to 0, and passes no gradient on. Without that bound the student would
    learn to put everything into the top k.

    Args:
        logprobs: The student's, with gradient, at the teacher's tokens.
        teacher_logprobs: Of its k likeliest tokens.
        mask: True where the teacher has an opinion.
    """
    student, teacher = (finite_logprobs(each) for each in _neutral(logprobs, teacher_logprobs, mask))
    return torch.where(mask, divergence(student, teacher, beta=0.0).clamp(min=0), 0.0)


def top_mass(logprobs: Float[Tensor, "b t k"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Return the mass that a distribution has in k tokens, in [0, 1], without gradient; 0 outside the mask."""
    return torch.where(mask, logprobs.detach().exp().sum(-1), 0.0)


def top_overlap(
    ids: Int[Tensor, "b t k"], teacher_ids: Int[Tensor, "b t k"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Return the share of the teacher's k likeliest tokens that are among the student's k; 0 outside the mask.

    Where it is low, distillation on policy does not succeed (2604.13016).

    Args:
        ids: The student's k likeliest tokens, each once; in any order.
        teacher_ids: The teacher's.
        mask: True where the teacher has an opinion.
    """
    # Sorted together, a token of both stands beside itself: k log k, where a comparison of all pairs takes k squared.
    together = torch.cat([ids, teacher_ids], dim=-1).sort(-1).values
    both = (together[..., 1:] == together[..., :-1]).sum(-1)
    return torch.where(mask, both / ids.shape[-1], 0.0)


def _neutral(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, outside the mask with half of the mass spread evenly over the k: logs and slopes are finite."""
    uniform = torch.full_like(teacher, 0.5 / teacher.shape[-1]).log()
    where = mask.unsqueeze(-1)
    return torch.where(where, student, uniform), torch.where(where, teacher, uniform).detach()
