"""Differences between a run's config and the defaults of the constructors that it names, or the config of another run.

Defaults come from `defaults.yaml`, so reading them loads no PyTorch: `scripts/config_reference.py` writes it with what
`look_up_defaults` finds. What the file lacks, or has of another version of Lightning, is looked up in the constructor.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_rl.core.errors import constructors_of

# ---------------------------------------------------------------------- differences


_KEYS_OF_OTHER_COMMANDS = (
    "plan", "reward_test", "data_check", "env_check", "chat", "serve", "doctor", "transcripts", "losses", "rollout",
    "export", "trust_run", "allow_targets", "task", "ckpt_path", "run_dir",
)  # fmt: skip

_OUTPUT_KEYS = ("logger", "callbacks.checkpoint", "callbacks.export.folder")

_REPEATED_IN_ALGO = ("model", "sampling", "generator", "reference", "optimizer", "scheduler", "reward", "judge", "env")
"""Parts of `algo` that stand at the top level, too."""


def changes_from_defaults(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return keys in their order, each with its value and the default that it differs from.

    A default is the constructor's; of `trainer`, the shipped config's where that sets one; None where there is none.
    Keys of other commands are left out, and those about the place of a run's files.

    Args:
        config: The config as a run writes it to config.yaml.
    """
    shipped = yaml.safe_load((_conf_folder() / "trainer" / "default.yaml").read_text(encoding="utf-8"))
    found: list[tuple[str, Any, Any]] = []
    for key, value in _without_repeats(config).items():
        known = {name: each for name, each in shipped.items() if name != "defaults"} if key == "trainer" else {}
        found += _changes_in(key, value, 0 if key == "seed" else None, known)
    return [change for change in found if not change[0].startswith(_OUTPUT_KEYS)]


def _changes_in(key: str, value: Any, default: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(value, Mapping):
        if _comparable(value) != _comparable(default):
            yield key, value, _default_name(default)
        return
    target = value.get("_target_")
    usual = {**defaults_of(target), **known}
    if target is not None and isinstance(default, NamedDefault) and default.name != str(target).rpartition(".")[2]:
        yield f"{key}._target_", target, _default_name(default)
    for name, each in value.items():
        if name not in ("_target_", "_partial_", "seed"):
            yield from _changes_in(f"{key}.{name}", each, usual.get(name), {})


def changes_between(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return keys whose values differ in the configs of two runs, with both; None where a config has no such key."""
    return [
        each
        for each in _differences("", _without_repeats(first), _without_repeats(second))
        if not each[0].startswith(_OUTPUT_KEYS)
    ]


def _differences(key: str, one: Any, two: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield differences; for parts with different targets, the targets and the keys that both have."""
    if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
        if _comparable(one) != _comparable(two):
            yield key, _target_of(one), _target_of(two)
        return
    alike = one.get("_target_") == two.get("_target_")
    names = dict.fromkeys([*one, *two]) if alike else [name for name in one if name in two]
    for name in names:
        if name != "_partial_":
            yield from _differences(f"{key}.{name}" if key else str(name), one.get(name), two.get(name))


def _target_of(value: Any) -> Any:
    return value["_target_"] if isinstance(value, Mapping) and "_target_" in value else value


def _without_repeats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without keys of other commands, and without those that `algo` repeats from the top level."""
    found = {key: value for key, value in config.items() if key not in _KEYS_OF_OTHER_COMMANDS}
    algo = found.get("algo")
    if isinstance(algo, Mapping):
        repeated = {name for name in _REPEATED_IN_ALGO if name in algo and algo[name] == config.get(name)}
        if algo.get("evaluation") == config.get("eval"):
            repeated.add("evaluation")
        found["algo"] = {name: each for name, each in algo.items() if name not in repeated}
    return found


def _comparable(value: Any) -> Any:
    """Return a form that is equal for equal meanings: sequences as lists, and one value for nothing."""
    if isinstance(value, (list, tuple)):
        return [_comparable(each) for each in value] or None
    if isinstance(value, Mapping):
        return dict(value) or None
    return None if isinstance(value, NamedDefault) and value.function else value


def _default_name(default: Any) -> Any:
    return default.name if isinstance(default, NamedDefault) else default


# ---------------------------------------------------------------------- the model's preset, and typed keys


def set_by_model(config: Mapping[str, Any]) -> dict[str, str]:
    """Return keys, as `changes_from_defaults` names them, with the value that the model's preset recommends, each with
    the preset's name.

    They need not have been typed: `model=tiny` alone sets a learning rate.
    """
    model = config.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    found: dict[str, str] = {}
    for preset in sorted((_conf_folder() / "model").glob("*.yaml")):
        settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
        preset_model = settings.pop("model", None)
        if isinstance(preset_model, Mapping) and preset_model.get("name") == name:
            found |= {key: preset.stem for key, value in _leaves(settings) if _value_at(config, key) == value}
    return found


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif name != "defaults":
            yield f"{above}{name}", value


def _value_at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def typed_commands(summary: Mapping[str, Any]) -> list[str]:
    """Return the commands in `summary.json`: the one that began the run, and those that resumed it."""
    went_on = summary.get("went_on")
    found = [summary.get("command"), *(went_on if isinstance(went_on, list) else [])]
    return [each for each in found if isinstance(each, str) and each]


def keys_in_commands(commands: Sequence[str]) -> set[str]:
    """Return the keys in these commands: of `seed=1`, `+trainer.x=2` and `--trainer.x 2` the names. A command that
    cannot be read has none."""
    words: list[str] = []
    for command in commands:
        with contextlib.suppress(ValueError):  # quotes that do not end
            words += shlex.split(command)
    return {word.lstrip("+-").partition("=")[0] for word in words if "=" in word or word.startswith("--")}


def _conf_folder() -> Path:
    from lit_rl import conf

    return Path(next(iter(conf.__path__)))


# ---------------------------------------------------------------------- defaults of constructors


KNOWN_PACKAGES = ("lit_rl.", "lightning.")
"""Packages whose constructors are looked up. A run's config may name others; reading it imports none of them."""

DEFAULTS_FILE = Path(__file__).with_name("defaults.yaml")

_FUNCTION, _OBJECT = "_function_", "_object_"


@dataclass(frozen=True)
class NamedDefault:
    """A default that a config cannot hold as a plain value."""

    name: str
    """Name of the function, also where some of its arguments are bound; name of the object's class; else its text."""
    function: bool
    """True for a function. A config that has null there means it."""


def defaults_of(target: Any) -> dict[str, Any]:
    """Return parameters and their defaults, plain or `NamedDefault`, those of parents too where keywords are passed
    on.

    Args:
        target: The path of a constructor or a function. Anything outside `KNOWN_PACKAGES` has no known defaults.
    """
    if not isinstance(target, str) or not target.startswith(KNOWN_PACKAGES):
        return {}
    if (stored := _stored_defaults().get(target)) is None or _stored_defaults()["_lightning_"] != lightning_version():
        return look_up_defaults(target)
    return {name: _from_stored(value) for name, value in stored.items()}


def look_up_defaults(target: str) -> dict[str, Any]:
    """Return the same from the constructor or function itself, which imports it."""
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:  # an optional package is missing, or a version had it elsewhere
        found = None
    if found is None:
        return {}
    defaults: dict[str, Any] = {}
    for function in constructors_of(found) if inspect.isclass(found) else [found]:
        with contextlib.suppress(TypeError, ValueError):  # without a signature
            for parameter in inspect.signature(function).parameters.values():
                if parameter.default is not parameter.empty:
                    defaults.setdefault(parameter.name, parameter.default)
    return {name: _as_default(default) for name, default in defaults.items()}


def plain_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults in the form of the file."""
    return {
        name: {_FUNCTION if each.function else _OBJECT: each.name} if isinstance(each, NamedDefault) else each
        for name, each in defaults.items()
    }


def lightning_version() -> str:
    """Return the first two numbers of Lightning's version."""
    return ".".join(importlib.metadata.version("lightning").split(".")[:2])


@functools.cache
def _stored_defaults() -> Mapping[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(DEFAULTS_FILE.read_text(encoding="utf-8"), Loader=loader)


def _from_stored(value: Any) -> Any:
    if isinstance(value, dict) and (kind := next(iter(value), None)) in (_FUNCTION, _OBJECT):
        return NamedDefault(value[kind], kind == _FUNCTION)
    return value


def _as_default(default: Any) -> Any:
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":  # of a dataclass: it begins empty
        return {}
    if isinstance(default, (list, tuple)):
        return [_as_default(each) for each in default]
    if default is None or isinstance(default, (bool, int, float, str, dict)):
        return default
    inner = getattr(default, "func", default)
    if callable(default):
        return NamedDefault(getattr(inner, "__name__", type(inner).__name__), function=True)
    ours = type(default).__module__.startswith("lit_rl.")
    return NamedDefault(type(default).__name__ if ours else str(default), function=False)
