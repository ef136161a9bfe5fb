"""Checks of sampling and generator settings that teach nothing, or make the importance ratio wrong."""

from __future__ import annotations

from typing import Any

from lit_rl.algorithms.optim.strategies import flattens, shards
from lit_rl.errors import ConfigError, check_draws
from lit_rl.generation.base import Generator
from lit_rl.rollout import Sampling

_CUTTING = ("top_p", "top_k", "min_p")
"""Settings that rule out tokens by probability: engine and training may rule out different ones."""


def sampling_teaches(sampling: Sampling, generator: Generator, *, weighted: bool) -> None:
    """Refuse settings under which a group teaches nothing, or the importance ratio would be wrong.

    Args:
        sampling: Sampling of the training.
        generator: The generator.
        weighted: Whether `algo/correction` weights samples against the engine.

    Raises:
        ConfigError: names the settings.
    """
    check_draws(sampling.temperature)
    # A weight is the ratio of the training's distribution to the sampled one, whatever the difference.
    accounted_for = weighted and not generator.exact
    if sampling.unscored and not accounted_for:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in sampling.unscored)
        raise ConfigError(
            f"{keys}: tokens would be drawn from a distribution that the log-probs of training are not taken under: "
            f"the importance ratio would be wrong. Switch it off for training{_weights_would_do(generator)}."
        )
    if generator.reshaped_by and not accounted_for:
        names = ", ".join(f"generator.generation_kwargs.{name}" for name in generator.reshaped_by)
        raise ConfigError(
            f"{names}: tokens would be drawn from a distribution that the log-probs of training are not taken under: "
            "the importance ratio would be wrong. sampling.repetition_penalty and min_new_tokens are scored exactly. "
            "Leave it out, or weight the samples (algo/correction=token_truncate, of the methods that have it)."
        )
    cutting = [name for name in sampling.reshaped if name in _CUTTING]
    if cutting and not accounted_for and not generator.reports_kept_mass:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in cutting)
        raise ConfigError(
            f"{keys}: {type(generator).__name__} does not report how much probability it cut off, so its log-probs "
            "cannot be compared with the training's. Switch it off for training, or take generator=native"
            f"{_weights_would_do(generator)}; eval.top_p and eval.top_k are free."
        )


def _weights_would_do(generator: Generator) -> str:
    return "" if generator.exact else ", or weight the samples (algo/correction=token_truncate)"


def lag_is_corrected(generator: Generator, *, weighted: bool) -> None:
    """Refuse a lag that the generator does not support, or that nothing corrects for.

    Raises:
        ConfigError: names what to set.
    """
    lag, name = generator.lag, type(generator).__name__
    if not isinstance(lag, int) or lag < 0:
        raise ConfigError(
            f"generator.lag={lag}: it counts rollouts, 0 (draw with the newest weights), 1 (one rollout old) or more."
        )
    if lag and generator.exact:
        raise ConfigError(
            f"generator.lag={lag}: {name} decodes with the policy itself, which cannot be learned from meanwhile. Take "
            "an engine that runs elsewhere (generator=vllm_server), or generator.lag=0."
        )
    if lag and not weighted:
        raise ConfigError(
            f"generator.lag={lag} draws with weights of an earlier rollout, and nothing weighs the samples by what "
            "changed since: set algo/correction (auto is token_truncate here), or generator.lag=0."
        )


def weights_are_copied(generator: Generator, trainer: Any) -> None:
    """Refuse to draw more than one rollout ahead where a process cannot copy the weights by itself.

    Raises:
        ConfigError: several processes, or a strategy that may take weights apart.
    """
    lag, processes = generator.lag, trainer.world_size
    if lag < 2 or (processes == 1 and not shards(trainer.strategy) and not flattens(trainer.strategy)):
        return
    raise ConfigError(
        f"generator.lag={lag} is built for one process that holds whole weights, and this run has {processes} with "
        f"{type(trainer.strategy).__name__}: a thread updates the engine from a copy of them, and may ask no other "
        "process for a part. Set generator.lag=1, or trainer.devices=1 and strategy=auto."
    )
