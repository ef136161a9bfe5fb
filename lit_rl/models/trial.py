"""The trial of a faster way to compute what a model computes: it is used where a few tokens give the same numbers.

A way is tried once a model and kind of device, on a few tokens, beside the model's own. Nothing replaces the model's
own way silently: a note says that a model does not fit, and by how much numbers differ; an unforeseen error is a
warning, as it is a defect that costs speed alone and would be found by nobody. Our tests turn that warning into an
error (pyproject.toml).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from lit_rl.models.sharding import device_of
from lit_rl.models.trunk import base_of

_VERDICTS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, str], bool]] = weakref.WeakKeyDictionary()
"""Verdicts of each model that was tried, by setting and kind of device."""


class Unfit(Exception):
    """The error for a model that does not compute what the faster way stands for.

    Args:
        why: Ends a sentence, without a full stop.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class EquivalenceTrial:
    """A faster way to compute, and the bound within which its numbers are the model's own.

    Args:
        key: The setting that switches it on.
        instead: The way that is taken otherwise, as a whole sentence without a full stop.
        most: By how much the largest number may differ, in standard deviations of all numbers, above 0.
    """

    key: str
    instead: str
    most: float

    def passes(self, model: nn.Module, compute: Callable[[], tuple[Tensor, Tensor]]) -> bool:
        """Compute both ways once, and tell whether the faster one gives the same numbers. If not, log the reason, once.

        Args:
            model: The model that is tried.
            compute: Returns the numbers of the faster way and the model's own, of one shape.
        """
        verdicts, key = _VERDICTS.setdefault(model, {}), (self.key, device_of(model).type)
        if key in verdicts:
            return verdicts[key]
        from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

        name = type(base_of(model)).__name__
        try:
            fast, own = compute()
            difference, spread = (fast - own).abs().max().item(), own.std().item()
        except Unfit as unfit:
            rank_zero_info(f"{self.key}=true does not fit {name}: {unfit.why}. {self.instead}.")
            verdicts[key] = False
            return False
        except Exception as error:  # also of a model's own code, which may be anybody's
            first = " ".join(str(error).split())[:300]
            rank_zero_warn(
                f"{self.key}=true could not be tried on {name}, for {type(error).__name__}: {first}. {self.instead}. "
                f"Please report it; {self.key}=false goes without."
            )
            verdicts[key] = False
            return False
        verdicts[key] = difference <= self.most * spread
        if verdicts[key]:
            return True
        rank_zero_info(
            f"{self.key}=true does not fit {name} on {own.device.type}: its numbers differ from the model's own by "
            f"{difference:.2g}, and {self.most:g} x {spread:.2g} is allowed. {self.instead}."
        )
        return False
