"""Names of settings in other libraries: one table of them, and the one answer to a key or a keyword that there is not.

`other_names.yaml` has a row a name, with a column for each place where somebody may write it:

- `key`: the key that the command line reads it as; `may_mean`: the several that it may be, which are told instead.
- `TRL`, `verl`: what the library's name is on the command line, from docs/from-trl.md and docs/from-verl.md
  (`scripts/source_pages.py names` writes these two columns, and leaves the others).
- `algorithm`, `data`, `optimizer`, `sampling`: what it is in the constructor of one. A list has keywords of ours, of
  which the first that the class takes is meant; a word of `PLACES` stands for its sentence.
- `speedups`: what it is in the constructor of a model or a generator, where it is the name of a switch.
- `model`, `reward_model`: what to set in place of an argument of `from_pretrained`.

Nothing heavy is loaded, so a refusal comes at once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from lit_rl.core.errors import ConfigError, UnknownKeyword, did_you_mean, keyword_names, nearest

TABLE = Path(__file__).with_suffix(".yaml")
_PAGES = {"TRL": "docs/from-trl.md", "verl": "docs/from-verl.md"}


class Place(NamedTuple):
    """A sentence about where a setting belongs in Python."""

    sentence: str
    needs: str = ""
    """The keyword without which a class has no such setting."""
    without: str = ""
    """The sentence for such a class; empty where it has nothing of the kind."""


REWARD = "reward=...: a function, or lit_rl.exact_match"
_LEARNS = "it learns from the rows of a data set"
PLACES = {
    "batch": Place("it belongs to the data module: lit_rl.{module}(rows, {batch}=...)"),
    "critic": Place("here it is critic=, of lit_rl.models.critics: SeparateCritic() or SharedTrunk()", "critic"),
    "env": Place(
        "it is an environment: env=lit_rl.FunctionTools(...), CustomEnvironment(...) or RolloutFunction(...)", "env"
    ),
    "length": Place("it belongs to the data module: lit_rl.{module}(rows, {length}=...)"),
    "model": Place(
        "it belongs to the model: model=lit_rl.LanguageModel(name, lora=...), or a PeftModel with tokenizer="
    ),
    "optimizer": Place("it belongs to the optimizer: optimizer=lit_rl.AdamW(lr=...)"),
    "reference": Place(
        "here it is reference=lit_rl.models.references.OtherModel(name); without it, the policy as it began"
    ),
    "reward": Place(f"it is TRL's name: here it is {REWARD}", "reward", _LEARNS),
    "reward_model": Place("it belongs to the reward: lit_rl.RewardModel(model, tokenizer=...)", "reward", _LEARNS),
    "rows": Place("rows belong to a data module: trainer.fit(module, datamodule=lit_rl.{module}(rows, val=...))"),
    "sampling": Place(
        "it belongs to the sampling: sampling=lit_rl.Sampling(max_new_tokens=..., temperature=...)", "sampling"
    ),
    "trainer": Place("it belongs to lightning.Trainer(...)"),
}
"""Sentences for many names, by the word that stands for them in the table."""

ROLLOUT = {
    "module": "RolloutDataModule",
    "length": "max_prompt_tokens",
    "batch": "prompts_per_rollout",
    "config": "GRPOConfig",
}
"""Words for the brackets in these sentences, for an algorithm that draws its own completions."""

_OF_FIT = {
    "algo": "model",
    "generator": "model.generator",
    "model": "model.model",
    "reward": "model.reward",
    "run_dir": "trainer.default_root_dir",
    "sampling": "model.sampling",
}
"""Keys of LightningCLI by those of the Hydra command line, where they differ."""

_COLUMNS_OF_FIT = {"model": "algorithm", "data": "data", "optimizer": "optimizer", "sampling": "sampling"}
"""Columns of the constructors whose keywords are keys of LightningCLI, by the last word above the key."""


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(TABLE.read_text(encoding="utf-8"), loader)  # both loaders make plain data alone


@functools.cache
def column(name: str) -> dict[str, Any]:
    """Return a column of the table: what stands in it, by the other libraries' names."""
    return {row: cells[name] for row, cells in _rows().items() if name in cells}


def hint(
    key: str, door: str = "train", taken: Iterable[str] = (), beside: str = "", facts: Mapping[str, str] = ROLLOUT
) -> str:
    """Return what is said about a key that there is not, with a space in front; empty where nothing is known.

    Args:
        key: As it was written.
        door: `train` (Hydra), `fit` (LightningCLI), or a column of constructors.
        taken: The names that there are beside it.
        beside: Said after the nearest of these, where the table does not have the name.
        facts: What stands in the brackets of `PLACES`.
    """
    known = [*taken]
    said = meaning(key, door, known, facts)
    return said or f"{did_you_mean(key.rpartition('.')[2], known)}{beside}"


def unknown_key(key: str, door: str = "train", taken: Iterable[str] = (), beside: str = "") -> ConfigError:
    """Return the error about a key that there is not, of arguments like those of `hint`."""
    return not_a_key(key, hint(key, door, taken, beside))


def not_a_key(key: str, said: str) -> ConfigError:
    """Return the error about a key that there is not; `said` has a space in front."""
    return ConfigError(f"{key} is not a key.{said}")


def meaning(key: str, door: str = "train", taken: Iterable[str] = (), facts: Mapping[str, str] = ROLLOUT) -> str:
    """Return what the table says of a key's last word, as `hint` does; empty where it has no such name."""
    name = key.rpartition(".")[2]
    cells = _rows().get(name, {})
    if door == "train":
        if "may_mean" in cells:
            return may_mean(cells["may_mean"])
        return f" Did you mean {cells['key']!r}?" if cells.get("key", key) != key else from_page(key)
    page = functools.partial(from_page, name, "On the command line")
    if door == "fit":
        meant = _key_of_fit(cells.get("key", key))
        if "key" in cells and meant != key:
            return f" Did you mean {meant!r}?"
        door = _COLUMNS_OF_FIT.get(key.split(".")[-2] if "." in key else "", "")
        page = functools.partial(from_page, name, "For lit-rl train")
    return _of_constructor(cells[door], {*taken}, facts) if door in cells else page()


def _key_of_fit(key: str) -> str:
    head, dot, rest = key.partition(".")
    return f"{_OF_FIT.get(head, head)}{dot}{rest}"


def _of_constructor(here: str | list[str], taken: set[str], facts: Mapping[str, str]) -> str:
    if isinstance(here, list):
        own = next((name for name in here if name in taken), None)
        return f" Here it is {own}=." if own else ""
    place = PLACES.get(here, Place(here))
    said = place.sentence if not place.needs or place.needs in taken else place.without
    for name, fact in facts.items():
        said = said.replace(f"{{{name}}}", fact)
    return f" {said[0].upper()}{said[1:]}." if said else ""


def may_mean(keys: str) -> str:
    """Return the sentence about a name that is several keys."""
    return f" What it may mean: {keys}."


def from_page(key: str, where: str = "Here") -> str:
    """Return what a name of TRL or verl is on the command line; empty where neither page has it.

    Args:
        key: As it was typed. Its last word may be a field of TRL or, alone, the end of a key of verl.
        where: The words in front of it.
    """
    name = key.rpartition(".")[2]
    verl, trl = column("verl"), column("TRL")
    if re.search(rf"(?<![\w.]){re.escape(key)}=", f"{verl.get(key)} {trl.get(name)}"):  # a key of another choice
        return ""
    if key in verl:
        return _quoted(key, "verl", where)
    if name in trl:
        return _quoted(name, "TRL", where)
    ends = [whole for whole in verl if whole.endswith(f".{name}")] if "_" in name else []
    return _quoted(ends[0], "verl", where) if len(ends) == 1 else ""


def near_name(name: str) -> str:
    """Return the hint for a mistyped name of TRL."""
    found = nearest(name, column("TRL")) if len(name) > 5 else None
    return "" if found in (None, name) else f" Did you mean {found!r}?{from_page(found)}"


def _quoted(name: str, library: str, where: str) -> str:
    whose, answer = "TRL's name" if library == "TRL" else "verl's key", column(library)[name]
    return f" {name} is {whose}. {where}: {answer}{'' if answer.endswith('...') else '.'} More: {_PAGES[library]}."


# ---------------------------------------------------------------------- keywords of constructors


def refuse_unknown_keywords(
    kind: type, given: Iterable[str], taken: type, door: str, facts: Mapping[str, str] = ROLLOUT
) -> None:
    """Refuse keywords that no constructor takes.

    Args:
        kind: The class to construct.
        given: The names of the keywords that are passed on.
        taken: The class whose constructor gets them, and its parents'.
        door: The column of the table for such a class.
        facts: What stands in the brackets of `PLACES`.

    Raises:
        UnknownKeyword: names the first of them, and the place where it belongs or the nearest keyword.
    """
    known = keyword_names(taken)
    wrong = next((name for name in given if name not in known), None)
    if wrong is None:
        return
    said = hint(wrong, door, known | keyword_names(kind), facts=facts)
    error = UnknownKeyword(f"{kind.__name__} takes no {wrong}=.{said} help({kind.__name__}) lists them.")
    error.keyword = wrong
    raise error


T = TypeVar("T")


def reject_unknown_keywords(door: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class without `**keywords`, such as a dataclass, to refuse unknown keywords with a helpful message.

    The constructor keeps its signature.

    Args:
        door: The column of the table for such a class.
    """

    def decorate(kind: type[T]) -> type[T]:
        made: Any = kind.__init__

        @functools.wraps(made)
        def constructor(self: Any, *arguments: Any, **given: Any) -> None:
            refuse_unknown_keywords(kind, given, kind, door)
            made(self, *arguments, **given)

        kind.__init__ = constructor
        return kind

    return decorate
