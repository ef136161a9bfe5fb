"""A typed value as Hydra's grammar reads it: a plain text is quoted for it, and what no quotes mend is refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from lit_rl.errors import ConfigError

_PLAIN = re.compile(r"[\w./:~@%+?|*-]*", re.ASCII)
"""Text that the grammar reads as it stands."""
_TOLD_BY_HYDRA = ("choice", "range", "interval", "glob", "shuffle", "sort", "tag", "int", "float", "str", "bool")
"""Functions of the grammar."""
_ESCAPE = re.compile(r"(?<!\\)\\n|(?<!\\)\\t(?![A-Za-z])|\\\\n")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\n": "\\n"}
_IN_QUOTES = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_OWN_ESCAPES = ("chat_template", "grammar", "json_schema", "pattern", "regex")
"""Keys whose text is in a language that reads escapes itself."""


def readable(word: str, *, sweeps: bool = False) -> str:
    """Return `key=value` as Hydra's grammar reads it: a text such as `lr=1.jsonl` or `<|im_end|>` is quoted.

    A text has one meaning where the grammar has none for it, also as a member of a list. A mapping, a nested list and
    quotes that do not end are structures of the grammar, so what is wrong in one is said.

    Args:
        word: As it was typed.
        sweeps: True if the command line has `-m`, so that commas stand between the values of a sweep.

    Raises:
        ConfigError: how to type what may be meant.
    """
    key, equals, value = word.partition("=")
    if not equals or _PLAIN.fullmatch(value) or (reason := _unread(word)) is None:
        return word
    if key.startswith("~"):
        raise ConfigError(f"{word} takes a setting away, so it has no value: type {key} alone.")
    if (members := re.fullmatch(r"\[([^][{}'\"]*)\]", value)) and members[1].strip(" ,"):
        return f"{key}=[{','.join(_member(each.strip(' ')) for each in members[1].split(','))}]"
    if sweeps and value.endswith(",") and not set(value) & set("[]{}'\""):
        raise ConfigError(f"{word} ends with a comma, behind which a value is missing: type {key}={value.rstrip(',')}.")
    if sweeps and "," in value and not set(value) & set("[]{}'\""):
        return f"{key}={','.join(map(_member, value.split(',')))}"
    if value[0] in "[{'\"" or value.partition("(")[0] in _TOLD_BY_HYDRA:
        raise _refused(key, value, reason)
    return f"{key}={quoted(value)}"


def ambiguous(word: str) -> ConfigError:
    """Return the error about a comma where no sweep was asked for.

    Args:
        word: As Hydra has it.
    """
    key, _, value = word.partition("=")
    number = ""
    if parts := re.fullmatch(r"(-?\d+),(\d+)(e-?\d+)?", value):
        whole, digits, exponent = parts[1], parts[2], parts[3] or ""
        number = f" A number has a point, and nothing between thousands: {key}={whole}.{digits}{exponent}"
        number += f" or {key}={whole}{digits}." if len(digits) == 3 and not exponent else "."
    return ConfigError(
        f"{word!r} has a comma, which stands between the values of a sweep. Type {typed(key, value)} for one text, "
        f"{shlex.quote(f'{key}=[{value}]')} for a list, or add -m for a run of each.{number}"
    )


def typed(key: str, value: str) -> str:
    """Return `key=value` for a text as one types it into a shell.

    Args:
        key: Key of the setting.
        value: Any text.
    """
    if "," in value or value[:1] in ("[", "{", "'", '"') or value.partition("(")[0] in _TOLD_BY_HYDRA:
        value = quoted(value) if '"' in value or "\\" in value else f'"{value}"'
    return shlex.quote(f"{key}={value}")


def quoted(value: str) -> str:
    """Return a text in quotes of the grammar, if it needs them; text in quotes stays."""
    if value[:1] in ("'", '"') or re.fullmatch(r"[\w./:~-]+", value, re.ASCII):
        return value
    return _in_quotes(value)


def _in_quotes(value: str) -> str:
    return "'" + re.sub(r"(\\*)(?='|$)", r"\1\1", value).replace("'", "\\'") + "'"


def _member(value: str) -> str:
    """Return one value of a list or a sweep."""
    return value if _unread(f"key={value}") is None else _in_quotes(value)


def unquoted(value: str) -> str:
    """Return the text that a value of the grammar stands for, where that is one text in quotes; others stay."""
    if len(value) < 2 or value[0] not in "'\"" or value[-1] != value[0] or _unread(f"key={value}") is not None:
        return value
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return str(OverridesParser.create().parse_override(f"key={value}").value())


def with_line_breaks(words: Sequence[str]) -> list[str]:
    r"""Return the settings with a line break for each `\n` in quotes, and a tab for each `\t` before no letter.

    `\\n` is the two characters. Hydra leaves all as they are typed, and a shell has no short way to type a line break.
    """
    return [_with_line_breaks(word) for word in words]


def _with_line_breaks(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals or "\\" not in value or key.rpartition(".")[2] in _OWN_ESCAPES:
        return word
    if re.fullmatch(r"(?:\\[nt]|[][, ])*", value):  # nothing else, without quotes
        return readable(f"{key}={_breaks(value)}", sweeps=True)
    return f"{key}={_IN_QUOTES.sub(lambda found: _breaks(found[0]), value)}"


def _breaks(text: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPES[found[0]], text)


def _unread(word: str) -> str | None:
    """Return why the grammar cannot read it; None where it can."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(word)
    except HydraException as error:
        return str(error).partition("\n")[0]
    return None


def _refused(key: str, value: str, reason: str) -> ConfigError:
    if value[0] in "'\"":
        inside = value.strip(value[0])
        return ConfigError(
            f"{key}={value}: the quotes end before the value does, or not at all. Type {typed(key, inside)} for the "
            f"text {inside!r}."
        )
    if value[0] in "[{":
        return ConfigError(
            f"{key}={value} cannot be read ({reason}). Lists are [a,b], mappings {{a: b}}, and a text in one with a "
            f"comma, a bracket or a quote stands in quotes: {_QUOTED[value[0]]}. Type "
            f"{shlex.quote(f'{key}={quoted(value)}')} for the text {value!r}."
        )
    return ConfigError(f"{key}={value} cannot be read: {reason}. Type {typed(key, value)} for the text.")


_QUOTED = {"[": """'sampling.stop=["a,b","c"]'""", "{": """'data.rename={"my column": prompt}'"""}
