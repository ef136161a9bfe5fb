"""The base of settings, and the constructor that takes them as keywords.

A class with settings has a dataclass of them, and a constructor that reads it:

    @dataclass(frozen=True, kw_only=True)
    class GRPOConfig(PolicyGradientConfig):
        group_size: AtLeastOne = 8
        \"\"\"Completions a prompt.\"\"\"

    class GRPO(PolicyGradient):
        @takes(GRPOConfig)
        def __init__(self, settings: GRPOConfig) -> None: ...

The signature of `GRPO(...)`, its help, and what an editor knows of it are then those of the dataclass.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from lit_rl.core.declared_settings import declared_by
from lit_rl.core.errors import ConfigError, check_function_setting

P = ParamSpec("P")
Owner = TypeVar("Owner")
Config = TypeVar("Config", bound="Settings")


class _Unset(enum.Enum):
    REQUIRED = "required"

    def __repr__(self) -> str:
        return self.value


REQUIRED: Any = _Unset.REQUIRED
"""The default of a setting that has to be set, in the dataclass or beside it: `GRPO("tiny", reward, config=...)`."""


@dataclass(frozen=True)
class Imported:
    """A default that is imported when an object is built, so that its settings can be read without PyTorch."""

    path: str
    """Dotted path of a function or an object."""

    def load(self) -> Any:
        """Return what the path names."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def __repr__(self) -> str:
        return self.path


def imported(path: str) -> Any:
    """Return a default that `path` names; its type is that of the field."""
    return Imported(path)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base of settings: values are checked against their annotations, and functions can be called.

    Raises:
        ConfigError: names the key of the first value that is not allowed, the value and what is allowed.
    """

    key: ClassVar[str]
    """Name of the config's group with these settings."""

    config: Settings | None = None
    """All settings as one object, such as `GRPOConfig(group_size=4)`. Settings that are passed beside it win."""

    def __post_init__(self) -> None:
        if self.config is not None:
            raise ConfigError(f"config belongs to a constructor: GRPO(..., config={type(self).__name__}(...)).")
        for name, owner in field_owners(type(self)).items():
            value, kind = getattr(self, name), owner.__annotations__[name]
            if kind in ("Callable", "Callable | None") and not isinstance(value, (Imported, _Unset)):
                check_function_setting(name, value, optional=kind != "Callable")
        for name, allowed in declared_by(type(self)).items():
            if not isinstance(value := getattr(self, name), (Imported, _Unset)):
                allowed.check(f"{self.key}.{name}", value)


def takes(
    config: Callable[P, Config],
) -> Callable[[Callable[[Owner, Config], None]], Callable[Concatenate[Owner, P], None]]:
    """Return a decorator of a constructor that reads settings: it then takes each of them as a keyword.

    `config=` takes all of them as one object, which also is how a subclass hands its settings to its parent:
    `super().__init__(config=settings)`.

    Args:
        config: The dataclass of the settings.
    """

    def decorate(init: Callable[[Owner, Config], None]) -> Callable[Concatenate[Owner, P], None]:
        made: Any = config
        signature = _signature(made)

        @functools.wraps(init)
        def constructor(self: Owner, *arguments: Any, **keywords: Any) -> None:
            try:
                values = signature.bind_partial(self, *arguments, **keywords).arguments
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            del values["self"]
            init(self, _settings(type(self).__name__, made, values))

        described: Any = constructor
        described.__signature__ = signature
        described.__annotations__ = types_of(made)
        described.__doc__ = _docstring(made)
        described.settings = made
        return described

    return decorate


def _settings(name: str, config: type[Config], values: dict[str, Any]) -> Config:
    """Return the settings that a constructor's arguments make, with defaults imported."""
    whole = values.pop("config", None)
    if whole is not None and not isinstance(whole, config):
        raise ConfigError(
            f"config is a {type(whole).__name__}; {name} takes a {config.__name__}. Write "
            f"{name}(..., config=lit_rl.{config.__name__}(...)), or each setting as a keyword."
        )
    settings = config(**values) if whole is None else dataclasses.replace(whole, **values)
    return dataclasses.replace(settings, **config_values(settings))


def config_values(config: Settings | None) -> dict[str, Any]:
    """Return the settings of an object that are set, by name, with defaults imported; none without an object."""
    values = vars(config) if isinstance(config, Settings) else {}
    return {
        name: value.load() if isinstance(value, Imported) else value
        for name, value in values.items()
        if value is not REQUIRED and name != "config"
    }


def field_owners(config: type[Settings]) -> dict[str, type[Settings]]:
    """Return each setting with the class that declares it, in the order of a constructor's signature.

    What may be passed by position comes first, then what the class itself declares, then what its parents do.
    """
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}
    owners: dict[str, type[Settings]] = {}
    for owner in config.__mro__:
        for name in vars(owner).get("__annotations__", ()):
            if name in fields:
                owners.setdefault(name, owner)
    by_position = [name for name, field in fields.items() if not field.kw_only]
    return {name: owners[name] for name in (*by_position, *owners)}


def _signature(config: type[Settings]) -> inspect.Signature:
    """Return the signature of a constructor with these settings; annotations are texts, as they stand in the source."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, owner in field_owners(config).items():
        field = fields[name]
        default = field.default.load() if isinstance(field.default, Imported) else field.default
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY if field.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if default in (REQUIRED, dataclasses.MISSING) else default,
                annotation=owner.__annotations__[name],
            )
        )
    return inspect.Signature(parameters, return_annotation=None)


def _docstring(config: type[Settings]) -> str:
    """Return the docstring of a constructor with these settings, in Google's style."""
    lines = [f"Take the settings of `{config.__name__}` as keywords.", "", "Args:"]
    for name, sentence in sentences(config).items():
        lines.append(textwrap.fill(f"{name}: {sentence}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8))
    return "\n".join(lines)


# ---------------------------------------------------------------------- what the source says


@functools.cache
def _sources(module: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return a module's imports for type checkers, as dotted paths by name, and the sentence of each field by class."""
    paths: dict[str, str] = {}
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom):
                    paths |= {alias.asname or alias.name: f"{each.module}.{alias.name}" for alias in each.names}
        elif isinstance(node, ast.ClassDef):
            found = texts[node.name] = {}
            for field, text in zip(node.body, node.body[1:]):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                        found[name] = inspect.cleandoc(sentence).replace("\n", " ")
    return paths, texts


def sentences(config: type[Settings]) -> dict[str, str]:
    """Return the sentence of each setting, those of the class itself first."""
    found: dict[str, str] = {}
    for owner in config.__mro__:
        if issubclass(owner, Settings):
            for name, text in _sources(owner.__module__)[1].get(owner.__name__, {}).items():
                found.setdefault(name, text)
    return {name: found[name] for name in field_owners(config) if name in found}


class _Names(dict[str, Any]):
    """Names of a module's annotations; those that it imports for type checkers alone are imported when asked for."""

    def __init__(self, module: str) -> None:
        super().__init__(vars(sys.modules[module]))
        self.paths = _sources(module)[0]

    def __missing__(self, name: str) -> Any:
        return Imported(self.paths[name]).load()


def types_of(config: type[Settings]) -> dict[str, Any]:
    """Return the type of each setting, with `Annotated` metadata. Imports the types."""
    return {
        name: eval(owner.__annotations__[name], {}, _Names(owner.__module__))  # noqa: S307 (our own annotations)
        for name, owner in field_owners(config).items()
    }
