"""Checks of runs that learn from a data set, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.data.offline.example import Example, Kind
from lit_rl.errors import ConfigError, DataError
from lit_rl.models.policy.language_model import LanguageModel

MODULES = {
    "texts": "SupervisedDataModule(...) (data=texts)",
    "pairs": "PreferenceDataModule(...) (data=preferences)",
    "verdicts": "PreferenceDataModule(...) (data=preferences)",
    "stepwise": "StepwiseDataModule(...) (data=steps)",
}
"""The data module of each kind of examples, and its config."""


def examples_of(trainer: Any, kind: Kind, method: str) -> Any:
    """Return the Trainer's data module of examples.

    Args:
        trainer: The Trainer.
        kind: Kind of examples that the method learns from.
        method: Name of the method, for the message.

    Raises:
        ConfigError: there is none, or it makes no examples of this kind.
    """
    return example_data(getattr(trainer, "datamodule", None), kind, method)


def example_data(data: Any, kind: Kind, method: str) -> Any:
    """Return a data module, if it makes examples of this kind.

    Raises:
        ConfigError: there is none, or it makes no examples of this kind.
    """
    if kind not in getattr(data, "serves", ()):
        came = "no data module" if data is None else type(data).__name__
        raise ConfigError(f"{method} learns from {kind}; the Trainer got {came}. Pass datamodule={MODULES[kind]}.")
    return data


def texts_fit(model: LanguageModel, longest: int, *, streamed: bool) -> None:
    """Refuse texts that are longer than the model's context.

    Args:
        model: The policy, whose context has to hold every text.
        longest: Tokens of the longest row; for a stream, the most that a later row may have.
        streamed: Whether the rows come from a stream.

    Raises:
        ConfigError: the context is shorter.
    """
    context = model.context_length
    if context is not None and longest > context:
        who = "A row of a stream may have" if streamed else "The longest row has"
        raise ConfigError(
            f"{who} {longest} tokens, but the context of {model.name} holds {context}: "
            f"lower data.max_length to {context}."
        )


@dataclass(frozen=True)
class AllRows:
    """A term that needs all rows before the first step."""

    who: str
    """The setting, and what it does with all rows, as subject and verb."""
    instead: str
    """The setting to do without it."""


def stream_will_do(terms: Iterable[AllRows]) -> None:
    """Refuse terms that need all rows before the first step, as a stream is never available at once.

    Raises:
        ConfigError: there is such a term.
    """
    for term in terms:
        raise ConfigError(
            f"data.stream_buffer: {term.who} all rows before the first step, and a stream is never there all at once. "
            f"Leave data.stream_buffer out, or {term.instead}."
        )


def longest_prompt(options: Any, examples: Sequence[Example]) -> int:
    """Return the tokens of the longest prompt of texts whose completions are written anew in the training.

    Args:
        options: Options of the data module.
        examples: All training rows.

    Raises:
        ConfigError: rows are packed, or not only completions are learned.
        DataError: a row has no prompt.
    """
    why = "The completions of a step are written anew (algo.on_policy_fraction, algo.teacher_completions)"
    for key, needed in (("learn", "completion"), ("packing", "none")):
        if (came := getattr(options, key)) != needed:
            raise ConfigError(f"data.{key}={came}: {why}, which needs a prompt a row: set data.{key}={needed}.")
    longest = 0
    for example in examples:
        length = example.texts[0].prompt_tokens
        if not length:
            raise DataError(
                f"{example.where}: the text has no prompt. {why}, so every row needs a prompt and a completion; for "
                "texts alone set algo.on_policy_fraction=0 and algo.teacher_completions=false."
            )
        longest = max(longest, length)
    return longest
