"""Checks of the losses of preference methods, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, get_args, get_origin

import torch
from torch import Tensor

from lit_rl.algorithms.preflight.settings import settings
from lit_rl.algorithms.signatures import annotations_of, name_of, notes, unwrapped
from lit_rl.errors import ConfigError, did_you_mean
from lit_rl.ops.preference.divergences import reverse_kl
from lit_rl.ops.preference.pairs import OfStep, Pairs, PolicyPairs, RatioPairs


def by_name(functions: Any) -> dict[str, Callable[..., Tensor]]:
    """Return the losses by name, each called once on a pair, so that it may refuse its own settings.

    Raises:
        ConfigError: there is none, or one refuses its settings.
    """
    named = dict(functions) if isinstance(functions, Mapping) else {name_of(functions): functions}
    if not named:
        raise ConfigError("algo.preference is empty: there is nothing to learn without a loss, such as sigmoid.")
    for name, function in named.items():
        settings(f"preference.{name}", partial(function, _probe(), 0.1))
    return named


def weights(functions: Mapping[str, Any], given: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of each loss, 1 by default.

    Raises:
        ConfigError: a weight belongs to no loss, or is below 0.
    """
    given = given or {}
    for name, weight in given.items():
        if name not in functions:
            raise ConfigError(
                f"algo.preference_weights.{name}: there is no such loss; algo.preference has {', '.join(functions)}."
                f"{did_you_mean(name, functions)}"
            )
        if not weight >= 0:
            raise ConfigError(f"algo.preference_weights.{name}={weight} is out of range: allowed is 0 and above.")
    return {name: float(given.get(name, 1.0)) for name in functions}


def divergence_is_read(functions: Mapping[str, Any], divergence: Callable[[Tensor], Tensor]) -> None:
    """Refuse a divergence that a loss would not read.

    Raises:
        ConfigError: names the losses that do not read it.
    """
    settings("divergence", partial(divergence, torch.zeros(1)))
    if unwrapped(divergence) is reverse_kl:
        return
    deaf = [name for name, function in functions.items() if not reads_divergence(function)]
    if deaf:
        raise ConfigError(
            f"algo/divergence: {', '.join(deaf)} reads the log ratios as they are, so the divergence would change "
            "nothing in it. Take algo/divergence=reverse_kl, or another algo/preference."
        )


def reads_reference(function: Callable[..., Any]) -> bool:
    """Tell whether a loss reads more than log-probs of the policy, by the type of its pairs."""
    return _type_of_pairs(function) is not PolicyPairs


def reads_divergence(function: Callable[..., Any]) -> bool:
    """Tell whether a loss reads scores, by the type of its pairs."""
    return _type_of_pairs(function) not in (PolicyPairs, RatioPairs)


def couples_pairs(function: Callable[..., Any]) -> bool:
    """Tell whether a loss takes the pairs of a whole optimizer step together."""
    return any(isinstance(note, OfStep) for note in notes(_first_annotation(function)))


def over_step(functions: Mapping[str, Any]) -> list[str]:
    """Return the names of losses that sort over all pairs of an optimizer step."""
    return [name for name, function in functions.items() if couples_pairs(function)]


def weighs_pairs(functions: Mapping[str, Any]) -> None:
    """Refuse weights of pairs where a loss compares no pairs of the data.

    Raises:
        ConfigError: a loss compares quantiles over pairs, which no weight of a pair fits.
    """
    if sorted_over := over_step(functions):
        raise ConfigError(
            f"algo.likelihood_weights=true weighs each pair, and {', '.join(sorted_over)} sorts completions over all "
            "pairs of a step: what it compares are no pairs of the data. Take one of the two."
        )


def lengths_are_read(functions: Mapping[str, Any]) -> None:
    """Refuse `algo.per_token` where it would change nothing.

    Raises:
        ConfigError: no loss divides by a length; found by calling them with other lengths.
    """
    chosen, rejected = torch.tensor([-1.0, -2.0, -9.0, -1.0]), torch.tensor([-2.0, -1.0, -1.0, -9.0])
    ones, fixed = torch.ones(4), {"nll": -chosen, "nll_tokens": 1.0, "step_rows": 1.0}
    short, long = (Pairs(chosen, rejected, ones, 2 * ones, n * ones, 2 * n * ones, **fixed) for n in (1, 3))  # pyright: ignore
    if any(not torch.equal(function(short, 0.1), function(long, 0.1)) for function in functions.values()):
        return
    raise ConfigError(
        f"algo.per_token=true divides by the lengths of completions in losses that read them, and algo.preference "
        f"({', '.join(functions)}) reads none. Leave it out, or take a loss that does: algo/preference=[ipo], "
        "[sigmoid_norm] or [simpo]."
    )


def _type_of_pairs(function: Callable[..., Any]) -> Any:
    """Return the type of a loss's pairs; `Any` where it is not annotated: such a function gets all of `Pairs`."""
    annotation = _first_annotation(function)
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _first_annotation(function: Callable[..., Any]) -> Any:
    return next(iter(annotations_of(function).values()), Any)


def _probe() -> Pairs:
    half, one = torch.full((1,), -0.5), torch.ones(1)
    return Pairs(half, 2 * half, half, half, one, one)
