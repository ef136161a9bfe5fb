"""Arguments of LightningCLI that jsonargparse alone would misread: the data module that `--data.*` belongs to, and
`null`.

`null` is read as such at every depth, and refused where a constructor has no use for it: jsonargparse lets it pass for
any argument, and hands it on below two classes as the text ``None``.
"""

from __future__ import annotations

import collections.abc
import contextlib
import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import lightning as L
import yaml
from jsonargparse import Namespace, get_loader, set_loader

from lit_rl import algorithms
from lit_rl.cli.config_files import check_size
from lit_rl.cli.schemas import parameters
from lit_rl.core.errors import ConfigError
from lit_rl.data.example_module import PreferenceDataModule, StepwiseDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule

DATA_MODULES: dict[str, type[L.LightningDataModule]] = {
    "texts": SupervisedDataModule,
    "pairs": PreferenceDataModule,
    "triples": PreferenceDataModule,
    "verdicts": PreferenceDataModule,
    "stepwise": StepwiseDataModule,
}
"""Data modules by the kind that an algorithm learns from; `RolloutDataModule` for all others."""


def data_module_of(arguments: Sequence[str]) -> type[L.LightningDataModule]:
    """Return the data module whose settings are the keys of `data`: that of the kind which the algorithm learns from.

    The algorithm is told from the arguments and from the config files that they name, the last word counting.
    """
    named, before = "", ""
    for argument in arguments:
        key, has_value, value = argument.partition("=") if argument.startswith("-") else (before, "=", argument)
        before = "" if has_value else argument
        if has_value and key in ("--config", "-c"):
            named = _model_in(Path(value)) or named
        elif has_value and key in ("--model", "--model.class_path"):
            named = value
    found = getattr(algorithms, named.rpartition(".")[2], None)
    return DATA_MODULES.get(getattr(found, "learns_from", ""), RolloutDataModule)


def _model_in(path: Path) -> str:
    """Return the class that a config file gives `model`; empty where it gives none, or cannot be read: the parser
    reports that."""
    check_size(path)
    try:
        model = (yaml.safe_load(path.read_text()) or {}).get("model")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return ""
    return str(model.get("class_path", "") if isinstance(model, dict) else model or "")


@contextlib.contextmanager
def read_at_every_depth() -> Iterator[None]:
    """Read ``None`` as null in this block, as Python's users write it, and as jsonargparse writes it to itself."""
    read = get_loader("yaml")
    set_loader("yaml", lambda text: None if text == "None" else read(text), (yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", read, (yaml.YAMLError,))


def check_nulls(key: str, spec: Namespace, target: Any = None) -> None:
    """Refuse a null that a constructor does not take.

    Args:
        key: Key of the object in the config.
        spec: The parsed spec: `class_path` and `init_args`, or the arguments alone.
        target: Target for arguments alone.

    Raises:
        ConfigError: names the key, what is allowed, and the default.
    """
    arguments = spec
    if target is None:
        target, arguments = _import_class(spec["class_path"]), spec.get("init_args") or Namespace()
    known = {parameter.name: (parameter, hint) for parameter, hint in parameters(target)}
    for name, value in vars(arguments).items():
        if isinstance(value, Namespace) and "class_path" in value:
            check_nulls(f"{key}.{name}", value)
        elif isinstance(value, list):
            for i, each in enumerate(value):
                if isinstance(each, Namespace) and "class_path" in each:
                    check_nulls(f"{key}.{name}[{i}]", each)
        elif value is None and name in known:
            _check_null(f"{key}.{name}", *known[name])


def _check_null(key: str, parameter: inspect.Parameter, hint: Any) -> None:
    if parameter.default is None or _takes_null(hint):
        return
    default = "" if parameter.default is parameter.empty else f" Leave it out for its default, {parameter.default!r}."
    raise ConfigError(f"{key}=null: allowed is {_type_text(hint)}.{default}")


def _takes_null(hint: Any) -> bool:
    """Tell whether null is allowed, also where a function may stand: its receiver checks it."""
    kinds = get_args(hint) or (hint,)
    return any(kind in (Any, NoneType) or (get_origin(kind) or kind) is collections.abc.Callable for kind in kinds)


def _type_text(hint: Any) -> str:
    return " or ".join(getattr(kind, "__name__", str(kind)) for kind in get_args(hint) or (hint,))


def _import_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
