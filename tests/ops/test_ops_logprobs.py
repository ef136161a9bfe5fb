import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import in_turn
from token_scores import gather_logprobs, logprobs_and_entropy_with_gradient
from transformers.generation import logits_process as peer

from lit_rl.ops import logprobs as module
from lit_rl.ops.logprobs import logprobs_and_entropy
from lit_rl.ops.sampling_distribution import NO_TRUNCATION, Truncation

CUT = Truncation(top_k=7, top_p=0.9, min_p=0.02)


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


def both(logits, ids, **settings):
    return sum(logprobs_and_entropy_with_gradient(logits, ids, **settings))


@in_turn(truncation=[NO_TRUNCATION, CUT], function=[gather_logprobs, both])
def test_no_float32_tensor_of_the_size_of_the_logits(monkeypatch, function, truncation):
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
        function(logits, ids, truncation=truncation).sum().backward()
    # 32 numbers are the results themselves.
    assert 32 <= largest <= 64


def test_a_view_of_longer_logits(batch):
    logits, ids, _ = batch
    whole = torch.cat([logits, logits], dim=1)
    assert torch.equal(gather_logprobs(whole[:, 2:7], ids), gather_logprobs(whole[:, 2:7].contiguous(), ids))


def test_near_certain_tokens_keep_their_digits():
    """log p of about -4.5e-5 beside logits of 30: subtracting a log-sum-exp of 30 would leave two digits."""
    got = gather_logprobs(torch.tensor([[[30.0, 20.0]]]), torch.tensor([[0]])).item()
    assert got == pytest.approx(-math.log1p(math.exp(-10)), rel=2e-3)


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


# ------------------------------------------------------------------ entropy with gradient


def entropy_of(logits, temperature):
    """The definition, in float64, over the finite logits."""
    log_softmax = (logits.double() / temperature).log_softmax(-1)
    return -(log_softmax.exp() * log_softmax.masked_fill(log_softmax == -math.inf, 0.0)).sum(-1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
@pytest.mark.parametrize("numbers", [1, 20, 60, 2**22], ids=lambda n: f"blocks of {n}")
def test_value_and_gradient_of_both_are_those_of_the_definition(batch, temperature, numbers, monkeypatch):
    monkeypatch.setattr(module, "CPU_BLOCK", numbers)
    logits, ids, weights = batch
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropy = logprobs_and_entropy_with_gradient(ours, ids, temperature=temperature)
    expected = plain(exact, ids, temperature), entropy_of(exact, temperature)
    torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], atol=1e-6, rtol=1e-6)
    assert torch.equal(gather_logprobs(ours, ids, temperature=temperature), logprobs)
    (logprobs * weights + entropy * weights.flip(0)).sum().backward()
    (expected[0] * weights + expected[1] * weights.flip(0)).sum().backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=1e-6)


@in_turn(temperature=[0.6, 1.0], truncation=[NO_TRUNCATION, CUT])
def test_every_function_gives_the_same_bits(batch, temperature, truncation):
    logits, ids, _ = batch
    settings = {"temperature": temperature, "truncation": truncation}
    logprobs, entropy = logprobs_and_entropy(logits, ids, **settings)
    with_gradient = logprobs_and_entropy_with_gradient(logits.clone().requires_grad_(), ids, **settings)
    assert torch.equal(gather_logprobs(logits, ids, **settings), logprobs)
    assert torch.equal(gather_logprobs(logits.clone().requires_grad_(), ids, **settings), logprobs)
    assert torch.equal(with_gradient[0], logprobs)
    assert torch.equal(with_gradient[1], entropy)
    assert with_gradient[1].requires_grad
    still, entropy = logprobs_and_entropy(logits.clone().requires_grad_(), ids, **settings)
    assert still.requires_grad and not entropy.requires_grad


def test_the_gradient_of_log_probs_does_not_depend_on_who_asks_for_entropy(batch):
    logits, ids, weights = batch
    gradients = []
    for function in (gather_logprobs, lambda *args: logprobs_and_entropy_with_gradient(*args)[0]):
        leaf = logits.clone().requires_grad_()
        (function(leaf, ids) * weights).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


def test_excluded_tokens_have_no_gradient_however_large_the_weight():
    logits = torch.tensor([[[0.0, 1.0, -math.inf]]], requires_grad=True)
    _, entropy = logprobs_and_entropy_with_gradient(logits, torch.tensor([[0]]), temperature=0.1)
    (1e30 * entropy).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0, 2] == 0
    torch.testing.assert_close(logits.grad[0, 0, 1], -logits.grad[0, 0, 0])
    assert logits.grad[0, 0, 0] > 0


# ------------------------------------------------------------------ truncation


def kept_by_transformers(logits, ids, temperature, truncation):
    """Bool `(b, t, v)`: what the peer's processors keep, and the scored token."""
    flat = logits.flatten(0, 1) / temperature
    if truncation.top_k:
        flat = peer.TopKLogitsWarper(truncation.top_k)(None, flat)
    if truncation.top_p < 1:
        flat = peer.TopPLogitsWarper(truncation.top_p)(None, flat)
    if truncation.min_p > 0:
        flat = peer.MinPLogitsWarper(truncation.min_p)(None, flat)
    return flat.isfinite().view_as(logits).scatter(-1, ids.unsqueeze(-1), True)


truncations = st.builds(
    Truncation,
    top_k=st.integers(0, 12),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.5)),
)


@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.4, 2.5),
    truncation=truncations,
    numbers=st.sampled_from([1, 160, 2**22]),
)
def test_truncated_values_and_gradients_are_those_of_the_definition(seed, temperature, truncation, numbers):
    """Any combination, any block size, and tokens that truncation would have cut off."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 4, 11, generator=generator)
    ids = torch.randint(11, (2, 4), generator=generator)
    weights = torch.randn(2, 2, 4, generator=generator)
    kept = kept_by_transformers(logits, ids, temperature, truncation)
    settings = {"temperature": temperature, "truncation": truncation}
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_BLOCK", numbers)
        logprobs, entropy = logprobs_and_entropy_with_gradient(ours, ids, **settings)
        (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    masked = exact.masked_fill(~kept, -math.inf)
    expected = plain(masked, ids, temperature), entropy_of(masked, temperature)
    torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], atol=1e-5, rtol=1e-5)
    (expected[0] * weights[0] + expected[1] * weights[1]).sum().backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)
    assert (ours.grad[~kept] == 0).all()


@given(seed=st.integers(0, 2**31), truncation=truncations)
def test_the_backward_pass_has_the_set_of_the_forward_pass_where_logits_tie(seed, truncation):
    """Half-precision logits are full of ties, and top-p cuts between equals."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (2, 4, 11), generator=generator).float()
    ids = torch.randint(11, (2, 4), generator=generator)
    leaf = logits.clone().requires_grad_()
    logprobs = gather_logprobs(leaf, ids, truncation=truncation)
    logprobs.sum().backward()
    kept = truncation(logits).scatter(-1, ids.unsqueeze(-1), logits.gather(-1, ids.unsqueeze(-1)))
    expected = -kept.softmax(-1)
    expected.scatter_add_(-1, ids.unsqueeze(-1), torch.ones(2, 4, 1))
    torch.testing.assert_close(leaf.grad, expected, atol=1e-6, rtol=1e-6)


def test_truncated_bfloat16(batch):
    logits, ids, weights = batch
    half = logits.bfloat16().requires_grad_()
    got = gather_logprobs(half, ids, truncation=CUT)
    single = half.detach().float().requires_grad_()
    expected = gather_logprobs(single, ids, truncation=CUT)
    assert torch.equal(got, expected)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(half.grad, single.grad.bfloat16())
