"""The groups of the config, their choices and keys, known from files alone: `lit-rl list`, shell completion, and the
check of a mistyped key before torch loads.

The keys of a schema come from a constructor's signature; `schema_keys.yaml` holds them, so that no constructor is
imported: `scripts/config_reference.py` writes it.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_rl.core.errors import ConfigError, did_you_mean

_WIDTH = 119
_MANY = 20
"""Number of choices that would bury a hint before them."""

_NEIGHBOURS = 5
"""Number of keys that are named beside an unknown one."""


def conf_folder() -> Path:
    """Return the folder of the groups: beside the package in a checkout, in it where it was installed."""
    folder = Path(__file__).parents[2] / "conf"
    return folder if folder.is_dir() else Path(__file__).parents[1] / "conf"


def groups(folders: Sequence[Path]) -> dict[str, dict[str, str]]:
    """Return every group, those inside a group too: its choices and their first lines.

    Args:
        folders: Of configs; a later one's file stands for an earlier one's of the same name, as in Hydra.
    """
    found: dict[str, dict[str, str]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            group = path.parent.relative_to(folder).as_posix()
            if group not in (".", "lightning"):  # whole configs
                found.setdefault(group, {})[path.stem] = first_line(path)
    return dict(sorted(found.items()))


def first_line(path: Path) -> str:
    """Return the first comment of a YAML file that is for a reader."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @"):  # Hydra's own
            continue
        return line.removeprefix("# ") if line.startswith("# ") else ""
    return ""


def default_choices() -> dict[str, str]:
    """Return the default choice of each group at the top."""
    text = (conf_folder() / "config.yaml").read_text(encoding="utf-8")
    head = text.partition("defaults:\n")[2].partition("\n\n")[0]
    return {name: choice.strip("[]") for name, choice in re.findall(r"- (\w+): (\S+)", head) if choice != "null"}


def top_keys(file: str = "config.yaml") -> list[str]:
    """Return the keys at the top of the config, or of a file of a group, beside the groups; nothing where there is
    none."""
    path = conf_folder() / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [name for name in re.findall(r"^(\w+):", text, re.M) if name != "defaults"]


def no_choice_message(group: str, choice: str, options: Sequence[str]) -> str:
    """Return the message about an unknown choice: another way to write what is meant, or the nearest choice, and as
    many names as a line holds."""
    near = did_you_mean(choice, options)
    own = _OWN[group](choice, near) if group in _OWN else ""
    near = own or near
    if own or (near and len(options) > _MANY):
        return f"{group}={choice} is not a choice.{near} `lit-rl list {group}` lists all {len(options)}."
    return f"{group}={choice} is not a choice.{near} {group} has: {', '.join(options)}."


def _own_model(choice: str, near: str) -> str:
    return "" if near else f" A folder, or a model of the hub, is written model=local model.name={choice}."


def _own_data(choice: str, near: str) -> str:
    """Return how to name own data, for a text that looks like a file or a hub id, however near it is to a choice."""
    looks = "/" in choice or Path(choice).suffix or Path(choice).exists()
    return f" For rows of your own, type data.path={choice}." if looks else ""


def _own_reward(choice: str, near: str) -> str:
    if Path(choice).suffix != ".py":
        return "" if near else " For a function of your own, type reward=./FILE.py:NAME."
    file = choice if Path(choice).is_absolute() else f"./{Path(choice)}"
    return f" For a function of your own, type reward={file}:NAME."


_OWN = {"model": _own_model, "data": _own_data, "reward": _own_reward}
"""Groups in whose place people type a thing of their own, each with a function of the choice and the nearest one that
returns how that is written."""


def neighbouring_keys(head: str, name: str, names: Iterable[str], command: str = "") -> str:
    """Return the message about the keys beside an unknown one: those with the most similar names, and the command that
    lists all.

    Args:
        head: The key above; empty at the top.
        name: The key, below that.
        names: Those that there are; none where that is not known.
        command: Lists them; empty is that of a training.
    """
    there, owner = sorted(names), head or "The top level"
    if len(there) <= _NEIGHBOURS:
        return f" {owner} has: {', '.join(there)}." if there else ""
    near = difflib.get_close_matches(name, there, n=_NEIGHBOURS, cutoff=0.0)
    command = command or f"lit-rl train --cfg job{f' --package {head}' if head else ''}"
    return f" {owner} has {', '.join(near)} and {len(there) - len(near)} more: `{command}` lists them."


def print_list(words: Sequence[str]) -> int:
    """Print the groups, or the choices of the named ones.

    Raises:
        ConfigError: a word is no group.
    """
    folders, names = _config_folders(words)
    found, taken = groups(folders), default_choices()
    for name in names:
        if name not in found:
            raise ConfigError(_no_group(name, names, found))
    lines = [line for name in names for line in _choices(name, found[name], taken.get(name))] if names else []
    lines = lines or _overview(found, taken)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _no_group(name: str, names: Sequence[str], found: dict[str, dict[str, str]]) -> str:
    """Return the message about a word that is no group: a choice of another word's group, or how groups are written."""
    for group in names:
        if name in found.get(group, {}):
            return (
                f"{name!r} is not a group: it is a choice of {group}, which `lit-rl list {group}` describes. Its "
                f"keys: `lit-rl train {group}={name} --cfg job --package {group.replace('/', '.')}`."
            )
    return f"{name!r} is not a group.{did_you_mean(name, found)} `lit-rl list` lists all {len(found)}."


def _config_folders(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return our folder and, with `--config-dir DIR`, the user's; and the other words."""
    rest, folders = list(words), [conf_folder()]
    if "--config-dir" in rest:
        at = rest.index("--config-dir")
        if at + 1 == len(rest) or not Path(rest[at + 1]).is_dir():
            raise ConfigError(f"--config-dir needs a folder, but got {' '.join(rest[at + 1 : at + 2]) or 'nothing'}.")
        folders.append(Path(rest[at + 1]))
        del rest[at : at + 2]
    return folders, rest


def _overview(found: dict[str, dict[str, str]], taken: dict[str, str]) -> list[str]:
    wide = max(map(len, found))
    lines = [f"  {name:<{wide}}  {len(choices):>3}  {taken.get(name, '')}".rstrip() for name, choices in found.items()]
    return [
        "Groups of the config, the number of choices of each, and its default:",
        *lines,
        "`lit-rl list algo` lists the choices of one; `algo=NAME` chooses one, `algo/loss=NAME` one inside it.",
    ]


_FAMILIES = {
    "From rewards of what the policy writes": ("grpo", "rloo", "ppo", "reinforce"),
    "From pairs that the policy writes and a judge compares": ("online_dpo", "nash_md", "xpo"),
    "From a data set of pairs": ("dpo", "cpo", "orpo", "tpo"),
    "From a data set of single good and bad completions": ("kto", "bco"),
    "From texts": ("sft", "gkd"),
    "Reward models": ("reward_model", "process_reward_model"),
}
"""The tables of docs/algorithms/README.md, and the methods that every other choice of `algo` begins with."""


def _choices(name: str, choices: dict[str, str], taken: str | None) -> list[str]:
    wide = max(map(len, choices))
    lines = [f"{name}=...{f'   (default: {taken})' if taken else ''}"]
    for title, members in _families(choices).items() if name == "algo" else [("", list(choices))]:
        lines += ["", f"{title}:"] if title else []
        for choice in members:
            head = f"  {choice:<{wide}}  "
            said = textwrap.wrap(choices[choice], _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
            lines += said or [head.rstrip()]
    return lines


def _families(choices: dict[str, str]) -> dict[str, list[str]]:
    """Return the choices of `algo` by their kind of data, the methods that others begin with first."""
    found: dict[str, list[str]] = {
        title: [name for name in first if name in choices] for title, first in _FAMILIES.items()
    }
    placed = {name for first in _FAMILIES.values() for name in first}
    for choice in choices:
        begins = _base_method(choice)
        title = next((title for title, first in _FAMILIES.items() if begins in first), "Your own")
        if choice not in placed:
            found.setdefault(title, []).append(choice)
    return {title: members for title, members in found.items() if members}


def _base_method(choice: str) -> str:
    """Return the method that a choice's file extends, through as many others as stand between."""
    path = conf_folder() / "algo" / f"{choice}.yaml"
    ends = {name for first in _FAMILIES.values() for name in first}
    while choice not in ends and path.is_file():
        ends.add(choice)  # the file of a class of one's own may have the name of its schema
        begins = re.search(r"^defaults:\s+(?:- |\[)(?:/schemas/)?(\w+)", path.read_text(encoding="utf-8"), re.M)
        choice = begins[1].lower() if begins else ""  # a schema has the name of its class
        path = path.with_name(f"{choice}.yaml")
    return choice


SCHEMA_KEYS = Path(__file__).with_name("schema_keys.yaml")
_HERE = "_here_"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def keys_of_choice(group: str, choice: str) -> set[str]:
    """Return the keys that `group=choice` has at its top.

    Args:
        group: Such as `algo`.
        choice: The name of one of its files, without its ending.
    """
    return _keys_of_file(conf_folder() / group / f"{choice}.yaml", group)


@functools.cache
def keys_of_group(group: str) -> set[str]:
    """Return the keys that any choice of a group has."""
    files = (conf_folder() / group).glob("*.yaml")
    return set().union(*(_keys_of_file(path, group) for path in files))


@functools.cache
def _keys_of_file(path: Path, group: str) -> set[str]:
    """Return the keys at the top of a file's group; one of the package `_global_` has them under the group's name."""
    text = path.read_text(encoding="utf-8")
    content = yaml.load(text, _LOADER) or {}  # both loaders make plain data alone
    whole = text.startswith("# @package _global_")
    keys = {str(key) for key in (content.get(group, {}) if whole else content)} - {"defaults"}
    for entry in content.get("defaults", ()):
        file, choice = next(iter(entry.items())) if isinstance(entry, dict) else (entry, None)
        file, _, place = file.partition("@")
        if file == "_self_" or file.startswith("override "):
            continue
        if place.partition(".")[0] == group and whole:
            place = place.partition(".")[2] or _HERE
        elif whole and (place or file.startswith("/")):
            continue  # of another group
        keys |= _keys_of_default(path.parent, group, file, choice, place)
    return keys


def _keys_of_default(folder: Path, group: str, file: str, choice: Any, place: str) -> set[str]:
    """Return the keys of one line of a defaults list: those of a file, or one key under which a file stands."""
    if choice is not None and not place:
        return {file.rpartition("/")[2]}
    if place not in ("", _HERE):
        return {place.partition(".")[0]}
    if file.startswith("/schemas/"):
        return {*schema_keys()[file.removeprefix("/schemas/")], "_target_", "_partial_"}
    file = file if choice is None else f"{file}/{choice}"
    return _keys_of_file(
        (conf_folder() / file[1:] if file.startswith("/") else folder / file).with_suffix(".yaml"), group
    )


@functools.cache
def schema_keys() -> dict[str, dict[str, Any]]:
    """Return each schema by its name, as `lit_rl.cli.schemas` writes it; and `_versions_`."""
    return yaml.load(SCHEMA_KEYS.read_text(encoding="utf-8"), _LOADER)


BASH = """\
_lit_rl() {
    local line="${COMP_LINE:0:$COMP_POINT}"
    local word="${line##* }"
    local before="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("${found#"$before"}")
    done < <(lit-rl completion words "$word" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 0 ]] && compopt -o default
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -F _lit_rl lit-rl
"""

ZSH = """\
_lit_rl() {
    local -a found begun whole
    found=(${(f)"$(lit-rl completion words "$PREFIX" 2>/dev/null)"})
    (( $#found )) || { _files; return }
    begun=(${(M)found:#*=}) whole=(${found:#*=})
    compadd -S '' -a begun
    compadd -a whole
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _lit_rl lit-rl
"""
FISH = """\
complete -c lit-rl -a '(lit-rl completion words (commandline -ct) 2>/dev/null)'
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def print_completion(words: Sequence[str], commands: Sequence[str]) -> int:
    """Print the script, or, for that script, the completions of the typed word.

    Args:
        words: The shell; or `words` and the beginning.
        commands: Words that may stand first.

    Raises:
        ConfigError: a shell that is not known.
    """
    if words and words[0] == "words":
        begun = words[1] if len(words) > 1 else ""
        sys.stdout.write("".join(f"{word}\n" for word in candidates(begun, commands)))
        return 0
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(
            f"lit-rl completion knows {', '.join(SHELLS)}, but got {' '.join(words) or 'no shell'}. Type: "
            'eval "$(lit-rl completion bash)", the same with zsh, or: lit-rl completion fish | source'
        )
    sys.stdout.write(SHELLS[words[0]])
    return 0


def candidates(begun: str, commands: Sequence[str]) -> list[str]:
    """Return completions of the word: commands and groups; behind `group=` its choices."""
    found = groups([conf_folder()])
    group, equals, _ = begun.partition("=")
    if equals:
        words = [f"{group}={choice}" for choice in found.get(group, ())]
    else:
        words = [*commands, *(f"{name}=" for name in found)]
    return sorted(word for word in words if word.startswith(begun))
