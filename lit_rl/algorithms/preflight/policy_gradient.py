"""Checks of combinations of the terms of a policy-gradient objective that nothing could be learned from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.preflight.estimators import columns_to_rows, is_ours, two_prompts
from lit_rl.algorithms.preflight.settings import settings
from lit_rl.algorithms.terms.controllers import KLControl
from lit_rl.algorithms.terms.engine_correction import EngineCorrection
from lit_rl.errors import ConfigError, in_range


def rewards_are_there(algorithm: str, names: tuple[str, ...]) -> None:
    """Refuse a run without a reward function.

    Raises:
        ConfigError: there is no reward function to learn from.
    """
    if not names:
        raise ConfigError(
            f"{algorithm} learns from rewards, and there is no function: set reward, such as exact_match."
        )


def terms_take_their_settings(
    loss: Callable, selection: Callable | None, engine: EngineCorrection, shaping: Callable | None
) -> None:
    """Call each term that checks its own settings once, with a row of two tokens.

    Args:
        loss: Loss of each token.
        selection: Selection of tokens, if any.
        engine: The engine correction, with its functions.
        shaping: Shaping of the rewards of rows, if any.

    Raises:
        ConfigError: one refuses its settings.
    """
    row, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    probes: dict[str, tuple[Callable | None, tuple[Tensor, ...]]] = {
        "loss": (loss, (row, row, torch.zeros(1), mask)),
        "correction": (engine.correction, (row, row, mask)),
        "rejection": (engine.rejection, (row, row, mask)),
        "selection": (selection, (row, mask)),
    }
    for key, (function, arguments) in probes.items():
        if function is not None:
            settings(key, partial(function, *arguments))
    if shaping is not None and is_ours(shaping):  # a user's own may hold a state
        settings("shaping", partial(columns_to_rows, shaping, two_prompts()))


def group_is_large_enough(algorithm: str, group_size: int, *, compares_completions: Callable[[], bool]) -> None:
    """Refuse groups of one where the advantage compares completions of a prompt.

    Raises:
        ConfigError: the advantage compares completions of a prompt, and there is one.
    """
    if group_size < 2 and compares_completions():  # called only then: it tries out the estimator
        raise ConfigError(
            f"algo.group_size={group_size}: this advantage compares completions of one prompt, so {algorithm} needs "
            "2 or more (8 is usual). For one completion a prompt take algo=reinforce_pp or algo=remax."
        )
    in_range("algo.group_size", group_size, low=1)


def controller_has_a_term(control: KLControl, *weights: float) -> None:
    """Refuse a controller without a KL term to control, or without the attribute `adapts`.

    Raises:
        ConfigError: the controller changes the weight of a KL, and there is none; or it has no `adapts`.
    """
    if not hasattr(control, "adapts"):
        raise ConfigError(
            f"algo.kl_control={type(control).__name__} does not say whether its factor changes during the run: give "
            "the class `adapts = True`, or False where `update` does nothing."
        )
    if control.adapts and not any(weights):
        raise ConfigError(
            f"algo/kl_control: {type(control).__name__} changes the weight of a KL term, and there is none: set "
            "algo.beta (KL in the loss) or algo.reward_beta (KL in the reward) above 0."
        )


def weights_fit(engine: EngineCorrection, *, multiplied_by_loss: bool) -> None:
    """Refuse a normalisation without weights, and weights of rows in a loss that multiplies those of tokens.

    Args:
        engine: The correction, and its normalisation.
        multiplied_by_loss: Whether the loss applies the weights itself.

    Raises:
        ConfigError: names what to take.
    """
    if engine.correction is None:
        if engine.normalisation is not None:
            raise ConfigError("algo/weight_norm brings weights to mean 1, and there are none: set algo/correction too.")
        return
    if not multiplied_by_loss:
        return
    row, mask = torch.tensor([[0.0, 0.5]]), torch.ones(1, 2, dtype=torch.bool)
    weights: Any = engine.correction(row, torch.zeros(1, 2), mask)
    if weights[0, 0] == weights[0, 1]:  # a row's weight would count once for each of its tokens
        raise ConfigError(
            "algo/correction: this loss takes the product of the weights of a row's tokens, and a sequence's weight is "
            "such a product already. Take algo/correction=token_truncate or token_mask."
        )
