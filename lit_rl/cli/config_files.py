"""A config file whose aliases would blow it up is refused before it is built.

Hydra has no hook there, so the method with which it reads a file is wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource

from lit_rl.errors import ConfigError

LARGEST = 100_000
"""Values that a file may hold once its aliases are written out. Ours hold hundreds."""


@contextmanager
def bounded() -> Iterator[None]:
    """Every file is checked before it is read, while this lasts."""
    # Hydra loads its plugins by itself: the class that an import gives is another one.
    kinds: list[Any] = Plugins.instance().discover(ConfigSource)
    files = next(kind for kind in kinds if kind.scheme() == "file")
    read = files.load_config

    def checked(source: Any, config_path: str) -> Any:
        check_size(Path(source.path) / source._normalize_file_name(config_path))
        return read(source, config_path)

    files.load_config = checked
    try:
        yield
    finally:
        files.load_config = read


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
