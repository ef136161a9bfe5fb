"""What the settings of a loss may be: refused before anything is loaded, by the ranges that its signature declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_rl.algorithms.signatures import annotations_of, name_of, notes, parameters, reads, setting
from lit_rl.errors import ConfigError, in_range
from lit_rl.ops.ranges import Above, Pair, Range


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
    """Refuse a loss with a parameter `weights` whose annotation does not say who multiplies by them.

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
