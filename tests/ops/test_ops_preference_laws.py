"""Laws of the losses of pairs: symmetries, known constants, gradients, extreme values, refused settings, schemas."""

from dataclasses import replace
from functools import partial
from math import log
from typing import Annotated

import pytest
import torch

from lit_rl.algorithms.checks.preference_checks import couples_pairs, reads_divergence, reads_reference
from lit_rl.ops import preference_losses
from lit_rl.ops.preference_losses import (
    OfStep,
    Pairs,
    PolicyPairs,
    RatioPairs,
    alpha_divergence,
    alphapo,
    aot,
    aot_unpaired,
    apo_down,
    apo_zero,
    bco_pair,
    discopop,
    exo_pair,
    forward_kl,
    hinge,
    ipo,
    js_divergence,
    nca_pair,
    reverse_kl,
    robust,
    sft,
    sigmoid,
    sigmoid_norm,
    simpo,
    sppo_hard,
    sums_of_pairs,
)

OF_SCORES = [sigmoid, sigmoid_norm, hinge, ipo, exo_pair, robust, discopop]
OF_RATIOS = [nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, aot, aot_unpaired]
REFERENCE_FREE = [simpo, alphapo]
ALL = [*OF_SCORES, *OF_RATIOS, *REFERENCE_FREE, sft]
SMOOTHED = [partial(f, label_smoothing=0.2) for f in (sigmoid, exo_pair, robust, aot, aot_unpaired, simpo, alphapo)]
DIVERGENCES = [reverse_kl, forward_kl, js_divergence, alpha_divergence, partial(alpha_divergence, alpha=1.5)]


def random_pairs(rows=5, dtype=torch.float32, seed=0, divergence=reverse_kl):
    g = torch.Generator().manual_seed(seed)
    chosen, rejected, ref_chosen, ref_rejected = -6 + 2 * torch.randn(4, rows, generator=g, dtype=dtype)
    counts = torch.randint(1, 9, (2, rows), generator=g).to(dtype)
    return Pairs(chosen, rejected, ref_chosen, ref_rejected, *counts, divergence=divergence)


def swapped(p):
    tokens = {"chosen_tokens": p.rejected_tokens, "rejected_tokens": p.chosen_tokens}
    refs = {"ref_chosen": p.ref_rejected, "ref_rejected": p.ref_chosen}
    return replace(p, chosen=p.rejected, rejected=p.chosen, **refs, **tokens)


def named(function) -> str:
    """A test's name must be the same in every process: no address in it."""
    if isinstance(function, str):
        return function
    if isinstance(function, partial):
        return named(function.func) + "".join(f"-{key}={value}" for key, value in function.keywords.items())
    return function.__name__


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_swapping_flips_the_margin(divergence):
    p = random_pairs(divergence=divergence)
    assert torch.equal(swapped(p).margin, -p.margin)
    assert torch.equal(p.margin, p.chosen_score - p.rejected_score)
    gap = sigmoid(swapped(p), 0.3) - sigmoid(p, 0.3)
    assert torch.allclose(gap, 0.3 * p.margin, atol=1e-5), "-ls(-z) + ls(z) = z"


LOG2 = log(2)


@pytest.mark.parametrize(
    ("loss", "beta", "constant"),
    [
        (sigmoid, 0.1, LOG2),
        (partial(sigmoid, label_smoothing=0.3), 0.1, LOG2),
        (sigmoid_norm, 0.1, LOG2),
        (hinge, 0.1, 1.0),
        (ipo, 0.1, 25.0),
        (partial(exo_pair, label_smoothing=0.5), 0.1, 0.0),
        (nca_pair, 0.1, 2 * LOG2),
        (partial(robust, label_smoothing=0.3), 0.1, LOG2),
        (bco_pair, 0.1, 2 * LOG2),
        (sppo_hard, 0.1, 50.0),
        (aot, 0.1, LOG2),
        (apo_zero, 0.1, 1.0),
        (apo_down, 0.1, 1.0),
        (discopop, 0.1, (LOG2 + 1) / 2),
    ],
)
def test_where_the_policy_is_the_reference_the_loss_is_known(loss, beta, constant):
    for divergence in DIVERGENCES:
        p = random_pairs(divergence=divergence)
        at_reference = replace(p, ref_chosen=p.chosen, ref_rejected=p.rejected)
        assert torch.allclose(loss(at_reference, beta), torch.full((5,), constant), atol=1e-6)


@pytest.mark.parametrize("loss", [*OF_SCORES, *OF_RATIOS])
def test_only_log_ratios_count(loss):
    """Prompts that are harder for policy and reference alike change nothing. AOT sorts, so one shift for all rows."""
    p = random_pairs(dtype=torch.float64)
    moved = {name: getattr(p, name) + 3.0 for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")}
    assert torch.allclose(loss(replace(p, **moved), 0.2), loss(p, 0.2), rtol=1e-9)


@pytest.mark.parametrize("loss", OF_RATIOS)
def test_losses_of_ratios_say_so_and_read_no_divergence(loss):
    p = random_pairs()
    assert not reads_divergence(loss) and torch.equal(loss(p, 0.2), loss(replace(p, divergence=forward_kl), 0.2))


def narrowed(p, kind):
    """The pairs with nothing but what `kind` declares, so that to read anything else fails."""
    narrow = kind()
    for name in {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}:
        setattr(narrow, name, getattr(p, name))
    return narrow


@pytest.mark.parametrize(
    ("loss", "kind"), [*((f, RatioPairs) for f in OF_RATIOS), *((f, PolicyPairs) for f in REFERENCE_FREE)]
)
def test_a_loss_reads_no_more_than_its_signature_says(loss, kind):
    p = random_pairs()
    assert torch.equal(loss(narrowed(p, kind), 0.2), loss(p, 0.2))


def test_what_is_needed_is_what_signatures_say():
    assert [loss for loss in ALL if not reads_reference(loss)] == REFERENCE_FREE
    assert [loss for loss in ALL if reads_divergence(loss)] == [*OF_SCORES, sft]
    assert [loss for loss in ALL if couples_pairs(loss)] == [aot, aot_unpaired]


@pytest.mark.parametrize("loss", ALL)
def test_a_loss_that_couples_no_pairs_gives_each_its_value_whatever_the_others_are(loss):
    whole = replace(random_pairs(), nll_tokens=7, step_rows=5)
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_tokens", "rejected_tokens")
    first = replace(whole, **{name: getattr(whole, name)[:2] for name in names})
    alone = torch.allclose(loss(first, 0.2), loss(whole, 0.2)[:2], rtol=1e-6)
    assert alone != couples_pairs(loss)


def unannotated(pairs, beta):
    return -beta * pairs.margin


class Callable_:
    def __call__(self, pairs: PolicyPairs, beta: float):
        return -beta * pairs.chosen_mean


def of_step(p: Annotated[Pairs, OfStep()], beta):
    return -beta * p.margin


def unresolved(pairs: "NotThere", beta):  # noqa: F821
    return -beta * pairs.margin


NEEDS = [
    (unannotated, (True, True, False)),
    (lambda p, b: p.chosen, (True, True, False)),
    (unresolved, (True, True, False)),
    (Callable_(), (False, False, False)),
    (of_step, (True, True, True)),
    (partial(simpo, gamma=0.1), (False, False, False)),
    (partial(partial(aot, label_smoothing=0.1)), (True, False, True)),
]


@pytest.mark.parametrize(("loss", "needs"), NEEDS, ids=range(len(NEEDS)))
def test_a_loss_without_annotations_is_given_everything(loss, needs):
    """Of whatever name its arguments are; what settings were given changes nothing."""
    assert (reads_reference(loss), reads_divergence(loss), couples_pairs(loss)) == needs


@pytest.mark.parametrize(
    ("loss", "divergence"),
    [
        *((loss, DIVERGENCES[at % 5]) for at, loss in enumerate([*ALL, *SMOOTHED])),
        *((sigmoid, divergence) for divergence in DIVERGENCES[1:]),
    ],
    ids=named,
)
def test_gradients_are_finite_differences(loss, divergence):
    p = random_pairs(dtype=torch.float64, divergence=divergence)

    def total(chosen, rejected):
        return loss(replace(p, chosen=chosen, rejected=rejected), 0.3).sum()

    columns = [p.chosen.requires_grad_(), p.rejected.requires_grad_()]
    assert torch.autograd.gradcheck(total, columns)


@pytest.mark.parametrize("loss", [*ALL, *SMOOTHED, partial(discopop, tau=3.0), partial(alphapo, alpha=-2.0)], ids=named)
def test_extreme_log_ratios_have_finite_gradients(loss):
    for at, divergence in enumerate(DIVERGENCES):
        far_pairs_have_finite_gradients(loss, divergence, (1.0, 100.0)[at % 2])


def far_pairs_have_finite_gradients(loss, divergence, tokens):
    far = torch.tensor([1e4, -1e4, 1e4, -1e4, 0.0])
    p = Pairs(
        far.clone().requires_grad_(), far.flip(0).requires_grad_(), *[torch.zeros(5)] * 2, *[tokens * torch.ones(5)] * 2
    )
    p = replace(p, divergence=divergence)
    out = loss(p, 0.1)
    slopes = torch.autograd.grad(out.sum(), (p.chosen, p.rejected), allow_unused=True)
    assert all(x.isfinite().all() for x in slopes if x is not None)
    exploding = loss is ipo and divergence in (forward_kl, DIVERGENCES[4])
    assert not out.isnan().any() and (exploding or out.isfinite().all())


def test_sorted_losses_are_of_the_step_however_it_is_cut():
    """Others' rows without gradient: the rows of one part of a step have the gradient that the whole step gives."""
    for loss in (aot, aot_unpaired):
        whole = random_pairs(rows=6)
        leaves = whole.chosen.requires_grad_(), whole.rejected.requires_grad_()
        expected = torch.autograd.grad(loss(whole, 0.5).sum(), leaves)
        for part in (slice(0, 2), slice(2, 6)):
            own = [x.detach().clone().requires_grad_() for x in leaves]
            mixed = [
                torch.cat([x.detach()[: part.start], y[part], x.detach()[part.stop :]]) for x, y in zip(leaves, own)
            ]
            out = loss(replace(whole, chosen=mixed[0], rejected=mixed[1]), 0.5)
            assert torch.equal(out, loss(whole, 0.5))
            for grad, right in zip(torch.autograd.grad(out[part].sum(), own), expected):
                assert torch.allclose(grad[part], right[part])


def test_sorted_losses_do_not_care_who_is_whose_partner():
    p = random_pairs(dtype=torch.float64)
    turned = replace(p, ref_chosen=p.ref_chosen.roll(1), ref_rejected=p.ref_rejected.roll(1))
    assert torch.allclose(aot(p, 0.5), aot(turned, 0.5))
    turned = replace(p, rejected=p.rejected.roll(2), ref_rejected=p.ref_rejected.roll(2))
    assert torch.allclose(aot_unpaired(p, 0.5).sum(), aot_unpaired(turned, 0.5).sum())
    order = torch.tensor([3, 0, 4, 1, 2])
    columns = ("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_tokens", "rejected_tokens")
    shuffled = replace(p, **{name: getattr(p, name)[order] for name in columns})
    for loss in (aot, aot_unpaired):
        assert torch.allclose(loss(shuffled, 0.5), loss(p, 0.5)[order])


def test_sums_of_pairs():
    """Chosen: 2 tokens of 4, rejected: 3; the tail is the rejected one's third token."""
    nan = float("nan")
    logprobs = torch.tensor([[nan, -1.0, -2.0, nan], [-1.0, -0.5, -4.0, nan]], requires_grad=True)
    mask = torch.tensor([[False, True, True, False], [True, True, True, False]])
    assert sums_of_pairs(logprobs, mask).tolist() == [-3.0, -5.5]
    out = sums_of_pairs(logprobs, mask, tail_weight=0.25)
    assert out.tolist() == [-3.0, -2.5]
    (grad,) = torch.autograd.grad(out.sum(), logprobs)
    assert grad.tolist() == [[0, 1, 1, 0], [1, 1, 0.25, 0]]
    assert sums_of_pairs(logprobs, mask, tail_weight=0.0).tolist() == [-3.0, -1.5]


def test_sums_of_pairs_pair_row_i_with_row_b_plus_i():
    logprobs = -torch.ones(4, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 1, 1]]).bool()  # two pairs: 3 against 1, 1 against 3
    assert sums_of_pairs(logprobs, mask, tail_weight=0.5).tolist() == [-2, -1, -1, -2]
    assert sums_of_pairs(logprobs.bfloat16(), mask).dtype == torch.float32


def test_padding_changes_nothing():
    g = torch.Generator().manual_seed(1)
    logprobs, mask = -torch.rand(6, 5, generator=g), torch.rand(6, 5, generator=g) > 0.3
    for weight in (1.0, 0.3):
        plain = sums_of_pairs(logprobs, mask, tail_weight=weight)
        for padding in ((2, 0), (0, 3), (1, 4)):
            wider = torch.nn.functional.pad(logprobs, padding, value=float("nan"))
            out = sums_of_pairs(wider, torch.nn.functional.pad(mask, padding), tail_weight=weight)
            assert torch.allclose(out, plain)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *[
            (partial(f, label_smoothing=e), "label_smoothing")
            for f in (sigmoid, aot, simpo, alphapo)
            for e in (-0.1, 0.6)
        ],
        *[(partial(exo_pair, label_smoothing=e), "label_smoothing") for e in (0.0, 0.51, float("nan"))],
        *[(partial(robust, label_smoothing=e), "label_smoothing") for e in (-1e-9, 0.5)],
        (partial(aot_unpaired, label_smoothing=1.0), "label_smoothing"),
        (partial(discopop, tau=0.0), "tau"),
        (partial(simpo, gamma=-0.5), "gamma"),
        (partial(alphapo, gamma=float("nan")), "gamma"),
        (partial(alphapo, alpha=float("inf")), "alpha"),
    ],
    ids=named,
)
def test_settings_out_of_range_are_refused_by_name(call, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        call(random_pairs(), 0.1)


def test_what_is_no_pair_is_refused():
    mask = torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="3 rows are no pairs"):
        sums_of_pairs(torch.zeros(3, 2), mask)
    with pytest.raises(ValueError, match="^tail_weight="):
        sums_of_pairs(torch.zeros(2, 2), mask[:2], tail_weight=1.5)
    with pytest.raises(ValueError, match="^alpha="):
        alpha_divergence(torch.zeros(2), alpha=float("nan"))


def test_every_loss_has_a_name_of_its_own_among_all_ops():
    from lit_rl.cli import schemas

    others = [module for module in schemas.OPS if not module.startswith("lit_rl.ops.preference_losses")]
    for module in ("lit_rl.ops.preference_losses", *others):
        for other in others:
            if module != other:
                assert not names_of(schemas, module) & names_of(schemas, other)
    assert names_of(schemas, "lit_rl.ops.preference_losses") == {x for x in preference_losses.__all__ if x != "Pairs"}


def names_of(schemas, module):
    before, schemas.OPS = schemas.OPS, (module,)
    try:
        return set(schemas.public_functions())
    finally:
        schemas.OPS = before
