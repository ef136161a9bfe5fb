"""What `Sampling` says of single tokens and of the whole text: a bias on logits, and the form of a response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lit_rl.errors import ConfigError, in_range

_LARGEST_BIAS = 100.0
"""The limit of every engine: vLLM clips larger biases to it, so they are refused here."""


class LogitBias(dict[int, float]):
    """Token ids and the biases added to their logits: an immutable, hashable dict (config systems know no other
    mapping).

    Args:
        biases: Ids as integers, or as strings of digits (keys of config files); biases in [-100, 100].

    Raises:
        ConfigError: a key is no token id, or a bias is no number in the range.
    """

    def __init__(self, biases: Any = None) -> None:
        try:
            given = dict(biases or {})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"sampling.logit_bias={biases!r} must map token ids to numbers, such as {{42: -5.0}}."
            ) from error
        super().__init__({_token_id(key): _bias(key, value) for key, value in given.items()})

    def _fixed(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("sampling.logit_bias cannot be changed: make another with dataclasses.replace.")

    __setitem__ = __delitem__ = __ior__ = popitem = clear = _fixed
    update = setdefault = _fixed  # pyright: ignore[reportAssignmentType]

    def pop(self, key: Any, *default: Any) -> Any:
        """Return the default for a missing key: LightningCLI's parser pops a key of its own from every dict."""
        return default[0] if default and key not in self else self._fixed()

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return LogitBias, (dict(self),)


def _token_id(key: Any) -> int:
    text = str(key).strip()
    if isinstance(key, bool) or not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"sampling.logit_bias has the key {key!r}, which is no token id: ids are integers from 0 on. "
            "tokenizer.convert_tokens_to_ids(token) gives a token's."
        )
    return int(text)


def _bias(key: Any, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"sampling.logit_bias: {key}: {value!r} is no number.")
    in_range(f"sampling.logit_bias.{key}", value, low=-_LARGEST_BIAS, high=_LARGEST_BIAS)
    return float(value)


@dataclass(frozen=True)
class Structured:
    """The form that every response must have, kept by the engine that samples. Exactly one of the four is set.

    Args:
        regex: A regular expression that the whole response matches.
        json_schema: A JSON schema, as a dict or as JSON text; kept as text.
        grammar: A context-free grammar (EBNF or Lark), as vLLM takes it.
        choice: The responses that are allowed.

    Raises:
        ConfigError: none or several are set, or the value is invalid.
    """

    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            came = f"{' and '.join(given)} are set" if given else "none is set"
            raise ConfigError(f"sampling.structured takes exactly one of regex, json_schema, grammar, choice: {came}.")
        for key in ("regex", "grammar"):
            text = getattr(self, key)
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"sampling.structured.{key}={text!r} must be a text that is not empty.")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        """The name of the constraint that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)


def _schema_text(schema: Any) -> str:
    """Return the schema as JSON text: a dict could be changed, and has no hash."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(parsed, Mapping):
            return json.dumps(parsed)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"sampling.structured.json_schema={schema!r} is no JSON: {error}.") from error
    raise ConfigError(f"sampling.structured.json_schema={schema!r} must be a JSON object, such as {{type: object}}.")


def _choices(choice: Any) -> tuple[str, ...]:
    if isinstance(choice, str) or not choice or not all(isinstance(text, str) and text for text in choice):
        raise ConfigError(
            f"sampling.structured.choice={choice!r} must be a list of texts, none of them empty: ['yes', 'no']."
        )
    return tuple(choice)
