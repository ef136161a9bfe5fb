"""One sentence (the key, its value, the allowed ones) from jsonargparse's account of everything that it tried."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
from jsonargparse import ArgumentError

from lit_rl.cli.lightning_words import no_such_key
from lit_rl.cli.schemas import parameters
from lit_rl.cli.targets import ALLOWED
from lit_rl.core.errors import ConfigError, LitRLError, did_you_mean
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule

Factories = Mapping[str, Sequence[type]]
"""Keys that take one of a few classes."""


@contextmanager
def in_one_sentence(factories: Factories) -> Iterator[None]:
    """Turn refusals of jsonargparse in this block into a ConfigError; errors of our constructors are raised as they
    were."""
    try:
        yield
    except (ArgumentError, ValueError) as error:
        if (ours := _ours(error)) is not None:
            raise ours from error
        if "jsonargparse" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise  # Lightning's own: cli.messages knows them
        raise _explained(str(error), factories) from error


def _ours(error: BaseException | None) -> LitRLError | None:
    """Return the error of one of our constructors, before jsonargparse wrapped it in an account of its attempts."""
    while error is not None and not isinstance(error, LitRLError):
        error = error.__cause__ or error.__context__
    return error


def _explained(text: str, factories: Factories) -> ConfigError:
    """Return the key and the reason, from jsonargparse's account of them."""
    key = ".".join(_keys(text))
    if denied := re.search(r"Importing '([^']+)' is not allowed", text):
        target, listed = denied.group(1), ", ".join(f"{prefix}*" for prefix in ALLOWED)
        return ConfigError(
            f"{key}={target!r} is not on the list of what a config may build ({listed}). For a class of your own, "
            f"allow its package on the command line: --allow_targets=[{target.split('.')[0]}]. A reward function needs "
            "no such path: --model.reward=lit_rl.rewards.from_paths --model.reward.fn=package.module:name."
        )
    if unknown := re.search(_UNKNOWN, text):
        option, whole, group, member = unknown.groups()
        return _unknown(whole or (f"{group}.{member}" if group else f"{key}.{option}"), text, factories)
    if name := re.search(r"Expected a dot import path string: (\w+)", text):
        known = {"model": ["GRPO", "PPO", "RLOO", "Reinforce"]} | {
            slot: [kind.__name__ for kind in kinds] for slot, kinds in factories.items()
        }
        choices = known.get(key, [])
        listed = f" Allowed is {', '.join(choices)}, or a dotted path." if choices else " Allowed is a dotted path."
        return ConfigError(f"{key}={name.group(1)} is not a class.{did_you_mean(name.group(1), choices)}{listed}")
    if key == "data" and (name := re.search(r"Unable to load config ['\"]([^'\"]+)", text)):
        return ConfigError(
            f"data={name[1]} is no file of settings, and no class is named here: the data module follows from --model "
            "(SFT, DPO: examples; GRPO, PPO: prompts). Leave it out; its settings are --data.path=FILE and the like."
        )
    lines = [re.sub(_ECHO, "", line).strip(" -") for line in text.splitlines()]
    said = [line for line in lines if line]
    reasons = dict.fromkeys([line for line in said if not re.match(_OTHERS, line)] or said)
    if re.search(r"the following arguments are required: \w+\.model$", text):
        return ConfigError(
            "There is no model: --model GRPO (or another class of lit_rl), or a --config FILE that has one."
        )
    if path := re.search(r"Unexpected import path format: (\S+\.py:\w+)", text):
        return ConfigError(
            f"{key}={path[1]}: a function in a file is --{key}=lit_rl.rewards.from_paths --{key}.fn={path[1]}; in a "
            f"module that can be imported --{key}=MODULE.NAME."
        )
    what = _without_classes("; ".join(reasons)) + _given_value(text, reasons)
    if key and (kinds := _kinds(what)):
        return ConfigError(f"{key}={what.partition('Got value: ')[2]}: allowed is {', or '.join(kinds)}.")
    return ConfigError(f"{key}: {what}"[:1000] if key else what[:1000])


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def _kinds(what: str) -> list[str]:
    """Return the plain types that a key takes, in words; nothing where it takes an object too."""
    said, _, came = what.partition("Got value: ")
    if not came:
        return []
    found = [re.fullmatch(r"Expected a (?:(\w+)|typing\.Literal\[(.*)\])[. ]*", part) for part in said.split("; ")]
    if not all(each and (each[2] or each[1] in _KINDS) for each in found):
        return []
    return [_KINDS[each[1]] if each[1] else each[2].replace("'", "") for each in found if each]


def _keys(text: str) -> list[str]:
    """Return the key in its parts: they stand one inside the other, and parts further out are of another attempt."""
    found: list[tuple[int, str]] = []
    for line in text.splitlines():
        if (part := re.match(r'( *)[Pp]arser key "([^"]+)"', line)) and (not found or len(part[1]) > found[-1][0]):
            found.append((len(part[1]), part[2]))
    return [name for _, name in found]


def _given_value(text: str, reasons: Iterable[str]) -> str:
    """Return the value, which is named once for all of several types, and once for one beside it."""
    came = re.search(r"Given value: (?!NestedArg|Namespace)(.*)", text)
    return f". Got value: {came[1]}" if came and not any("Got value: " in reason for reason in reasons) else ""


def _without_classes(text: str) -> str:
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)


_UNKNOWN = (
    r"Option '([^']+)' is not accepted|unrecognized arguments: --([\w.]+)"
    r"|Group '([^']+)' does not accept option '([^']+)'"
)
_ECHO = (
    r"[Pp]arser key \"[^\"]+\":|Problem with given class_path '[^']+':|Does not validate against any.*|Subtypes: .*"
    r"|Errors:$|Expected a <class 'NoneType'>|Given value.*|Expected a path but .* either not accessible or invalid"
)
"""Phrases of jsonargparse around a reason."""
_OTHERS = r"Import path .* does not correspond to a subclass of |Type <class 'collections.abc.Callable'> expects"
"""Its phrases about the other kinds that could stand there, beside the one that was meant."""


def _unknown(key: str, text: str, factories: Factories) -> ConfigError:
    head, _, name = key.rpartition(".")
    if head == "model" and name.split(".")[0] in factories:
        return ConfigError(f"{key} is not a key: it stands at the top, --{name}=...")
    owner: Any = {"trainer": L.Trainer, "data": RolloutDataModule}.get(head)
    if built := re.findall(r"given class_path '([\w.]+)'", text):
        module, _, last = built[-1].rpartition(".")
        owner = getattr(sys.modules.get(module), last, None)
    if head.rpartition(".")[2] == "sampling":  # a setting of the model, with settings of its own
        head, owner = "model.sampling", Sampling
    taken = [p.name for p, _ in parameters(owner)] if owner else []
    if (first := key.partition(".")[0]) in factories and first in taken:  # said of the model, without its name
        return ConfigError(f"model.{key} is not a key: it stands at the top, --{key}=...")
    names = sorted(n for n in taken if n not in factories)
    return no_such_key(head, name, names)
