"""Which attention the installed transformers has for a family."""

from __future__ import annotations

import pytest
from transformers import Gemma2PreTrainedModel


def needs_sdpa(kind: str) -> None:
    """Skip a family that has none: transformers 5.24 has taken it from Gemma2, whose scores have a soft cap.

    Nor does a law in float64 hold of the eager one: its softmax is float32, in which the mask of float64 is infinite,
    and padding becomes NaN.
    """
    if kind == "gemma2" and not Gemma2PreTrainedModel._supports_sdpa:
        pytest.skip("this transformers has no sdpa attention for Gemma2")
