"""The keys of a group, known from YAML files alone: a mistyped one is refused before torch is loaded.

What a schema has comes from a constructor's signature. `schema_keys.yaml` holds it, so that no constructor is imported:
`scripts/config_reference.py` writes it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from lit_rl.cli.listing import conf_folder

SCHEMA_KEYS = Path(__file__).with_name("schema_keys.yaml")
_HERE = "_here_"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def of_choice(group: str, choice: str) -> set[str]:
    """Return the keys that `group=choice` has at its top.

    Args:
        group: Such as `algo`.
        choice: The name of one of its files, without its ending.
    """
    return _of_file(conf_folder() / group / f"{choice}.yaml", group)


@functools.cache
def of_group(group: str) -> set[str]:
    """Return the keys that any choice of a group has."""
    files = (conf_folder() / group).glob("*.yaml")
    return set().union(*(_of_file(path, group) for path in files))


@functools.cache
def _of_file(path: Path, group: str) -> set[str]:
    """Return the keys at the top of a file's group; one of the package `_global_` has them under the group's name."""
    text = path.read_text(encoding="utf-8")
    content = yaml.load(text, _LOADER) or {}  # both loaders make plain data alone
    whole = text.startswith("# @package _global_")
    keys = {str(key) for key in (content.get(group, {}) if whole else content)} - {"defaults"}
    for entry in content.get("defaults", ()):
        file, choice = next(iter(entry.items())) if isinstance(entry, dict) else (entry, None)
        file, _, place = file.partition("@")
        if file == "_self_" or file.startswith("override "):
            continue
        if place.partition(".")[0] == group and whole:
            place = place.partition(".")[2] or _HERE
        elif whole and (place or file.startswith("/")):
            continue  # of another group
        keys |= _of_default(path.parent, group, file, choice, place)
    return keys


def _of_default(folder: Path, group: str, file: str, choice: Any, place: str) -> set[str]:
    """Return the keys of one line of a defaults list: those of a file, or one key under which a file stands."""
    if choice is not None and not place:
        return {file.rpartition("/")[2]}
    if place not in ("", _HERE):
        return {place.partition(".")[0]}
    if file.startswith("/schemas/"):
        return {*schema_keys()[file.removeprefix("/schemas/")], "_target_", "_partial_"}
    file = file if choice is None else f"{file}/{choice}"
    return _of_file((conf_folder() / file[1:] if file.startswith("/") else folder / file).with_suffix(".yaml"), group)


@functools.cache
def schema_keys() -> dict[str, dict[str, Any]]:
    """Return each schema by its name, as `lit_rl.cli.schemas` writes it; and `_versions_`."""
    return yaml.load(SCHEMA_KEYS.read_text(encoding="utf-8"), _LOADER)
