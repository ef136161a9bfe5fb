"""Functions that users choose (losses, advantages, reductions): what they are passed, and what they may return.

A function is passed the offered arguments that it has parameters for. A function with `**keywords` is passed all of
them, like a reward function. An annotation restricts the columns, or the values of a setting.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lit_rl.core.declared_settings import annotations_of
from lit_rl.core.errors import ConfigError
from lit_rl.ops.reductions import Highest, Lowest, Metrics, Summed, WeightsInside
from lit_rl.rewards.contract import is_taken


def arguments_for(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `offered` that the function has parameters for."""
    if takes_any_keyword(function):
        return {name: value for name, value in offered.items() if name not in _preset_keywords(function)}
    return {name: value for name, value in offered.items() if name in parameters(function)}


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the function's parameters, without those that a `functools.partial` has set."""
    given = _preset_keywords(function)
    kinds = inspect.signature(function).parameters.values()
    return tuple(p.name for p in kinds if p.name not in given and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Tell whether the function has `**keywords`."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def reads_column(function: Callable[..., Any], name: str) -> bool:
    """Tell whether the function is passed the column `name` if it is offered."""
    return bool(arguments_for(function, {name: None}))


def unwrap(function: Any) -> Any:
    """Return the function inside a `functools.partial`, or inside LightningCLI's `WithKeywords`."""
    return unwrap(function.func) if hasattr(function, "func") else function


def copies_for(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors to call a function with: copies for a user's function, which may change them in place.

    Functions of lit_rl change nothing, and get the tensors themselves.
    """
    return tensors if is_from_lit_rl(function) else tuple(tensor.clone() for tensor in tensors)


def is_from_lit_rl(function: Any) -> bool:
    """Tell whether a function is defined in lit_rl."""
    return str(getattr(unwrap(function), "__module__", None)).startswith("lit_rl.")


def name_of(function: Any) -> str:
    """Return the name of a function, with or without settings."""
    return getattr(unwrap(function), "__name__", type(function).__name__)


def setting_of(function: Callable[..., Any], name: str) -> Any:
    """Return the value of a function's keyword: as it was set, or its default."""
    given = _preset_keywords(function)
    return given[name] if name in given else inspect.signature(function).parameters[name].default


def _preset_keywords(function: Callable[..., Any]) -> Mapping[str, Any]:
    return getattr(function, "keywords", {})


def accepts_positional(function: Callable[..., Any], count: int) -> bool:
    """Tell whether the function can be called with exactly this many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def multiplies_weights(loss: Callable[..., Any]) -> bool:
    """Tell whether a loss applies the engine correction's weights itself: a parameter has the type `WeightsInside`.

    All other losses are multiplied by the weights.
    """
    return WeightsInside in annotations_of(loss).values()


# ---------------------------------------------------------------------- their results


def check_shape(key: str, value: Any, *shapes: tuple[int, ...]) -> None:
    """Refuse a user's function whose result has another shape.

    Args:
        key: The function's setting.
        value: Its result.
        shapes: Allowed shapes.

    Raises:
        ConfigError: the result is no tensor, or of another shape.
    """
    found = tuple(value.shape) if isinstance(value, Tensor) else None
    if found not in shapes:
        what = f"a tensor of shape {found}" if found is not None else f"a {type(value).__name__}"
        raise ConfigError(f"{key} returned {what}, expected a tensor of shape {' or '.join(map(str, shapes))}.")


def check_loss_output(returned: Any, logprobs: Tensor, loss: Callable[..., Any]) -> tuple[Tensor, Metrics]:
    """Return the result of a policy loss, if it can be learned from.

    Args:
        returned: One value a token, and metrics.
        logprobs: `(b, t)` of the policy.
        loss: The function. Metrics are checked for a user's own.

    Raises:
        ConfigError: the result has another form or shape, or logs under one of the run's own names.
    """
    got = f"a {type(returned).__name__}"
    if isinstance(returned, tuple) and len(returned) == 2:
        tokens, metrics = returned
        if isinstance(tokens, Tensor) and tokens.shape == logprobs.shape:
            if not is_from_lit_rl(loss):
                _check_loss_metrics(metrics)
            return tokens, metrics
        got = f"(a {type(tokens).__name__}, ...)"
        if isinstance(tokens, Tensor):
            got = "(a scalar, metrics)" if tokens.ndim == 0 else f"tokens of shape {tuple(tokens.shape)}"
    elif isinstance(returned, Tensor):
        got = f"a tensor of shape {tuple(returned.shape)} alone"
    raise ConfigError(
        f"loss returned {got}, expected (tokens, metrics): the loss of every token, in the shape of logprobs "
        f"{tuple(logprobs.shape)}, and a dict of (numerator, denominator), which may be empty. reduction= averages the "
        "tokens."
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
            "loss returned tokens without a gradient, so nothing would be learned. Compute them from logprobs, without "
            "detach(), item(), numpy() or torch.no_grad()."
        )


_LOSS_METRICS = re.compile(r"(clip_ratio|fipo|m2po|vespo|clip_cov|kl_cov)/.*|ratio_mean|approx_kl|cispo_clip_ratio")
"""Metrics that a run has from its loss only, and that a user's loss may log too."""


def _check_loss_metrics(metrics: Any) -> None:
    """Refuse metrics of a user's loss that could not be logged, or would replace others."""
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else ((None, metrics),):
        pair = isinstance(metric, tuple) and len(metric) == 2 and all(isinstance(part, Tensor) for part in metric)
        if name is None or not (pair or isinstance(metric, Highest | Lowest | Summed)):
            what = "metrics" if name is None else f"the metric {name!r}"
            raise ConfigError(
                f"loss returned {what} as a {type(metric).__name__}. Return a dict whose values are (numerator, "
                "denominator), two tensors whose sums over all micro-batches are divided: (values[mask].sum(), "
                "mask.sum())."
            )
        if is_taken(name) and not _LOSS_METRICS.fullmatch(name):
            raise ConfigError(
                f"loss returned the metric {name!r}, but the run itself logs train/{name}. Choose another name, such "
                f"as 'loss/my_{name.replace('/', '_')}'."
            )
