"""Checks of the data, the lengths and the Trainer's settings before any weight is loaded, for rollouts and data
sets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.algorithms.optim.schedules import FromTorch, Schedule, check_schedule
from lit_rl.core.errors import ConfigError, DataError, did_you_mean, in_range
from lit_rl.core.rollout import Sampling
from lit_rl.core.visuals import IMAGE_COLUMNS as IMAGES
from lit_rl.core.visuals import VIDEO_COLUMNS as VIDEOS
from lit_rl.data.example_set import Example
from lit_rl.data.kinds import Kind
from lit_rl.generation.generator import Generator
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.references import Auto, Reference
from lit_rl.rewards.weighted_rewards import Rewards

# ---------------------------------------------------------------------- runs with rollouts


def rollout_data(trainer: Any) -> Any:
    """Return the Trainer's data module of prompts.

    Raises:
        ConfigError: there is none, or it is of another kind.
    """
    return check_prompt_data(getattr(trainer, "datamodule", None))


def check_prompt_data(data: Any) -> Any:
    """Return a data module, if it is one of prompts.

    Raises:
        ConfigError: there is none, or it is of another kind.
    """
    if data is None or not hasattr(data, "prompts_per_rollout"):
        passed = "no data module" if data is None else type(data).__name__
        raise ConfigError(
            f"The Trainer got {passed}. Pass datamodule=RolloutDataModule(...): other loaders deal no rollouts."
        )
    return data


def check_one_accumulation(trainer: Any, because: str) -> None:
    """Refuse a `GradientAccumulationScheduler`.

    Raises:
        ConfigError: the number of micro-batches of a step changes during the run.
    """
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ConfigError(
            f"GradientAccumulationScheduler changes the micro-batches of a step during the run, and {because}. Use one "
            "trainer.accumulate_grad_batches."
        )


def check_context_length(
    model: LanguageModel, key: str, longest: int, new_tokens: int, prompt_key: str = "data.max_prompt_tokens"
) -> None:
    """Refuse prompts and completions that the model's context cannot hold.

    Args:
        model: The policy, with its context length.
        key: Setting of `new_tokens`, for the message.
        longest: Tokens of the longest prompt.
        new_tokens: Tokens of the longest completion.
        prompt_key: Setting that bounds prompts, for the message.

    Raises:
        ConfigError: names the settings to lower, and the values.
    """
    context = model.context_length
    if context is None or longest + new_tokens <= context:
        return
    prompts = f", or {prompt_key} to {context - new_tokens}" if context > new_tokens else ""
    raise ConfigError(
        f"The longest prompt has {longest} tokens; with {key}={new_tokens} that is "
        f"{longest + new_tokens}, but the context of {model.name} holds {context}. Lower "
        f"{key} to {max(1, context - longest)}{prompts}."
    )


def shorten_sampling(model: LanguageModel, sampling: Sampling, longest: int) -> Sampling:
    """Return the default sampling with completions shortened to the model's context, with a warning where needed.

    Where the context leaves no token at all it is unchanged, and `check_context_length` refuses it.

    Args:
        model: The policy, with its context length.
        sampling: The constructor's default.
        longest: Tokens of the longest prompt.
    """
    context = model.context_length
    left = sampling.max_new_tokens if context is None else context - longest
    if not 1 <= left < sampling.max_new_tokens:
        return sampling
    rank_zero_warn(
        f"sampling.max_new_tokens={left}, in place of the default of {sampling.max_new_tokens}: the context of "
        f"{model.name} ({context} tokens) has no more room after the longest prompt ({longest}). Set "
        "sampling=lit_rl.Sampling(max_new_tokens=...) to choose it."
    )
    return replace(sampling, max_new_tokens=left)


def check_engine(generator: Generator, sampling: Sampling, longest: int) -> None:
    """Let an engine refuse the lengths and settings of the run."""
    generator.check(sampling, longest)


def bind_validation(rewards: Rewards, data: Any, also: Sequence[str] = ()) -> None:
    """Check the rewards against the columns of every validation set and further columns (`also`)."""
    for name, columns in data.val_columns.items():
        try:
            rewards.bind([*columns, *also])
        except Exception as error:
            error.add_note(f"(in the validation set {name or 'data.val_*'})")
            raise


def check_scored_values(rewards: Rewards, data: Any, also: Sequence[str] = ()) -> None:
    """Let rewards check the values of columns, in the training set and every validation set."""
    for columns in data.columns_of_sets():
        rewards.check(columns, also)


def report_unread_columns(data: Any, names: Sequence[str], read: Collection[str], *, sees: bool) -> None:
    """Report columns of the user's rows that nothing reads; those of shipped tasks are left out.

    Args:
        data: The data module.
        names: Names of the columns besides those that are learned from or answered.
        read: Columns that a reward may read.
        sees: Whether the policy is a model over images, which reads their columns.
    """
    known = {*read, "tools", "chat_template_kwargs", *((*IMAGES, *VIDEOS) if sees else ())}
    unread = [name for name in names if name not in known]
    if unread and getattr(data, "task", None) is None:
        rank_zero_info(f"Columns that nothing reads: {', '.join(unread)}.")


def warn_unused_evaluation(evaluation: Evaluation, trainer: Any, sets: Collection[str], stage: str) -> None:
    """Warn of validation settings that have no effect.

    Args:
        evaluation: The settings.
        trainer: The Trainer.
        sets: Names of the validation sets that have prompts.
        stage: `fit`, or another stage, which always validates.
    """
    changed = {each.name: getattr(evaluation, each.name) for each in fields(evaluation)}
    changed = {name: value for name, value in changed.items() if value != getattr(Evaluation, name)}
    if stage == "fit" and changed and (not sets or not trainer.limit_val_batches):
        why = "trainer.limit_val_batches=0" if sets else "there are no validation prompts"
        rank_zero_warn(f"{_keys_of(changed)} changes nothing in this training: {why}.")
    elif evaluation.temperature == 0:
        unused = {name: value for name, value in changed.items() if name in ("top_p", "top_k", "group_size")}
        if unused:
            rank_zero_warn(
                f"{_keys_of(unused)} changes nothing with eval.temperature=0: decoding is greedy, and all completions "
                "of a prompt are equal. Set eval.temperature above 0."
            )


def _keys_of(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"eval.{name}={value}" for name, value in settings.items())


def check_monitors(
    trainer: Any, logged: Collection[str], beginning: str = "", may_come: Callable[[str], bool] = lambda name: False
) -> None:
    """Refuse callbacks that monitor a metric that is never logged.

    Metrics of a training are known after its first line, those of a validation at its end. One that a function of the
    user's may log later may be missing until the first validation, where Lightning's callbacks need it, and beyond that
    for callbacks that do not (``EarlyStopping(strict=False)``).

    Args:
        trainer: The Trainer with the callbacks.
        logged: Metrics logged now, beside those that the Trainer knows.
        beginning: Prefix of the names that are known to be complete.
        may_come: Predicate: a name that has not been logged yet may be later.

    Raises:
        ConfigError: names the callback, its monitor, and what is logged.
    """
    known = {*trainer.callback_metrics, *logged, "step", "epoch"}
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if monitor is None or monitor in known or not monitor.startswith(beginning):
            continue
        later = may_come(monitor)
        if later and (beginning or not getattr(callback, "strict", True)):
            rank_zero_info(
                f"{type(callback).__name__}(monitor={monitor!r}) watches a metric that has not been logged yet."
                f"{did_you_mean(monitor, known)} The run goes on, as a function of yours may log it later."
            )
            continue
        hint = " If your own function logs it in some batches only, log it in every batch." if later else ""
        raise ConfigError(
            f"{type(callback).__name__}(monitor={monitor!r}) watches a metric that is never logged."
            f"{did_you_mean(monitor, known)} Logged are: {', '.join(sorted(known))}.{hint}"
        )


def check_trainer_settings(trainer: Any) -> None:
    """Refuse numbers that Lightning accepts but that are meaningless, or would fail in the middle of a run.

    Raises:
        ConfigError: names the setting and its range.
    """
    check_process_count(getattr(trainer, "num_devices", 1), getattr(trainer, "num_nodes", 1))
    for name in ("log_every_n_steps", "num_sanity_val_steps", "gradient_clip_val"):
        low = -1 if name == "num_sanity_val_steps" else 0
        if isinstance(value := getattr(trainer, name), int | float):
            in_range(f"trainer.{name}", value, low=low)
    if (every := trainer.check_val_every_n_epoch) is not None:
        in_range("trainer.check_val_every_n_epoch", every, low=1)
    interval = trainer.val_check_interval
    if isinstance(interval, int | float) and interval <= 0:
        raise ConfigError(
            f"trainer.val_check_interval={interval} is out of range: allowed is a whole number of micro-batches from "
            "1, or a share of the epoch above 0.0. To leave validation out, set trainer.limit_val_batches=0."
        )


def check_process_count(devices: int, nodes: int) -> None:
    """Refuse a number of torchrun's processes that is not that of the Trainer's devices.

    Args:
        devices: The Trainer's devices of a node.
        nodes: `trainer.num_nodes`.

    Raises:
        ConfigError: torchrun has started another number of processes.
    """
    if not TorchElasticEnvironment.detect():
        return
    started, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if started != devices * nodes:
        nodes_started = max(1, started // per_node)
        raise ConfigError(
            f"torchrun started {started} processes, {per_node} of them on this machine, but trainer.devices={devices} "
            f"and trainer.num_nodes={nodes}. Set trainer.devices={per_node} trainer.num_nodes={nodes_started}, or "
            "start the command without torchrun: it then starts the processes of a node itself."
        )


def epoch_batches(trainer: Any) -> int:
    """Return the number of batches of an epoch in Lightning's loop, on this rank."""
    batches, limit = len(trainer.datamodule.train_dataloader()), trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def total_steps(trainer: Any) -> float:
    """Return the optimizer steps of the whole run; infinite if nothing ends it.

    `Trainer.estimated_stepping_batches` will not do: read before a checkpoint is restored, it makes Lightning set
    up the training data at once, and the restored position of the loader is never used.
    """
    steps = math.inf if trainer.max_steps in (None, -1) else trainer.max_steps
    if trainer.max_epochs in (None, -1):
        return steps
    return min(steps, math.ceil(epoch_batches(trainer) / trainer.accumulate_grad_batches) * trainer.max_epochs)


def check_length(trainer: Any, data: Any, schedules: Iterable[Schedule | FromTorch]) -> None:
    """Refuse settings that do not fit the length of the run, after batches are planned and before weights load.

    Raises:
        ConfigError: see `check_run_length` and `check_schedule`.
    """
    if isinstance(trainer.strategy, ModelParallelStrategy) and not torch.distributed.is_initialized():
        return  # `lit-rl plan` stands in for processes without a rendezvous: their batches are not known yet
    val_batches, steps = [len(loader) for loader in data.val_dataloader()], total_steps(trainer)
    check_run_length(trainer, len(data.train_dataloader()), steps, val_batches)
    for schedule in schedules:
        check_schedule(schedule, steps)


def check_run_length(trainer: Any, batches: int, steps: float, val_batches: Sequence[int]) -> None:
    """Refuse limits of less than a batch, and validations, or monitors of them, that the run does not reach.

    Args:
        trainer: The Trainer, with its micro-batches.
        batches: Micro-batches of an epoch on this rank, without a limit.
        steps: Optimizer steps of the run; infinite where they are unknown.
        val_batches: Batches of each validation set, without a limit.

    Raises:
        ConfigError: names the numbers, and the settings to change.
    """
    if trainer.fast_dev_run:
        return
    taken = _batches_taken(trainer, "train", batches)
    validates = sum(_batches_taken(trainer, "val", each) for each in val_batches) > 0
    interval, every = trainer.val_check_interval, trainer.check_val_every_n_epoch
    if validates and every is not None and isinstance(interval, int) and 0 < taken < interval:
        raise ConfigError(
            f"trainer.val_check_interval={interval} counts micro-batches within an epoch, and an epoch of this run has "
            f"{taken}. Set trainer.check_val_every_n_epoch=null to count them over the epochs, a number up to {taken}, "
            "or neither for a validation at the end of each epoch."
        )
    last_batch = steps * trainer.accumulate_grad_batches
    first_val = _first_validation(taken, interval, every) if validates else math.inf
    if first_val is None or (validates and first_val <= last_batch):
        return
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if monitor is None or not monitor.startswith("val"):
            continue
        why = "it validates nothing"
        if first_val < math.inf:
            why = (
                f"it ends after {last_batch:g} micro-batches, before the first validation, which comes after "
                f"{first_val:g}. Set trainer.val_check_interval to {last_batch:g} or less, or trainer.max_steps higher"
            )
        raise ConfigError(
            f"{type(callback).__name__}(monitor={monitor!r}) watches a validation, and this run makes none: {why}."
        )


def _batches_taken(trainer: Any, stage: str, batches: int) -> int:
    """Return the batches that the Trainer takes of `batches`."""
    limit = getattr(trainer, f"limit_{stage}_batches")
    if not isinstance(limit, float):
        return min(limit, batches)
    if 0 < limit * batches < 1:
        name = "overfit_batches" if trainer.overfit_batches else f"limit_{stage}_batches"
        what = "an epoch" if stage == "train" else "the validation"
        raise ConfigError(
            f"trainer.{name}={limit} takes no batch: {what} has {batches}. Allowed is a whole number of batches, or a "
            f"share from {math.ceil(1000 / batches) / 1000:g}."
        )
    return int(limit * batches)


def _first_validation(batches: int, interval: Any, every: int | None) -> int | None:
    """Return the micro-batch of the run after which the first validation comes; None where it depends on the clock."""
    if not isinstance(interval, int | float):
        return None
    within = interval if isinstance(interval, int) else max(1, int(batches * interval))
    return within if every is None else (every - 1) * batches + within


def warn_unused_reference(reference: Reference, needed: bool, otherwise: str) -> None:
    """Warn of a reference that was set and that nothing reads.

    Args:
        reference: The reference as it was given.
        needed: Whether a term reads it.
        otherwise: The reason why nothing does, or the setting that would.
    """
    if not (needed or isinstance(reference, Auto)):
        rank_zero_warn(f"reference={type(reference).__name__} is not loaded: {otherwise}")


def warn_partial_rollouts(trainer: Any, slots: int) -> None:
    """Warn of a `limit_train_batches` in micro-batches that ends an epoch in the middle of a rollout."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int) and limit % slots and not trainer.fast_dev_run:
        rank_zero_warn(
            f"trainer.limit_train_batches={limit} ends every epoch in the middle of a rollout of {slots} "
            f"micro-batches: take a multiple of {slots}."
        )


# ---------------------------------------------------------------------- runs on a data set


MODULES = {
    "texts": "SupervisedDataModule(...) (data=texts)",
    "pairs": "PreferenceDataModule(...) (data=preferences)",
    "triples": "PreferenceDataModule(...) (data=preferences)",
    "verdicts": "PreferenceDataModule(...) (data=preferences)",
    "stepwise": "StepwiseDataModule(...) (data=steps)",
}
"""The data module of each kind of examples, and its config."""


def trainer_examples(trainer: Any, kind: Kind, method: str) -> Any:
    """Return the Trainer's data module of examples.

    Args:
        trainer: The Trainer.
        kind: Kind of examples that the method learns from.
        method: Name of the method, for the message.

    Raises:
        ConfigError: there is none, or it makes no examples of this kind.
    """
    return check_example_data(getattr(trainer, "datamodule", None), kind, method)


def check_example_data(data: Any, kind: Kind, method: str) -> Any:
    """Return a data module, if it makes examples of this kind.

    Raises:
        ConfigError: there is none, or it makes no examples of this kind.
    """
    if kind not in getattr(data, "serves", ()):
        passed = "no data module" if data is None else type(data).__name__
        raise ConfigError(f"{method} learns from {kind}; the Trainer got {passed}. Pass datamodule={MODULES[kind]}.")
    return data


def check_text_lengths(model: LanguageModel, longest: int, *, streamed: bool) -> None:
    """Refuse texts that are longer than the model's context.

    Args:
        model: The policy, whose context has to hold every text.
        longest: Tokens of the longest row; for a stream, the most that a later row may have.
        streamed: Whether the rows come from a stream.

    Raises:
        ConfigError: the context is shorter.
    """
    context = model.context_length
    if context is not None and longest > context:
        subject = "A row of a stream may have" if streamed else "The longest row has"
        raise ConfigError(
            f"{subject} {longest} tokens, but the context of {model.name} holds {context}: "
            f"lower data.max_length to {context}."
        )


@dataclass(frozen=True)
class NeedsAllRows:
    """A term that needs all rows before the first step."""

    who: str
    """The setting, and what it does with all rows, as subject and verb."""
    instead: str
    """The setting to do without it."""


def check_stream(terms: Iterable[NeedsAllRows]) -> None:
    """Refuse terms that need all rows before the first step, as a stream is never available at once.

    Raises:
        ConfigError: there is such a term.
    """
    for term in terms:
        raise ConfigError(
            f"data.stream_buffer: {term.who} all rows before the first step, and a stream never has all its rows at "
            f"hand. Leave data.stream_buffer out, or {term.instead}."
        )


def longest_rewritten_prompt(options: Any, examples: Sequence[Example]) -> int:
    """Return the tokens of the longest prompt of texts whose completions are generated in the training.

    Args:
        options: Options of the data module.
        examples: All training rows.

    Raises:
        ConfigError: rows are packed, or not only completions are learned.
        DataError: a row has no prompt.
    """
    why = "The completions of a step are generated (algo.on_policy_fraction, algo.teacher_completions)"
    for key, needed in (("learn", "completion"), ("packing", "none")):
        if (value := getattr(options, key)) != needed:
            raise ConfigError(f"data.{key}={value}: {why}, which takes one prompt per row. Set data.{key}={needed}.")
    longest = 0
    for example in examples:
        length = example.texts[0].prompt_tokens
        if not length:
            raise DataError(
                f"{example.where}: the text has no prompt. {why}, so every row needs a prompt and a completion; for "
                "texts alone set algo.on_policy_fraction=0 and algo.teacher_completions=false."
            )
        longest = max(longest, length)
    return longest
