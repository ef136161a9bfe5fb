"""Formulas of distillation: by hand, against the divergence over the vocabulary, and blind where the
teacher has no opinion."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.ops.distillation import (
    prefix_weights,
    renormalized,
    sampled_kl,
    token_advantages,
    top_divergence,
    top_forward_kl,
    top_mass,
    top_overlap,
    with_tail,
)
from lit_rl.ops.imitation import generalized_jsd
from lit_rl.ops.kl import corrected_k3, k1, k2, k3

BETAS = [0.0, 0.3, 1.0]
SUPPORTS = [with_tail, renormalized]
FAR = 2, 3, 11


def logits_of(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 2 * torch.randn(2, *FAR, generator=generator, dtype=dtype)
    return student.requires_grad_(), teacher


def top_of(student: torch.Tensor, teacher: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of both at the teacher's k likeliest tokens."""
    top = teacher.log_softmax(-1).topk(k)
    return student.log_softmax(-1).gather(-1, top.indices), top.values


EVERYWHERE = torch.ones(FAR[:2], dtype=torch.bool)


def test_the_advantage_is_the_log_ratio_and_passes_no_gradient():
    teacher, student = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[-3.0, -0.5, -1.0]], requires_grad=True)
    found = token_advantages(teacher, student, torch.tensor([[True, True, False]]))
    assert found.tolist() == [[2.0, -1.5, 0.0]]
    assert not found.requires_grad


@pytest.mark.parametrize("kl", [k1, k2, k3, corrected_k3])
def test_an_estimate_is_the_estimators_where_the_teacher_speaks_and_nothing_elsewhere(kl):
    student = torch.tensor([[-3.0, -0.5, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-1.0, -2.0, -math.inf, math.nan]], dtype=torch.float64)
    old = torch.tensor([[-2.9, -0.6, math.nan, -2.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, False]])
    found = sampled_kl(kl, student, teacher, old, mask)
    wanted = kl(student[:, :2], teacher[:, :2], old[:, :2])
    torch.testing.assert_close(found[:, :2], wanted)
    assert found[:, 2:].tolist() == [[0, 0]]
    (slope,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(slope[:, :2], torch.autograd.grad(wanted.sum(), student)[0][:, :2])
    assert slope[:, 2:].tolist() == [[0, 0]]


def test_prefix_weights_by_hand():
    advantages = torch.tensor([[1.0, -2.0, math.nan, 1.0], [0.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False, True], [True, True, True, True]])
    assert prefix_weights(advantages, mask).tolist() == [[1.5, 1.375, 1.0, 1.125], [1.5] * 4]
    assert prefix_weights(advantages, mask, gamma=0.0).tolist() == [[1.0] * 4] * 2


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=9), st.floats(0, 2), st.floats(0.1, 10))
def test_prefix_weights_fall_from_one_plus_gamma_and_read_no_scale(values, gamma, scale):
    advantages, mask = torch.tensor([values], dtype=torch.float64), torch.ones(1, len(values), dtype=torch.bool)
    weights = prefix_weights(advantages, mask, gamma)
    assert weights[0, 0] == pytest.approx(1 + gamma)
    assert (weights.diff() <= 1e-9).all() and (weights >= 1 - 1e-9).all()
    torch.testing.assert_close(prefix_weights(advantages * scale, mask, gamma), weights)


# ------------------------------------------------------------------ the top k


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("beta", BETAS)
def test_over_the_whole_vocabulary_it_is_gkds_with_its_gradient(beta, support, dtype):
    student, teacher = logits_of(2, dtype)
    wanted = generalized_jsd(student, teacher, beta=beta)
    found = top_divergence(*top_of(student, teacher, k=FAR[-1]), EVERYWHERE, beta=beta, support=support)
    bound: dict[str, Any] = {"atol": 2e-6, "rtol": 2e-6}
    torch.testing.assert_close(found, wanted, **bound)
    slopes = [torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (found, wanted)]
    torch.testing.assert_close(*slopes, **bound)


def test_forward_kl_over_the_whole_vocabulary_is_gkds_at_0():
    student, teacher = logits_of(3)
    wanted = generalized_jsd(student, teacher, beta=0.0)
    found = top_forward_kl(*top_of(student, teacher, k=FAR[-1]), EVERYWHERE)
    torch.testing.assert_close(found, wanted)
    slopes = [torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (found, wanted)]
    torch.testing.assert_close(*slopes)


def test_forward_kl_by_hand_and_its_bound():
    student = torch.tensor([[[0.25, 0.25], [0.5, 0.4]]]).log().requires_grad_()
    teacher = torch.tensor([[[0.5, 0.25], [0.5, 0.3]]]).log()
    found = top_forward_kl(student, teacher, torch.ones(1, 2, dtype=torch.bool))
    # the second has more mass in the two tokens than the teacher: 0.3 log(0.3 / 0.4) is below 0
    torch.testing.assert_close(found, torch.tensor([[0.5 * math.log(2), 0.0]]))
    (slope,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(slope, torch.tensor([[[-0.5, -0.25], [0.0, 0.0]]]))


@given(st.integers(0, 10**6), st.integers(1, FAR[-1] - 1), st.sampled_from(BETAS))
def test_what_is_lumped_together_diverges_less(seed, k, beta):
    student, teacher = logits_of(seed)
    whole = generalized_jsd(student, teacher, beta=beta)
    found = [top_divergence(*top_of(student, teacher, each), EVERYWHERE, beta=beta) for each in (k, k + 1)]
    assert (found[0] <= found[1] + 1e-6).all() and (found[1] <= whole + 1e-6).all() and (found[0] >= -1e-9).all()


def test_one_token_teaches_with_a_tail_and_not_without():
    student, teacher = top_of(*logits_of(4), k=1)
    assert (top_divergence(student, teacher, EVERYWHERE, beta=1.0) > 1e-3).all()
    assert top_divergence(student, teacher, EVERYWHERE, beta=1.0, support=renormalized).abs().max() < 1e-9


@pytest.mark.parametrize("poison", [-math.inf, math.nan])
@pytest.mark.parametrize(
    "formula",
    [top_forward_kl, *(lambda *a, b=b, s=s: top_divergence(*a, beta=b, support=s) for b in BETAS for s in SUPPORTS)],
)
def test_where_the_teacher_is_silent_nothing_is_read(formula, poison):
    student, teacher = (each.detach() for each in top_of(*logits_of(5), k=3))
    mask = torch.tensor([[True, False, True], [False, False, True]])
    hidden = mask.unsqueeze(-1)
    poisoned = torch.where(hidden, student, poison).requires_grad_()
    found = formula(poisoned, torch.where(hidden, teacher, poison), mask)
    student.requires_grad_()
    clean = torch.where(mask, formula(student, teacher, EVERYWHERE), 0.0)
    torch.testing.assert_close(found, clean)
    slopes = [torch.autograd.grad(value.sum(), each)[0] for value, each in ((found, poisoned), (clean, student))]
    torch.testing.assert_close(*slopes)


def test_a_beta_out_of_range_is_refused():
    student, teacher = top_of(*logits_of(6), k=2)
    with pytest.raises(ValueError, match=r"beta=1\.5"):
        top_divergence(student, teacher, EVERYWHERE, beta=1.5)


def test_mass_and_overlap_by_hand():
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[[0.5, 0.25], [0.1, 0.1], [math.nan, 0.1]]]).log()
    torch.testing.assert_close(top_mass(logprobs, mask), torch.tensor([[0.75, 0.2, 0.0]]))
    ids, teacher_ids = torch.tensor([[[3, 1], [4, 5], [1, 2]]]), torch.tensor([[[1, 9], [5, 4], [1, 2]]])
    assert top_overlap(ids, teacher_ids, mask).tolist() == [[0.5, 1.0, 0.0]]


@given(st.lists(st.permutations(range(7)), min_size=2, max_size=2), st.integers(1, 7))
def test_overlap_is_that_of_the_sets(orders, k):
    ids, teacher_ids = (torch.tensor([[order[:k]]]) for order in orders)
    wanted = len(set(orders[0][:k]) & set(orders[1][:k])) / k
    assert top_overlap(ids, teacher_ids, torch.ones(1, 1, dtype=torch.bool)).item() == pytest.approx(wanted)
