"""What is a secret by its name or its form is left out of what a run writes."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

_SECRET_KEY = re.compile(
    r"(^|[_-])(token|api_key|api-key|apikey|access_key|private_key|secret|password|passwd|credential|authorization)s?$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|[0-9a-f]{40})\b|(?<=://)[^/@\s]+@"
    r"|(?<=Bearer )\S+|(?<=[?&]sig=)[^&\s]+|(?<=[?&]signature=)[^&\s]+"
    r"|(?<=token=)\S+|(?<=api_key=)\S+|(?<=secret=)\S+|(?<=password=)\S+"
)
_NOT_SECRET = {"eos_token", "pad_token", "revision"}
_COUNT_OF_TOKENS = re.compile(r"tokens=(\d+|null)$", re.IGNORECASE)
"""How a word ends that sets a length: `max_new_tokens=6` is no secret."""


def redact_command(command: str) -> str:
    """A command line whose words are redacted as a config is: `group.key=value` by the names of its key, and a value
    with a part that is a secret as a whole."""
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
        return f"{key}{equals}<redacted>"
    return f"{key}{equals}{value if redact(tree, name) == tree else '<redacted>'}"


def redact(node: Any, key: str = "") -> Any:
    """The tree with everything that is a secret by its name or its form replaced."""
    if isinstance(node, dict):
        return {name: redact(value, str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [redact(value, key) for value in node]
    if isinstance(node, str) and key not in _NOT_SECRET:
        if _SECRET_KEY.search(key) and node and not _COUNT_OF_TOKENS.search(f"{key}={node}"):
            return "<redacted>"
        return _SECRET_VALUE.sub("<redacted>", node)
    return node
