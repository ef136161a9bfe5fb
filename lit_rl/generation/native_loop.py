"""The decode loop of `native`: rows that run, groups that wait for places, and rows that wait for an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lit_rl.generation.batches import DecodeBatch, Decoded, Waiting
from lit_rl.generation.decoding import DecodingSteps
from lit_rl.generation.responses import Responses
from lit_rl.generation.transforms import TokenSampler
from lit_rl.rollout import Prompts, Sampling
from lit_rl.turns import Heard, Responder

_COMPACT_BELOW = 0.75
"""Drop finished rows once this share of the rows still runs. A step rewrites the key-value cache anyway, so dropping a
quarter pays back within a few steps, and happens only a few times a batch."""


class DecodeLoop:
    """Decodes every row of a request, at most so many at a time.

    Rows that end leave, and groups that wait take their places. Where a responder answers the rows, one that has said
    something keeps its place and its part of the cache until the answer is there; others go on meanwhile.

    Args:
        begin: Reads the prompts of a batch.
        prompts: What is asked for.
        sampling: How to draw.
        places: Rows that may be held at a time.
        whole: All rows of the request as one batch.
    """

    def __init__(
        self,
        begin: Callable[[DecodeBatch], DecodingSteps],
        prompts: Prompts,
        sampling: Sampling,
        places: int,
        whole: DecodeBatch,
    ) -> None:
        self._begin, self._places = begin, places
        self._waiting = Waiting(prompts, places, whole.keys.device)
        self._sampler = TokenSampler.of(whole, prompts, sampling)
        self._responses = Responses(prompts, sampling, len(whole.rows), whole.keys.device)
        self._rows = torch.zeros(0, dtype=torch.long, device=whole.keys.device)
        self._steps: DecodingSteps | None = None
        self._talk = (
            None if prompts.responder is None else _Talk(prompts.responder, prompts, self._responses, self._sampler)
        )

    def run(self) -> Decoded:
        """The responses of all rows."""
        while (steps := self._taken()) is not None:
            while not self._step(steps):
                pass
        return self._responses.decoded()

    def _taken(self) -> DecodingSteps | None:
        """The rows that run, once answered rows and waiting groups have taken the places that are free; None: all are
        over."""
        self._take_places()
        while self._steps is None and (self._waiting or (self._talk and self._talk.held)):
            self._take_places(wait=True)
        return self._steps

    def _take_places(self, *, wait: bool = False) -> None:
        for joining in self._talk.answered(wait=wait and self._talk.held > 0) if self._talk else ():
            self._join(*joining)
        held = len(self._rows) + (self._talk.held if self._talk else 0)
        if (self._steps is None or self._steps.joinable) and (batch := self._waiting.take(self._places - held)):
            self._join(self._begin(batch), batch.rows.to(self._rows.device))

    def _join(self, steps: DecodingSteps, rows: Tensor) -> None:
        if self._steps is None:
            self._steps, self._rows = steps, rows
        else:
            self._steps.join(steps)
            self._rows = torch.cat([self._rows, rows])

    def _step(self, steps: DecodingSteps) -> bool:
        """Give every row a token. Returns whether places have become free."""
        rows = self._rows
        drawn = self._sampler(steps.logits, self._responses.spoken(rows), rows)
        running, tokens = self._responses.add(rows, drawn), drawn.tokens
        if self._talk:
            self._talk.tell(rows, running)
        left = int(running.sum())
        thinned = left <= _COMPACT_BELOW * len(rows) or steps.full
        if thinned:
            if self._talk:
                self._talk.hold(steps, rows, (~running).nonzero().squeeze(-1))
            kept = running.nonzero().squeeze(-1)
            self._rows, tokens = rows[kept], tokens[kept]
            if left == 0:
                self._steps = None
                return True
            steps.keep(kept)
        elif self._talk:
            self._talk.passed_by(rows, running)
        steps.advance(tokens)
        return thinned


class _Talk:
    """Rows that have said something, each with its part of the cache, until they are answered.

    Args:
        responder: Who answers.
        prompts: What was asked for.
        responses: Where what is said and heard stands.
        sampler: Is told what was heard.
    """

    def __init__(self, responder: Responder, prompts: Prompts, responses: Responses, sampler: TokenSampler) -> None:
        self._responder, self._responses, self._sampler = responder, responses, sampler
        lengths = [len(ids) for ids in prompts.token_ids for _ in range(prompts.group_size)]
        self._prompt_lengths = lengths
        self._told = torch.zeros_like(responses.ended)
        # Tokens that a row was given since it was over, while it still stood among those that run.
        self._stale = torch.zeros_like(responses.lengths)
        self._parts: list[tuple[DecodingSteps, list[int]]] = []
        self._heard: dict[int, Heard] = {}

    @property
    def held(self) -> int:
        """Rows that wait for an answer."""
        return sum(len(rows) for _, rows in self._parts)

    def tell(self, rows: Tensor, running: Tensor) -> None:
        """Tell the responder of the turns that are over now."""
        for row in rows[~running & ~self._told[rows]].tolist():
            self._told[row] = True
            self._responder.tell(self._responses.said(row))

    def passed_by(self, rows: Tensor, running: Tensor) -> None:
        """All rows are about to be given a token, those that are over too."""
        self._stale[rows] += ~running

    def hold(self, steps: DecodingSteps, rows: Tensor, over: Tensor) -> None:
        """Take rows that are over out of those that run; ``over`` is their numbers among these."""
        if len(over):
            self._parts.append((steps.split(over), rows[over].tolist()))

    def answered(self, *, wait: bool) -> Iterator[tuple[DecodingSteps, Tensor]]:
        """The rows that go on, having read what they were answered."""
        self._heard |= {heard.row: heard for heard in self._responder.answers(wait=wait)}
        parts, self._parts = self._parts, []
        for steps, rows in parts:
            waiting = [i for i, row in enumerate(rows) if row not in self._heard]
            if len(waiting) == len(rows):
                self._parts.append((steps, rows))
                continue
            if waiting:
                self._parts.append((_split(steps, rows, waiting), [rows[i] for i in waiting]))
            chunks = {i: chunk for i, row in enumerate(rows) if row in self._heard and (chunk := self._read(row))}
            if chunks:
                part, device = _split(steps, rows, list(chunks)), self._stale.device
                of = torch.tensor([rows[i] for i in chunks], device=device)
                ids, positions = zip(*chunks.values())
                part.feed(ids, torch.tensor(positions, device=device), self._stale[of])
                self._stale[of] = 0
                self._told[of] = False
                yield part, of

    def _read(self, row: int) -> tuple[list[int], int] | None:
        """What the model has to read before the row's next turn, and the position of its first token in the text. The
        last token that it said is part of it. None where the conversation is over."""
        heard, last = self._heard.pop(row), self._responses.last(row)
        position = self._prompt_lengths[row] + int(self._responses.lengths[row]) - 1
        if not self._responses.hear(heard):
            return None
        self._sampler.next_turn(row, self._responses.text(row))
        return [last, *(heard.token_ids or ())], position


def _split(steps: DecodingSteps, rows: Sequence[int], which: Sequence[int]) -> DecodingSteps:
    """Those rows by themselves."""
    return steps if len(which) == len(rows) else steps.split(torch.tensor(which, device=steps.logits.device))
