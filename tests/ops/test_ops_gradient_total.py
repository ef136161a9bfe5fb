"""A weight whose uses add their gradients to one sum: what autograd makes of them, in the memory of one gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_tensors import Live
from torch.nn import functional as F

from lit_rl.ops.fused_head import Distribution, SummedWeight, linear_logprobs, measure_rows
from lit_rl.ops.sampling_distribution import Truncation

D, V = 5, 11
PLAIN = Distribution()


def weight_of(dtype=torch.float64, size=(V, D)):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def loss_of(weight, calls, *, summed, padding=None, distribution=PLAIN):
    """Texts that are looked up and scored by one weight, a call after another; each token predicts itself."""
    sums = SummedWeight.of(weight) if summed else None
    total = 0.0
    for ids in calls:
        hidden = sums.lookup(ids, padding) if sums else F.embedding(ids, weight, padding)
        head = weight.detach() if sums else weight
        scores = linear_logprobs(hidden.tanh().flatten(0, -2), head, ids.flatten(), distribution, summed=sums)
        total = total + scores.logprobs.square().sum()
    return total


def gradient(weight, calls, **how):
    return torch.autograd.grad(loss_of(weight, calls, **how), weight)[0]


@given(
    calls=st.lists(st.lists(st.integers(0, V - 1), max_size=6), min_size=1, max_size=3),
    padding=st.one_of(st.none(), st.integers(0, V - 1)),
    truncation=st.sampled_from([Truncation(), Truncation(top_k=3)]),
)
def test_the_sum_is_what_autograd_adds_up(calls, padding, truncation):
    weight, distribution = weight_of(), Distribution(0.7, truncation)
    calls = [torch.tensor(ids, dtype=torch.long) for ids in calls]
    one, other = (
        gradient(weight, calls, summed=summed, padding=padding, distribution=distribution) for summed in (True, False)
    )
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_lookups_alone(shape):
    weight, ids = weight_of(), torch.full(shape, 4)
    found = SummedWeight.of(weight).lookup(ids)
    assert torch.equal(found, F.embedding(ids, weight)) and found.requires_grad
    found.sum().backward()
    wanted = torch.zeros(V, D, dtype=torch.float64)
    wanted[4] = ids.numel()
    assert torch.equal(weight.grad, wanted)


def test_micro_batches_add_up_in_the_gradient_of_the_weight():
    weight, calls = weight_of(), [torch.tensor([1, 2, 2]), torch.tensor([3])]
    for ids in calls:
        loss_of(weight, [ids], summed=True).backward()
    torch.testing.assert_close(weight.grad, gradient(weight, calls, summed=False))


def test_a_graph_may_run_backward_twice_and_past_the_weight():
    """A pass that stops above the weight leaves nothing to the next one."""
    weight, ids = weight_of(), torch.tensor([1, 5, 5])
    sums = SummedWeight.of(weight)
    hidden = sums.lookup(ids)
    hidden.retain_grad()
    loss = linear_logprobs(hidden, weight.detach(), ids, summed=sums).logprobs.sum()
    for _ in range(2):
        torch.autograd.grad(loss, hidden, retain_graph=True)
    whole = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2)]
    wanted = torch.autograd.grad(linear_logprobs(F.embedding(ids, weight), weight, ids).logprobs.sum(), weight)[0]
    for found in whole:
        torch.testing.assert_close(found, wanted)


def test_what_nothing_uses_gets_no_gradient():
    weight = weight_of()
    SummedWeight.of(weight)
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2))


def test_other_uses_of_the_weight_count():
    weight, ids = weight_of(), torch.tensor([1, 1])
    (SummedWeight.of(weight).lookup(ids).sum() + (3 * weight).sum()).backward()
    wanted = torch.full((V, D), 3.0, dtype=torch.float64)
    wanted[1] += 2
    assert torch.equal(weight.grad, wanted)


@pytest.mark.parametrize("summed", [True, False])
def test_under_a_master_rows_are_added_in_float32(summed):
    """A token that is looked up 600 times gets 600 ones: sums in bfloat16 stay at 256."""
    weight = weight_of(torch.bfloat16)
    weight.grad_dtype = torch.float32
    ids = torch.full((600,), 3)
    found = SummedWeight.of(weight).lookup(ids) if summed else F.embedding(ids, weight)
    found.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert (weight.grad[3] == 600).all() == summed


def test_a_weight_that_is_narrow_by_itself_keeps_its_type():
    weight, calls = weight_of(torch.bfloat16), [torch.tensor([1, 2]), torch.tensor([3, 1])]
    one, other = (gradient(weight, calls, summed=summed) for summed in (True, False))
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_rows_of_logits_add_to_the_sum_too():
    weight, hidden = weight_of(), torch.randn(7, D, dtype=torch.float64)

    def squares(rows, logits):
        return (logits.square().sum(1),)

    sums = SummedWeight.of(weight)
    found = sum(measure_rows(hidden, weight.detach(), None, squares, size=3, summed=sums)[0].sum() for _ in range(2))
    found.backward()
    wanted = torch.autograd.grad((hidden @ weight.T).square().sum(), weight)[0]
    torch.testing.assert_close(weight.grad, 2 * wanted)


@pytest.mark.parametrize("summed", [True, False])
def test_two_calls_take_the_memory_of_one_gradient(summed):
    weight = weight_of(torch.float32, (4096, 64))
    calls = [torch.arange(4), torch.arange(9)]
    loss = loss_of(weight, calls, summed=summed)
    with Live() as live:
        loss.backward()
    assert (live.peak < 1.1 * weight.nbytes) == summed
    assert live.peak < 3.1 * weight.nbytes
