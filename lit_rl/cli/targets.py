"""The list of paths that `_target_` may name; everything else is refused. Imports nothing but named paths."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_rl.core.errors import BackendError, ConfigError, did_you_mean

ALLOWED = ("lit_rl.", "lightning.", "torch.optim.")
"""Prefixes that `_target_` may have. `allow_targets=[my_package]` adds the user's own, by their own hand."""

_CLASSES_ONLY = ("lightning.", "torch.", "lit_rl.")
_FUNCTIONS = ("lit_rl.ops.", "lit_rl.rewards.", "lit_rl.data.recipes.", "lit_rl.algorithms.terms.groups.")
"""Prefixes under which a config may name functions too."""

_BUILD_THEMSELVES = ("lightning.pytorch.cli.", "lit_rl.cli.")


def find_here(packages: Iterable[str]) -> None:
    """Let packages that the user allows lie in the working directory, however Python was started. Last in line, so
    that it hides no package that is installed."""
    here = Path.cwd()
    first = {name.partition(".")[0] for name in packages}
    if str(here) not in sys.path and any((here / name).is_dir() or (here / f"{name}.py").is_file() for name in first):
        sys.path.append(str(here))


def targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every dotted path that building the tree would import, with its key."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from targets(item, f"{key}[{i}]")
    elif isinstance(node, dict):
        target = node.get("_target_")
        if target == "hydra.utils.get_method":
            yield f"{key}.path", str(node.get("path"))
        elif target is not None:
            yield f"{key}._target_", str(target)
        for name, value in node.items():
            yield from targets(value, f"{key}.{name}" if key else str(name))


def check_target(key: str, target: str, allowed: Sequence[str]) -> str:
    """Refuse a path outside the list: a config is read from files, and a path can be any function of any package.

    Returns: the path of what it names, by the module that defines it.
    """
    if not target.startswith(tuple(allowed)):
        raise ConfigError(
            f"{key}={target!r} is not on the list of what a config may build ({', '.join(f'{a}*' for a in allowed)}). "
            f"For a class of your own, allow its package on the command line: allow_targets=[{target.split('.')[0]}]. "
            "A reward function needs no target: reward=function reward.fn=package.module:name."
        )
    found, home = _find(key, target)
    # A module's imports are its attributes too: `lit_rl.x.os.system` begins as allowed and is not.
    if not f"{home}.".startswith(tuple(allowed)):
        raise ConfigError(f"{key}={target!r} leads into {home}, which is not on the list of what a config may build.")
    if target.startswith(_CLASSES_ONLY) and not target.startswith(_FUNCTIONS) and not isinstance(found, type):
        raise ConfigError(f"{key}={target!r} is no class; of {target.split('.')[0]} a config may build classes only.")
    if f"{home}.".startswith(_BUILD_THEMSELVES):
        raise ConfigError(f"{key}={target!r} builds whatever its own arguments name, and no list would hold that.")
    return f"{home}.{getattr(found, '__qualname__', '')}"


def _find(key: str, target: str) -> tuple[Any, str]:
    """Return the object that a path names, and the module that defines it."""
    parts = target.split(".")
    found, rest = _module(key, parts)
    for name in rest:
        if not hasattr(found, name):
            near = did_you_mean(name, [public for public in dir(found) if not public.startswith("_")])
            raise ConfigError(f"{key}={target!r} does not exist.{near}")
        found = getattr(found, name)
    return found, getattr(found, "__module__", None) or getattr(found, "__name__", type(found).__module__)


def _module(key: str, parts: list[str]) -> tuple[Any, list[str]]:
    """Return the longest beginning of a path that is a module, and the rest."""
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            return importlib.import_module(name), parts[count:]
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # the module is there and lacks another one
                raise BackendError(f"{key}={'.'.join(parts)} needs a package that is not installed: {error}") from error
    raise ConfigError(
        f"{key}={'.'.join(parts)}: there is no module {parts[0]!r}. It may be installed, on PYTHONPATH, or here: "
        f"{parts[0]}.py in {Path.cwd()}, once you allow it with allow_targets=[{parts[0]}]."
    )
