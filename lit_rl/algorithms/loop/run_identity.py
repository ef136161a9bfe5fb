"""The identity of a run: what its checkpoints note of model, settings and optimizer, and what a resume compares.

    part                                               if it has changed
    frozen weights, adapter, tokenizer, reference      refused by name; `model.allow_changed` accepts it
    class of the optimizer                             refused: no optimizer reads the state of another
    settings of optimizer and schedule                 used from the next step on, and reported
    other arguments of constructors and the Trainer    used from the next step on, and reported

The rows of the data, their order and the cut of a step are noted by the loader, the kind of the algorithm and the
precision by the module. All values are plain. Strings of settings may be secrets, so only their digests are kept.

Restoring an optimizer and its schedule restores the settings of the run that wrote the checkpoint too, and the learning
rate of its next step: 0 where that run was over. So the settings of this run are put back, and the rate is computed
from the schedule anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_rl.algorithms.optim.master_weights import MasterWeights, optimizer_path
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.core import upstream
from lit_rl.core.errors import StorageError
from lit_rl.core.fingerprints import dependencies_of, fingerprint_of, is_mark, text_digest
from lit_rl.core.user_functions import load_by_path
from lit_rl.environments.environment_base import Interactive
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.trunk import name_in_base

Record = dict[str, Any]
"""Plain values by the names of parts, as users know them."""

_SAMPLED = 1 << 14
"""Least numbers of each tensor in its digest."""
_DEEPEST = 6
_LISTED = 50
"""Most parts of a mapping, or of what code reads, that are recorded singly; more get one digest."""
_LOOKED_AT = 10_000
"""Most items of a container that are recorded; of more, only their number."""

_OF_ADAPTERS = {
    "peft_type": "kind",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "lora_dropout": "dropout",
}
"""Settings of `model.lora` by PEFT's names."""
_NO_SETTINGS_OF_ADAPTERS = {
    *("base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version"),
    *("runtime_config", "init_lora_weights", "init_weights", "loftq_config", "eva_config", "corda_config"),
    *("lora_dropout", "module_dropout"),
}
"""PEFT's settings that do not change the function of trained adapters, given their weights and the base."""


def model_record(description: LanguageModel, policy: nn.Module, reference: Any) -> Record:
    """Return the record of base model, adapter, tokenizer and reference. To be called before the policy is sharded.

    Args:
        description: The description of the policy.
        policy: The loaded policy.
        reference: The frozen reference module of a term; None where there is none.
    """
    from peft import PeftModel

    frozen = {name_in_base(name): p for name, p in policy.named_parameters() if not p.requires_grad}
    tokenizer: Any = description.tokenizer
    encoded = repr((sorted(tokenizer.get_vocab().items()), tokenizer.encode("naïve 日本語 🙂 2+2=4\n\t x  y")))
    record: Record = {"model.name": description.name, "tokenizer": text_digest(encoded)}
    if frozen:
        record["frozen weights"] = weights_digest(frozen)
    if isinstance(policy, PeftModel):
        record |= _adapter(policy.peft_config[str(policy.active_adapter)])
    held = getattr(reference, "model", reference)
    if isinstance(held, nn.Module):
        record["reference weights"] = weights_digest(dict(held.named_parameters()))
    return record


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return a digest that is equal for equal weights, in any floating type.

    It changes with any row of a tensor, or with many numbers: it includes one number of each row, each in the next
    column, and at least 16,384 of the whole.
    """
    made = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        held = tensor.detach().reshape(-1)
        columns = tensor.shape[-1] if tensor.dim() else 1
        some = held[:: max(1, min(held.numel() // _SAMPLED, columns - 1))].cpu()
        if some.is_floating_point():
            some = some.to(torch.bfloat16)
        made.update(f"{name} {tuple(tensor.shape)}".encode())
        made.update(some.contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def _adapter(config: Any) -> Record:
    """Return the settings of an adapter that differ from PEFT's defaults, by the names of `model.lora`."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changed = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _NO_SETTINGS_OF_ADAPTERS and (name in ("r", "lora_alpha") or value != defaults.get(name))
    }
    record: Record = {}
    for name, value in changed.items():
        plain_value = sorted(value) if isinstance(value, set | frozenset) else value
        if name == "target_modules" and isinstance(plain_value, list):  # the weights tell which layers of each name
            plain_value = sorted({path.rpartition(".")[2] for path in plain_value})
        text = str(getattr(plain_value, "value", plain_value)) if plain_value not in (None, {}, []) else None
        if text is not None:
            recorded = (
                plain_value if isinstance(plain_value, int | float) else text if len(text) <= 200 else text_digest(text)
            )
            record[f"model.lora.{_OF_ADAPTERS.get(name, name)}"] = recorded
    return record


_PATHS = ("path", "functions", "read", "show")
"""Parameters of environments that are paths of code."""


def _resolve_paths(value: Any) -> Any:
    """Replace paths of code by the functions and classes, which are loaded already."""
    if isinstance(value, list | tuple):
        return [_resolve_paths(each) for each in value]
    if not isinstance(value, str) or not re.fullmatch(r"[^\s:]+:[A-Za-z_]\w*", value):
        return value
    with contextlib.suppress(Exception):  # any other text
        return load_by_path(value, "env").value
    return value


class Word(str):
    """An option of a `Literal`, which is no secret, and so is recorded as it is."""


def with_choices(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a constructor's arguments, with the strings that its annotations list as `Word`."""
    choices = _choices_of_arguments(kind)
    return {
        name: Word(value) if isinstance(value, str) and value in choices.get(name, ()) else value
        for name, value in arguments.items()
    }


@functools.cache
def _choices_of_arguments(kind: type) -> dict[str, set[Any]]:
    found: dict[str, set[Any]] = {}
    for each in reversed(kind.__mro__):
        if "__init__" in vars(each):
            with contextlib.suppress(Exception):  # annotations may be imported for type checkers only
                hints = typing.get_type_hints(each.__init__)
                found |= {name: choices for name, hint in hints.items() if (choices := _choices(hint))}
    return found


def _choices(hint: Any) -> set[Any]:
    """Return the strings of every `Literal` in an annotation."""
    if typing.get_origin(hint) is Literal:
        return {each for each in typing.get_args(hint) if isinstance(each, str)}
    return set().union(*(_choices(each) for each in typing.get_args(hint)))


def _flat(value: Any, key: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        return
    if value is None or isinstance(value, bool | int | float):
        yield key, value
    elif isinstance(value, Word) or is_mark(value):
        yield key, str(value)
    elif isinstance(value, str | bytes):
        yield key, text_digest(value)
    elif isinstance(value, Mapping | list | tuple | set | frozenset):
        yield from _flat_container(value, key, depth)
    elif isinstance(value, Tensor):
        yield key, f"Tensor #{weights_digest({'': value})}"
    elif isinstance(value, functools.partial) or hasattr(value, "func"):
        yield from _flat(value.func, key, depth + 1)
        yield from _flat(dict(enumerate(getattr(value, "args", ()))), key, depth + 1)
        yield from _flat(getattr(value, "keywords", {}), key, depth + 1)
    elif inspect.ismethod(value) and not inspect.isclass(value.__self__):
        yield key, fingerprint_of(value)
        yield from _flat_object(value.__self__, key, depth)
    elif callable(value) and (inspect.isroutine(value) or inspect.isclass(value) or hasattr(value, "__wrapped__")):
        yield key, fingerprint_of(value)
        yield from _flat_read(value, key, depth)
    else:
        yield key, fingerprint_of(type(value))
        yield from _flat_object(value, key, depth)


def _flat_container(value: Any, key: str, depth: int) -> Iterator[tuple[str, Any]]:
    if len(value) > _LOOKED_AT:
        yield key, f"{len(value)} things"
    elif isinstance(value, Mapping) and len(value) > _LISTED:
        yield key, _mark_of(value, depth)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flat(each, f"{key}.{name}" if key else str(name), depth + 1)
    else:
        parts = [dict(_flat(each, "", depth + 1)) for each in value]
        yield key, text_digest(repr(sorted(map(repr, parts)) if isinstance(value, set | frozenset) else parts))


def _flat_object(value: Any, key: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield f"{key}.weights", f"{type(value).__name__} #{weights_digest(dict(value.named_parameters()))}"
        return
    yield from _flat(_settings_of(value), key, depth + 1)
    yield from _flat_read(type(value), key, depth)


def _flat_read(function: Any, key: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a user's code reads; a container as one value, and a package as one too."""
    read: dict[str, Any] = {}
    for name, value in dependencies_of(function):
        with contextlib.suppress(Exception):  # foreign objects may raise anything
            mapping = isinstance(value, Mapping) and len(value) <= _LOOKED_AT
            found = {"": _mark_of(value, depth)} if mapping else dict(_flat(value, "", depth + 1))
            read |= {f"{key}.{name}{part and '.'}{part.removeprefix('.')}": each for part, each in found.items()}
    yield from (
        read.items() if len(read) <= _LISTED else [(f"{key}.code", text_digest(repr(sorted(read.items(), key=repr))))]
    )


def _mark_of(value: Mapping[Any, Any], depth: int) -> str:
    """Return one digest for all items of a mapping."""
    each = (item for name, one in value.items() for item in _flat(one, str(name), depth + 1))
    return text_digest(repr(sorted(each, key=repr)))


def _settings_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object with the names of its constructor's parameters."""
    try:
        names = inspect.signature(type(value)).parameters
    except (TypeError, ValueError):
        return {}
    if isinstance(value, re.Pattern):
        return {"pattern": value.pattern, "flags": value.flags}
    held: dict[str, Any] = {}
    for name in names:
        for attribute in (name, f"_{name}"):
            with contextlib.suppress(Exception):  # a property of the user's may raise anything
                held[name] = getattr(value, attribute)
                break
    settings = vars(value).get("settings") if hasattr(value, "__dict__") else None
    fields = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
    if isinstance(value, Interactive):
        held |= {name: _resolve_paths(each) if name in _PATHS else each for name, each in value.given.items()}
    held = with_choices(type(value), held)
    return held | {field.name: getattr(settings, field.name) for field in fields}


def check_model(before: Record, now: Record, *, allowed: bool) -> list[str]:
    """Refuse a checkpoint whose weights were trained on another model.

    Args:
        before: `model_record` of the run that wrote the checkpoint.
        now: `model_record` of this run.
        allowed: `model.allow_changed`.

    Returns:
        The differences, where they are allowed.

    Raises:
        StorageError: names each part that differs, with both values.
    """
    compared = before.keys() | now.keys()
    compared -= {"model.name", *({"reference weights"} - (before.keys() & now.keys()))}
    changes = differences(*({key: record.get(key) for key in compared} for record in (before, now)))
    if changes and before.get("model.name") != now.get("model.name"):
        changes.insert(0, f"model.name {before.get('model.name')} -> {now.get('model.name')}")
    if changes and not allowed:
        raise StorageError(
            f"The checkpoint's weights were trained on another model than this run's: {', '.join(changes)}. Resume "
            "with the model and adapter settings of the run's config.yaml; start a new run from its export, "
            "model.name=<run_dir>/hf; or accept the difference with model.allow_changed=true."
        )
    return changes


def differences(before: Record, now: Record) -> list[str]:
    """Describe changed settings: `sampling.temperature 1.0 -> 0.7`. Only callbacks of both runs are compared.

    Each entry point adds some callbacks of its own.
    """
    in_both = before.keys() & now.keys()
    compared = {key for key in before.keys() | now.keys() if key in in_both or not key.startswith("callbacks.")}
    keys = sorted(key for key in compared if _value(before, key) != _value(now, key))
    return [_describe_change(key, _value(before, key), _value(now, key)) for key in keys]


def _value(record: Record, key: str) -> Any:
    value = record.get(key)
    return list(value) if isinstance(value, tuple) else value


def _describe_change(key: str, before: Any, now: Any) -> str:
    """Describe a change; with digests only that there is one."""
    if any(isinstance(each, str) and ("#" in each or key in _DIGESTS) for each in (before, now)):
        names = [str(each).partition(" #")[0] for each in (before, now) if isinstance(each, str) and " #" in each]
        return f"{key} ({' -> '.join(dict.fromkeys(names))}) changed" if names else f"{key} changed"
    return f"{key} {_short(before)} -> {_short(now)}"


_DIGESTS = ("frozen weights", "reference weights", "tokenizer")


def _short(value: Any) -> str:
    if value is None:
        return "(not set)"
    return (
        value.removeprefix("lit_rl.")
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


CONFIG_GROUPS = {
    **{name: name for name in ("reward", "sampling", "generator", "env", "judge", "reference", "scheduler")},
    "evaluation": "eval",
}
"""Arguments that are config groups of their own; all others are settings of `algo`."""
_MODEL_SETTINGS = (
    *(
        "dtype",
        "attn_implementation",
        "freeze",
        "disable_dropout",
        "lm_head_fp32",
        "use_liger_kernel",
        "compile",
        "quantization",
    ),
    *("init_kwargs", "eos_token", "pad_token"),
)
_TRAINER_SETTINGS = (
    *("max_steps", "max_epochs", "precision", "gradient_clip_val", "gradient_clip_algorithm", "overfit_batches"),
    *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"),
)

_PLAIN_MODEL_STRINGS = ("dtype", "attn_implementation", "quantization")
"""Strings that are no secrets, and are recorded in plain text."""


def _plain_string(value: Any) -> Any:
    return Word(value) if isinstance(value, str) else value


def run_settings(algorithm: type, arguments: Mapping[str, Any], model: LanguageModel, trainer: Any = None) -> Record:
    """Return the settings that change what a run learns or logs, without the optimizer's, as a flat record.

    ``{"algo.beta": 0.1, "reward": "score #3f5a..", "sampling.temperature": 1.0}``: objects are flattened by their
    constructor arguments.

    Args:
        algorithm: The class of the method.
        arguments: The arguments of its constructor, by name.
        model: The description of the policy.
        trainer: The Trainer; None without one.
    """
    held = {name: getattr(model, name) for name in _MODEL_SETTINGS}
    given: dict[str, Any] = {"model": held | {name: _plain_string(held[name]) for name in _PLAIN_MODEL_STRINGS}}
    given["model"]["chat_template"] = getattr(model.tokenizer, "chat_template", None)
    given["model"]["lora.dropout"] = getattr(model.lora, "dropout", None)
    given["algo"] = algorithm
    for name, value in with_choices(algorithm, arguments).items():
        if name in CONFIG_GROUPS:
            given[CONFIG_GROUPS[name]] = value
        elif name not in ("optimizer", "micro_batch_size"):
            given[f"algo.{name}"] = value
    if trainer is not None:
        given["trainer"] = {name: _plain_string(getattr(trainer, name)) for name in _TRAINER_SETTINGS}
        for callback in trainer.callbacks:
            name = getattr(callback, "choice", "") or getattr(callback, "key", "") or type(callback).__name__
            held = _settings_of(callback)
            given[f"callbacks.{name}"] = {
                key: value for key, value in held.items() if isinstance(value, bool | int | float)
            }
        given["trainer"]["strategy"] = _plain_string(type(trainer.strategy).__name__)
        given["trainer"]["accelerator"] = _plain_string(trainer.strategy.root_device.type)
    # All of them by name, however many there are.
    flat = (item for name, value in given.items() for item in _flat(value, name, 1))
    return {key: value for key, value in flat if value is not None}


class _Resumed(NamedTuple):
    """A checkpoint's record of the run that wrote it."""

    optimizer: dict[str, Any] | None
    """`initial_settings` of its optimizer; None in a checkpoint without one."""
    changes: list[str]
    """Descriptions of settings that differ from this run's."""


class RunIdentity:
    """The identity of a run: its base weights, its settings and its optimizer, as they were when it began."""

    def __init__(self) -> None:
        self.model: Record = {}
        """`model_record` of the base weights; empty until the policy is loaded."""
        self.settings: Record = {}
        """`run_settings` at the start of the fit: files of functions may be edited while it runs. Empty before."""
        self.optimizer: Record = {}
        """`initial_settings` of the new optimizer; empty until it is made."""
        self._resumed: _Resumed | None = None

    def record(self, settings: Record) -> dict[str, Record]:
        """Return a checkpoint's record of the run, with its `settings`; outside a fit they are those of now."""
        found = {"model": self.model, "settings": settings}
        return found | ({"optimizer": self.optimizer} if self.optimizer else {})

    def compare(self, checkpoint: Mapping[str, Any], algorithm: str, *, resumes: bool, allow_changed: bool) -> None:
        """Refuse weights of another model, and an optimizer that cannot read the state; note other changes.

        Args:
            checkpoint: The checkpoint.
            algorithm: The class that reads it, for messages.
            resumes: Whether a fit goes on from it; otherwise its weights are read alone.
            allow_changed: `model.allow_changed`.

        Raises:
            StorageError: names the difference.
        """
        if not resumes and "run" not in checkpoint:
            return  # weights alone
        noted, changes = checkpoints.saved_by_algorithm(checkpoint, algorithm)["run"], []
        if self.model:
            beside = () if resumes else ("reference weights",)
            now = {name: value for name, value in self.model.items() if name not in beside}
            changes += check_model(noted["model"], now, allowed=allow_changed)
        if resumes:
            changes += differences(noted["settings"], self.settings)
            self._resumed = _Resumed(noted.get("optimizer"), changes)
            self._optimizer_changes()

    def note_optimizer(self, optimizer: Optimizer, schedule: LRScheduler) -> None:
        """Note a new optimizer.

        Raises:
            StorageError: it cannot read the state of the checkpoint that the run is resumed from.
        """
        self.optimizer = initial_settings(optimizer, schedule)
        self._optimizer_changes()

    def _optimizer_changes(self) -> list[str]:
        """Refuse an optimizer that cannot read the checkpoint's state. Waits until both are known, in either order."""
        if self._resumed is None or not self.optimizer:
            return []
        return check_optimizer_state(self._resumed.optimizer, self.optimizer)

    @property
    def is_resumed(self) -> bool:
        """True from a checkpoint's comparison until `apply_settings`."""
        return self._resumed is not None

    def apply_settings(
        self, optimizer: Optimizer, schedule: LRScheduler, make: Callable[[Optimizer], LRScheduler], *, step: int
    ) -> LRScheduler:
        """Continue with the optimizer's settings of this run, and report the differences from the checkpoint's run.

        Args:
            optimizer: The restored optimizer.
            schedule: The restored schedule.
            make: Function that makes this run's schedule anew.
            step: Optimizer steps of the checkpoint.

        Returns:
            The schedule to use.
        """
        resumed = self._resumed
        assert resumed is not None, "there is no checkpoint to go on from"
        schedule = continue_with_settings(optimizer, schedule, resumed.optimizer, self.optimizer, make)
        if changes := [*self._optimizer_changes(), *resumed.changes]:
            rank_zero_info(
                f"Going on from step {step} with what the checkpoint's run had otherwise: {', '.join(changes)}."
            )
        self._resumed = None
        return schedule


# ---------------------------------------------------------------------- the optimizer of a resumed run


def initial_settings(optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Return the class of a new optimizer, the settings of its groups and those of its schedule, as plain values.

    The learning rate is that before the schedule.
    """
    inner = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        groups.append(_plain(settings | {"lr": float(group.get("initial_lr", group["lr"]))}))
    state = scheduler.state_dict()
    schedule = (
        {}
        if isinstance(scheduler, LambdaLR)
        else _plain({k: v for k, v in state.items() if k not in upstream.SCHEDULER_COUNTS})
    )
    return {"class": optimizer_path(inner), "groups": groups, "schedule": schedule}


def _plain(value: Any) -> Any:
    """Return numbers, strings, and containers of them; None for everything else."""
    if isinstance(value, Mapping):
        plain = {str(key): _plain(each) for key, each in value.items() if key not in upstream.SCHEDULER_COUNTS}
        return {key: each for key, each in plain.items() if each is not None or value.get(key, 0) is None}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None


def check_optimizer_state(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Refuse an optimizer that cannot read the state of a checkpoint.

    Args:
        before: `initial_settings` of the run that wrote it; None where that run had no optimizer.
        now: `initial_settings` of this run.

    Returns:
        Descriptions of the settings that differ in this run.

    Raises:
        StorageError: the optimizer is another, or has other groups.
    """
    if before is None:
        return []
    if before["class"] != now["class"]:
        raise StorageError(
            f"The checkpoint was written with optimizer={before['class']}, and this run has {now['class']}, which "
            "cannot read the other's state. Resume with the optimizer (optimizer, optimizer.path) of the run's "
            "config.yaml, or start a new run from the exported model: model.name=<run_dir>/hf."
        )
    if len(before["groups"]) != len(now["groups"]):
        raise StorageError(
            f"The checkpoint's optimizer has {len(before['groups'])} groups of parameters, and this run's has "
            f"{len(now['groups'])}. Resume with the algorithm settings of the run's config.yaml."
        )
    several = len(now["groups"]) > 1
    changes = [
        f"optimizer.{key} {was} -> {value}" + (f" ({group.get('name', 'a group')})" if several else "")
        for old_group, group in zip(before["groups"], now["groups"], strict=True)
        for key, (was, value) in _changed_settings(old_group, group).items()
    ]
    schedule = _changed_settings(before["schedule"], now["schedule"])
    return changes + [f"scheduler.{key} {was} -> {value}" for key, (was, value) in schedule.items()]


def _changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each setting that differs; a newer torch may have further settings."""
    return {key: (before[key], value) for key, value in now.items() if key in before and before[key] != value}


def continue_with_settings(
    optimizer: Optimizer,
    scheduler: LRScheduler,
    before: Mapping[str, Any] | None,
    now: Mapping[str, Any],
    make_schedule: Callable[[Optimizer], LRScheduler],
) -> LRScheduler:
    """Apply this run's settings to a restored optimizer and schedule.

    Args:
        optimizer: The restored optimizer.
        scheduler: The restored schedule.
        before: `initial_settings` of the run that wrote the checkpoint; None where that run had no optimizer.
        now: `initial_settings` of this run.
        make_schedule: Function that makes this run's schedule anew.

    Returns:
        The schedule to use: the restored one, unless it has other settings than this run and cannot take new ones;
        then a new one that was stepped as far.
    """
    if before is None:
        return scheduler
    rates = [group["lr"] for group in now["groups"]]
    rate_changed = False
    for group, old, new in zip(optimizer.param_groups, before["groups"], now["groups"], strict=True):
        changes = _changed_settings(old, new)
        rate_changed = rate_changed or "lr" in changes
        group.update({key: tuple(v) if isinstance(v, list) else v for key, (_, v) in changes.items() if key != "lr"})
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = rates
        step = scheduler.last_epoch
        for group, rate, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["initial_lr"], group["lr"] = rate, rate * factor(step)
        upstream.set_last_rates(scheduler, [group["lr"] for group in optimizer.param_groups])
    elif rate_changed or before["schedule"] != now["schedule"]:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = group["lr"] = rate
        new_schedule = make_schedule(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is stepped before the optimizer
            for _ in range(scheduler.last_epoch):
                new_schedule.step()
        return new_schedule
    return scheduler
