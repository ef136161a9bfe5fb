import math

import pytest
import torch

from lit_rl.ops import logprobs as module
from lit_rl.ops.logprobs import gather_logprobs, logprobs_and_entropy


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 5, 11, generator=generator)
    ids = torch.randint(11, (3, 5), generator=generator)
    weights = torch.randn(3, 5, generator=generator)
    return logits, ids, weights


def plain(logits, ids, temperature):
    """The definition, in float64."""
    return (logits.double() / temperature).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def test_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    got = gather_logprobs(logits, torch.tensor([[1]]))
    assert got.item() == pytest.approx(math.log(3 / 4))
    # At temperature 1/2 the odds are squared.
    assert gather_logprobs(logits, torch.tensor([[1]]), temperature=0.5).item() == pytest.approx(math.log(9 / 10))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
@pytest.mark.parametrize("numbers", [1, 20, 60, 2**22], ids=lambda n: f"blocks of {n}")
def test_value_and_gradient_are_those_of_log_softmax(batch, temperature, numbers, monkeypatch):
    monkeypatch.setattr(module, "CPU_BLOCK", numbers)
    logits, ids, weights = batch
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got, expected = gather_logprobs(ours, ids, temperature=temperature), plain(exact, ids, temperature)
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-6)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=1e-6)


def test_same_bits_with_and_without_gradient(batch):
    logits, ids, _ = batch
    with_gradient = gather_logprobs(logits.clone().requires_grad_(), ids)
    with torch.no_grad():
        assert torch.equal(gather_logprobs(logits, ids), with_gradient)


def test_bfloat16_logits_are_scored_in_float32(batch):
    logits, ids, weights = batch
    half = logits.bfloat16().requires_grad_()
    got = gather_logprobs(half, ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), plain(half.detach(), ids, 1.0), atol=1e-6, rtol=1e-6)
    (got * weights).sum().backward()
    assert half.grad.dtype == torch.bfloat16
    exact = half.detach().double().requires_grad_()
    (plain(exact, ids, 1.0) * weights).sum().backward()
    torch.testing.assert_close(half.grad.double(), exact.grad, atol=1e-2, rtol=1e-2)


def test_no_float32_tensor_of_the_size_of_the_logits(monkeypatch):
    """Forward and backward: the largest float32 tensor in flight is one block."""
    monkeypatch.setattr(module, "CPU_BLOCK", 64)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    largest = max(largest, tensor.numel())
            return out

    logits = torch.randn(4, 8, 16).bfloat16().requires_grad_()
    ids = torch.zeros(4, 8, dtype=torch.long)
    with Watch():
        gather_logprobs(logits, ids).sum().backward()
    assert 32 <= largest <= 64


def test_a_view_of_longer_logits(batch):
    logits, ids, _ = batch
    whole = torch.cat([logits, logits], dim=1)
    assert torch.equal(gather_logprobs(whole[:, 2:7], ids), gather_logprobs(whole[:, 2:7].contiguous(), ids))


def test_adding_a_constant_to_the_logits_changes_nothing(batch):
    logits, ids, _ = batch
    torch.testing.assert_close(gather_logprobs(logits + 7.0, ids), gather_logprobs(logits, ids), atol=1e-5, rtol=1e-5)


def test_near_certain_tokens_keep_their_digits():
    """log p of about -4.5e-5 beside logits of 30: subtracting a log-sum-exp of 30 would leave two digits."""
    got = gather_logprobs(torch.tensor([[[30.0, 20.0]]]), torch.tensor([[0]])).item()
    assert got == pytest.approx(-math.log1p(math.exp(-10)), rel=2e-3)


def test_probabilities_sum_to_one(batch):
    logits, _, _ = batch
    every = [gather_logprobs(logits, torch.full((3, 5), token)).exp() for token in range(11)]
    torch.testing.assert_close(torch.stack(every).sum(0), torch.ones(3, 5))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_entropy(batch, temperature):
    logits, ids, _ = batch
    logits = logits.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(logits, ids, temperature=temperature)
    expected = torch.distributions.Categorical(logits=logits.detach() / temperature).entropy()
    torch.testing.assert_close(entropy, expected)
    assert torch.equal(logprobs, gather_logprobs(logits, ids, temperature=temperature))
    assert logprobs.requires_grad and not entropy.requires_grad


def test_entropy_of_a_uniform_distribution_is_log_v():
    _, entropy = logprobs_and_entropy(torch.zeros(1, 1, 50), torch.tensor([[3]]))
    assert entropy.item() == pytest.approx(math.log(50))


def test_excluded_tokens_have_no_part_in_the_entropy():
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]], requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([[0]]))
    assert entropy.item() == pytest.approx(math.log(2))
    logprobs.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.5, -0.5, 0.0]]]))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_above_zero(batch, temperature):
    logits, ids, _ = batch
    with pytest.raises(AssertionError, match="temperature"):
        gather_logprobs(logits, ids, temperature=temperature)


def test_no_rows():
    assert gather_logprobs(torch.zeros(0, 4, 7), torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4)
