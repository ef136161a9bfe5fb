"""Settings of sampling and generator under which nothing could be learned, or the importance ratio would be wrong."""

from __future__ import annotations

from lit_rl.errors import ConfigError
from lit_rl.generation.base import Generator
from lit_rl.rollout import Sampling

_UNSCORED = ("repetition_penalty", "min_new_tokens", "bad_words", "logit_bias", "structured")
"""Settings of `Sampling` that change what is drawn and that training's log-probs know nothing of."""


def sampling_teaches(sampling: Sampling, generator: Generator, *, weighted: bool) -> None:
    """Refuse settings under which a group teaches nothing, or the importance ratio would be wrong.

    Args:
        sampling: Of the training.
        generator: What draws.
        weighted: Whether `algo/correction` gives samples weights against the engine.

    Raises:
        ConfigError: names the settings.
    """
    if sampling.greedy:
        raise ConfigError(
            "sampling.temperature=0 draws one and the same completion for a whole group, so every advantage is 0. A "
            "greedy choice has no log-probability to learn from. Train with 1.0; greedy decoding is for evaluation "
            "(eval.temperature=0)."
        )
    # A weight is the ratio of the training's distribution to the one that was drawn from, whatever made the two differ.
    accounted_for = weighted and not generator.exact
    unscored = [name for name in sampling.reshaped if name in _UNSCORED]
    if unscored and not accounted_for:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in unscored)
        raise ConfigError(
            f"{keys}: tokens would be drawn from a distribution that the log-probs of training are not taken under: "
            "the importance ratio would be wrong. Switch it off for training "
            f"(a reward against repetition: reward=repetition){_weights_would_do(generator)}."
        )
    if sampling.reshaped and not accounted_for and not generator.reports_kept_mass:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in sampling.reshaped)
        raise ConfigError(
            f"{keys}: {type(generator).__name__} does not report how much probability it cut off, so its log-probs "
            "cannot be compared with the training's. Switch it off for training, or take generator=native"
            f"{_weights_would_do(generator)}; eval.top_p and eval.top_k are free."
        )


def _weights_would_do(generator: Generator) -> str:
    return "" if generator.exact else ", or weight the samples (algo/correction=token_truncate)"


def lag_is_corrected(generator: Generator, *, weighted: bool) -> None:
    """Refuse a generator that draws ahead and cannot, or whose older samples nothing corrects for.

    Raises:
        ConfigError: says what to set.
    """
    lag, name = generator.lag, type(generator).__name__
    if lag not in (0, 1):
        raise ConfigError(f"generator.lag={lag}: allowed are 0 (draw with the newest weights) and 1 (one rollout old).")
    if lag and generator.exact:
        raise ConfigError(
            f"generator.lag={lag}: {name} decodes with the policy itself, which cannot be learned from meanwhile. Take "
            "an engine that runs elsewhere (generator=vllm_server), or generator.lag=0."
        )
    if lag and not weighted:
        raise ConfigError(
            f"generator.lag={lag} draws with weights that are a rollout old, and nothing weighs the samples by what "
            "changed since: set algo/correction (auto is token_truncate here), or generator.lag=0."
        )
