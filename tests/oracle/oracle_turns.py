"""Rollouts of several turns on both sides: TRL's own loop of tools and ours are given the same turns.

TRL's `_generate_and_score_completions` runs as it is, and calls its tools; ours is the `Interaction` of `env=`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from oracle_cases import GIVEN, ROWS, Case, second
from oracle_trl import Oracle, make_tokenizer
from said_turns import ids_of
from torch import Tensor

LONGEST = 700


def call(name: str, **arguments: Any) -> str:
    """A call as Qwen's templates write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def chat_tokenizer() -> Any:
    import trl

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"})
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen2_5.jinja").read_text()
    return tokenizer


@dataclass
class Theirs:
    """TRL's rollout."""

    taken: dict[str, Any]
    completions: list[Any]
    """What rewards were given."""
    columns: dict[str, Any]
    """What else they were given, as it was then."""
    metrics: dict[str, list[float]]


def their_rollout(
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    case: Case,
    said: Sequence[Sequence[str]],
    rows: Sequence[dict[str, Any]],
    logprobs: Sequence[Sequence[float]] | None = None,
) -> Theirs:
    """TRL's rollout of these rows of the data, one a completion, in which each says its turns.

    `logprobs` are what the engine reports of all that a row says.
    """
    trainer, turns, seen, columns = oracle.trainer, [0] * ROWS, [], dict[str, Any]()
    tokenizer = trainer.processing_class

    reported = None if logprobs is None else [list(row) for row in logprobs]

    def says(prompt_ids: Sequence[Any], *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float]] | None]:
        going = [row for row in range(ROWS) if turns[row] < len(said[row])]
        assert len(going) == len(prompt_ids), "TRL goes on with other rows than those that called a tool"
        texts = [said[row][turns[row]] for row in going]
        for row in going:
            turns[row] += 1
        ids = [ids_of(tokenizer, text) for text in texts]
        if reported is None:
            return ids, None
        return ids, [[reported[row].pop(0) for _ in said_now] for row, said_now in zip(going, ids)]

    def watched(completions: Any, **given: Any) -> list[float | None]:
        seen.extend(copy.deepcopy(completions))
        wanted = {"prompts", "environments", *rows[0]}
        columns.update(copy.deepcopy({name: given[name] for name in given if name in wanted}))
        return list(GIVEN["first"])

    oracle.configure(settings, case)
    monkeypatch.setattr(trainer, "_generate_single_turn", says)
    monkeypatch.setattr(trainer, "reward_funcs", [watched, second, *trainer.reward_funcs[2:]])
    GIVEN.update(first=case.first, second=case.second)
    oracle.at("rollout")
    taken = trainer._generate_and_score_completions([copy.deepcopy(row) for row in rows])
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
    return Theirs(taken, seen, columns, metrics)


def tokens(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[there.bool()].tolist() for row, there in zip(ids, mask)]


def plain(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    """Role, text without blanks around it, and calls: TRL leaves a text without calls out where it is empty."""
    return [(each["role"], (each.get("content") or "").strip(), each.get("tool_calls")) for each in messages]
