"""Odds ratio, reward-model losses and the generalised JSD: numbers worked out on paper, gradients, extreme values."""

from math import exp, log

import pytest
import torch
from tiers import in_turn

from lit_rl.ops import logprobs
from lit_rl.ops.imitation import generalized_jsd
from lit_rl.ops.preference_losses import bradley_terry, odds_ratio, step_label_loss


def test_odds_ratio_by_hand():
    """Probabilities 3/4 and 1/3: odds 3 and 1/2, their ratio 6, sigma(log 6) = 6/7."""
    chosen, rejected = (torch.tensor([log(p)], requires_grad=True) for p in (3 / 4, 1 / 3))
    losses, log_odds = odds_ratio(chosen, rejected)
    assert losses.item() == pytest.approx(log(7 / 6)) and log_odds.item() == pytest.approx(log(6))
    slopes = torch.autograd.grad(losses.sum(), (chosen, rejected))
    assert [x.item() for x in slopes] == pytest.approx([-4 / 7, 3 / 14])  # the slope of log odds is 1 / (1 - p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_certain_and_of_hopeless_completions(dtype):
    x = torch.tensor([0.0, -1e-30, -1e-8, -log(2), -1e4, 0.0, -1e4], dtype=dtype)
    y = torch.tensor([0.0, -1e4, -1e-8, -log(2), 0.0, -1.0, -1e4], dtype=dtype)
    columns = x.requires_grad_(), y.requires_grad_()
    losses, log_odds = odds_ratio(*columns)
    slopes = torch.autograd.grad(losses.sum(), columns)
    assert all(z.isfinite().all() for z in (losses, log_odds, *slopes))
    assert log_odds[0] == log_odds[6] == 0 and log_odds[1] > 1e4 and log_odds[4] < -1e4


def test_odds_are_accurate_near_certainty():
    tiny = torch.tensor([-1e-6, -0.69, -0.70], dtype=torch.float32)
    _, log_odds = odds_ratio(tiny, torch.full((3,), log(0.5)))
    right = [log(exp(x) / -(exp(x) - 1)) for x in tiny.double().tolist()]
    assert log_odds.tolist() == pytest.approx(right, rel=1e-4, abs=1e-6)


def test_gradients_of_the_odds_ratio():
    chosen, rejected = (-torch.rand(2, 6, dtype=torch.float64) * 2 - 0.05).unbind()
    assert torch.autograd.gradcheck(odds_ratio, (chosen.requires_grad_(), rejected.requires_grad_()))


def test_bradley_terry():
    chosen, rejected = torch.tensor([log(6), 1.0]), torch.tensor([0.0, 1.0])
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx([log(7 / 6), log(2)])
    margins = torch.tensor([log(6) - log(3), -1.0])
    assert bradley_terry(chosen, rejected, margins).tolist() == pytest.approx([log(4 / 3), log(1 + exp(-1))])
    centred = bradley_terry(torch.tensor([1.0]), torch.tensor([2.0]), center=0.5)
    assert centred.item() == pytest.approx(log(1 + exp(1)) + 4.5)
    gap = bradley_terry(rejected, chosen) - bradley_terry(chosen, rejected)
    assert torch.allclose(gap, chosen - rejected), "swapping flips the margin"
    assert torch.allclose(bradley_terry(chosen + 9, rejected + 9), bradley_terry(chosen, rejected), atol=1e-5)
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    losses = bradley_terry(far, -far, center=0.01)
    assert losses.tolist() == pytest.approx([0.0, 2e4])
    assert torch.autograd.grad(losses.sum(), far)[0].isfinite().all()
    with pytest.raises(ValueError, match="^center=-1"):
        bradley_terry(chosen, rejected, center=-1.0)


def test_steps():
    """sigma(log 3) = 3/4."""
    nan = float("nan")
    logits = torch.tensor([[nan, log(3), log(3), log(3), nan]], requires_grad=True)
    labels, mask = torch.tensor([[nan, 1.0, 0.0, 0.5, 0.0]]), torch.tensor([[0, 1, 1, 1, 0]]).bool()
    out = step_label_loss(logits, labels, mask)
    assert out.flatten().tolist() == pytest.approx([0, log(4 / 3), log(4), log(16 / 3) / 2, 0])
    (slopes,) = torch.autograd.grad(out.sum(), logits)
    assert slopes.flatten().tolist() == pytest.approx([0, -1 / 4, 3 / 4, 1 / 4, 0])
    far = step_label_loss(torch.tensor([[1e4, -1e4]]), torch.tensor([[0.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert far.tolist() == [[1e4, 0.0]]


S, T = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[log(3), 0.0]]])
"""A student of 1/2, 1/2 and a teacher of 3/4, 1/4."""


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, 0.75 * log(3 / 2) + 0.25 * log(1 / 2)),
        (1.0, 0.5 * log(2 / 3) + 0.5 * log(2)),
        # the mixture is 5/8, 3/8
        (0.5, 0.5 * (0.75 * log(6 / 5) + 0.25 * log(2 / 3)) + 0.5 * (0.5 * log(4 / 5) + 0.5 * log(4 / 3))),
        # 0.2 T + 0.8 S is 11/20, 9/20
        (0.2, 0.2 * (0.75 * log(15 / 11) + 0.25 * log(5 / 9)) + 0.8 * (0.5 * log(10 / 11) + 0.5 * log(10 / 9))),
    ],
)
def test_jsd_by_hand(beta, expected):
    assert generalized_jsd(S, T, beta=beta).item() == pytest.approx(expected, rel=1e-4)
    # a temperature of 2 undoes twice the logits
    assert generalized_jsd(S, 2 * T, beta=beta, temperature=2.0).item() == pytest.approx(expected, rel=1e-4)


def random_logits(shape=(2, 3, 5), dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    return tuple(2 * torch.randn(shape, generator=g, dtype=dtype) for _ in range(2))


BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_gradient_is_a_finite_difference(beta):
    student, teacher = random_logits()
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: generalized_jsd(x, teacher, beta=beta, temperature=1.3), student)


@in_turn(temperature=[0.7, 1.0], beta=BETAS)
def test_jsd_is_that_of_trl(beta, temperature, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = (x.float() for x in random_logits())
    grads, values = [], []
    for loss in (generalized_jsd, GKDTrainer.generalized_jsd_loss):
        x = student.clone().requires_grad_()
        more = {} if loss is generalized_jsd else {"reduction": "sum"}
        out = loss(x, teacher, beta=beta, temperature=temperature, **more).sum()
        grads.append(torch.autograd.grad(out, x)[0])
        values.append(out.item())
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_of_extreme_logits_is_finite(beta):
    inf = float("inf")
    student = torch.tensor([[[1e4, -1e4, 0.0], [0.0, 0.0, -inf]]], requires_grad=True)
    teacher = torch.tensor([[[-1e4, 1e4, 0.0], [0.0, 1.0, -inf]]], requires_grad=True)
    out = generalized_jsd(student, teacher, beta=beta)
    (grad,) = torch.autograd.grad(out.sum(), student, retain_graph=True)
    assert out.isfinite().all() and grad.isfinite().all()
    assert torch.autograd.grad(out.sum(), teacher, allow_unused=True) == (None,)


def test_jsd_blocks_and_half_precision(monkeypatch):
    student, teacher = (x.float() for x in random_logits((3, 4, 7)))
    whole, grad = value_and_grad(student, teacher)
    monkeypatch.setattr(logprobs, "CPU_BLOCK", 14)
    parts = value_and_grad(student, teacher)
    assert torch.allclose(whole, parts[0]) and torch.allclose(grad, parts[1])
    half, of_half = value_and_grad(student.bfloat16(), teacher.bfloat16())
    assert half.dtype == torch.float32 and of_half.dtype == torch.bfloat16
    exact, _ = value_and_grad(student.bfloat16().float(), teacher.bfloat16().float())
    assert torch.equal(half, exact)


def value_and_grad(student, teacher):
    x = student.clone().requires_grad_()
    out = generalized_jsd(x, teacher)
    return out.detach(), torch.autograd.grad(out.sum(), x)[0]


def test_jsd_refuses():
    for settings, name in (({"beta": 1.1}, "beta"), ({"beta": -0.1}, "beta"), ({"temperature": 0.0}, "temperature")):
        with pytest.raises(ValueError, match=f"^{name}="):
            generalized_jsd(S, T, **settings)
