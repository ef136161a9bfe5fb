"""The dict that a rollout function returned, checked and parsed: one row a completion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lit_rl.data.checks import excerpt
from lit_rl.environments.remembered import told_of
from lit_rl.errors import GenerationError, NumericError
from lit_rl.generation.batches import Decoded
from lit_rl.generation.returned_messages import NoMessages, read_messages
from lit_rl.rewards.functions.contract import ARGUMENTS, SINGULAR
from lit_rl.rollout import Message, Prompts

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"
ENDED = "ended"
MESSAGES = "episode_messages"
ERROR = "episode_error"
_OPTIONAL = (MASK, ENDED, MESSAGES, ERROR)
_OWN = (*REQUIRED, *_OPTIONAL)
"""Keys of its own; all others are for rewards."""


@dataclass(frozen=True)
class Failure:
    """The reason why a completion is neither scored nor learned from."""

    end: Literal["failed", "timeout"]
    error: str


@dataclass(frozen=True)
class ReturnedRow:
    """One completion."""

    prompt_ids: list[int]
    token_ids: list[int]
    """Up to the last one that the policy wrote: later ones have no effect."""
    logprobs: list[float]
    """0 where the policy did not write."""
    written: list[bool]
    """True for the tokens that the policy wrote."""
    ended: bool | None
    """True where it came to its end; None where that was not returned."""
    messages: list[Message] | None = None
    """Its messages, where they were returned: one of the assistant for each turn of the policy."""
    failure: Failure | None = None
    """None where nothing failed."""

    @property
    def turns(self) -> list[int]:
        """The turn of each token: tokens between two turns of the policy count to the first."""
        turns, now, begun = list[int](), 0, False
        for before, written in zip([False, *self.written], self.written):
            now += begun and written and not before
            begun = begun or written
            turns.append(now)
        return turns


class Returned:
    """The dict of a rollout function.

    Args:
        returned: The function's value.
        who: The function's name, for messages.
        count: Requested completions.
        group_size: Completions of each prompt.
        max_prompt_tokens: Most tokens of a prompt.
        max_tokens: Most tokens of a completion.

    Raises:
        GenerationError: it is no dict of lists of the right lengths; names the key and the completion.
        NumericError: a log-prob is not finite.
    """

    def __init__(
        self,
        returned: Any,
        who: str,
        count: int,
        *,
        group_size: int,
        max_prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        self._who, self._count = who, count
        missing = [key for key in REQUIRED if not isinstance(returned, Mapping) or key not in returned]
        if missing:
            came = f"a dict without {', '.join(missing)}" if isinstance(returned, Mapping) else type(returned).__name__
            raise self._wrong(f"returned {came}; it returns a dict with {', '.join(REQUIRED)}, one entry a completion")
        self._returned = returned
        columns = [self._list(key) for key in REQUIRED]
        columns += [self._list(key) if returned.get(key) is not None else [None] * count for key in _OPTIONAL]
        self.rows = [self._row(index, *parts) for index, parts in enumerate(zip(*columns, strict=True))]
        self.has_mask = returned.get(MASK) is not None
        for index, row in enumerate(self.rows):
            if row.prompt_ids != self.rows[index // group_size * group_size].prompt_ids:
                raise self._wrong(
                    f"gave completion {index} other prompt_ids than the first of its group: the {group_size} "
                    "completions of a prompt are compared, and answer the same"
                )
            self._check_lengths(index, row, max_prompt_tokens, max_tokens)

    def _check_lengths(self, index: int, row: ReturnedRow, max_prompt_tokens: int, max_tokens: int) -> None:
        if len(row.prompt_ids) > max_prompt_tokens:
            raise self._wrong(
                f"gave completion {index} a prompt of {len(row.prompt_ids)} tokens, and the run is planned for "
                f"{max_prompt_tokens}: set env.max_prompt_tokens"
            )
        if len(row.token_ids) > max_tokens:
            raise self._wrong(
                f"gave completion {index} {len(row.token_ids)} tokens, and env.max_tokens={max_tokens}: raise it, or "
                "end conversations earlier"
            )

    def _wrong(self, what: str) -> GenerationError:
        return GenerationError(f"env.path={self._who} {what}.")

    def _list(self, key: str) -> Sequence[Any]:
        values = self._returned[key]
        if not _is_listed(values) or len(values) != self._count:
            length = f"{len(values)} entries" if _is_listed(values) else type(values).__name__
            raise self._wrong(f"returned {length} as {key}; it takes a list of {self._count}, one for each completion")
        return values

    def _row(self, index: int, prompt_ids: Any, token_ids: Any, logprobs: Any, *optional: Any) -> ReturnedRow:
        mask, ended, messages, error = optional
        prompt, tokens = self._ids(index, "prompt_ids", prompt_ids), self._ids(index, "completion_ids", token_ids)
        lengths = {"logprobs": logprobs} | ({} if mask is None else {MASK: mask})
        for key, values in lengths.items():
            if not hasattr(values, "__len__") or len(values) != len(tokens):
                length = len(values) if hasattr(values, "__len__") else repr(values)
                raise self._wrong(f"gave completion {index} {length} {key} for {len(tokens)} tokens: one for each")
        written = [True] * len(tokens) if mask is None else [self._bit(index, MASK, value) for value in mask]
        if not any(written):
            raise self._wrong(f"gave completion {index} an {MASK} without a token of the policy")
        end = len(written) - written[::-1].index(True)
        found = [self._number(index, value) if ours else 0.0 for value, ours in zip(logprobs, written)]
        is_ended = None if ended is None else self._bit(index, ENDED, ended)
        failure = None if error is None else self._failure(index, error)
        row = ReturnedRow(prompt, tokens[:end], found[:end], written[:end], is_ended, failure=failure)
        return row if messages is None else replace(row, messages=self._messages(index, messages, row.turns[-1] + 1))

    def _messages(self, index: int, given: Any, turns: int) -> list[Message]:
        try:
            return read_messages(given, turns)
        except NoMessages as why:
            raise self._wrong(f"gave completion {index} {MESSAGES}, which {why}") from why

    def _failure(self, index: int, error: Any) -> Failure:
        if isinstance(error, Exception):
            return Failure("timeout" if isinstance(error, TimeoutError) else "failed", told_of(error))
        if not isinstance(error, str) or not error:
            raise self._wrong(
                f"gave completion {index} {excerpt(repr(error))} as {ERROR}; it takes what went wrong, a text or an "
                "exception, and None where nothing did"
            )
        return Failure("failed", excerpt(error, 200))

    def _ids(self, index: int, key: str, ids: Any) -> list[int]:
        listed: Any = ids.tolist() if hasattr(ids, "tolist") else ids
        if not isinstance(listed, Sequence) or not listed or not all(map(_is_token, listed)):
            raise self._wrong(f"gave completion {index} {excerpt(repr(ids))} as {key}; it takes one token id or more")
        return list(listed)

    def _bit(self, index: int, key: str, value: Any) -> bool:
        if value not in (0, 1):
            raise self._wrong(f"gave completion {index} {excerpt(repr(value))} in {key}; it takes 1 or 0")
        return bool(value)

    def _number(self, index: int, value: Any) -> float:
        alone: Any = value[0] if isinstance(value, Sequence) and len(value) == 1 else value  # as vLLM has them
        try:
            number = float(alone)
        except (TypeError, ValueError):
            wrong = f"gave completion {index} the log-prob {excerpt(repr(value))}, which is no number"
            raise self._wrong(wrong) from None
        if not math.isfinite(number):
            raise NumericError(f"env.path={self._who} gave completion {index} the log-prob {number}.")
        return number

    def extra(self, columns: Sequence[str], declared: Sequence[str]) -> list[dict[str, Any]]:
        """Return the other columns of each completion: an entry of a list, or one value for all.

        Args:
            columns: Columns of the data, whose names are taken.
            declared: Names that it has to return.
        """
        others = {key: value for key, value in self._returned.items() if key not in _OWN}
        if missing := [name for name in declared if name not in others]:
            raise self._wrong(f"did not return {', '.join(missing)}, which env.columns names")
        if taken := [name for name in others if name in (*columns, "episodes", *ARGUMENTS, *SINGULAR)]:
            raise self._wrong(f"returned {', '.join(taken)}, which rewards get already: give it another name")
        lists = {key: self._list(key) for key, value in others.items() if _is_listed(value)}
        return [{key: lists[key][i] if key in lists else others[key] for key in others} for i in range(self._count)]

    def decoded(self, asked: Prompts) -> Decoded:
        """Return the completions as tensors."""
        width = max(len(row.token_ids) for row in self.rows)

        def padded(values: Sequence[Sequence[Any]], fill: Any) -> torch.Tensor:
            return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values])

        there = torch.arange(width) < torch.tensor([len(row.token_ids) for row in self.rows])[:, None]
        return Decoded(
            ids=padded([row.token_ids for row in self.rows], asked.pad_id),
            mask=padded([row.written for row in self.rows], False),
            logprobs=padded([row.logprobs for row in self.rows], 0.0).float(),
            ended=torch.tensor(
                [row.token_ids[-1] in asked.eos_ids if row.ended is None else row.ended for row in self.rows]
            ),
            kept_logmass=None,
            attended=there if self.has_mask else None,
            turn=padded([row.turns for row in self.rows], 0) if self.has_mask else None,
        )


def _is_listed(value: Any) -> bool:
    """Tell whether it is a list, a tuple or an array: an entry a completion."""
    return isinstance(value, list | tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and value >= 0
