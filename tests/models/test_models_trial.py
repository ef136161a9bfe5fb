"""A quicker way that is not taken is said, with the reason, and an error among them fails a test."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from lit_rl.models import trial
from lit_rl.models.trial import EquivalenceTrial, Unfit

TRIAL = EquivalenceTrial("generator.quick", "It goes the long way", most=0.01)
OWN = torch.tensor([-1.0, 1.0])  # of standard deviation sqrt(2)


def broken(error: Exception):
    def both():
        raise error

    return both


@pytest.fixture
def notes(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_info", said.append)
    return said


@pytest.mark.parametrize(("apart", "passes"), [(0.0, True), (0.0141, True), (0.0143, False), (math.nan, False)])
def test_numbers_may_differ_by_a_share_of_their_spread(notes, apart, passes):
    assert TRIAL.passes(nn.Linear(1, 1), lambda: (OWN + apart, OWN)) is passes
    assert bool(notes) is not passes
    for note in notes:
        assert "generator.quick=true does not fit Linear on cpu" in note and "0.01 x 1.4 is allowed" in note
        assert "It goes the long way." in note


def test_a_model_is_tried_once(notes):
    model, asked = nn.Linear(1, 1), []

    def both():
        asked.append(model)
        return OWN + 1, OWN

    other = EquivalenceTrial("generator.another", "It goes the long way", most=2.0)
    assert [TRIAL.passes(model, both), TRIAL.passes(model, both), other.passes(model, both)] == [False, False, True]
    assert len(asked) == 2 and len(notes) == 1


def test_equal_numbers_without_spread_pass(notes):
    assert TRIAL.passes(nn.Linear(1, 1), lambda: (torch.ones(2), torch.ones(2))) and not notes


def test_a_model_of_another_kind_is_a_note(notes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not TRIAL.passes(nn.Linear(1, 1), broken(Unfit("it has a window")))
    assert notes == ["generator.quick=true does not fit Linear: it has a window. It goes the long way."]


@pytest.mark.parametrize("error", [RuntimeError("two\ndevices"), TypeError("two devices"), ValueError("two devices")])
def test_any_other_error_is_a_warning_and_fails_a_test(error):
    said = "generator.quick=true could not be tried on Linear, for .*Error: two devices. It goes the long way. .*=false"
    with pytest.raises(UserWarning, match=said) as raised:
        TRIAL.passes(nn.Linear(1, 1), broken(error))
    assert raised.value.__context__ is error, "its traceback is kept"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not TRIAL.passes(nn.Linear(1, 1), broken(error))
    assert len(caught) == 1


def test_what_the_trials_raise_of_their_own_accord_is_no_defect():
    from lit_rl.generation.grouped_cache import NotGrouped
    from lit_rl.models.shared_attention import NotFolded

    for refusal in (NotGrouped, NotFolded):
        assert issubclass(refusal, trial.Unfit) and refusal("why").why == "why"
