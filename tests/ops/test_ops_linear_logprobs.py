"""Log-probs straight from hidden states: those of the logits, with their gradients, however the blocks are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import in_turn
from token_scores import logprobs_and_entropy_with_gradient

from lit_rl.ops import fused_head as module
from lit_rl.ops.fused_head import Distribution, linear_logprobs
from lit_rl.ops.logprobs import token_stats
from lit_rl.ops.sampling_distribution import Truncation

CUT = Truncation(top_k=7, top_p=0.9, min_p=0.02)
N, D, V = 13, 6, 37


@pytest.fixture(params=[0, 2**24], ids=["computed twice", "kept"])
def kept(request, monkeypatch):
    monkeypatch.setattr(module, "KEPT", request.param)


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, D), (V, D), (V,)))
    ids = torch.randint(V, (N,), generator=generator)
    return hidden.requires_grad_(), (2 * weight).requires_grad_(), bias.requires_grad_(), ids


def plain(hidden, weight, bias, ids, temperature):
    """The definition."""
    log_p = ((hidden @ weight.T + bias) / temperature).log_softmax(-1)
    return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
@pytest.mark.parametrize(("columns", "numbers"), [(5, 15), (V, 3 * V), (16, 2**22), (2**13, 2**22)])
def test_value_and_gradient_are_those_of_the_definition(monkeypatch, kept, temperature, columns, numbers):
    monkeypatch.setattr(module, "COLUMNS", columns)
    monkeypatch.setattr(module.of_logits, "CPU_BLOCK", numbers)
    hidden, weight, bias, ids = inputs()
    ways = torch.randn(2, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = plain(hidden, weight, bias, ids, temperature)
    scores = linear_logprobs(
        hidden, weight, ids, Distribution(temperature, entropy=True, entropy_gradient=True), bias=bias
    )
    got = scores.logprobs, scores.entropy
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    pairs = [(ways * torch.stack(both)).sum() for both in (got, wanted)]
    for one, other in zip(*(gradients(loss, hidden, weight, bias) for loss in pairs)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_the_entropy_has_a_gradient_only_where_it_was_asked_for(kept):
    hidden, weight, bias, ids = inputs()
    for asked in (False, True):
        scores = linear_logprobs(hidden, weight, ids, Distribution(entropy=True, entropy_gradient=asked), bias=bias)
        assert scores.entropy.requires_grad == asked and scores.logprobs.requires_grad
    assert linear_logprobs(hidden, weight, ids).entropy is None


def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(kept):
    hidden, weight, bias, ids = inputs()
    both = gradients(linear_logprobs(hidden, weight, ids, bias=bias).logprobs.sum(), hidden, weight)
    head_only = linear_logprobs(hidden.detach(), weight, ids, bias=bias.detach()).logprobs.sum()
    trunk_only = linear_logprobs(hidden, weight.detach(), ids, bias=bias.detach()).logprobs.sum()
    assert torch.equal(gradients(head_only, weight)[0], both[1])
    assert torch.equal(gradients(trunk_only, hidden)[0], both[0])


def test_same_bits_with_and_without_gradient_and_when_computed_again(kept):
    hidden, weight, bias, ids = inputs(torch.float32)
    with_gradient = linear_logprobs(hidden, weight, ids, bias=bias).logprobs
    first = torch.autograd.grad(with_gradient.sum(), weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(with_gradient.sum(), weight)[0])
    with torch.no_grad():
        assert torch.equal(linear_logprobs(hidden, weight, ids, bias=bias).logprobs, with_gradient)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_truncation_is_that_of_logits(monkeypatch, temperature):
    hidden, weight, bias, ids = inputs(torch.float32)
    wanted = logprobs_and_entropy_with_gradient(
        (hidden @ weight.T + bias)[None], ids[None], temperature=temperature, truncation=CUT
    )
    monkeypatch.setattr(module.of_logits, "CPU_BLOCK", 4 * 3 * V)
    scores = linear_logprobs(hidden, weight, ids, Distribution(temperature, CUT, True, True), bias=bias)
    for one, other in zip((scores.logprobs, scores.entropy), wanted):
        torch.testing.assert_close(one, other[0], rtol=1e-5, atol=1e-5)
    sums = scores.logprobs.sum() + scores.entropy.sum(), wanted[0].sum() + wanted[1].sum()
    for one, other in zip(*(gradients(loss, hidden, weight, bias) for loss in sums)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@given(columns=st.integers(1, V + 1), seed=st.integers(0, 3))
def test_statistics_are_those_of_logits(columns, seed):
    hidden, weight, bias, ids = inputs(torch.float32, seed)
    ids = torch.where(torch.arange(N) % 2 == 0, (hidden @ weight.T + bias).argmax(1), ids)
    wanted = token_stats((hidden @ weight.T + bias).detach()[None], ids[None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COLUMNS", columns)
        found = linear_logprobs(hidden, weight, ids, Distribution(stats=True), bias=bias).stats
    assert torch.equal(found.correct, wanted.correct[0]) and found.correct.sum() >= N // 2
    torch.testing.assert_close(found.log_sum_sq, wanted.log_sum_sq[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.mean_logit, wanted.mean_logit[0], rtol=1e-4, atol=1e-5)


def test_of_equally_likely_tokens_the_first_counts_as_the_likeliest(monkeypatch):
    monkeypatch.setattr(module, "COLUMNS", 2)
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    found = linear_logprobs(hidden, weight, torch.tensor([1, 3]), Distribution(stats=True)).stats
    assert found.correct.tolist() == [True, False]


@pytest.mark.parametrize("width", [7, 32, 96, 512, 8192], ids=lambda width: f"{width} tokens")
def test_the_likeliest_is_the_first_of_the_highest(width):
    """Few different logits, so that most rows have several highest ones, in one piece and in several."""
    logits = torch.randint(3, (40, width), generator=torch.Generator().manual_seed(5)).float()
    logits[1], logits[2, -1], logits[3, width // 2] = -torch.inf, 9.0, torch.nan
    assert torch.equal(module._likeliest(logits), logits.argmax(1))


def test_half_precision_is_multiplied_as_the_head_does_and_summed_in_float32(kept):
    hidden, weight, bias, ids = inputs(torch.bfloat16)
    found = linear_logprobs(hidden, weight, ids, bias=bias).logprobs
    assert found.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, weight, bias)
    wanted = logits.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    ours = gradients(found.sum(), hidden, weight, bias)
    assert {g.dtype for g in ours} == {torch.bfloat16}
    for one, other in zip(ours, gradients(wanted.sum(), hidden, weight, bias)):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


def test_large_logits_overflow_nothing():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[3e4], [2e4], [-3e4]])
    found = linear_logprobs(hidden, weight, torch.tensor([1]), Distribution(entropy=True))
    assert found.logprobs.item() == pytest.approx(-1e4) and found.entropy.item() == 0


@pytest.mark.parametrize("truncation", [Truncation(), CUT])
def test_the_logits_are_never_whole(monkeypatch, truncation):
    """Forward and backward: the largest tensor in flight is a block, a weight, or the hidden states."""
    monkeypatch.setattr(module, "KEPT", 0)
    monkeypatch.setattr(module, "COLUMNS", 16)
    monkeypatch.setattr(module.of_logits, "CPU_BLOCK", 4 * 64)
    n, d, v = 150, 2, 41
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return out

    hidden, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    with Watch():
        scores = linear_logprobs(hidden, weight, torch.randint(v, (n,)), Distribution(1.0, truncation, True, True))
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert largest == n * d


@pytest.mark.parametrize("distribution", [Distribution(entropy=True), Distribution(0.5, Truncation(top_p=0.9), True)])
def test_no_tokens_have_no_scores_and_a_gradient_of_zero(distribution):
    hidden, weight, _, _ = inputs()
    found = linear_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long), distribution)
    assert found.logprobs.shape == found.entropy.shape == (0,) and found.logprobs.dtype == hidden.dtype
    assert gradients(found.logprobs.sum(), weight)[0].abs().sum() == 0


PRECISE = [Distribution(), Distribution(truncation=Truncation(top_p=0.9))]


@pytest.mark.parametrize("distribution", PRECISE, ids=["plain", "truncated"])
def test_under_a_master_the_gradient_of_the_head_is_summed_unrounded(monkeypatch, distribution) -> None:
    monkeypatch.setattr(module, "_rows", lambda *_: 8)  # eight blocks of tokens
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=draw).bfloat16() for shape in ((64, 16), (40, 16)))
    ids = torch.randint(0, 40, (64,), generator=draw)
    found = {}
    for kind in (torch.bfloat16, torch.float32):
        head = weight.clone().requires_grad_()
        head.grad_dtype = kind
        linear_logprobs(hidden, head, ids, distribution).logprobs.sum().backward()
        assert head.grad is not None and head.grad.dtype == kind
        found[kind] = head.grad
    assert torch.equal(found[torch.float32].bfloat16(), found[torch.bfloat16])
    assert not torch.equal(found[torch.float32], found[torch.bfloat16].float())


@pytest.mark.parametrize("distribution", PRECISE, ids=["plain", "truncated"])
def test_blocks_add_no_error_to_gradients_in_half_precision(monkeypatch, distribution) -> None:
    """Weight and bias are narrow copies of float32 ones, as under autocast."""
    draw = torch.Generator().manual_seed(5)
    hidden, weight, bias = (torch.randn(shape, generator=draw).bfloat16() for shape in ((512, 16), (40, 16), (40,)))
    ids, off = torch.randint(0, 40, (512,), generator=draw), {}

    def of(kind, rows):
        monkeypatch.setattr(module, "_rows", lambda *_: rows)
        parts = [part.to(kind).requires_grad_() for part in (hidden, weight, bias)]
        ours = linear_logprobs(*parts[:2], ids, distribution, bias=parts[2])
        return [part.double() for part in gradients(ours.logprobs.sum(), *parts)]

    wanted = of(torch.float64, 512)
    for rows in (512, 4):
        off[rows] = [(mine - exact).norm() / exact.norm() for mine, exact in zip(of(torch.bfloat16, rows), wanted)]
    assert all(many < 1.3 * one for many, one in zip(off[4], off[512])), off


def test_logits_are_let_go_with_the_backward_pass_and_a_second_one_computes_them_anew() -> None:
    draw = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(shape, generator=draw, requires_grad=True) for shape in ((9, 8), (30, 8)))
    logprobs = linear_logprobs(hidden, weight, torch.arange(9)).logprobs
    total, node = logprobs.square().sum(), logprobs.grad_fn
    assert node.kept
    first = torch.autograd.grad(total, [hidden, weight], retain_graph=True)
    assert not node.kept, "logits that are not needed again stay until the loss is let go"
    second = torch.autograd.grad(total, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@in_turn(dtype=[torch.float32, torch.bfloat16], temperature=[0.7, 1.0])
def test_logits_are_kept_as_they_were_multiplied_out_and_nothing_is_lost(monkeypatch, dtype, temperature) -> None:
    hidden, weight, bias, ids = inputs(dtype)
    found = {}
    for kept in (0, N * V * dtype.itemsize):
        monkeypatch.setattr(module, "KEPT", kept)
        logprobs = linear_logprobs(hidden, weight, ids, Distribution(temperature), bias=bias).logprobs
        assert sum(block.nbytes for block in logprobs.grad_fn.kept) == kept
        found[kept] = logprobs, *gradients(logprobs.square().sum(), hidden, weight, bias)
    assert all(torch.equal(one, other) for one, other in zip(*found.values()))
