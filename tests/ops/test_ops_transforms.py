from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as peer

from lit_rl.ops import sampling_distribution
from lit_rl.ops.sampling_distribution import NO_TRUNCATION, Truncation, kept_logmass

NO_IDS = torch.empty(0, dtype=torch.long)
seeds = st.integers(0, 2**31)
truncations = st.builds(
    Truncation,
    top_k=st.integers(0, 20),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.5)),
)


def random_logits(seed: int, *, ties: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 17, generator=generator)
    return torch.where(torch.rand(4, 17, generator=generator) < 0.2, logits.round(), logits) if ties else logits


def tied_logits(seed: int) -> Tensor:
    return torch.randint(-2, 3, (4, 17), generator=torch.Generator().manual_seed(seed)).float()


def equal_distributions(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=1e-5, atol=1e-7)


def equal_up_to_ties(seed: int, ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> None:
    """The peer's sort leaves it open which of equal logits are cut off; all else is the same."""
    untied, tied = random_logits(seed, ties=False), random_logits(seed)
    equal_distributions(ours(untied), theirs(untied))
    equal_distributions(*(cut(tied).sort(dim=-1).values for cut in (ours, theirs)))


@given(seed=seeds, value=st.floats(0.05, 5))
def test_temperature_equals_transformers(seed: int, value: float) -> None:
    logits = random_logits(seed)
    equal_distributions(
        sampling_distribution.temperature(logits, value), peer.TemperatureLogitsWarper(value)(NO_IDS, logits)
    )


@given(seed=seeds, k=st.integers(1, 30))
def test_top_k_equals_transformers(seed: int, k: int) -> None:
    logits = random_logits(seed)
    equal_distributions(sampling_distribution.top_k(logits, k), peer.TopKLogitsWarper(k)(NO_IDS, logits))


@given(seed=seeds, p=st.floats(0.01, 0.999))
def test_top_p_equals_transformers(seed: int, p: float) -> None:
    warper = peer.TopPLogitsWarper(p)
    equal_up_to_ties(seed, lambda logits: sampling_distribution.top_p(logits, p), lambda logits: warper(NO_IDS, logits))


@given(seed=seeds, p=st.floats(0.01, 1))
def test_min_p_equals_transformers(seed: int, p: float) -> None:
    logits = random_logits(seed)
    equal_distributions(sampling_distribution.min_p(logits, p), peer.MinPLogitsWarper(p)(NO_IDS, logits))


@given(
    seed=seeds,
    temperature=st.floats(0.3, 2),
    k=st.integers(1, 17),
    p=st.floats(0.2, 0.99),
    min_p=st.floats(0.01, 0.5),
)
def test_chain_equals_transformers_in_its_order(seed: int, temperature: float, k: int, p: float, min_p: float) -> None:
    truncation = Truncation(top_k=k, top_p=p, min_p=min_p)

    def theirs(logits: Tensor) -> Tensor:
        for processor in (
            peer.TemperatureLogitsWarper(temperature),
            peer.TopKLogitsWarper(k),
            peer.TopPLogitsWarper(p),
            peer.MinPLogitsWarper(min_p),
        ):
            logits = processor(NO_IDS, logits)
        return logits

    equal_up_to_ties(seed, lambda logits: truncation(sampling_distribution.temperature(logits, temperature)), theirs)


def test_what_is_off_leaves_the_very_same_tensor() -> None:
    logits = random_logits(0)
    assert NO_TRUNCATION.off
    assert NO_TRUNCATION(sampling_distribution.temperature(logits, 1.0)) is logits


@pytest.mark.parametrize("setting", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}])
def test_ranges(setting: dict) -> None:
    with pytest.raises(AssertionError, match="out of range"):
        Truncation(**setting)


def test_transforms_edit_nothing() -> None:
    logits = random_logits(1)
    before = logits.clone()
    Truncation(top_k=5, top_p=0.8, min_p=0.1)(sampling_distribution.temperature(logits, 0.5))
    assert torch.equal(logits, before)


@given(seed=seeds, truncation=truncations, ties=st.booleans())
def test_the_shape_before_the_vocabulary_means_nothing(seed: int, truncation: Truncation, ties: bool) -> None:
    """The engine cuts rows, the scoring cuts blocks of rows and columns: ties are resolved alike."""
    logits = tied_logits(seed) if ties else random_logits(seed)
    kept = truncation(logits)
    assert torch.equal(truncation(logits.view(2, 2, 17)).view(4, 17), kept)
    assert torch.equal(torch.stack([truncation(row) for row in logits]), kept)


@given(seed=seeds, truncation=truncations)
def test_of_equal_logits_the_highest_ids_are_kept(seed: int, truncation: Truncation) -> None:
    """The kept tokens are the last ones in the order of (logit, id): the scoring stores nothing but the first."""
    logits = tied_logits(seed)
    order = logits.argsort(dim=-1, stable=True)
    in_order = truncation(logits).isfinite().gather(-1, order)
    assert in_order[:, -1].all()
    assert (in_order.int().diff(dim=-1) >= 0).all()


def test_kept_mass_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for truncation, mass in (
        (Truncation(top_k=2), 0.8),
        (Truncation(top_p=0.9), 0.95),
        (Truncation(min_p=0.2), 0.95),
        (Truncation(top_k=3, top_p=0.6), 0.8),  # 0.5 / 0.95 does not reach 0.6
        (Truncation(top_k=1), 0.5),
    ):
        assert kept_logmass(logits, truncation(logits)).item() == pytest.approx(math.log(mass), abs=1e-6)


@given(seed=seeds, truncation=truncations, temperature=st.floats(0.3, 3))
def test_renormalising_takes_the_kept_mass_off(seed: int, truncation: Truncation, temperature: float) -> None:
    scaled = sampling_distribution.temperature(random_logits(seed), temperature)
    kept = truncation(scaled)
    mass = kept_logmass(scaled, kept)
    assert (mass <= 0).all()
    alive = kept.isfinite()
    expected = (scaled.log_softmax(-1) - mass[:, None])[alive]
    torch.testing.assert_close(kept.log_softmax(-1)[alive], expected, atol=1e-5, rtol=0)


def test_kept_mass_of_what_cut_nothing_is_exactly_0() -> None:
    logits = random_logits(5)
    assert torch.equal(kept_logmass(logits, Truncation(top_k=17)(logits)), torch.zeros(4))


def test_kept_mass_of_nan_is_nan() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0]])
    assert kept_logmass(logits, Truncation(top_k=2)(logits)).isnan().all()
