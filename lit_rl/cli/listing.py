"""`lit-rl list`: the groups of the config, and the choices of one with what each says of itself in its first line."""

from __future__ import annotations

import difflib
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_rl.errors import ConfigError, did_you_mean

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


def defaults() -> dict[str, str]:
    """Return the default choice of each group at the top."""
    text = (conf_folder() / "config.yaml").read_text(encoding="utf-8")
    head = text.partition("defaults:\n")[2].partition("\n\n")[0]
    return {name: choice.strip("[]") for name, choice in re.findall(r"- (\w+): (\S+)", head) if choice != "null"}


def keys(file: str = "config.yaml") -> list[str]:
    """Return the keys at the top of the config, or of a file of a group, beside the groups; nothing where there is
    none."""
    path = conf_folder() / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [name for name in re.findall(r"^(\w+):", text, re.M) if name != "defaults"]


def no_choice(group: str, choice: str, options: Sequence[str]) -> str:
    """Return the message about an unknown choice: another way to write what is meant, or the nearest choice, and as
    many names as a line holds."""
    near = did_you_mean(choice, options)
    own = _OWN[group](choice, near) if group in _OWN else ""
    near = own or near
    if own or (near and len(options) > _MANY):
        return f"{group}={choice} is not a choice.{near} `lit-rl list {group}` says what the {len(options)} are."
    return f"{group}={choice} is not a choice.{near} {group} has: {', '.join(options)}."


def _own_model(choice: str, near: str) -> str:
    return "" if near else f" A folder, or a model of the hub, is model=local model.name={choice}."


def _own_data(choice: str, near: str) -> str:
    """Return how to name own data, for a text that looks like a file or a hub id, however near it is to a choice."""
    looks = "/" in choice or Path(choice).suffix or Path(choice).exists()
    return f" Rows of your own are data.path={choice}." if looks else ""


def _own_reward(choice: str, near: str) -> str:
    if Path(choice).suffix != ".py":
        return "" if near else " A function of yours is reward=./FILE.py:NAME."
    file = choice if Path(choice).is_absolute() else f"./{Path(choice)}"
    return f" A function of yours is reward={file}:NAME."


_OWN = {"model": _own_model, "data": _own_data, "reward": _own_reward}
"""Groups in whose place people type a thing of their own, each with a function of the choice and the nearest one that
returns how that is written."""


def some_keys(head: str, name: str, names: Iterable[str], command: str = "") -> str:
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


def run(words: Sequence[str]) -> int:
    """Print the groups, or the choices of the named ones.

    Raises:
        ConfigError: a word is no group.
    """
    folders, names = _folders(words)
    found, taken = groups(folders), defaults()
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
                f"{name!r} is no group: it is a choice of {group}, and `lit-rl list {group}` says what it is. Its "
                f"keys: `lit-rl train {group}={name} --cfg job --package {group.replace('/', '.')}`."
            )
    return f"{name!r} is no group.{did_you_mean(name, found)} `lit-rl list` names the {len(found)} that there are."


def _folders(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return our folder and, with `--config-dir DIR`, the user's; and the other words."""
    rest, folders = list(words), [conf_folder()]
    if "--config-dir" in rest:
        at = rest.index("--config-dir")
        if at + 1 == len(rest) or not Path(rest[at + 1]).is_dir():
            raise ConfigError(f"--config-dir needs a folder, and got {' '.join(rest[at + 1 : at + 2]) or 'nothing'}.")
        folders.append(Path(rest[at + 1]))
        del rest[at : at + 2]
    return folders, rest


def _overview(found: dict[str, dict[str, str]], taken: dict[str, str]) -> list[str]:
    wide = max(map(len, found))
    lines = [f"  {name:<{wide}}  {len(choices):>3}  {taken.get(name, '')}".rstrip() for name, choices in found.items()]
    return [
        "Groups of the config, how many choices each has, and the one that is taken where none is typed:",
        *lines,
        "`lit-rl list algo` says what the choices of one are; `algo=NAME` takes one, `algo/loss=NAME` one inside it.",
    ]


_FAMILIES = {
    "From rewards of what the policy writes": ("grpo", "rloo", "ppo", "reinforce"),
    "From pairs that the policy writes and a judge compares": ("online_dpo", "nash_md", "xpo"),
    "From a data set of pairs": ("dpo", "cpo", "orpo"),
    "From a data set of single good and bad completions": ("kto", "bco"),
    "From texts": ("sft", "gkd"),
    "Models that score": ("reward_model", "process_reward_model"),
}
"""The tables of docs/algorithms/README.md, and the methods that every other choice of `algo` begins with."""


def _choices(name: str, choices: dict[str, str], taken: str | None) -> list[str]:
    wide = max(map(len, choices))
    lines = [f"{name}=...{f'   ({taken} where none is typed)' if taken else ''}"]
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
        begins = _begins_with(choice)
        title = next((title for title, first in _FAMILIES.items() if begins in first), "Your own")
        if choice not in placed:
            found.setdefault(title, []).append(choice)
    return {title: members for title, members in found.items() if members}


def _begins_with(choice: str) -> str:
    """Return the method that a choice's file extends, through as many others as stand between."""
    path = conf_folder() / "algo" / f"{choice}.yaml"
    every = {name for first in _FAMILIES.values() for name in first}
    while choice not in every and path.is_file():
        begins = re.search(r"^defaults:\s+(?:- |\[)(?:/schemas/)?(\w+)", path.read_text(encoding="utf-8"), re.M)
        choice = begins[1].lower() if begins else ""  # a schema has the name of its class
        path = path.with_name(f"{choice}.yaml")
    return choice
