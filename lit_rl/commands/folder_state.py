"""Whether a folder is taken by a run, told by its files alone."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_rl.errors import ConfigError, StorageError, nearest

_RELEASE = "# lit_rl=="
"""First characters of config.yaml, as Lightning's begins with its own."""
_CONFIG_KEYS = {"algo", "data", "run_dir", "task", "trainer"}


def check_is_no_file(folder: Path) -> None:
    """Refuse a file in a folder's place.

    Raises:
        StorageError: names it.
    """
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"run_dir={folder} is a file; it must be a folder, or a name that is free.")


def check_is_folder(folder: Path) -> None:
    """Refuse a path that is no folder, where a run has to be.

    Raises:
        ConfigError: names it, and the nearest run that stands beside it.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"run_dir={folder} is no folder: give the folder of a run, such as runs/...{nearest_run(folder)}"
        )


def check_has_config(folder: Path) -> None:
    """Refuse a folder without config.yaml, where a run's settings are read.

    Raises:
        ConfigError: names it, and the nearest run that stands beside it.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run_dir={folder} holds no config.yaml: give the folder of a run.{nearest_run(folder)}")


def check_has_checkpoint(folder: Path) -> None:
    """Refuse a folder without any checkpoint, where the newest one is asked for.

    Raises:
        StorageError: names the folder that is empty, and the nearest run that stands beside it.
    """
    if not any((folder / "checkpoints").glob("*.ckpt")):
        raise no_checkpoint(folder)


def no_checkpoint(folder: Path) -> StorageError:
    """Return the error of a command that reads the newest checkpoint of a run, where there is no whole one."""
    return StorageError(
        f"ckpt_path=last: there is no whole checkpoint in {folder / 'checkpoints'}. Set run_dir to the run that is "
        f"meant, or ckpt_path to a file.{nearest_run(folder)}"
    )


def nearest_run(folder: Path) -> str:
    """Return ``" Did you mean 'runs/x'?"`` for a run in the same folder; empty where none is near, or this is a run
    itself."""
    runs = {file.parent.name for file in folder.parent.glob("*/config.yaml")}
    near = None if folder.name in runs else nearest(folder.name, runs)
    return "" if near is None else f" Did you mean {str(folder.with_name(near))!r}?"


def held(folder: Path, state: str) -> ConfigError:
    """Return the error about a folder that holds another run.

    Args:
        folder: The folder as the user typed it.
        state: Its contents, such as "a finished run".
    """
    return ConfigError(f"run_dir={folder} holds {state}. Continue it with ckpt_path=last, or take another run_dir.")


def is_finished(folder: Path) -> bool:
    """Tell whether a run in this folder has finished. (A summary without a run is the user's, and is not read.)"""
    ours = holds_a_run(folder) or any((folder / "checkpoints").glob("*.ckpt"))
    return ours and read_summary(folder).get("status") == "finished"


def holds_a_run(folder: Path) -> bool:
    """Tell whether a run wrote config.yaml, which is there before anything else of the run is."""
    return is_of_a_run(read_config(folder))


def is_of_a_run(config: Mapping[str, Any]) -> bool:
    """Tell whether a run wrote this config; another program's config.yaml has other keys."""
    return config.keys() >= _CONFIG_KEYS


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.yaml as a mapping; empty where it cannot be read."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary; empty where there is none. Nothing depends on a damaged one: it is written anew, with a
    warning."""
    file = folder / "summary.json"
    if not file.is_file():
        return {}
    try:
        summary = json.loads(file.read_text())
        if isinstance(summary, dict):
            return summary
        what = f"a {type(summary).__name__}"
    except ValueError as error:
        what = f"not JSON: {error}"
    warnings.warn(f"{file} is damaged ({what}). What it said is lost, and it is written anew.", stacklevel=3)
    return {}


def release(package: str = "lit-rl") -> str:
    """Return the version of lit_rl, or of another package; empty where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def signed(config: str) -> str:
    """Return the text of config.yaml under a line with the version of lit_rl that writes it."""
    return f"{_RELEASE}{release()}\n{config}" if release() else config


def written_by(folder: Path) -> str:
    """Return the version of lit_rl that wrote config.yaml; empty where the file does not name one."""
    with contextlib.suppress(OSError, ValueError), (folder / "config.yaml").open(encoding="utf-8") as file:
        first = file.readline(200)
        return first.removeprefix(_RELEASE).strip() if first.startswith(_RELEASE) else ""
    return ""


@contextlib.contextmanager
def told_of_release(folder: Path) -> Iterator[None]:
    """Add a note to errors about settings or a checkpoint of a run that another version of lit_rl made."""
    theirs, ours = written_by(folder), release()
    try:
        yield
    except (ConfigError, StorageError) as error:
        if theirs and ours and theirs != ours:
            error.add_note(
                f"The run in {folder} was made by lit_rl {theirs}, and this is {ours}: what one of the two knows, the "
                f"other may not. lit_rl {theirs} reads it."
            )
        raise
