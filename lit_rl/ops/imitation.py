"""Losses of imitation, before they are averaged: tokens of a given text, and the distributions of a teacher.

Supervised fine-tuning learns texts (:func:`cross_entropy`, :func:`dft`, :func:`chord`); distillation learns from a
teacher by the generalised Jensen-Shannon divergence of GKD (2306.13649, :func:`generalized_jsd`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.ops.logprobs import blocks, finite_logprobs
from lit_rl.ops.sampling_distribution import NO_TRUNCATION

__all__ = ["chord", "cross_entropy", "dft"]


def cross_entropy(logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """``-log pi(token)``, in nats.

    Args:
        logprobs: Of the texts' own tokens.
    """
    return -logprobs


def dft(logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """``-sg(pi(token)) log pi(token)`` (dynamic fine-tuning, 2508.05629); sg passes no gradient on.

    Its gradient is that of ``-pi(token)``: as a policy gradient with a reward of 1 for the text, without the weight
    1 / pi that cross-entropy gives to what the policy would hardly write.

    Args:
        logprobs: Of the texts' own tokens.
    """
    return -logprobs.detach().exp() * logprobs


def chord(logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """``-sg(p (1 - p)) log p`` with ``p = pi(token)``: the token weight of CHORD (2508.11408).

    sg passes no gradient on. What the policy is sure of teaches nothing, and what it would hardly write disturbs
    nothing: the weight is largest, 1/4, where it is undecided.

    Args:
        logprobs: Of the texts' own tokens.
    """
    p = logprobs.detach().exp()
    return -p * (1 - p) * logprobs


def generalized_jsd(
    student_logits: Float[Tensor, "b t v"],
    teacher_logits: Float[Tensor, "b t v"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Float[Tensor, "b t"]:
    """``beta KL(T || M) + (1 - beta) KL(S || M)`` at each position, with ``M = beta T + (1 - beta) S`` (eq. 1).

    S and T are the softmax of the logits over the temperature, of student and teacher. 0 is the forward KL(T || S), 1
    the reverse KL(S || T), as in the paper and in TRL; in between the divergence is at most ``log 2``, and it tends to
    0, not to the KL, as beta tends to an end.

    Both directions work block by block, at least in float32, and keep nothing of the size of the logits. Only the
    student has a gradient, ``(1 - beta) S (log(S / M) - KL(S || M)) / temperature`` within the range; nothing is
    multiplied by the square of the temperature.

    Args:
        student_logits: With gradient.
        teacher_logits: Over the same vocabulary. Never differentiated.
        beta: In [0, 1].
        temperature: Above 0.

    Raises:
        ValueError: a setting is out of range, or the shapes differ.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta} is out of range: allowed is [0, 1], from the forward to the reverse KL.")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} is out of range: it has to be above 0.")
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"the student's logits are {tuple(student_logits.shape)} and the teacher's {tuple(teacher_logits.shape)}: "
            "both have to see the same tokens and to share one vocabulary."
        )
    return _Divergence.apply(student_logits, teacher_logits.detach(), beta, temperature)


class _Divergence(torch.autograd.Function):
    """A function that keeps the logits as they are: the backward pass computes both distributions anew."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
        value = torch.empty(student.shape[:2], dtype=_dtype(student), device=student.device)
        for block in blocks(student, NO_TRUNCATION):
            s, t = _log_softmax(student[block], temperature), _log_softmax(teacher[block], temperature)
            value[block] = divergence(s, t, beta)
        ctx.save_for_backward(student, teacher)
        ctx.settings = beta, temperature
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        student, teacher = ctx.saved_tensors
        beta, temperature = ctx.settings
        grad = torch.empty_like(student)
        for block in blocks(student, NO_TRUNCATION):
            s, t = _log_softmax(student[block], temperature), _log_softmax(teacher[block], temperature)
            grad[block] = _slope(s, t, beta) * (grads[0][block].unsqueeze(-1) / temperature)
        return grad, None, None, None


def divergence(s: Float[Tensor, "*b k"], t: Float[Tensor, "*b k"], beta: float) -> Float[Tensor, "*b"]:
    """Return the divergence of :func:`generalized_jsd` between distributions, the last dimension of finite
    log-probs ``s`` (student) and ``t`` (teacher); differentiable by both."""
    if beta == 0:
        return _kl(t, s)
    if beta == 1:
        return _kl(s, t)
    mixture = _mixture(s, t, beta)
    return beta * _kl(t, mixture) + (1 - beta) * _kl(s, mixture)


def _slope(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """Return the derivative by the student's logits over the temperature."""
    if beta == 0:
        return s.exp() - t.exp()
    gap = s - (t if beta == 1 else _mixture(s, t, beta))
    p = s.exp()
    return (1.0 if beta == 1 else 1 - beta) * p * (gap - (p * gap).sum(-1, keepdim=True))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _mixture(s: Tensor, t: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return finite_logprobs((logits.to(_dtype(logits)) / temperature).log_softmax(-1))


def _dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
