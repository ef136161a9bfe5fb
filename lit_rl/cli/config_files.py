"""Config files whose aliases would blow them up are refused before they are built."""

from __future__ import annotations

from pathlib import Path

import yaml

from lit_rl.core.errors import ConfigError

LARGEST = 100_000
"""Values that a file may hold once its aliases are written out. Ours hold hundreds."""


def check_size(file: Path) -> None:
    """Refuse a file that holds no keys, or whose aliases stand for more than `LARGEST` values. (Its reader reports
    other faults.)

    Raises:
        ConfigError: it is no text, holds a list or a text and no keys, is too large, or nested too deeply to be read.
    """
    try:
        with file.open(encoding="utf-8") as text:
            tree = yaml.compose(text, Loader=yaml.SafeLoader)
            values = _values(tree, {})
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no config: it is no text in UTF-8 ({error.reason}). Save it as such.") from None
    except (OSError, ValueError, yaml.YAMLError):
        return
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply to be a config.") from None
    _check_form(file, tree)
    if values > LARGEST:
        raise ConfigError(
            f"{file} holds {values:.3g} values once its aliases (*name) are written out; allowed are {LARGEST}."
        )


def _check_form(file: Path, tree: yaml.Node | None) -> None:
    """Refuse a file without keys, or with a list of defaults that is none. An empty file has no keys to be wrong."""
    if isinstance(tree, yaml.ScalarNode) and tree.tag == "tag:yaml.org,2002:null":
        return
    if tree is not None and not isinstance(tree, yaml.MappingNode):
        what = "a list" if isinstance(tree, yaml.SequenceNode) else "a text"
        raise ConfigError(f"{file} is no config: it holds {what}, and a config holds keys, such as `seed: 1`.")
    for key, value in tree.value if tree is not None else ():
        if key.value == "defaults" and not isinstance(value, yaml.SequenceNode):
            raise ConfigError(
                f"{file}: defaults has to be a list, a line each: `- override /algo: dpo`. Without any, leave it out."
            )


def _values(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Return the number of values below a node, each alias counted in full; one that contains itself is endless."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = LARGEST + 1  # until it is known: only its own inside sees this
        children = [child for pair in node.value for child in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]
