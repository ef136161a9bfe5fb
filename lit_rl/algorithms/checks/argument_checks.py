"""Checks of the arguments of constructors, Trainers and factories, with hints for people who know other libraries.

Each message names the argument, its value, what is allowed, and what to write.
"""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import lightning as L
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch.optim import Optimizer

from lit_rl.algorithms.checks.data_and_trainer import MODULES, check_example_data
from lit_rl.core import other_names
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.data.kinds import Kind
from lit_rl.environments.environment_base import Interactive
from lit_rl.models.language_model import LanguageModel
from lit_rl.rewards.weighted_rewards import Rewards
from lit_rl.settings.base import config_values


def try_settings(key: str, probe: Callable[[], Any]) -> None:
    """Call a term once, so that it refuses its settings now.

    Raises:
        ConfigError: names the key under `algo`.
    """
    try:
        probe()
    except ValueError as error:
        raise ConfigError(f"algo.{key}: {error}") from error


_NEEDED = {
    "model": "model=...: a name, folder or hub id, or lit_rl.LanguageModel(name)",
    "reward": other_names.REWARD,
}
"""Values to pass for arguments without a default."""


class MissingArgument(ConfigError):
    """The error for a missing argument that has no default."""


class CheckedArguments:
    """The base of classes that report missing arguments by a `ConfigError` of their own.

    The check is in `__new__`, so that the signature of `__init__`, which type checkers, Hydra's schemas and
    LightningCLI read, keeps its arguments without defaults.
    """

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        known = inspect.signature(cls).parameters
        by_name = config_values(keywords.get("config")) | dict(zip(known, arguments, strict=False)) | keywords
        _check_nothing_missing(cls, by_name)
        check_keywords(cls, keywords, cls)
        values: dict[str, Any] = {}
        for base in cls.__mro__:
            if "__init__" in vars(base) and issubclass(base, CheckedArguments):
                for parameter in [*inspect.signature(base.__init__).parameters.values()][1:]:
                    if parameter.kind not in _VARIADIC and parameter.name not in ("model", "tokenizer", "config"):
                        values.setdefault(parameter.name, by_name.get(parameter.name, parameter.default))
        made = super().__new__(cls)
        object.__setattr__(made, "_arguments", values)
        return made

    _arguments: dict[str, Any]
    """Arguments of the constructor by name, with defaults of every base class; without `model` and `tokenizer`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to an empty object and the state, so that copies and pickles pass no arguments to `__new__`."""
        _, _, *state = super().__reduce_ex__(protocol)
        return object.__new__, (type(self),), *state


def _check_nothing_missing(algorithm: type, arguments: Mapping[str, Any]) -> None:
    known = inspect.signature(algorithm).parameters.values()
    needed = [each.name for each in known if each.default is each.empty and each.kind not in _VARIADIC]
    if missing := [name for name in needed if name not in arguments]:
        foreign = {name: value for name, value in arguments.items() if name in other_names.column("algorithm")}
        check_keywords(algorithm, foreign, algorithm)
        examples = ", and ".join(_NEEDED.get(name, f"{name}=...") for name in missing)
        name = algorithm.__name__
        raise MissingArgument(f"{name} needs {' and '.join(missing)}. Pass {examples}. help({name}) says more.")


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_reward(algorithm: type, model: Any, value: Any) -> None:
    """Refuse a reward that is text, or that is swapped with the model.

    Args:
        algorithm: The class to construct.
        model: Its argument `model`.
        value: Its argument `check_reward`.

    Raises:
        ConfigError: says what to write.
    """
    name = algorithm.__name__
    if isinstance(value, (str, LanguageModel)) and (inspect.isroutine(model) or isinstance(model, (partial, Rewards))):
        raise ConfigError(f"The arguments are swapped: the model comes first, {name}(model, reward).")
    if isinstance(value, str):
        raise ConfigError(
            f"reward={value!r:.60} is a string. Pass the function itself, such as reward=lit_rl.exact_match; "
            "lit_rl.rewards.from_paths loads one from a path."
        )


def check_keywords(algorithm: type, keywords: Mapping[str, Any], taken: type) -> None:
    """Refuse keywords that no constructor of an algorithm takes.

    Args:
        algorithm: The class to construct.
        keywords: The keywords to pass on.
        taken: The class whose constructor, with its bases', gets them.

    Raises:
        ConfigError: names the first of them, and where it belongs or what is near.
    """
    kind: Kind | None = getattr(algorithm, "learns_from", None)
    facts = {"length": "max_length", "batch": "batch_size"} if kind else {}
    settings = getattr(algorithm.__init__, "settings", None)
    facts |= {"config": settings.__name__} if settings else {}
    facts = other_names.ROLLOUT | facts | {"module": _data_module_name(kind)}
    other_names.refuse_unknown_keywords(algorithm, keywords, taken, "algorithm", facts)


def _data_module_name(learns_from: Kind | None) -> str:
    """Return the class name of the data module for a kind of rows."""
    return "RolloutDataModule" if learns_from is None else MODULES[learns_from].partition("(")[0]


def check_data_module(algorithm: type, value: Any) -> None:
    """Refuse rows, a loader, or a data module of another kind in place of the data module, before rows are counted.

    Args:
        algorithm: The class that is trained.
        value: The Trainer's `datamodule`.

    Raises:
        ConfigError: says what to pass.
    """
    kind: Kind | None = getattr(algorithm, "learns_from", None)
    if isinstance(value, L.LightningDataModule) and kind is not None:
        check_example_data(value, kind, algorithm.__name__)
    if value is None or isinstance(value, L.LightningDataModule):
        return
    passed = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    raise ConfigError(
        f"datamodule is {passed}, which is no data module. Pass datamodule=lit_rl.{_data_module_name(kind)}(rows)."
    )


def check_trainer(name: str, value: L.Trainer, *, compiled: bool) -> None:
    """Refuse features of Lightning that do not work with these modules, before the run begins.

    Args:
        name: Name of the module's class.
        value: The Trainer.
        compiled: Whether `torch.compile` was called on the module.

    Raises:
        ConfigError: says what to do in its place.
    """
    if compiled:
        raise ConfigError(
            f"torch.compile({name}(...)) would compile rollouts, rewards and data again in each step. Pass the module "
            f"itself to the Trainer: {name}(...)."
        )
    for callback in value.callbacks:  # pyright: ignore
        if isinstance(callback, LearningRateFinder):
            raise ConfigError(
                f"Tuner.lr_find cannot tune {name}: on policy the loss is about zero at any learning rate, so its "
                "curve shows nothing. Compare the rewards of a few runs instead, with AdamW(lr=1e-5) and others, or "
                "by lit-rl train -m optimizer.lr=1e-6,1e-5,1e-4."
            )
        if isinstance(callback, BatchSizeFinder):
            raise ConfigError(
                f"Tuner.scale_batch_size cannot tune {name}, which has no batch_size. Set "
                f"{name}(micro_batch_size='auto'): it takes as many rows at once as fit into memory."
            )


def refuse_damaged_checkpoints(strategy: Any) -> None:
    """Patch a strategy to refuse a damaged checkpoint with a clear message: the module learns the path too late."""
    if "load_checkpoint" not in vars(strategy):
        strategy.load_checkpoint = partial(_load_if_whole, strategy.load_checkpoint)


def _load_if_whole(load: Any, checkpoint_path: Any, *args: Any, **keywords: Any) -> Any:
    file = Path(checkpoint_path) if isinstance(checkpoint_path, str | Path) else None
    if file is not None and file.is_file() and not zipfile.is_zipfile(file):
        size = file.stat().st_size
        what = f"its {size} bytes are cut off, or are another kind of file" if size else "it is empty"
        raise StorageError(
            f"ckpt_path={str(file)!r} is no checkpoint: {what}. Resume from an older one, or start anew without it."
        )
    return load(checkpoint_path, *args, **keywords)


def check_environment(value: Any) -> None:
    """Refuse an `env` that is no interactive environment.

    Raises:
        ConfigError: names what to write.
    """
    if value is not None and not isinstance(value, Interactive):
        raise ConfigError(
            f"env is {value!r:.60}, a {type(value).__name__}. Write env=lit_rl.FunctionTools(functions), "
            "CustomEnvironment(factory) or RolloutFunction(function)."
        )


def check_reference(value: Any) -> None:
    """Refuse a value that is no reference.

    Raises:
        ConfigError: names what is allowed.
    """
    if not hasattr(value, "scoring") or isinstance(value, type):
        raise ConfigError(
            f"reference is {value!r:.60}. Allowed is an object of lit_rl.models.references, such as FrozenCopy() "
            "or AdapterBase(), or None, which chooses by the policy."
        )


def check_optimizer_factory(value: Any) -> None:
    """Refuse a value that cannot make an optimizer.

    Raises:
        ConfigError: names what is allowed.
    """
    if isinstance(value, Optimizer):
        why = f"is a {type(value).__name__} that has weights already, which are not the run's"
    elif not callable(value):
        why = f"is {value!r:.60}"
    else:
        return
    raise ConfigError(
        f"optimizer {why}. Allowed is a function that makes an optimizer from parameter groups: lit_rl.AdamW(lr=1e-5), "
        "or functools.partial(torch.optim.SGD, lr=1e-3)."
    )


def check_made_optimizer(value: Any) -> None:
    """Refuse the result of an optimizer factory that is no optimizer.

    Raises:
        ConfigError: names its type.
    """
    if not isinstance(value, Optimizer):
        raise ConfigError(
            f"optimizer returned a {type(value).__name__}, expected a torch.optim.Optimizer. Pass a function from "
            "parameter groups to an optimizer, such as lit_rl.AdamW(lr=1e-5)."
        )
