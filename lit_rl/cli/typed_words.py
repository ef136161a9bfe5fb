"""The words of a command line as Hydra's grammar reads them: plain texts are quoted, and options are put behind
settings (argparse takes settings in one row only). What cannot be read is refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from lit_rl.core.errors import ConfigError

# ---------------------------------------------------------------------- values


_PLAIN = re.compile(r"[\w./:~@%+?|*-]*", re.ASCII)
"""Text that the grammar reads as it stands."""

_GRAMMAR_FUNCTIONS = ("choice", "range", "interval", "glob", "shuffle", "sort", "tag", "int", "float", "str", "bool")
"""Functions of the grammar."""


def readable(word: str, *, sweeps: bool = False) -> str:
    """Return `key=value` as Hydra's grammar reads it: a text such as `lr=1.jsonl` or `<|im_end|>` is quoted.

    A text that the grammar cannot read is taken literally, also in a list. A mapping, a nested list and an open quote
    are structures of the grammar: faults in them are errors.

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
    if value[0] in "[{'\"" or value.partition("(")[0] in _GRAMMAR_FUNCTIONS:
        raise _refused(key, value, reason)
    return f"{key}={quoted(value)}"


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
    if "," in value or value[:1] in ("[", "{", "'", '"') or value.partition("(")[0] in _GRAMMAR_FUNCTIONS:
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


# ---------------------------------------------------------------------- line breaks


_ESCAPE = re.compile(r"(?<!\\)\\n|(?<!\\)\\t(?![A-Za-z])|\\\\n")

_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\n": "\\n"}

_IN_QUOTES = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)

_OWN_ESCAPES = ("chat_template", "grammar", "json_schema", "pattern", "regex")
"""Keys whose text is in a language that reads escapes itself."""


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


_SWITCHES = re.compile(r"((?:\w+\.)*speedups)(?:\.\w+=[^,(]*|=\{[^{}]*\})")
"""One or several switches of a setting such as `generator.speedups`, and no sweep over them."""


def key_of_switches(word: str) -> str | None:
    """Return the setting that a word sets single switches of, such as `generator.speedups`; None for other words."""
    found = _SWITCHES.fullmatch(word)
    return None if found is None else found[1]


def add_switches(word: str, key: str, value: object) -> list[str]:
    """Return the words by which Hydra sets single switches, as it adds no key to a word such as `auto`.

    Args:
        word: As it was typed.
        key: The setting.
        value: Its value without the word: a mapping, whose other switches stay as they are; "auto"; or None where there
            is no such setting, which Hydra then says.

    Raises:
        ConfigError: all switches are off, by the command line or by a file.
    """
    if isinstance(value, Mapping):
        return [f"++{word}"]
    if value in (False, "off"):
        raise ConfigError(
            f"{key}=off and {word} exclude each other: leave one of them out. Switches that are not named are as in "
            "auto."
        )
    return [f"{key}={{}}", f"++{word}"]


# ---------------------------------------------------------------------- options


ELSEWHERE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
"""Options that add groups of the user's; the next word is their value."""

WITH_A_VALUE = (*ELSEWHERE, "--cfg", "-c", "--package", "-p", "--experimental-rerun")
"""Options whose value is the next word."""

_WITH_OR_WITHOUT = ("--info", "-i")

_ALONE = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", "-s"),
)

_ASKED = {"--run": "r", "-r": "r", "--multirun": "m", "-m": "m", "--cfg": "c", "-c": "c", "--info": "i", "-i": "i"}
"""Options of which Hydra takes one."""

_OF_CFG = ("job", "hydra", "all")

ALL = (*WITH_A_VALUE, *_WITH_OR_WITHOUT, *_ALONE)


def after_settings(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, settings first and options behind, each in the order in which they were
    typed.

    The word that follows an option which takes a value goes with it, also where it looks like a setting: a folder's
    name may. After `--info`, which may stand alone, a setting is one.

    Raises:
        ConfigError: an option has no value, `--cfg` has one that it does not know, or two options ask for two things.
    """
    _check_values(words)
    names = [word.partition("=")[0] for word in words]
    asked = {_ASKED[name]: name for name in names if name in _ASKED}
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked.values())} ask for different things: leave one of them out.")
    settings: list[str] = []
    options: list[str] = []
    before = ""
    for word in words:
        is_value = before in WITH_A_VALUE or (before in _WITH_OR_WITHOUT and "=" not in word)
        of_an_option = word.startswith("-") or is_value
        (options if of_an_option else settings).append(word)
        before = word if word.startswith("-") else ""
    return [*settings, *options]


def _check_values(words: Sequence[str]) -> None:
    for word, after in zip(words, [*words[1:], ""]):
        if word in ("--cfg", "-c") and after not in _OF_CFG:
            came = f", and {after!r} came" if after else ""
            raise ConfigError(
                f"{word} takes one of {', '.join(_OF_CFG)}{came}: type {word} job for the config of a run."
            )
        if word in WITH_A_VALUE and (not after or after in ALL):
            raise ConfigError(f"{word} needs a value behind it: {word} VALUE.")
