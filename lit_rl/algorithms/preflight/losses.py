"""Checks of a loss: its settings against the ranges that its signature declares, before anything is loaded, and its
results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lit_rl.algorithms.signatures import annotations_of, is_shipped, name_of, notes, parameters, reads, setting
from lit_rl.errors import ConfigError, in_range
from lit_rl.ops.ranges import Above, Pair, Range
from lit_rl.ops.step import Highest, Lowest, Metrics, Summed
from lit_rl.rewards.functions.names import is_taken


def loss_settings(loss: Callable[..., Any], key: str = "algo.loss") -> None:
    """Check the settings that a `functools.partial` carries against the annotations of `lit_rl.ops.ranges`.

    A function that declares no range, such as a user's own, may be set to anything.

    Raises:
        ConfigError: a setting is out of its range; names the key, the value and the range.
    """
    given = getattr(loss, "keywords", {})
    for name, annotation in annotations_of(loss).items():
        for range_ in notes(annotation):
            if (value := given.get(name)) is not None:
                _check(f"{key}.{name}", value, range_, loss)


def weights_are_declared(loss: Callable[..., Any], key: str = "algo.loss") -> None:
    """Refuse a loss with a parameter `weights` whose annotation does not tell who multiplies by them.

    Raises:
        ConfigError: there is no annotation, or none that can be read.
    """
    if reads(loss, "weights") and annotations_of(loss).get("weights") is Any:
        raise ConfigError(
            f"{key}={name_of(loss)}: it takes `weights`, the weights against an engine, "
            "and its annotation does not say what for. If the loss multiplies by them itself, write `weights: "
            "WeightsInside = None` (lit_rl.ops.step, imported at run time). If it only looks at them, write `weights: "
            "Tensor | None`: the loss is then multiplied by them afterwards, as every other is."
        )


def _check(key: str, value: Any, range_: Any, loss: Callable[..., Any]) -> None:
    match range_:
        case Range():
            in_range(key, value, low=range_.low, high=range_.high, open_low=range_.open_low)
        case Above():
            bound = range_.bound(**{name: setting(loss, name) for name in parameters(range_.bound)})
            in_range(key, value, low=bound, open_low=True)
        case Pair() if not (len(value) == 2 and range_.sound(*value)):
            raise ConfigError(f"{key}={list(value)} must be {range_.meaning}.")


def checked(returned: Any, logprobs: Tensor, loss: Callable[..., Any]) -> tuple[Tensor, Metrics]:
    """Return the result of a policy loss, if it can be learned from.

    Args:
        returned: One value a token, and metrics.
        logprobs: `(b, t)` of the policy.
        loss: The function. Metrics are checked for a user's own.

    Raises:
        ConfigError: the result has another form or shape, or logs under one of the run's own names.
    """
    came = f"a {type(returned).__name__}"
    if isinstance(returned, tuple) and len(returned) == 2:
        tokens, metrics = returned
        if isinstance(tokens, Tensor) and tokens.shape == logprobs.shape:
            if not is_shipped(loss):
                _check_metrics(metrics)
            return tokens, metrics
        came = f"(a {type(tokens).__name__}, ...)"
        if isinstance(tokens, Tensor):
            came = "(a scalar, metrics)" if tokens.ndim == 0 else f"tokens of shape {tuple(tokens.shape)}"
    elif isinstance(returned, Tensor):
        came = f"a tensor of shape {tuple(returned.shape)} alone"
    raise ConfigError(
        f"loss gave {came}. It is to return (tokens, metrics): the loss of every token, of the shape of logprobs "
        f"{tuple(logprobs.shape)}, and a dict of (numerator, denominator), which may be empty. The mean is taken by "
        "reduction=."
    )


def check_gradient(objective: Tensor, logprobs: Tensor) -> None:
    """Refuse an objective without any gradient.

    Args:
        objective: The policy's loss with all further terms.
        logprobs: Log-probs of the policy, with a gradient where it trains.

    Raises:
        ConfigError: nothing would be learned.
    """
    if logprobs.requires_grad and not objective.requires_grad:
        raise ConfigError(
            "loss gave tokens without a gradient, so nothing would be learned. Make them of logprobs, without "
            "detach(), item(), numpy() or torch.no_grad()."
        )


_OF_LOSSES = re.compile(r"(clip_ratio|vespo|clip_cov|kl_cov)/.*|ratio_mean|approx_kl|cispo_clip_ratio")
"""Metrics that a run has from its loss only, and that a user's loss may log too."""


def _check_metrics(metrics: Any) -> None:
    """Refuse metrics of a user's loss that could not be logged, or would replace others."""
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else ((None, metrics),):
        pair = isinstance(metric, tuple) and len(metric) == 2 and all(isinstance(part, Tensor) for part in metric)
        if name is None or not (pair or isinstance(metric, Highest | Lowest | Summed)):
            what = "metrics" if name is None else f"the metric {name!r}"
            raise ConfigError(
                f"loss gave {what} as a {type(metric).__name__}. It is to give a dict, and a metric is (numerator, "
                "denominator), tensors of which the sums over all micro-batches are divided: (values[mask].sum(), "
                "mask.sum())."
            )
        if is_taken(name) and not _OF_LOSSES.fullmatch(name):
            raise ConfigError(
                f"loss gave the metric {name!r}, and train/{name} is a number of the run's own. Name it otherwise; "
                f"'loss/my_{name.replace('/', '_')}' is free."
            )
