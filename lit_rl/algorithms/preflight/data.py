"""What of the data, the lengths and the Trainer is refused before any weight is loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.errors import ConfigError, did_you_mean
from lit_rl.generation.base import Generator
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.reference.base import Auto, Reference
from lit_rl.rewards.sums.weighted import Rewards
from lit_rl.rollout import Sampling


def rollout_data(trainer: Any) -> Any:
    """The Trainer's data module of prompts.

    Raises:
        ConfigError: there is none, or it is of another kind.
    """
    return prompts_of(getattr(trainer, "datamodule", None))


def prompts_of(data: Any) -> Any:
    """A data module, which is one of prompts.

    Raises:
        ConfigError: there is none, or it is of another kind.
    """
    if data is None or not hasattr(data, "prompts_per_rollout"):
        came = "no data module" if data is None else type(data).__name__
        raise ConfigError(
            f"The Trainer got {came}. Pass datamodule=RolloutDataModule(...): other loaders do not know rollouts."
        )
    return data


def one_accumulation(trainer: Any, because: str) -> None:
    """Refuse a `GradientAccumulationScheduler`.

    Raises:
        ConfigError: the number of micro-batches of a step changes during the run.
    """
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ConfigError(
            f"GradientAccumulationScheduler changes the micro-batches of a step during the run, and {because}. Use one "
            "trainer.accumulate_grad_batches."
        )


def fits_context(
    model: LanguageModel, key: str, longest: int, new_tokens: int, prompt_key: str = "data.max_prompt_tokens"
) -> None:
    """Refuse prompts and completions that the model's context cannot hold.

    Args:
        model: Whose context.
        key: Of `new_tokens`, for the message.
        longest: Tokens of the longest prompt.
        new_tokens: Tokens of the longest completion.
        prompt_key: The key that bounds prompts, for the message.

    Raises:
        ConfigError: says what to lower, and to what.
    """
    holds = model.context_length
    if holds is None or longest + new_tokens <= holds:
        return
    prompts = f", or {prompt_key} to {holds - new_tokens}" if holds > new_tokens else ""
    raise ConfigError(
        f"The longest prompt has {longest} tokens; with {key}={new_tokens} that is "
        f"{longest + new_tokens}, but the context of {model.name} holds {holds}. Lower "
        f"{key} to {max(1, holds - longest)}{prompts}."
    )


def shortened(model: LanguageModel, sampling: Sampling, longest: int) -> Sampling:
    """A sampling that nobody chose, with completions as long as the model's context leaves room for; said where that
    changes it. Where there is no room at all it stays, and `fits_context` refuses it.

    Args:
        model: Whose context.
        sampling: Of the constructor's default.
        longest: Tokens of the longest prompt.
    """
    holds = model.context_length
    room = sampling.max_new_tokens if holds is None else holds - longest
    if not 1 <= room < sampling.max_new_tokens:
        return sampling
    rank_zero_warn(
        f"sampling.max_new_tokens={room}: no sampling was given, the default of {sampling.max_new_tokens} tokens does "
        f"not fit, and the context of {model.name} ({holds}) leaves {room} behind the longest prompt ({longest}). "
        f"sampling=lit_rl.Sampling(max_new_tokens=...) sets it."
    )
    return replace(sampling, max_new_tokens=room)


def engine_takes(generator: Generator, sampling: Sampling, longest: int) -> None:
    """Let an engine refuse the lengths and settings that it will be asked for."""
    generator.check(sampling, longest)


def bind_validation(rewards: Rewards, data: Any, also: Sequence[str] = ()) -> None:
    """Check the rewards against the columns of every validation set, and those that are there also."""
    for name, columns in data.val_columns.items():
        try:
            rewards.bind([*columns, *also])
        except Exception as error:
            error.add_note(f"(in the validation set {name or 'data.val_*'})")
            raise


def values_are_scored(rewards: Rewards, data: Any, also: Sequence[str] = ()) -> None:
    """Let rewards that look at the values of columns refuse them, of the training and of every validation set."""
    for columns in data.columns_of_sets():
        rewards.check(columns, also)


def monitors(trainer: Any, logged: Collection[str]) -> None:
    """At the end of a validation every metric has been logged once: a monitor of any other would wait for ever.

    Raises:
        ConfigError: names the callback, its monitor, and what is logged.
    """
    known = {*trainer.callback_metrics, *logged, "step", "epoch"}
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if monitor is not None and monitor not in known:
            raise ConfigError(
                f"{type(callback).__name__}(monitor={monitor!r}) watches a metric that is never logged."
                f"{did_you_mean(monitor, known)} Logged are: {', '.join(sorted(known))}."
            )


def reference_is_read(reference: Reference, needed: bool, otherwise: str) -> None:
    """Warn of a reference that was chosen and that nothing reads.

    Args:
        reference: As it was given.
        needed: Whether a term reads it.
        otherwise: Why nothing does, or what would.
    """
    if not (needed or isinstance(reference, Auto)):
        rank_zero_warn(f"reference={type(reference).__name__} is not loaded: {otherwise}")


def whole_rollouts(trainer: Any, slots: int) -> None:
    """`limit_train_batches` counts micro-batches; one that ends an epoch in the middle of a rollout wastes the rest."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int) and limit % slots and not trainer.fast_dev_run:
        rank_zero_warn(
            f"trainer.limit_train_batches={limit} ends every epoch in the middle of a rollout of {slots} "
            f"micro-batches: take a multiple of {slots}."
        )
