"""How the config of a run differs from the defaults of the constructors that it names."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

OURS = ("lit_rl.", "lightning.")
"""Packages whose constructors are looked at. A run's config may name others; reading it imports none of them."""

_OF_OTHER_COMMANDS = (
    "plan", "reward_test", "data_check", "env_check", "chat", "serve", "doctor", "transcripts", "losses", "rollout",
    "export", "trust_run", "allow_targets", "task", "ckpt_path", "run_dir",
)  # fmt: skip
_WHERE_IT_WRITES = ("logger", "callbacks.checkpoint", "callbacks.export.folder")
_SAID_TWICE = ("model", "sampling", "generator", "reference", "optimizer", "scheduler", "reward", "judge", "env")
"""Parts of `algo` that stand at the top, too."""


def changes(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys in their order, each with its value and the default that it departs from.

    A default is the constructor's; of `trainer`, what the shipped config says where it says something. What has none
    is told with None. Keys of other commands are left out, and those that say where a run
    writes.

    Args:
        config: As a run writes it to config.yaml.
    """
    found: list[tuple[str, Any, Any]] = []
    for key, value in _once(config).items():
        known = _shipped_trainer() if key == "trainer" else {}
        found += _differing(key, value, 0 if key == "seed" else None, known)
    return [change for change in found if not change[0].startswith(_WHERE_IT_WRITES)]


def set_by_model(config: Mapping[str, Any]) -> dict[str, str]:
    """Keys, as `changes` names them, that have the value which the preset of the model recommends, and its name.

    Nobody needs to have typed them: `model=tiny` alone sets a learning rate.
    """
    model = config.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    found: dict[str, str] = {}
    for preset in sorted((_shipped() / "model").glob("*.yaml")):
        said = yaml.safe_load(preset.read_text(encoding="utf-8"))
        of_model = said.pop("model", None)
        if isinstance(of_model, Mapping) and of_model.get("name") == name:
            found |= {key: preset.stem for key, value in _leaves(said) if _at(config, key) == value}
    return found


def commands_of(summary: Mapping[str, Any]) -> list[str]:
    """What was typed, as `summary.json` has it: what began the run, and what went on with it."""
    went_on = summary.get("went_on")
    found = [summary.get("command"), *(went_on if isinstance(went_on, list) else [])]
    return [each for each in found if isinstance(each, str) and each]


def typed(commands: Sequence[str]) -> set[str]:
    """The keys in these: of `seed=1`, `+trainer.x=2` and `--trainer.x 2` the names. A command that cannot be read has
    none."""
    words: list[str] = []
    for command in commands:
        with contextlib.suppress(ValueError):  # quotes that do not end
            words += shlex.split(command)
    return {word.lstrip("+-").partition("=")[0] for word in words if "=" in word or word.startswith("--")}


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif name != "defaults":
            yield f"{above}{name}", value


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def between(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ in the configs of two runs, with both; None where a config has no such key."""
    return [each for each in _apart("", _once(first), _once(second)) if not each[0].startswith(_WHERE_IT_WRITES)]


def _apart(key: str, one: Any, two: Any) -> Iterator[tuple[str, Any, Any]]:
    """Of parts that are made otherwise: what makes them, and what both have."""
    if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
        if _plain(one) != _plain(two):
            yield key, _made_by(one), _made_by(two)
        return
    alike = one.get("_target_") == two.get("_target_")
    names = dict.fromkeys([*one, *two]) if alike else [name for name in one if name in two]
    for name in names:
        if name != "_partial_":
            yield from _apart(f"{key}.{name}" if key else str(name), one.get(name), two.get(name))


def _made_by(value: Any) -> Any:
    return value["_target_"] if isinstance(value, Mapping) and "_target_" in value else value


def _once(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without keys of other commands, and without what `algo` repeats of the top."""
    found = {key: value for key, value in config.items() if key not in _OF_OTHER_COMMANDS}
    algo = found.get("algo")
    if isinstance(algo, Mapping):
        repeated = {name for name in _SAID_TWICE if name in algo and algo[name] == config.get(name)}
        if algo.get("evaluation") == config.get("eval"):
            repeated.add("evaluation")
        found["algo"] = {name: each for name, each in algo.items() if name not in repeated}
    return found


def _differing(key: str, value: Any, default: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(value, Mapping):
        if _plain(value) != _plain(default):
            yield key, value, _said(default)
        return
    target = value.get("_target_")
    defaults = {**dict(_defaults(target)), **known}
    if target is not None and default is not None and _name(default) not in (None, str(target).rpartition(".")[2]):
        yield f"{key}._target_", target, _said(default)
    for name, each in value.items():
        if name not in ("_target_", "_partial_", "seed"):
            yield from _differing(f"{key}.{name}", each, defaults.get(name), {})


def _plain(value: Any) -> Any:
    """Equal for what means the same in a config: sequences as lists, and nothing, however it is written."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value] or None
    if isinstance(value, Mapping):
        return dict(value) or None
    return None if callable(value) else value


def _said(default: Any) -> Any:
    return _name(default) if callable(default) or _name(default) else default


def _name(default: Any) -> str | None:
    """Of a function, a `functools.partial` of one, or an object of ours; None for plain values."""
    inner = getattr(default, "func", default)
    if inspect.isroutine(inner) or isinstance(inner, type):
        return inner.__name__
    return type(inner).__name__ if type(inner).__module__.startswith("lit_rl.") else None


def _defaults(target: Any) -> Iterator[tuple[str, Any]]:
    """Of a constructor or a function of ours, those of parents too where it hands keywords on."""
    found = _load(target) if isinstance(target, str) and target.startswith(OURS) else None
    if found is None:
        return
    owners = (
        [vars(cls)["__init__"] for cls in found.__mro__ if "__init__" in vars(cls)]
        if inspect.isclass(found)
        else [found]
    )
    given: dict[str, Any] = {}
    for function in owners:
        signature = _signature(function)
        for name, parameter in signature.items():
            if parameter.default is not parameter.empty:
                given.setdefault(name, parameter.default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values()):
            break
    yield from given.items()


def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _load(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:  # an optional package is missing, or a version had it elsewhere
        return None


def _shipped_trainer() -> dict[str, Any]:
    """What the shipped config sets of the Trainer."""
    found = yaml.safe_load((_shipped() / "trainer" / "default.yaml").read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name != "defaults"}


def _shipped() -> Path:
    from lit_rl import conf

    return Path(next(iter(conf.__path__)))
