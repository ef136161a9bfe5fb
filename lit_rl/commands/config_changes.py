"""How the config of a run differs from the defaults of the constructors that it names."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_rl.commands import defaults
from lit_rl.commands.defaults import Made

_OF_OTHER_COMMANDS = (
    "plan", "reward_test", "data_check", "env_check", "chat", "serve", "doctor", "transcripts", "losses", "rollout",
    "export", "trust_run", "allow_targets", "task", "ckpt_path", "run_dir",
)  # fmt: skip
_WHERE_IT_WRITES = ("logger", "callbacks.checkpoint", "callbacks.export.folder")
_SAID_TWICE = ("model", "sampling", "generator", "reference", "optimizer", "scheduler", "reward", "judge", "env")
"""Parts of `algo` that stand at the top level, too."""


def changes(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return keys in their order, each with its value and the default that it differs from.

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
    """Return keys, as `changes_from_defaults` names them, with the value that the model's preset recommends, each with
    the preset's name.

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
    """Return the commands in `summary.json`: the one that began the run, and those that resumed it."""
    went_on = summary.get("went_on")
    found = [summary.get("command"), *(went_on if isinstance(went_on, list) else [])]
    return [each for each in found if isinstance(each, str) and each]


def typed(commands: Sequence[str]) -> set[str]:
    """Return the keys in these commands: of `seed=1`, `+trainer.x=2` and `--trainer.x 2` the names. A command that
    cannot be read has none."""
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
    """Return keys whose values differ in the configs of two runs, with both; None where a config has no such key."""
    return [each for each in _apart("", _once(first), _once(second)) if not each[0].startswith(_WHERE_IT_WRITES)]


def _apart(key: str, one: Any, two: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield differences; for parts with different targets, the targets and the keys that both have."""
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
    """Return the config without keys of other commands, and without those that `algo` repeats from the top level."""
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
    usual = {**defaults.of(target), **known}
    if target is not None and isinstance(default, Made) and default.name != str(target).rpartition(".")[2]:
        yield f"{key}._target_", target, _said(default)
    for name, each in value.items():
        if name not in ("_target_", "_partial_", "seed"):
            yield from _differing(f"{key}.{name}", each, usual.get(name), {})


def _plain(value: Any) -> Any:
    """Return a form that is equal for equal meanings: sequences as lists, and one value for nothing."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value] or None
    if isinstance(value, Mapping):
        return dict(value) or None
    return None if isinstance(value, Made) and value.function else value


def _said(default: Any) -> Any:
    return default.name if isinstance(default, Made) else default


def _shipped_trainer() -> dict[str, Any]:
    """Return the settings of the Trainer in the shipped config."""
    found = yaml.safe_load((_shipped() / "trainer" / "default.yaml").read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name != "defaults"}


def _shipped() -> Path:
    from lit_rl import conf

    return Path(next(iter(conf.__path__)))
