"""Conversations with an engine that keeps nothing between two turns: each turn reads the whole text again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from lit_rl.generation.batches import DecodeBatch, Decoded, decode_batches, has_padding, left_pad
from lit_rl.generation.responses import Responses
from lit_rl.generation.transforms import Drawn
from lit_rl.rollout import Prompts, Sampling
from lit_rl.transfers import in_one_transfer
from lit_rl.vision import with_later


class TurnByTurn:
    """The conversations of a request, held by an engine that decodes one turn of some rows at a time.

    Args:
        decode: Decodes a batch of one turn, of a request without a responder.
        prompts: The requested completions; their responder answers.
        sampling: How to draw; ``max_new_tokens`` are those of a turn.
        places: Most rows that are decoded at a time; None: all.
        device: The device of the tokens.
    """

    def __init__(
        self,
        decode: Callable[[DecodeBatch, Prompts, Sampling], Decoded],
        prompts: Prompts,
        sampling: Sampling,
        places: int | None,
        device: torch.device,
    ) -> None:
        self._decode, self._prompts, self._sampling, self._places = decode, prompts, sampling, places
        (self._whole,) = decode_batches(prompts, None, device)
        self._responses = Responses(prompts, sampling, len(self._whole.rows), device)

    def run(self) -> Decoded:
        """Return the responses of all rows."""
        responder, device = self._prompts.responder, self._whole.keys.device
        assert responder is not None
        self._speak(decode_batches(self._prompts, self._places, device))
        unanswered = len(self._whole.rows)
        while unanswered:
            heard = [*responder.answers(wait=True), *responder.answers(wait=False)]
            speaking = [each.row for each in heard if self._responses.hear(each)]
            unanswered -= len(heard) - len(speaking)
            self._speak(self._batches(speaking))
        return self._responses.decoded()

    def _speak(self, batches: Iterable[DecodeBatch]) -> None:
        """Decode a turn for the rows of each batch, and pass it to the responder."""
        responder, device = self._prompts.responder, self._whole.keys.device
        assert responder is not None
        alone = dataclasses.replace(self._prompts, responder=None)
        for batch in batches:
            rows, room = batch.rows.to(device), self._responses.room(int(batch.rows[0]))
            least = min(self._sampling.min_new_tokens, room)
            turn = dataclasses.replace(self._sampling, max_new_tokens=room, min_new_tokens=least)
            decoded = self._decode(batch, alone, turn)
            for column in range(decoded.ids.shape[1]):
                mass = None if decoded.kept_logmass is None else decoded.kept_logmass[:, column]
                self._responses.add(rows, Drawn(decoded.ids[:, column], decoded.logprobs[:, column], mass))
            self._responses.look(rows)
            for said in self._responses.said(batch.rows.tolist()):
                responder.tell(said)

    def _batches(self, rows: Sequence[int]) -> Iterator[DecodeBatch]:
        """Yield the next turn of these rows: those with equal room together, so that none leaves the model's
        context."""
        by_room: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: int(self._responses.lengths[row])):
            by_room.setdefault(self._responses.room(row), []).append(row)
        for together in by_room.values():
            for start in range(0, len(together), self._places or len(together)):
                yield self._batch(together[start : start + (self._places or len(together))])

    def _batch(self, rows: Sequence[int]) -> DecodeBatch:
        prompts, device = self._prompts, self._whole.keys.device
        said = self._responses.texts(rows)
        numbers = [row // prompts.group_size for row in rows]
        texts = [[*prompts.token_ids[number], *text] for number, text in zip(numbers, said)]
        which = torch.tensor(rows)
        ids, mask, at = in_one_transfer(device, *left_pad(texts, prompts.pad_id), which)
        seen = tuple(
            with_later(
                prompts.vision[number] if prompts.vision else None,
                len(prompts.token_ids[number]),
                self._responses.later(row),
                len(text),
            )
            for row, number, text in zip(rows, numbers, said)
        )
        keys, begun = self._whole.keys[at], self._responses.lengths[at]
        return DecodeBatch(ids, mask, 1, keys, which, rows, begun, seen, padded=has_padding(texts))
