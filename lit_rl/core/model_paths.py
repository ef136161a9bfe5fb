"""Names in a config, resolved and checked without loading: models by folder or hub id, functions by path."""

from __future__ import annotations

import ast
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from lit_rl.core.errors import BackendError, ConfigError, did_you_mean
from lit_rl.core.machine import go_offline_if_unreachable

FUNCTION_FORM = "allowed are 'package.module:name' and './file.py:name'"

MODEL_FILES = ("config.json", "adapter_config.json")
"""Files of which every folder with a model or an adapter has at least one."""

_MODELS = Path(sys.modules["lit_rl"].__path__[0]) / "models"

TINY = _MODELS / "tiny"
"""The policy that comes with the package: small enough to learn on a laptop CPU."""

DIGITS = _MODELS / "digits"
"""The one over images: it reads handwritten digits, a third of them right when it samples."""

SHIPPED = {"tiny": TINY, "digits": DIGITS}
"""Policies that come with the package, by their names."""

NOT_CACHED = (
    "is not in the local cache, and the hub is not asked (HF_HUB_OFFLINE is set, or it cannot be reached). Where there "
    "is a network, run `hf download {name}` and copy the cache; or give a folder."
)
"""The message for a model of the hub of which nothing is cached."""

_PAGE = re.compile(r"https?://[^/]+/([^/?#]+/[^/?#]+)")
"""A model's page on the hub."""

_LOCAL = re.compile(r"[./~\\]|[A-Za-z]:\\")
"""The beginning of a name that can only mean a folder."""

_OTHER_CACHES = ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE")
"""Variables with which older versions of transformers read another cache."""

_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_file(path: Path, key: str) -> None:
    """Refuse a path that is no Python file.

    Raises:
        ConfigError: names the Python files that are there.
    """
    if not path.is_file():
        here = sorted(file.name for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        found = f"Python files there: {', '.join(here) or 'none'}." if path.parent.is_dir() else "No such folder."
        raise ConfigError(f"{key}: there is no file {path}. {found}{did_you_mean(path.name, here)}")
    if path.suffix != ".py":
        raise ConfigError(f"{key}: {path} is not a Python file: {FUNCTION_FORM}.")


def missing_function_error(path: str, key: str, name: str, public: Sequence[str]) -> ConfigError:
    """Return the error for a file or module without that name."""
    there = ", ".join(public) or "none"
    return ConfigError(f"{key}={path!r}: there is no {name!r}. There are: {there}.{did_you_mean(name, public)}")


def check_function(path: str, key: str) -> None:
    """Refuse `./file.py:name` if the file is missing, or its text can have no such name; nothing of it is run.

    Modules are not searched for, and a file that may define names dynamically is assumed to have this one.

    Raises:
        ConfigError: the same as when the file is loaded.
    """
    source, colon, name = path.rpartition(":")
    if not colon or not source.endswith(".py"):
        return
    file = Path(source).expanduser().resolve()
    check_file(file, key)
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # reported where it is loaded
        return
    if name not in _bound(tree) and not _makes_names(tree):
        defined = (
            node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        )
        raise missing_function_error(
            path, key, name, sorted({node.name for node in defined if not node.name.startswith("_")})
        )


def weights_by_name(weights: Any, names: list[str]) -> dict[str, float]:
    """Return a weight for each name, 1 where none is given.

    Raises:
        ConfigError: a weight has no function, or is not a finite number.
    """
    given = {} if weights is None else weights
    if not isinstance(given, Mapping):
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(names):
            raise ConfigError(f"weights={weights!r} must be {len(names)} numbers, for {', '.join(names)}.")
        given = dict(zip(names, given))
    check_weights("weights", given, names)
    return {name: float(given.get(name, 1.0)) for name in names}


def check_weights(key: str, weights: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a weight that belongs to none of the reward functions, or is not a finite number.

    Args:
        key: Of the weights in the config.
        weights: By the names of functions.
        names: Of all functions.

    Raises:
        ConfigError: names the key and the function.
    """
    for name, weight in weights.items():
        if name not in names:
            raise ConfigError(
                f"{key} names {name!r}, which is no reward function. Functions: {', '.join(names)}."
                f"{did_you_mean(str(name), names)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"{key}.{name}={weight!r} must be a finite number.")


def _bound(tree: ast.Module) -> set[str]:
    """Return every name that is bound anywhere in it, in functions too: more than the module has."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DEFINED):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _makes_names(tree: ast.Module) -> bool:
    words = {"globals", "vars", "exec", "setattr", "__getattr__", "modules", "__dict__"}
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool(words & (named | _bound(tree))) or "*" in _bound(tree)


def resolve_model_path(key: str, name: str) -> Path | None:
    """Return the folder of a model, or None for a name that can only be one of the hub's.

    Raises:
        ConfigError: it is empty, a file, an address, the folder of a run, or written as a path where no folder is.
    """
    if not name.strip():
        raise ConfigError(f"{key}={name!r} is empty. Give a folder, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_is_no_run(key, name, folder)
        return folder.resolve()
    if folder.exists():
        what = "GGUF, made for inference: give a folder with safetensors" if folder.suffix == ".gguf" else ""
        raise ConfigError(f"{key}={name!r} is a file{f' of {what}' if what else '. Give the folder that holds it'}.")
    if page := _PAGE.match(name):
        raise ConfigError(f"{key}={name!r} is an address. Give the hub id {page[1]!r}, or a folder.")
    if _LOCAL.match(name) or name.count("/") > 1:
        near = did_you_mean(folder.name, _models_in(folder.parent))
        raise ConfigError(f"{key}={name!r} is written as a path, and there is no such folder.{near}")
    return None


def _check_is_no_run(key: str, name: str, folder: Path) -> None:
    """Refuse the folder of a run in a model's place: its model is in a folder inside it."""
    if any((folder / file).is_file() for file in MODEL_FILES) or not (folder / "config.yaml").is_file():
        return
    inside = str(Path(name) / "hf")
    first = "" if (folder / "hf").is_dir() else f"; `lit-rl export run_dir={name}` makes it"
    raise ConfigError(f"{key}={name!r} is the folder of a run. Its model is {key}={inside}{first}.")


def copy_without_hub(name: str) -> Path:
    """Return the folder in which scripts such as `scripts/smollm2.py` put a substitute for a model of the hub.

    `$LIT_RL_CACHE` moves it; it is `~/.cache/lit_rl` otherwise.
    """
    cache = Path(os.environ.get("LIT_RL_CACHE") or "~/.cache/lit_rl").expanduser()
    return cache / "models" / name


def check_model_is_readable(key: str, name: str) -> None:
    """Refuse a model of the hub that must be missing: the hub cannot be reached, and nothing of it is in the cache.
    Other faults are reported where it is read.

    Raises:
        ConfigError: as `resolve_model_path`.
        BackendError: it is missing.
    """
    if name in SHIPPED or resolve_model_path(key, name) or (copy_without_hub(name) / "config.json").is_file():
        return
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None or any(os.environ.get(each) for each in _OTHER_CACHES):
        return
    go_offline_if_unreachable()
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if constants.HF_HUB_OFFLINE and not any(folder.glob("snapshots/*/*")):
        raise BackendError(f"{key}={name!r} {NOT_CACHED.format(name=name)}")


def _models_in(parent: Path) -> set[str]:
    """Return the names of folders with a model: only these are worth suggesting."""
    return {file.parent.name for name in MODEL_FILES for file in parent.glob(f"*/{name}")}
