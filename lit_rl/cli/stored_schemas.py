"""The schemas of the config from a file, so that Hydra composes and checks types before torch is loaded.

`lit_rl.cli.schemas` makes them from constructors, and `scripts/config_reference.py` writes what it made to
`schema_keys.yaml`. Of another version of Lightning than the file was written with, they are made anew.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lit_rl.cli.key_names import schema_keys
from lit_rl.commands.defaults import lightning

_TYPES: dict[str, Any] = {"any": Any, "int": int, "float": float, "bool": bool, "str": str}
_OPTIONAL = {f"{name}?": typing.Optional[kind] for name, kind in _TYPES.items() if kind is not Any}  # noqa: UP045
FOREIGN = "lightning"
"""The other package with constructors among them."""


@functools.cache
def register() -> bool:
    """Put every schema into Hydra's store, in the group `schemas`, once a process.

    Returns:
        Whether they are those of the installed packages; if not, none was put there.
    """
    if schema_keys()["_versions_"] != versions():
        return False
    store = ConfigStore.instance()
    for name, fields in schema_keys().items():
        if not name.startswith("_"):
            store.store(group="schemas", name=name, node=restored(name, fields))
    return True


def versions() -> dict[str, str]:
    """Return the first two numbers of the versions of these packages."""
    return {FOREIGN: lightning()}


def stored(node: type) -> dict[str, Any]:
    """Return the file's form of a dataclass: a field's default where it names the target, else its type and default."""
    return {field.name: _said(field) for field in dataclasses.fields(node)}


def restored(name: str, fields: Mapping[str, Any]) -> type:
    """Return the dataclass of that form."""
    return dataclasses.make_dataclass(name, [(key, *_field(key, said)) for key, said in fields.items()])


def _said(field: dataclasses.Field) -> Any:
    if field.name in ("_target_", "_partial_"):
        return field.default
    kind: Any = field.type
    if dataclasses.is_dataclass(kind):
        return [kind.__name__, stored(kind)]  # pyright: ignore
    if field.default is not dataclasses.MISSING:
        return [_name(kind), field.default]
    if kind == dict[Any, Any]:
        return ["dict"]
    return [_name(kind), field.default_factory()]  # pyright: ignore


def _name(kind: Any) -> str:
    return next(name for name, each in {**_TYPES, **_OPTIONAL}.items() if each == kind)


def _field(key: str, said: Any) -> tuple[Any, Any]:
    if key in ("_target_", "_partial_"):
        return type(said), dataclasses.field(default=said)
    kind, *default = said
    if kind == "dict":
        return dict[Any, Any], dataclasses.field(default_factory=open_dict)
    if (known := {**_TYPES, **_OPTIONAL}.get(kind)) is None:
        made = restored(kind, default[0])
        return made, dataclasses.field(default_factory=made)
    if isinstance(default[0], (list, dict)):
        return known, dataclasses.field(default_factory=functools.partial(_copy, default[0]))
    return known, dataclasses.field(default=default[0])


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def open_dict() -> Any:
    """Return a dict whose keys are the user's: `key={name: value}` and `key.name=value` both work."""
    return OmegaConf.create({}, flags={"struct": False})
