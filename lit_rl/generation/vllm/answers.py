"""A server's answers, parsed from JSON. Any program may listen at an address, so every value is checked here.

Every function takes a JSON value as `Answered`, and raises `calls.ServerRefused` where it is no valid answer of vLLM
and our workers: with the address, the call, the place in the answer, an excerpt and the likely fix. Unused fields
(usage, times, ids of requests) may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from lit_rl.generation.vllm.calls import excerpt, nonsense
from lit_rl.generation.vllm.engine import Facts
from lit_rl.generation.vllm.requests import Answer, Request

_LOWEST = -9999.0
"""vLLM's log-prob in place of minus infinity; on the route for images, in place of NaN too."""
_HIGHEST = 0.01
"""A log-prob is at most 0; an engine that rounds may end a little above it."""
_MOST = 2**31 - 1
_MOST_WORKERS = 2**16
_LARGEST_BLOCK = 2**16
"""Tokens. The probe is longer than a block."""
_LONGEST_WORD = 1000
"""Letters of a name: they stand in messages."""


@dataclass(frozen=True)
class Answered:
    """A part of an answer, and its place."""

    url: str
    call: str
    value: Any
    place: str = "it"

    def refuse(self, wanted: str) -> NoReturn:
        raise nonsense(self.url, self.call, f"{self.place} is {excerpt(self.value)}, and has to be {wanted}")

    def part(self, name: str) -> Answered:
        """Return the part of an object under a name, which has to exist."""
        if not isinstance(self.value, dict) or name not in self.value:
            self.refuse(f'an object with "{name}"')
        place = name if self.place == "it" else f"{self.place}.{name}"
        return Answered(self.url, self.call, self.value[name], place)

    def entry(self, index: int) -> Answered:
        return Answered(self.url, self.call, self.value[index], f"{self.place}[{index}]")

    def entries(self) -> Iterator[Answered]:
        return (self.entry(index) for index in range(len(self.as_list())))

    def as_list(self) -> list[Any]:
        return self.value if isinstance(self.value, list) else self.refuse("a list")

    def whole(self, low: int = 1, high: int = _MOST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            self.refuse(f"a whole number from {low} to {high}")
        return self.value

    def whole_or_null(self, low: int = 1, high: int = _MOST) -> int | None:
        return None if self.value is None else self.whole(low, high)

    def word(self) -> str:
        if not isinstance(self.value, str) or not self.value.isprintable() or not 0 < len(self.value) <= _LONGEST_WORD:
            self.refuse("a name in printable letters")
        return self.value


# ---------------------------------------------------------------------- what a server is


def names_in(came: Answered) -> dict[str, int | None]:
    """Return the names of the model and of adapters, each with its longest sequence in tokens; one or more."""
    models, found = came.part("data"), {}
    for model in models.entries():
        name = model.part("id").word()
        found[name] = model.part("max_model_len").whole_or_null() if "max_model_len" in model.value else None
    return found or models.refuse("a list of one model or more")


def workers_in(came: Answered) -> int:
    """Return the number of workers behind a server."""
    return came.part("world_size").whole(high=_MOST_WORKERS)


def results_in(came: Answered) -> list[Any]:
    """Return the results of the workers; one or more."""
    results = came.part("results")
    return results.as_list() or results.refuse("a list with a result of every worker")


def facts_in(came: Answered) -> Facts:
    """Return the facts of a worker, see `worker.WeightUpdates.lit_rl_facts`."""
    known = {field.name for field in fields(Facts)}
    if not isinstance(came.value, dict):
        came.refuse("an object")
    if set(came.value) != known:
        missing, unknown = sorted(known - set(came.value)), sorted(set(came.value) - known)
        came.refuse(f"what workers of this lit_rl say: missing is {excerpt(missing)}, unknown {excerpt(unknown)}")
    return Facts(
        instance=came.part("instance").word(),
        version=came.part("version").whole_or_null(-_MOST),
        model=_model(came.part("model")),
        dtype=came.part("dtype").word(),
        max_model_len=came.part("max_model_len").whole(),
        block_size=came.part("block_size").whole(high=_LARGEST_BLOCK),
        logprobs_mode=came.part("logprobs_mode").word(),
        max_num_seqs=came.part("max_num_seqs").whole(),
        max_lora_rank=came.part("max_lora_rank").whole_or_null(0),
        device=came.part("device").word(),
    )


def _model(came: Answered) -> dict[str, Any]:
    """Return architecture and sizes, see `worker.shape_of`: words and numbers, with the size of the vocabulary."""
    came.part("vocab_size").whole()
    for name, value in came.value.items():
        if type(value) not in (bool, int):
            Answered(came.url, came.call, value, f"{came.place}[{excerpt(name)}]").word()
    return came.value


def was_reset(came: Answered) -> bool:
    """Tell whether a cache was emptied."""
    done = came.part("success")
    return done.value if isinstance(done.value, bool) else done.refuse("true or false")


# ---------------------------------------------------------------------- completions


def completions_in(came: Answered, request: Request, vocabulary: int) -> list[Answer]:
    """Parse the answer of ``POST /v1/completions``.

    Args:
        came: The answer.
        request: The request, with the number of completions, their longest length, and whether the log-probs of the
            prompt are required.
        vocabulary: Tokens of the model; ids are below it.
    """
    found = []
    for choice in _in_order(came, request):
        ids, ended = _tokens(choice, request, vocabulary), _ended(choice)
        logprobs = choice.part("logprobs").part("token_logprobs")
        scored = None
        if request.fields.get("prompt_logprobs") is not None:
            scored = _prompt_logprobs(choice.part("prompt_logprobs"), request.token_ids)
        found.append(Answer(ids, _logprobs(logprobs, logprobs.as_list(), len(ids)), ended, scored))
    return found


def drawn_in(came: Answered, request: Request, vocabulary: int) -> list[Answer]:
    """Parse the answer of ``POST /inference/v1/generate``; see `completions_in`. An unrepresentable log-prob is NaN."""
    found = []
    for choice in _in_order(came, request):
        ids, ended = _tokens(choice, request, vocabulary), _ended(choice)
        content = choice.part("logprobs").part("content")
        listed = _logprobs(content, _named(content), len(ids))
        found.append(Answer(ids, [math.nan if value <= _LOWEST else value for value in listed], ended))
    return found


def prompt_in(came: Answered) -> list[Any]:
    """Return the engine's tokens of a prompt with images; of any type, as they are only compared."""
    return came.part("prompt_token_ids").as_list()


def _in_order(came: Answered, request: Request) -> list[Answered]:
    choices, asked = came.part("choices"), request.completions
    if len(choices.as_list()) != asked:
        choices.refuse(f"a list of {asked}, as many completions as were asked for")
    found = {choice.part("index").whole(0, asked - 1): choice for choice in choices.entries()}
    if len(found) != asked:
        choices.refuse("a list in which each completion has an index of its own")
    return [found[index] for index in range(asked)]


def _tokens(choice: Answered, request: Request, vocabulary: int) -> list[int]:
    tokens, most = choice.part("token_ids"), request.fields["max_tokens"]
    ids = tokens.as_list()
    if not 1 <= len(ids) <= most:
        tokens.refuse(f"a list of 1 to {most} tokens, not of {len(ids)}")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary:
        for entry in tokens.entries():
            entry.whole(0, vocabulary - 1)
    return ids


def _ended(choice: Answered) -> bool:
    """Tell whether it ended by an EOS or a stop string, and not by its length."""
    reason = choice.part("finish_reason")
    if reason.value not in ("stop", "length"):
        reason.refuse('"stop" or "length" ("abort": another program has paused the server)')
    return reason.value == "stop"


def _logprobs(came: Answered, values: list[Any], count: int) -> list[float]:
    """Return `values` if they are `count` log-probs; `came` is their place."""
    if len(values) != count:
        came.refuse(f"a list of {count}, one for each token, not of {len(values)}")
    if set(map(type, values)) <= {int, float} and all(_LOWEST <= value <= _HIGHEST for value in values):
        return values
    wrong = next(i for i, v in enumerate(values) if type(v) not in (int, float) or not _LOWEST <= v <= _HIGHEST)
    Answered(came.url, came.call, values[wrong], f"{came.place}[{wrong}]").refuse(
        f"a log-prob: a number from {_LOWEST:g} to 0"
    )


def _named(content: Answered) -> list[Any]:
    """Return the values under "logprob" of a list's entries."""
    try:
        return [entry["logprob"] for entry in content.as_list()]
    except (TypeError, KeyError):
        return [entry.part("logprob").value for entry in content.entries()]  # says which has none


def _prompt_logprobs(came: Answered, prompt: list[int]) -> list[float]:
    """Return the log-prob of each token but the first, which has none; an entry holds other likely tokens too."""
    if len(came.as_list()) != len(prompt):
        came.refuse(f"a list of {len(prompt)}, one for each token of the prompt, not of {len(came.value)}")
    values = [came.entry(i).part(str(prompt[i])).part("logprob").value for i in range(1, len(prompt))]
    return _logprobs(came, values, len(prompt) - 1)
