"""What a config file may not do while Hydra composes it: grow without bound through aliases, or call what it likes.

Hydra has no hook before it builds its own callbacks and handlers of logs, so two of its methods are wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf

from lit_rl.errors import ConfigError

LARGEST = 100_000
"""Values that a file may hold once its aliases are written out. Ours hold hundreds."""

_HYDRAS = ("hydra._internal.core_plugins.", "hydra.experimental.callbacks.", "hydra_plugins.", "colorlog.")
_LOGS = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter")
_CALLED = ("_target_", "class", "()")
"""Keys of Hydra's own settings, and of Python's for logs, whose value is imported and called."""


@contextmanager
def guarded() -> Iterator[None]:
    """Files and Hydra's own settings are checked before they are used, while this lasts."""
    kinds: list[Any] = Plugins.instance().discover(ConfigSource)
    files = next(
        kind for kind in kinds if kind.scheme() == "file"
    )  # Hydra loads its plugins by itself: the class that an import gives is another one
    read, compose = files.load_config, ConfigLoaderImpl.load_configuration

    def checked_file(source: Any, config_path: str) -> Any:
        check_size(Path(source.path) / source._normalize_file_name(config_path))
        return read(source, config_path)

    def checked_config(*args: Any, **keywords: Any) -> DictConfig:
        config = compose(*args, **keywords)
        check_called(OmegaConf.to_container(config.hydra, resolve=False), "hydra")
        return config

    try:
        files.load_config, ConfigLoaderImpl.load_configuration = checked_file, checked_config
        yield
    finally:
        files.load_config, ConfigLoaderImpl.load_configuration = read, compose


def check_size(file: Path) -> None:
    """Refuse a file whose aliases stand for more than `LARGEST` values. (Another fault in it is its reader's.)

    Raises:
        ConfigError: it is too large, or nested too deeply to be read.
    """
    try:
        with file.open(encoding="utf-8") as text:
            values = _values(yaml.compose(text, Loader=yaml.SafeLoader), {})
    except (OSError, ValueError, yaml.YAMLError):
        return
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply to be a config.") from None
    if values > LARGEST:
        raise ConfigError(
            f"{file} holds {values:.3g} values once its aliases (*name) are written out; allowed are {LARGEST}."
        )


def _values(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Values below a node, each alias counted as what it stands for; one that is inside of itself is endless."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = LARGEST + 1  # until it is known: only its own inside sees this
        children = [child for pair in node.value for child in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]


def check_called(node: Any, key: str) -> None:
    """Refuse what Hydra would call beside its own parts: it is called before any list of ours is read.

    Raises:
        ConfigError: names the key.
    """
    if isinstance(node, list):
        for number, item in enumerate(node):
            check_called(item, f"{key}[{number}]")
    elif isinstance(node, dict):
        for name, value in node.items():
            called = name in _CALLED and isinstance(value, str)
            if called and not (value.startswith(_HYDRAS) or value in _LOGS):
                raise ConfigError(
                    f"{key}.{name}={value!r}: Hydra would call it before the run is checked. Allowed there are Hydra's "
                    f"own parts and plugins ({', '.join(f'{prefix}*' for prefix in _HYDRAS)}) and {', '.join(_LOGS)}. "
                    "For a callback of your own: callbacks.NAME._target_=..., with allow_targets=[PACKAGE]."
                )
            check_called(value, f"{key}.{name}")
