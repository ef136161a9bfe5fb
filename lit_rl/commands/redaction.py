"""What is a secret by its name or its form is left out of what a run writes."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from lit_rl.commands.secret_forms import REDACTED, is_named, without


def redact_command(command: str) -> str:
    """Redact the words of a command line as a config is: `group.key=value` by the names of its key, and a value with a
    secret in it as a whole."""
    return shlex.join(_redacted_word(*word.partition("=")) for word in shlex.split(command))


def _redacted_word(key: str, equals: str, value: str) -> str:
    if not equals:
        return redact(key)
    name = key.partition("@")[0].rpartition(".")[2]
    if value[:1] not in ("{", "["):
        return key + equals + redact(value, name)
    try:
        # Hydra needs no blank behind the colon of a dictionary, YAML does. What is no YAML then is hidden as a whole.
        tree = yaml.safe_load(re.sub(r":(?! )", ": ", value))
    except yaml.YAMLError:
        return f"{key}{equals}{REDACTED}"
    clean = redact(tree, name) == tree and without(value, commits=True) == value  # an address is whole in `value` alone
    return f"{key}{equals}{value if clean else REDACTED}"


def redact(node: Any, key: str = "") -> Any:
    """Return the tree with everything replaced that is a secret by its name or its form."""
    if isinstance(node, dict):
        return {name: redact(value, str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [redact(value, key) for value in node]
    if is_named(key, node):
        return REDACTED
    return without(node, commits=key.endswith("revision")) if isinstance(node, str) else node
