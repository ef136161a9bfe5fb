import math
from functools import partial

import pytest
import torch

from lit_rl.ops.reductions import (
    StepTotals,
    constant_mean,
    local_token_mean,
    sequence_mean,
    sequence_total,
    token_mean,
    token_sum,
    unmasked_constant_mean,
    unmasked_sequence_mean,
)

REDUCTIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant_mean": partial(constant_mean, length=10),
    "token_sum": token_sum,
    "sequence_total": sequence_total,
    "unmasked_sequence_mean": unmasked_sequence_mean,
    "unmasked_constant_mean": partial(unmasked_constant_mean, length=10),
}
EVERY = {**REDUCTIONS, "local_token_mean": local_token_mean}
every_reduction = pytest.mark.parametrize("reduce", EVERY.values(), ids=EVERY.keys())
every_reduction_of_the_step = pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS.keys())

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]]).bool()


def test_by_hand():
    per_token = torch.arange(16.0).reshape(4, 4)
    totals = StepTotals(sequences=4, tokens=7, unmasked_sequences=3, micro_batches=2)
    # Loss tokens: 0 1 2 3 | 4 | none | 12 14, with sums 6, 4, 0, 26.
    assert token_mean(per_token, MASK, totals).item() == pytest.approx(36 / 7)
    assert sequence_mean(per_token, MASK, totals).item() == pytest.approx((6 / 4 + 4 + 0 + 13) / 4)
    assert constant_mean(per_token, MASK, totals, length=10).item() == pytest.approx(36 / 40)
    assert token_sum(per_token, MASK, totals).item() == 36
    assert sequence_total(per_token, MASK, totals).item() == 36 / 4
    assert unmasked_sequence_mean(per_token, MASK, totals).item() == pytest.approx((6 / 4 + 4 + 13) / 3)
    assert unmasked_constant_mean(per_token, MASK, totals, length=10).item() == pytest.approx(36 / 30)
    assert local_token_mean(per_token, MASK, totals).item() == pytest.approx(36 / 7 / 2)


def test_totals_of_a_batch():
    totals = StepTotals.of(MASK)
    assert (int(totals.sequences), int(totals.tokens)) == (4, 7)
    assert (int(totals.unmasked_sequences), int(totals.micro_batches)) == (3, 1)


@every_reduction_of_the_step
@pytest.mark.parametrize("rows", [1, 4], ids=lambda rows: f"{8 // rows}x{rows}")
def test_the_cut_into_micro_batches_does_not_matter(reduce, rows):
    """8 rows of uneven length, one of them empty: shares of the micro-batches sum to the value of the whole batch."""
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(8, 6, 5, generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 1, 0, 3, 2, 5, 4, 1]).unsqueeze(1)
    totals = StepTotals.of(mask)

    def run(size):
        weight = torch.linspace(-1, 1, 5).requires_grad_()
        value = 0.0
        for chunk, chunk_mask in zip(features.split(size), mask.split(size)):
            share = reduce((chunk @ weight).exp(), chunk_mask, totals)
            share.backward()
            value += share.item()
        return value, weight.grad

    value, grad = run(rows)
    whole, whole_grad = run(8)
    assert value == pytest.approx(whole, rel=1e-6)
    torch.testing.assert_close(grad, whole_grad, atol=1e-6, rtol=1e-6)


def test_local_token_mean_is_the_mean_of_the_means_of_micro_batches():
    """It depends on the cut: whole, it is the token mean; row by row, the mean over rows, empty ones included."""
    per_token = torch.arange(16.0).reshape(4, 4)
    totals = StepTotals.of(MASK)
    assert local_token_mean(per_token, MASK, totals) == token_mean(per_token, MASK, totals)
    for rows, expected in ((2, (10 / 5 + 26 / 2) / 2), (1, (6 / 4 + 4 + 0 + 13) / 4)):
        totals = StepTotals(sequences=4, tokens=7, unmasked_sequences=3, micro_batches=4 // rows)
        shares = [local_token_mean(x, m, totals) for x, m in zip(per_token.split(rows), MASK.split(rows))]
        assert sum(shares).item() == pytest.approx(expected)


@every_reduction
def test_rows_may_come_in_any_order(reduce):
    per_token, order = torch.randn(4, 4), torch.tensor([2, 0, 3, 1])
    totals = StepTotals.of(MASK)
    torch.testing.assert_close(reduce(per_token[order], MASK[order], totals), reduce(per_token, MASK, totals))


@every_reduction
def test_an_all_masked_batch_gives_zero_attached_to_the_graph(reduce):
    per_token = torch.randn(3, 4, requires_grad=True)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    loss = reduce(per_token, mask, StepTotals.of(mask))
    loss.backward()
    assert loss.item() == 0
    assert per_token.grad is not None and per_token.grad.eq(0).all()


@every_reduction
@pytest.mark.parametrize("bad", [math.nan])
def test_masked_tokens_change_nothing(reduce, bad):
    per_token = torch.randn(4, 4)
    totals = StepTotals.of(MASK)
    dirty = per_token.masked_fill(~MASK, bad).requires_grad_()
    loss = reduce(dirty, MASK, totals)
    assert torch.equal(loss, reduce(per_token, MASK, totals))
    loss.backward()
    assert dirty.grad[~MASK].eq(0).all() and dirty.grad.isfinite().all()


@every_reduction
@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["int", "tensor"])
def test_totals_of_zero_do_not_divide_by_zero(reduce, kind):
    """A rank may count before it knows of the others, and a step may be empty everywhere."""
    per_token, mask = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    assert reduce(per_token, mask, StepTotals(kind(0), kind(0), kind(0), kind(0))).item() == 0


@pytest.mark.parametrize(
    ("reduce", "share"),
    [
        (sequence_mean, 3 / 4),
        (partial(constant_mean, length=10), 3 / 4),
        (sequence_total, 3 / 4),
        (unmasked_sequence_mean, 1),
        (partial(unmasked_constant_mean, length=10), 1),
        (token_mean, 1),
        (token_sum, 1),
        (local_token_mean, 1),
    ],
)
def test_what_one_fully_masked_row_of_four_leaves_of_the_others(reduce, share):
    per_token, without = torch.ones(4, 4), MASK.any(1)
    value = reduce(per_token, MASK, StepTotals.of(MASK))
    alone = reduce(per_token[without], MASK[without], StepTotals.of(MASK[without]))
    assert value.item() == pytest.approx(alone.item() * share)
