"""The decode loop of `native`: rows that run, groups that wait for places, and rows that wait for an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lit_rl.generation.batches import DecodeBatch, Decoded, Waiting
from lit_rl.generation.decoding import DecodingSteps
from lit_rl.generation.finished import FinishedRows
from lit_rl.generation.responses import Responses
from lit_rl.generation.transforms import TokenSampler
from lit_rl.rollout import Prompts, Sampling
from lit_rl.turns import Heard, Responder
from lit_rl.vision import Later

_COMPACT_BELOW = 0.75
"""Drop rows that are over once this share of the rows still runs. It copies what the others have in the cache, and so
does letting others take the places: for a quarter of the rows that pays back within a few tokens."""

_STRAGGLERS = 2
"""Prompts that are held at most, over those of places that are full of whole groups: the last row of a group keeps its
prompt. A memory plan counts as many."""

_LOOK_ON_CPU, _LOOK_ON_GPU = 1, 4
"""Tokens after which the device is asked how many rows still run: to ask an accelerator is to wait for it. What is
drawn meanwhile of rows that are over is thrown away."""

_POLL = 16
"""Tokens after which answers are looked for, where no row has ended."""


class DecodeLoop:
    """Decodes every row of a request, at most so many at a time.

    Rows that end leave. With continuous batching groups that wait take their places; without, these begin when all rows
    before them are over. Where a responder answers the rows, one that has said something keeps its place and its part
    of the cache until the answer is there; others go on meanwhile.

    Args:
        begin: Reads the prompts of a batch.
        prompts: What is asked for.
        sampling: How to draw.
        places: Rows that may be held at a time.
        whole: All rows of the request as one batch.
        continuous: Whether to batch continuously, where the rows of a batch can be joined to others.
    """

    def __init__(
        self,
        begin: Callable[[DecodeBatch], DecodingSteps],
        prompts: Prompts,
        sampling: Sampling,
        places: int,
        whole: DecodeBatch,
        continuous: bool,
    ) -> None:
        self._begin, self._places, self._continuous = begin, places, continuous
        self._waiting = Waiting(prompts, places, whole.keys.device)
        self._sampler = TokenSampler.of(whole, prompts, sampling)
        self._responses = Responses(prompts, sampling, len(whole.rows), whole.keys.device)
        self._rows = torch.zeros(0, dtype=torch.long, device=whole.keys.device)
        self._steps: DecodingSteps | None = None
        self._group, self._tokens, self._broken = prompts.group_size, 0, False
        self._talk = (
            None if prompts.responder is None else _Talk(prompts.responder, prompts, self._responses, self._sampler)
        )
        told = prompts.on_finished
        self._finished = None if told is None else FinishedRows(told, self._responses)

    def run(self) -> Decoded:
        """The responses of all rows. Logits that are not finite end it early: what was drawn of them says so."""
        while self._take_places():
            while not self._step():
                pass
        return self._responses.decoded()

    def _take_places(self) -> bool:
        """Let answered rows go on and waiting groups begin, as far as there are places; False where none runs then."""
        wait = False
        while not self._broken:
            for joining in self._talk.answered(wait=wait) if self._talk else ():
                self._join(*joining)
            if batch := self._next_batch():
                self._join(self._begin(batch), batch.rows.to(self._rows.device))
            held = self._talk.held if self._talk else 0
            if self._steps is not None or not (held or self._waiting):
                return self._steps is not None
            wait = held > 0
        return False

    def _next_batch(self) -> DecodeBatch | None:
        """The groups that may begin now."""
        held = self._talk.held if self._talk else 0
        if not self._continuous and (self._steps is not None or held):
            return None
        free = self._places - len(self._rows) - held
        if self._steps is None:
            return self._waiting.take(free)
        prompts = _STRAGGLERS * math.ceil(self._places / self._group) - self._steps.prompts
        return self._waiting.take(min(free, prompts * self._group)) if self._steps.joinable else None

    def _join(self, steps: DecodingSteps, rows: Tensor) -> None:
        if self._steps is None:
            self._steps, self._rows = steps, rows
        else:
            self._steps.join(steps)
            self._rows = torch.cat([self._rows, rows])

    def _step(self) -> bool:
        """Give every row a token. Returns whether it is time to look who may go on or begin."""
        assert self._steps is not None
        rows = self._rows
        drawn = self._sampler(self._steps.logits, self._responses.spoken(rows), rows)
        running = self._responses.add(rows, drawn)
        if not self._looks():
            self._go_on(drawn.tokens)
            return False
        left = int(running.sum())
        if self._talk and left < len(rows):
            self._talk.tell(rows, running)
        if self._finished and left < len(rows):
            self._finished.tell(rows, running)
        if left <= _COMPACT_BELOW * len(rows) or self._steps.full:
            self._broken = not bool(drawn.logprobs.isfinite().all())
            return self._drop(running, drawn.tokens)
        if self._talk:
            self._talk.passed_by(rows, running)
        self._go_on(drawn.tokens)
        return bool(self._talk and self._talk.held and self._tokens % _POLL == 0)

    def _looks(self) -> bool:
        """Whether to ask how many rows run. A responder is told at once."""
        assert self._steps is not None
        every = _LOOK_ON_CPU if self._rows.device.type == "cpu" else _LOOK_ON_GPU
        return self._talk is not None or self._steps.full or self._tokens % every == 0

    def _go_on(self, tokens: Tensor) -> None:
        assert self._steps is not None
        self._steps.advance(tokens)
        self._tokens += 1

    def _drop(self, running: Tensor, tokens: Tensor) -> bool:
        """Go on with the rows that run."""
        assert self._steps is not None
        kept = running.nonzero().squeeze(-1)
        if self._talk:
            self._talk.hold(self._steps, self._rows, (~running).nonzero().squeeze(-1))
        self._rows = self._rows[kept]
        if len(kept):
            self._steps.keep(kept)
            self._steps.advance(tokens[kept])
        else:
            self._steps = None
        return True


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
        new = rows[~running & ~self._told[rows]]
        if len(new):
            self._told[new] = True
            for said in self._responses.said(new):
                self._responder.tell(said)

    def passed_by(self, rows: Tensor, running: Tensor) -> None:
        """All rows are about to be given a token, those that are over too."""
        self._stale[rows] += ~running

    def hold(self, steps: DecodingSteps, rows: Tensor, over: Tensor) -> None:
        """Take rows that are over out of those that run; ``over`` is their numbers among these."""
        if len(over):
            self._parts.append((_split(steps, rows.tolist(), over.tolist()), rows[over].tolist()))

    def answered(self, *, wait: bool) -> Iterator[tuple[DecodingSteps, Tensor]]:
        """The rows that go on, having read what they were answered."""
        self._heard |= {heard.row: heard for heard in self._responder.answers(wait=wait)}
        for _ in range(len(self._parts)):
            steps, rows = self._parts.pop(0)
            waiting = [place for place, row in enumerate(rows) if row not in self._heard]
            if len(waiting) == len(rows):
                self._parts.append((steps, rows))
                continue
            if waiting:
                self._parts.append((_split(steps, rows, waiting), [rows[place] for place in waiting]))
            chunks = {i: chunk for i, row in enumerate(rows) if row in self._heard and (chunk := self._read(row))}
            if chunks:
                steps = _split(steps, rows, list(chunks))  # what the others have is let go before more is read
                of = torch.tensor([rows[place] for place in chunks], device=self._stale.device)
                ids, positions, seen = zip(*chunks.values())
                steps.feed(ids, torch.tensor(positions, device=of.device), self._stale[of], seen)
                self._stale[of], self._told[of] = 0, False
                yield steps, of

    def _read(self, row: int) -> tuple[list[int], int, tuple[Later, ...]] | None:
        """What the model has to read before the row's next turn, how many tokens stand before that in the text, and
        the images in it. The last token that it said is part of it. None where the conversation is over."""
        heard, last = self._heard.pop(row), self._responses.last(row)
        position = self._prompt_lengths[row] + int(self._responses.lengths[row]) - 1
        if not self._responses.hear(heard):
            return None
        self._sampler.next_turn(row, self._responses.text(row))
        return [last, *(heard.token_ids or ())], position, tuple(each.moved(1) for each in heard.seen)


def _split(steps: DecodingSteps, rows: Sequence[int], which: Sequence[int]) -> DecodingSteps:
    """Those rows by themselves."""
    return steps if len(which) == len(rows) else steps.split(torch.tensor(which, device=steps.logits.device))
