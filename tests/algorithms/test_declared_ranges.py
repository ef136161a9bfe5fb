"""The range of a setting is what the annotation of its parameter declares, whoever wrote the function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lit_rl.algorithms.checks.policy_gradient_checks import check_declared_weights, check_ranges
from lit_rl.algorithms.chosen_functions import multiplies_weights
from lit_rl.cli import schemas
from lit_rl.cli.lightning_app import WithKeywords
from lit_rl.core.declared_settings import annotated_metadata, annotations_of
from lit_rl.core.errors import ConfigError
from lit_rl.ops import policy_losses
from lit_rl.ops.ranges import Above, Pair, Range, Share
from lit_rl.ops.reductions import WeightsInside


def ceiling(*, floor: float) -> float:
    return 2 * floor


def declared(
    logprobs,
    *,
    share: Share = 0.5,
    maybe: Annotated[float, Range(-1.0, 1.0)] | None = None,
    floor: Annotated[float, Range(0.0)] = 1.0,
    top: Annotated[float, Above(ceiling)] = 3.0,
    rising: Annotated[Sequence[float], Pair("[low, high]", lambda low, high: low < high)] = (0, 1),
    free: float = 0.0,
):
    """A loss of a user's, whose parameters are named as nobody else's."""


class Declared:
    def __call__(self, logprobs, *, share: Share = 0.5):
        """The same as an object."""


def refused(loss: Any) -> str | None:
    try:
        check_ranges(loss, "algo.loss")
    except ConfigError as error:
        return str(error)
    return None


def given_settings(kind: Any, function: Any, **settings: Any) -> Any:
    return kind(function, settings) if kind is WithKeywords else kind(function, **settings)


@pytest.mark.parametrize("kind", [partial, WithKeywords])
@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("share", 0.0, "algo.loss.share=0.0 is out of range: allowed is (0, 1]."),
        ("share", math.nan, "algo.loss.share=nan is out of range: allowed is (0, 1]."),
        ("maybe", 1.5, "algo.loss.maybe=1.5 is out of range: allowed is [-1, 1]."),
        ("floor", -1.0, "algo.loss.floor=-1.0 is out of range: allowed is [0, inf]."),
        ("top", 2.0, "algo.loss.top=2.0 is out of range: allowed is (2, inf]."),
        ("rising", (1, 1), "algo.loss.rising=[1, 1] must be [low, high]."),
        ("rising", (1,), "algo.loss.rising=[1] must be [low, high]."),
    ],
)
def test_a_setting_out_of_its_declared_range_is_refused_with_the_range(kind, setting, value, words):
    assert refused(given_settings(kind, declared, **{setting: value})) == words


@pytest.mark.parametrize("kind", [partial, WithKeywords])
def test_what_is_in_range_or_has_none_passes(kind):
    for setting in ({"share": 1.0}, {"maybe": None}, {"maybe": 0.0}, {"rising": [1, 2]}, {"free": 9e9}):
        assert refused(given_settings(kind, declared, **setting)) is None


@given(st.floats(0.01, 10), st.floats(0.01, 30))
def test_a_bound_may_follow_from_another_setting(floor, top):
    assert (refused(partial(declared, floor=floor, top=top)) is None) == (top > 2 * floor)
    assert (refused(partial(declared, top=top)) is None) == (top > 2)  # the default of the other


def test_functions_that_declare_nothing_are_left_alone():
    def plain(logprobs, *, share):
        """Not ours."""

    def unresolved(logprobs, *, share: NotThere):  # noqa: F821 # pyright: ignore
        """A name that only a type checker knows."""

    for function in (plain, unresolved, lambda logprobs, share: None):
        assert refused(partial(function, share=-5.0)) is None
    assert refused(declared) is None and refused(len) is None


def test_an_annotation_that_cannot_be_read_hides_no_other():
    def loss(logprobs: NotThere, *, share: Share = 0.5, weights: WeightsInside = None):  # noqa: F821 # pyright: ignore
        """One name is known to a type checker only."""

    assert "algo.loss.share" in (refused(partial(loss, share=2.0)) or "")
    assert multiplies_weights(loss)


def test_a_loss_that_takes_weights_says_by_their_type_who_multiplies():
    def silent(logprobs, old, advantages, mask, weights=None):
        """Multiplies, or looks."""

    def unread(logprobs, old, advantages, mask, weights: NotThere = None):  # noqa: F821 # pyright: ignore
        """A type that is imported for the type checker only."""

    def looks(logprobs, old, advantages, mask, weights: Tensor | None = None):
        """And is multiplied afterwards."""

    def multiplies(logprobs, old, advantages, mask, weights: WeightsInside = None):
        """Itself."""

    for loss in (silent, unread, partial(silent, old=None)):
        with pytest.raises(ConfigError, match="weights: WeightsInside"):
            check_declared_weights(loss)
    for loss in (
        looks,
        multiplies,
        partial(silent, weights=None),
        policy_losses.clipped_policy_loss,
        policy_losses.vespo_loss,
        lambda *args, **kwargs: None,
    ):
        check_declared_weights(loss)
    assert multiplies_weights(multiplies) and not multiplies_weights(looks)


def test_an_object_that_is_called_declares_by_its_call():
    assert "share" in (refused(partial(Declared(), share=2.0)) or "")


def test_settings_given_in_two_steps_are_all_looked_at():
    assert "share" in (refused(partial(partial(declared, share=2.0), floor=1.0)) or "")


def test_hydra_sees_the_plain_type_under_a_range():
    loss = policy_losses.clipped_policy_loss
    assert annotated_metadata(annotations_of(loss)["clip_high"]) and not annotated_metadata(
        annotations_of(loss)["ratio"]
    )
    fields = schemas.schema("one", "path", loss, keywords_only=True).__dataclass_fields__
    assert (fields["clip_low"].type, fields["clip_low"].default) == (float, 0.2)
    assert fields["clip_high"].type == float | None
