"""Command-line aliases: names of TRL and verl, `lr`, a path in place of a preset.

Only where a word can mean one thing; else the message names the keys (`core.other_names`). Nothing heavy is loaded, so
a refusal comes at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_rl.cli import typed_words
from lit_rl.cli.listing import (
    conf_folder,
    default_choices,
    groups,
    keys_of_choice,
    keys_of_group,
    neighbouring_keys,
    no_choice_message,
    top_keys,
)
from lit_rl.cli.typed_words import quoted, readable, unquoted
from lit_rl.core.errors import ConfigError, did_you_mean, nearest
from lit_rl.core.other_names import column, from_page, may_mean, meaning, near_name, not_a_key, unknown_key

_BETA_OF_RLOO = "algo.reward_beta, the KL in the reward (TRL's beta of RLOO), or algo.beta, the KL in the loss"

_NEVER_EMPTY = ("run_dir", "ckpt_path", "data.path", "data.val_path", "model.name", "seed", "reward.fn")
"""Keys, beside the groups and the names that are read as a key, that take no empty text: it would be the current
folder, or nothing."""
_FEW = 4
"""Most choices that are named as having a key."""
_MAY_BE_REMOVED = ("callbacks", "logger", "debug", "experiment")
_FUNCTIONS = re.compile(r"\[ *([^\],]*\w:\w+(?: *, *[^\],]*\w:\w+)*) *\]")
"""A list of paths of functions."""
_ABSENT = "lit_rl.cli.build.absent"
_PLAIN = re.compile(r"[\w./~-]+")

MERGED = "merge=true is how every export is: merged weights, and the adapter of LoRA by itself in its folder adapter/."


def expand_export(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words of `lit-rl export` without `merge=true`, with `push_to_hub=` as a key of `export`; and a line
    to print.

    Raises:
        ConfigError: `merge` is something else.
    """
    kept, said = [], ""
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key.removeprefix("export.") != "merge":
            kept.append(f"export.{word}" if key == "push_to_hub" and equals else word)
        elif value.lower() == "true":
            said = MERGED
        else:
            raise ConfigError(
                f"{word}: an export is merged always. Its adapter is in the folder adapter/ by itself, to be loaded on "
                f"the base model. Leave {key} out."
            )
    return kept, said


def expand_aliases(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words with ours in place of others, and the replacements.

    Raises:
        ConfigError: a name could be several keys, a choice is none of its group's, or a key begins with no group.
    """
    elsewhere = (*typed_words.ELSEWHERE, "hydra.searchpath")
    own = any(word.startswith(elsewhere) for word in words)  # groups that we do not see
    found, keys = groups([conf_folder()]), column("key")
    typed = {word.partition("=")[0] for word in words if "=" in word}
    choices = _choices(words)
    out: list[str] = []
    new: list[str] = []
    check_spaces(words)
    sweeps = bool({"-m", "--multirun"} & {*words})
    for before, typed_word, next_word in zip(["", *words], words, [*words[1:], ""]):
        is_setting = not typed_word.startswith("-") and before not in typed_words.WITH_A_VALUE
        word = readable(typed_word, sweeps=sweeps) if is_setting else typed_word
        key, equals, value = word.partition("=")
        if word.startswith("~") and not any(each.startswith((f"+{key[1:]}.", f"+{key[1:]}=")) for each in words):
            _check_removed(key[1:], found)
        if word.startswith("-") and key not in typed_words.ALL:
            raise ConfigError(_dashed(key, value if equals else next_word))
        if not equals or word.startswith("-"):
            out.append(word)
            continue
        if not value and (key in found or key in _NEVER_EMPTY or key in keys):
            raise ConfigError(
                f"{key}= has no value after the =; an unset variable of the shell looks like this. Type {key}=VALUE, "
                "or leave it out for its default."
            )
        if value == "~" or value.startswith("~/"):  # which shells leave as it is behind a `=`, and Hydra cannot read
            value = quoted(str(Path(value).expanduser()))
        if key in column("may_mean"):
            raise unknown_key(key)
        if key == "beta" and any(w.startswith("algo=rloo") for w in words):
            raise not_a_key(key, may_mean(_BETA_OF_RLOO))
        read = _read(keys.get(key, key), value, typed, found)
        if read != [word]:
            new += read
        if not own and read in ([word], [f"reward={value}"]):
            _check(read[0].partition("=")[0], value, found, choices)
        out += read
    return out, new


def check_spaces(words: Sequence[str]) -> None:
    """Refuse `key = value`, which a shell splits into several words, and a key or a group alone.

    Raises:
        ConfigError: says what to type.
    """
    for before, word, after in zip(["", *words], words, [*words[1:], ""]):
        if word.endswith("\r"):
            raise ConfigError(
                f"{word!r} ends with the line end of Windows: the script has these. Save it with those of Unix "
                "(sed -i 's/\\r$//' FILE)."
            )
        if before.startswith("-") or word.startswith(("-", "~")):
            continue
        if word.endswith("=") and after and "=" not in after and not after.startswith(("-", "~")):
            raise ConfigError(f"{word} {after} has a space behind the =: write {word}{after}, without a space.")
        if after.startswith("=") and "=" not in word:
            rest = after[1:] or next(iter(words[words.index(after) + 1 :]), "...")
            raise ConfigError(f"{word} {after} has a space before the =: write {word}={rest}, without spaces.")
        head = word.partition(".")[0]
        if "=" not in word and head in {*groups([conf_folder()]), *column("key"), *top_keys()}:
            key, colon, value = word.partition(":")
            if not colon and after and "=" not in after and not after.startswith(("-", "~", "+")):
                value = after  # key value, as other tools have it
            raise ConfigError(f"{word} alone says nothing: write {key}={value or '...'}")


def _check_removed(key: str, found: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse to remove a group that the algorithm is made of, where no `+group=` replaces it."""
    if key in found and "/" not in key and key not in _MAY_BE_REMOVED:
        raise ConfigError(
            f"~{key} cannot be removed, because other settings use the group. Choose another: {key}=NAME. There are: "
            f"{', '.join(found[key])}."
        )


def _choices(words: Sequence[str]) -> dict[str, str] | None:
    """Return the choice of each group whose keys are known from its files: not of one to which a word adds a key. None
    where an experiment chooses."""
    typed = dict(word.split("=", 1) for word in words if "=" in word)
    if "experiment" in typed:
        return None
    added = {key.rpartition("@")[2].lstrip("+").partition(".")[0] for key in typed if key.startswith("+")}
    return {group: choice for group, choice in {**default_choices(), **typed}.items() if group not in added}


def _read(key: str, value: str, typed: set[str], found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return one word as ours."""
    if value == "null" and key in ("experiment", "debug"):  # as where they are not typed
        return []
    if value == "null" and (nothing := _nothing_of(key, found)):
        return [f"{key}={nothing}"]
    if key == "model" and value not in found["model"] and _is_path(value):
        return ["model=local", f"model.name={quoted(value)}"]
    one = re.search(r"\w:\w+$", unquoted(value)) if key == "reward" else None
    if one and value not in found["reward"] and value[0] != "[" and "{" not in value:
        return ["reward=function", f"reward.fn={quoted(value)}"]
    if key == "reward" and (many := _FUNCTIONS.fullmatch(value)) and "{" not in value:
        return ["reward=function", f"reward.fn=[{','.join(map(quoted, re.split(r' *, *', many[1])))}]"]
    if key == "reward.fn" and not {"reward", "experiment"} & typed:
        return ["reward=function", f"reward.fn={value}"]
    return [f"{key}={value}"]


def _nothing_of(group: str, found: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return the choice of a group that stands for nothing: a group takes a name, and no `null`."""
    if "none" in found.get(group, ()):
        return "none"
    files = {choice: conf_folder() / group / f"{choice}.yaml" for choice in found.get(group, ())}
    return next((name for name, file in files.items() if file.is_file() and _ABSENT in file.read_text()), None)


def _is_path(value: str) -> bool:
    """Tell whether it can only be a folder or a hub id."""
    plain = value.strip("'\"")
    return bool(plain) and "," not in plain and ("/" in plain or plain[0] in ".~" or Path(plain).is_dir())


def _check(key: str, value: str, found: Mapping[str, Mapping[str, str]], choices: Mapping[str, str] | None) -> None:
    """Refuse faults that show without the config: a choice that its group lacks, and a key that no choice has. An
    experiment (`choices` is None) may add keys at the top, so Hydra checks these."""
    if key in found and _PLAIN.fullmatch(value) and value not in found[key]:
        raise ConfigError(no_choice_message(key, value, list(found[key])))
    for word in value[1:-1].split(",") if key in found and re.fullmatch(r"\[[\w,. -]+\]", value) else ():
        if word.strip() not in found[key]:
            raise ConfigError(no_choice_message(key, word.strip(), list(found[key])))
    part = re.fullmatch(r"(\w+)[/\[](\w+)\]?", key)
    if part and part[1] in found and f"{part[1]}/{part[2]}" not in found:
        raise ConfigError(
            f"{key} is not a key. A key in {part[1]} is written with a point: {part[1]}.{part[2]}={value}."
        )
    head, dot, rest = key.partition(".")
    tops = {group for group in found if "/" not in group}
    known = {*tops, *top_keys()} - {"hydra"}
    adds = {name: choice for choice in found.get("debug", ()) for name in top_keys(f"debug/{choice}.yaml")}
    if head in adds and head not in known and choices is not None:
        if choices.get("debug") != adds[head]:
            raise ConfigError(f"{key} is not a key. debug={adds[head]} has it: type that too.")
        known.add(head)
    if choices is not None and not dot and head.isidentifier() and head not in {*known, "hydra"}:
        raise unknown_key(head, beside=_near(head, known, choices))
    said = "" if head in {*known, "hydra"} else did_you_mean(head, tops) or meaning(key)
    if dot and head.isidentifier() and said:  # others wait for the whole config
        raise not_a_key(key, said)
    if dot and choices and choices.get(head) in found.get(head, {}):
        _check_in_group(key, head, rest.partition(".")[0], choices[head])


def _dashed(flag: str, value: str) -> str:
    """Return the message about `--lr`, where `key=value` is written.

    Args:
        value: What followed; nothing, or another option or setting, is no value of it.
    """
    name = flag.lstrip("-").replace("-", "_")
    keys, several = column("key"), column("may_mean")
    if name in several:
        return f"{flag} is no option: settings are written key=value.{may_mean(several[name])}"
    said = shlex.quote(value) if value and not value.startswith("-") and "=" not in value else "..."
    if name not in keys and (told := from_page(name)) and name not in {*groups([conf_folder()]), *top_keys()}:
        return f"{flag} is no option: settings are written key=value.{told}"
    return f"{flag} is no option: settings are written key=value, such as {keys.get(name, name)}={said}"


def _near(name: str, known: set[str], choices: Mapping[str, str]) -> str:
    """Return the nearest of the keys at the top, of the names in other tools, and of the keys in groups; and the keys
    at the top, where that is no name of another tool's."""
    inside: dict[str, list[str]] = {}
    for group, choice in choices.items():
        for key in keys_of_choice(group, choice) if (conf_folder() / group / f"{choice}.yaml").is_file() else ():
            inside.setdefault(key, []).append(f"{group}.{key}")
    listed = neighbouring_keys("", name, known)
    others = {*column("key"), *column("may_mean")}
    near = nearest(name, sorted({*known, *others, *inside}))
    if near is None and (told := near_name(name)):
        return told
    near = near or next((key for key in sorted(known) if name.startswith(key)), None)  # algorithm, model_name
    if near is None:
        return listed
    if near in known or near not in others:
        return f" Did you mean {' or '.join(map(repr, [near] if near in known else inside[near]))}?{listed}"
    return meaning(near)


def of_other_choices(key: str) -> str:
    """Return the other choices of the group that have the key, where these are few; nothing where there are none.

    Args:
        key: One that the chosen one has not.
    """
    group, _, name = key.partition(".")
    files = sorted((conf_folder() / group).glob("*.yaml")) if name else []
    having = [path.stem for path in files if name in keys_of_choice(group, path.stem)]
    if not 0 < len(having) <= _FEW:
        return ""
    head, last = ", ".join(having[:-1]), having[-1]
    return f" {group}={f'{head} or ' if head else ''}{last} has it, and the {group} that is chosen here does not."


def _check_in_group(key: str, group: str, name: str, choice: str) -> None:
    """Refuse a key that no choice of the group has, where the chosen one has a similar name."""
    if name.isidentifier() and name not in keys_of_group(group):
        has = sorted(name for name in keys_of_choice(group, choice) if not name.startswith("_"))
        if meaning(key) or nearest(name, has):
            raise unknown_key(f"{group}.{name}", "train", has, neighbouring_keys(group, name, has))
