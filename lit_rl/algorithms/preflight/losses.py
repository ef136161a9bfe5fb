"""What the settings of our losses may be: refused before anything is loaded, since a loss itself checks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_rl.errors import ConfigError, in_range

_POSITIVE: dict[str, Any] = {"low": 0, "open_low": True}
_SHARE: dict[str, Any] = {"low": 0, "high": 1, "open_low": True}
_ABOVE_ONE: dict[str, Any] = {"low": 1, "open_low": True}
_RANGES: dict[str, dict[str, Any]] = {
    "clip_low": _SHARE,
    "clip_high": _POSITIVE,
    "cap": _POSITIVE,
    "share": _SHARE,
    "threshold": _SHARE,
    "threshold_low": _SHARE,
    "threshold_high": _SHARE,
    "temperature_positive": _POSITIVE,
    "temperature_negative": _POSITIVE,
    "kl_coef": {"low": 0},
    "kl_tau": {"low": 0},
}
"""Ranges of the settings of losses, by name; they mean the same in every loss but for those below."""

_OWN_RANGES: dict[str, dict[str, dict[str, Any]]] = {
    "gmpo_loss": {"clip_low": _POSITIVE},  # a distance of log ratios
    "dppo_tv_loss": {"cap": _ABOVE_ONE},
    "dppo_kl_loss": {"cap": _ABOVE_ONE, "threshold_low": _POSITIVE, "threshold_high": _POSITIVE},  # nats
}

_GAMMA = ("[k, lambda] with k at least 0 and lambda above 0", lambda k, rate: k >= 0 and rate > 0)
_PAIRS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "positive": _GAMMA,
    "negative": _GAMMA,
    "clip_range": ("[lower, upper] distance from 1, the lower in (0, 1]", lambda low, high: 0 < low <= 1 and high > 0),
    "band": ("[lowest, highest] covariance", lambda low, high: low < high),
}


def loss_settings(loss: Any, key: str = "algo.loss") -> None:
    """Ranges of the settings that a `functools.partial` of one of our losses carries."""
    settings, name = getattr(loss, "keywords", {}), getattr(getattr(loss, "func", None), "__name__", "")
    if not getattr(getattr(loss, "func", None), "__module__", "").startswith("lit_rl.ops.losses."):
        return  # the settings of a user's own function mean what the user says
    for setting, bounds in (_RANGES | _OWN_RANGES.get(name, {})).items():
        if (value := settings.get(setting)) is not None:
            in_range(f"{key}.{setting}", value, **bounds)
    if (delta := settings.get("delta")) is not None:
        high, low = settings.get("clip_high"), settings.get("clip_low")
        bounded = name == "clipped_policy_loss"  # the other dual clip has no upper bound to stay above
        highest = (high if high is not None else 0.2 if low is None else low) if bounded else 0.0
        in_range(f"{key}.delta", delta, low=1 + highest, open_low=True)
    for setting, (what, sound) in _PAIRS.items():
        pair = settings.get(setting)
        if pair is not None and not (len(pair) == 2 and sound(*pair)):
            raise ConfigError(f"{key}.{setting}={list(pair)} must be {what}.")
