"""The second argument of a rollout function: the run's generator, and the run's way to prompts and tokens."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.environments.source import EpisodeRequest
from lit_rl.errors import GenerationError, in_range
from lit_rl.generation.noise import sample_key, turn_key
from lit_rl.generation.ranks import beside
from lit_rl.rollout import Prompts


class RolloutHandle:
    """The `trainer` of a rollout function: the tokenizer, and the run's generator, synced to the policy.

    Args:
        request: The requested completions.
        encode: From a prompt to its tokens, as the run does it.
        tokenizer: The policy's.
        template_kwargs: Arguments of the chat template.
        max_tokens: Most tokens of a completion, with those that the policy did not write.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        encode: Callable[..., list[int]],
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        max_tokens: int,
    ) -> None:
        self._generate, self._asked, self._keys = request.generate, request.prompts, request.row_keys
        self._thread, self._calls = threading.get_ident(), [0] * len(request.row_keys)
        self._context = request.context
        self.seconds = 0.0
        """Seconds that `generate` has taken so far."""
        self.sampling = request.sampling
        """The run's sampling."""
        self.encode = encode
        """From a prompt to its tokens, by the chat template and its arguments."""
        self.tokenizer = self.processing_class = tokenizer
        self.template_kwargs, self.max_tokens = dict(template_kwargs), max_tokens
        self.eos_ids = tuple(request.prompts.eos_ids)
        """Every token that ends a turn."""
        self.count = len(request.row_keys)
        """Completions of this process."""
        self.columns = {name: self.of_completions(values) for name, values in request.batch.columns.items()}
        """The columns of the data, one entry a completion."""
        self.num_generations = self._asked.group_size
        """Completions of each prompt."""

    def __getattr__(self, name: str) -> Any:
        """Refuse a name of TRL's trainer, with a list of the names that exist.

        Raises:
            AttributeError: always: Python finds existing attributes first.
        """
        there = sorted({*vars(self), "generate"} - {each for each in vars(self) if each.startswith("_")})
        raise AttributeError(
            f"The trainer of a rollout function has no {name!r}: it is not TRL's GRPOTrainer. It has "
            f"{', '.join(there)} (docs/agents.md, A function that makes the rollouts). "
            "Completions are drawn by trainer.generate(ids)."
        )

    def of_completions(self, values: Sequence[Any]) -> list[Any]:
        """Return copies of values that are there once a prompt, one for each completion."""
        return [copy.deepcopy(value) for value in values for _ in range(self._asked.group_size)]

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        *,
        rows: Sequence[int] | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
    ) -> dict[str, list[Any]]:
        """Let the policy continue texts. A sample depends on its completion and on how often that was continued so far,
        and on no other text; with vLLM, a first one that is requested without the others differs from one with them.

        Args:
            prompt_ids: The tokens of each text.
            rows: The completion of each text. None: there is one for every completion, in order.
            max_new_tokens: One number, or one for each text. None is `sampling.max_new_tokens`. Texts are drawn
                together as long as they fit in the model's context, and each is cut to its own number: it gets the
                tokens that it would have got alone.

        Returns:
            ``prompt_ids``, ``completion_ids`` and ``logprobs``, as a rollout function returns them, and ``ended``:
            whether each came to its end.

        Raises:
            GenerationError: a text for no completion, or called in another thread than the function.
        """
        numbers = list(range(len(self._keys))) if rows is None else list(rows)
        self._check(prompt_ids, numbers)
        if not numbers:
            return {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "ended")}
        texts, rooms = [list(ids) for ids in prompt_ids], self._rooms(max_new_tokens, len(numbers))
        drawn: dict[int, tuple[list[int], list[float], bool]] = {}
        for together in self._together(texts, rooms):
            most = max(rooms[place] for place in together)
            parts = self._drawn([texts[place] for place in together], [numbers[place] for place in together], most)
            drawn |= {place: _cut(*part, rooms[place]) for place, part in zip(together, parts)}
        completions = [drawn[place] for place in range(len(texts))]
        columns = dict(zip(("completion_ids", "logprobs", "ended"), map(list, zip(*completions))))
        return {"prompt_ids": texts, **columns}

    def _rooms(self, max_new_tokens: int | Sequence[int] | None, count: int) -> list[int]:
        """Return the most new tokens of each of ``count`` texts."""
        given = self.sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        rooms = [given] * count if isinstance(given, int) else list(given)
        if len(rooms) != count:
            raise GenerationError(
                f"trainer.generate was given {count} texts and {len(rooms)} max_new_tokens: give one number, or one "
                "for each text."
            )
        for room in set(rooms):
            in_range("max_new_tokens", room, low=1)
        return rooms

    def _together(self, texts: Sequence[list[int]], rooms: Sequence[int]) -> Iterator[list[int]]:
        """Yield the places of the texts of each call. All are drawn with the room of the largest, which changes nothing
        for a text that stays in the context, and whose EOS `min_new_tokens` blocks for as long as it would alone."""
        left = list(range(len(texts)))
        while left:
            most = max(rooms[place] for place in left)
            now = [
                place
                for place in left
                if rooms[place] == most
                or (self._least(rooms[place]) == self._least(most) and len(texts[place]) + most <= self._context)
            ]
            yield now
            left = [place for place in left if place not in now]

    def _least(self, room: int) -> int:
        return min(self.sampling.min_new_tokens, room)

    def _drawn(
        self, texts: Sequence[list[int]], rows: Sequence[int], room: int
    ) -> list[tuple[list[int], list[float], bool]]:
        """Return tokens and log-probs of the continuations, and whether each came to its end."""
        sampling = replace(self.sampling, max_new_tokens=room, min_new_tokens=self._least(room))
        begun = time.perf_counter()
        with beside():  # ranks call it as often as they like: none waits for another
            out = self._generate(self._prompts(texts, rows), sampling)
        self.seconds += time.perf_counter() - begun
        for row in rows:
            self._calls[row] += 1
        within = [mask.nonzero()[:, 0] for mask in out.response_mask]
        return [
            (ids[there].tolist(), logprobs[there].tolist(), ended)
            for ids, logprobs, ended, there in zip(
                out.response_ids, out.sampler_logprobs, out.ended.tolist(), within, strict=True
            )
        ]

    def _check(self, prompt_ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        if threading.get_ident() != self._thread:
            raise GenerationError(
                "trainer.generate was called in another thread than the rollout function: call it there."
            )
        if len(prompt_ids) != len(rows) or len(set(rows)) < len(rows) or not set(rows) <= set(range(len(self._keys))):
            raise GenerationError(
                f"trainer.generate was given {len(prompt_ids)} texts for the completions {excerpt(repr(list(rows)))}. "
                f"There are {len(self._keys)}, each at most once in a call: say with rows=[...] which they are for."
            )

    def _prompts(self, prompt_ids: Sequence[list[int]], rows: Sequence[int]) -> Prompts:
        """Return the request: whole groups at their first turn, as it would be without a rollout function."""
        group, asked = self._asked.group_size, self._asked
        firsts = prompt_ids[::group]
        whole = list(rows) == list(range(len(self._keys))) and not any(self._calls)
        if whole and prompt_ids == [ids for ids in firsts for _ in range(group)]:
            return replace(asked, token_ids=firsts)
        keys = [
            turn_key(self._keys[row], self._calls[row])
            if self._calls[row]
            else sample_key(asked.keys[row // group], row % group)
            for row in rows
        ]
        return replace(asked, token_ids=prompt_ids, keys=keys, group_size=1)


def _cut(ids: list[int], logprobs: list[float], ended: bool, room: int) -> tuple[list[int], list[float], bool]:
    """Cut a completion to its room: a longer one has not come to its end there."""
    return ids[:room], logprobs[:room], ended and len(ids) <= room
