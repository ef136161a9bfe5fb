"""Controllers by hand, their bounds, and that a restored one goes on as if nothing had happened."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.terms.regularizers import AdaptiveEntropy, AdaptiveKL, FixedEntropy, FixedKL
from lit_rl.core.errors import ConfigError, NumericError, StorageError


def test_a_fixed_kl_stays_one():
    control = FixedKL()
    control.update(1e9, 512)
    assert control.factor == 1.0 and control.state() == {}
    control.load_state({})


def test_the_adaptive_kl_by_hand():
    control = AdaptiveKL(target=0.2, horizon=1000)
    seen = [control.factor]
    for kl in (0.2, 0.22, 10.0, 0.0):
        control.update(kl, 100)
        seen.append(control.factor)
    # No error; 10 % above; clipped at 20 % above; clipped at 20 % below.
    assert seen == pytest.approx([1.0, 1.0, 1.01, 1.01 * 1.02, 1.01 * 1.02 * 0.98])


@given(st.lists(st.tuples(st.floats(-10, 1e6), st.integers(1, 10**6)), max_size=30))
def test_the_factor_stays_positive_and_one_rollout_changes_it_by_a_fifth_at_most(updates):
    control = AdaptiveKL(target=0.1, horizon=100)
    for kl, sequences in updates:
        before = control.factor
        control.update(kl, sequences)
        assert 0.8 - 1e-9 <= control.factor / before <= 1.2 + 1e-9
        assert (control.factor >= before) == (kl >= control.target)


def test_fixed_entropy():
    control = FixedEntropy(0.01)
    control.update(5.0)
    assert control.coefficient == 0.01 and control.state() == {}
    control.load_state({})


def test_the_adaptive_entropy_by_hand():
    control = AdaptiveEntropy(coef=0.01, low=0.005, high=0.02, delta=0.004, target=0.5)
    seen = [control.coefficient]
    for entropy in (0.4, 0.5, 0.3, 0.6, 0.7, 0.8, 0.9, 0.9, 0.1):
        control.update(entropy)
        seen.append(control.coefficient)
    # No entropy is known at first; low ones (the target among them) raise it to the upper bound; high ones switch it
    # off and lower it meanwhile, to the lower bound, from which the last one raises it again.
    assert seen == pytest.approx([0.0, 0.014, 0.018, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.009])


@given(st.lists(st.floats(0, 10), max_size=30))
def test_the_coefficient_stays_within_its_bounds_or_is_off(entropies):
    control = AdaptiveEntropy(coef=0.1, low=0.05, high=0.2, delta=0.03, target=1.0)
    for entropy in entropies:
        control.update(entropy)
        if entropy > 1.0:
            assert control.coefficient == 0.0
        else:
            assert 0.05 <= control.coefficient <= 0.2


def test_the_state_of_another_controller_is_refused():
    for control, saved in (
        (AdaptiveKL(), {}),
        (FixedKL(), {"kl_factor": 2.0}),
        (AdaptiveEntropy(), {"kl_factor": 1.0}),
    ):
        with pytest.raises(StorageError, match=type(control).__name__):
            control.load_state(saved)


def test_a_controller_that_does_not_say_whether_it_adapts_is_refused_by_its_name():
    class Silent:
        factor = 1.0

    with pytest.raises(ConfigError, match="algo.kl_control=Silent.*adapts = True"):
        GRPO("tiny", len, beta=0.1, kl_control=Silent())  # pyright: ignore


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_refused_before_it_poisons_the_weight(bad):
    kl, entropy = AdaptiveKL(), AdaptiveEntropy()
    with pytest.raises(NumericError, match="KL"):
        kl.update(bad, 8)
    with pytest.raises(NumericError, match="entropy"):
        entropy.update(bad)
    assert kl.factor == 1.0 and entropy.state() == AdaptiveEntropy().state()
