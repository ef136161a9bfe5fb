"""The native generator: a decode loop of our own over any Hugging Face causal LM.

A prompt is computed once a group, finished rows leave, and waiting groups take their places. Rows of a conversation
keep their part of the cache until they are answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import EnvironmentTurn, Responder
from lit_rl.core.errors import ConfigError
from lit_rl.core.other_names import reject_unknown_keywords
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.core.speedups import DecodingSpeedups, SpeedupsSetting
from lit_rl.core.vision_inputs import Later
from lit_rl.generation.decoding import DecodingSteps, empty_cache, keeps_all
from lit_rl.generation.generator import DecodeBatch, Decoded, Generator, InProcessGenerator, WaitingRows, decode_batches
from lit_rl.generation.responses import FinishedRows, Responses, RowStates
from lit_rl.generation.token_sampler import TokenSampler
from lit_rl.models.trunk import base_of
from lit_rl.ops.ranges import AtLeastOne

if TYPE_CHECKING:
    from lit_rl.generation.fast_decoding import StepGraphs

MakeSteps = Callable[[nn.Module, DecodeBatch, int], DecodingSteps]
"""A function that makes the steps of a policy for a batch of rows and their number of new tokens."""


@checked("generator")
@reject_unknown_keywords("speedups")
class NativeGenerator(InProcessGenerator):
    """A generator that decodes in this process with the live policy: no copy, no server, nothing to install.

    The prompts are run once a group, and one token a row a step follows. Rows that ended leave. Works with bf16
    weights, autocast and PEFT: logits are sampled in float32.

    Args:
        batch_size: Sequences that are decoded at a time; None decodes all at once. Bounds memory: samples do not depend
            on it.
        speedups: Faster ways to draw the same samples: "auto" (all of them, each where it fits, but for CUDA graphs),
            "off", or a mapping such as {"lean_steps": False}, for benchmarks. See
            `lit_rl.core.speedups.DecodingSpeedups` for the names.
    """

    sees = True

    def __init__(
        self,
        batch_size: AtLeastOne | None = None,
        speedups: SpeedupsSetting = "auto",
    ) -> None:
        super().__init__(batch_size)
        self.speedups = DecodingSpeedups.read("generator.speedups", speedups)
        self.steps: str | None = None
        """The steps of the last batch: `cuda_graphs` of lean steps, `lean_steps`, a `grouped_cache` without them, or,
        with none of these, the model's `own` attention and cache."""

    def _decode(
        self, policy: nn.Module, prompts: Prompts, sampling: Sampling, device: torch.device
    ) -> Iterator[tuple[Tensor, Decoded]]:
        (whole,) = decode_batches(prompts, None, device)
        longest = prompts.longest_response(sampling)
        make_steps = (
            DecodingSteps if prompts.vision else self._choose_steps(policy, whole.prompt_ids.shape[1] + longest)
        )
        if isinstance(make_steps, partial):
            steps: Any = make_steps.func
            self.steps = "cuda_graphs" if steps.whole else "lean_steps"
        else:
            self.steps = "own" if make_steps is DecodingSteps else "grouped_cache"
        # A waiting row of a conversation keeps its part of the cache, which has to be all of its text.
        if prompts.responder is not None and make_steps is DecodingSteps and not keeps_all(policy, empty_cache(policy)):
            raise ConfigError(
                f"generator=native cannot hold conversations with {type(base_of(policy)).__name__}: it is no model of "
                "transformers, or layers of its cache have a window and may drop tokens. Use generator=hf with it."
            )
        graphs = None
        if self.steps == "cuda_graphs":
            from lit_rl.generation.fast_decoding import StepGraphs

            graphs = StepGraphs(device)
        places = self.rows_a_batch or len(whole.rows)
        loop = DecodeLoop(
            lambda batch: make_steps(policy, batch, longest),
            prompts,
            sampling,
            places,
            whole,
            continuous=self.speedups.continuous_batching,
            graphs=graphs,
        )
        yield whole.rows, loop.run()

    def _choose_steps(self, policy: nn.Module, length: int) -> MakeSteps:
        """Return the steps for texts of up to `length` tokens."""
        from lit_rl.generation.fast_decoding import (
            GraphedSteps,
            LeanModel,
            LeanSteps,
            lean_steps_proven,
            step_graphs_proven,
        )
        from lit_rl.generation.grouped_cache import GroupedSteps, grouped_cache_proven

        grouped = self.speedups.grouped_cache and grouped_cache_proven(policy, length)
        lean = grouped and self.speedups.lean_steps and lean_steps_proven(policy)
        model = LeanModel(policy, length) if lean else None
        graphed = self.speedups.cuda_graphs and step_graphs_proven(policy, lean=lean)
        if model is not None:
            return partial(GraphedSteps if graphed else LeanSteps, model)
        return GroupedSteps if grouped else DecodingSteps


def for_another_policy(generator: Generator) -> Generator:
    """Return a generator for another model than the policy: a teacher, an opponent.

    An engine holds the policy and nothing else, so such completions are decoded in this process. An in-process
    generator decodes with any model that it is synced to, and is returned itself.
    """
    return generator if isinstance(generator, InProcessGenerator) else NativeGenerator()


# ------------------------------------------------------------------ the decode loop

_COMPACT_BELOW = 0.75
"""The share of running rows at which finished ones are dropped. That copies the cache of the others, and so does a join
of new rows: for a quarter of the rows it pays back within a few tokens."""

_STRAGGLERS = 2
"""Extra prompts that are held at most, as the last running row of a group keeps its prompt. The memory plan counts
them."""

_POLL_TOKENS = 16
"""Tokens after which answers are polled, where no row has ended."""


class DecodeLoop:
    """A loop that decodes every row of a request, within a number of places.

    Finished rows leave. With continuous batching waiting groups take their places; without, these begin when all rows
    before them have finished. Where a responder answers the rows, one that waits keeps its place and its part of the
    cache until the answer is there; others continue meanwhile.

    Args:
        begin: Reads the prompts of a batch.
        prompts: The requested completions.
        sampling: How to draw.
        places: Most rows at a time.
        whole: All rows of the request as one batch.
        continuous: Batch continuously, where the rows of a batch can be joined to others.
        graphs: Replays steps of those that `begin` returns. None: each is launched by itself.
    """

    def __init__(
        self,
        begin: Callable[[DecodeBatch], DecodingSteps],
        prompts: Prompts,
        sampling: Sampling,
        places: int,
        whole: DecodeBatch,
        *,
        continuous: bool,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._begin, self._places, self._continuous, self._graphs = begin, places, continuous, graphs
        self._waiting = WaitingRows(prompts, places, whole.keys.device)
        self._sampler = TokenSampler(whole, prompts, sampling)
        self._responses = Responses(prompts, sampling, len(whole.rows), whole.keys.device)
        self._rows = torch.zeros(0, dtype=torch.long, device=whole.keys.device)
        self._steps: DecodingSteps | None = None
        # The newest tokens, which the model has not read yet.
        self._unread: Tensor | None = None
        self._group, self._tokens, self._diverged = prompts.group_size, 0, False
        # The step by which every row has finished, and the most tokens of a row's first turn.
        self._last_finish, self._first_turn = 0, min(sampling.max_new_tokens, self._responses.longest)
        self._conversations = (
            None
            if prompts.responder is None
            else _Conversations(prompts.responder, prompts, self._responses, self._sampler)
        )
        on_finished = prompts.on_finished
        self._finished = None if on_finished is None else FinishedRows(on_finished, self._responses)

    def run(self) -> Decoded:
        """Return the responses of all rows. Logits that are not finite end it early, and are part of the responses."""
        while self._fill_places():
            while not self._step():
                pass
        return self._responses.decoded()

    def _fill_places(self) -> bool:
        """Let answered rows continue and waiting groups begin, as far as there are places; return False where none runs
        then."""
        wait = False
        while not self._diverged:
            for joining in self._conversations.answered(wait=wait) if self._conversations else ():
                self._join(*joining)
            if batch := self._next_batch():
                self._join(self._begin(batch), batch.rows.to(self._rows.device), self._first_turn)
            held = self._conversations.held if self._conversations else 0
            if self._steps is not None or not (held or self._waiting.groups):
                return self._steps is not None
            wait = held > 0
        return False

    def _next_batch(self) -> DecodeBatch | None:
        """Return the groups that may begin now."""
        held = self._conversations.held if self._conversations else 0
        if not self._continuous and (self._steps is not None or held):
            return None
        free = self._places - len(self._rows) - held
        if self._steps is None:
            return self._waiting.take(free)
        prompts = _STRAGGLERS * math.ceil(self._places / self._group) - self._steps.prompts
        return self._waiting.take(min(free, prompts * self._group)) if self._steps.joinable else None

    def _join(self, steps: DecodingSteps, rows: Tensor, most: int) -> None:
        """Add these rows to those that run. ``most``: most tokens of a row in its turn."""
        self._last_finish = max(self._last_finish, self._tokens + most)
        if self._steps is None:
            self._steps, self._rows = steps, rows
        else:
            self._steps.join(steps)
            self._rows = torch.cat([self._rows, rows])

    def _step(self) -> bool:
        """Give every row a token. Return whether it is time to look for rows that may continue or begin."""
        assert self._steps is not None
        if self._graphs is None or self._unread is None:
            tokens = self._advance_and_draw(self._unread)
        else:
            tokens = self._graphs(self._advance_and_draw, self._responses.count_token, self._steps, self._unread)
        self._tokens += 1
        if self._steps.full or self._tokens % self._responses.poll_every == 0 or self._tokens >= self._last_finish:
            states = self._responses.read_states(self._rows)
            if self._conversations:
                self._conversations.report(self._rows, states)
            if self._finished:
                self._finished.report(states)
            if sum(states.running) <= _COMPACT_BELOW * len(states.rows) or self._steps.full:
                self._diverged = not states.finite
                self._drop_finished(states, tokens)
                return True
        self._unread = tokens
        if not (self._conversations and self._conversations.held) or self._tokens % _POLL_TOKENS:
            return False
        self._advance(tokens)
        return True

    def _advance_and_draw(self, unread: Tensor | None) -> Tensor:
        """Let the model read the newest tokens, if it has not yet, and draw the next ones, without a query of the
        device."""
        assert self._steps is not None
        if unread is not None:
            self._advance(unread)
        drawn = self._sampler(self._steps.logits, self._responses.turn_lengths(self._rows), self._rows)
        self._responses.add(self._rows, drawn)
        return drawn.tokens

    def _advance(self, tokens: Tensor) -> None:
        """Let the model read the newest tokens."""
        assert self._steps is not None
        if self._conversations:
            self._conversations.count_fillers(self._rows)
        self._steps.advance(tokens)
        self._unread = None

    def _drop_finished(self, states: RowStates, tokens: Tensor) -> None:
        """Drop the finished rows, and let the model read the newest tokens of the others."""
        assert self._steps is not None
        if self._conversations:
            self._conversations.hold(self._steps, states)
        running = [place for place, runs in enumerate(states.running) if runs]
        kept = torch.tensor(running, dtype=torch.long, device=self._rows.device)
        self._rows, self._unread = self._rows[kept], None
        if running:
            self._steps.keep(kept)
            self._steps.advance(tokens[kept])
        else:
            self._steps = None


class _Conversations:
    """Rows that wait for an answer, each with its part of the cache.

    Args:
        responder: Answers the rows.
        prompts: The requested completions.
        responses: The texts of the rows.
        sampler: Its history gets the answers.
    """

    def __init__(self, responder: Responder, prompts: Prompts, responses: Responses, sampler: TokenSampler) -> None:
        self._responder, self._responses, self._sampler = responder, responses, sampler
        lengths = [len(ids) for ids in prompts.token_ids for _ in range(prompts.group_size)]
        self._prompt_lengths = lengths
        self._reported: set[int] = set()
        # Filler tokens that a finished row has read while it was still in the batch.
        self._stale = torch.zeros_like(responses.lengths)
        self._parts: list[tuple[DecodingSteps, list[int]]] = []
        self._answers: dict[int, EnvironmentTurn] = {}

    @property
    def held(self) -> int:
        """The number of rows that wait for an answer."""
        return sum(len(rows) for _, rows in self._parts)

    def report(self, rows: Tensor, states: RowStates) -> None:
        """Pass the finished turns to the responder."""
        if states.behind is not None:
            self._stale[rows] += states.behind
        new = states.newly_finished(self._reported)
        for turn in self._responses.newest_turns(new) if new else ():
            self._responder.tell(turn)

    def count_fillers(self, rows: Tensor) -> None:
        """Count one filler token for each finished row that is still in the batch."""
        self._stale[rows] += self._responses.finished(rows)

    def hold(self, steps: DecodingSteps, states: RowStates) -> None:
        """Take finished rows out of those that run."""
        if over := [place for place, runs in enumerate(states.running) if not runs]:
            self._parts.append((_split(steps, states.rows, over), [states.rows[place] for place in over]))

    def answered(self, *, wait: bool) -> Iterator[tuple[DecodingSteps, Tensor, int]]:
        """Yield the rows that continue, after they have read their answers, and the most tokens that one may write
        now."""
        self._answers |= {answer.row: answer for answer in self._responder.answers(wait=wait)}
        for _ in range(len(self._parts)):
            steps, rows = self._parts.pop(0)
            waiting = [place for place, row in enumerate(rows) if row not in self._answers]
            if len(waiting) == len(rows):
                self._parts.append((steps, rows))
                continue
            if waiting:
                self._parts.append((_split(steps, rows, waiting), [rows[place] for place in waiting]))
            ready = [place for place, row in enumerate(rows) if row in self._answers]
            texts = self._responses.texts([rows[place] for place in ready])
            read = {place: self._read(rows[place], text) for place, text in zip(ready, texts, strict=True)}
            chunks = {place: chunk for place, chunk in read.items() if chunk is not None}
            if chunks:
                steps = _split(steps, rows, list(chunks))  # frees the cache of the others before more is read
                running = [rows[place] for place in chunks]
                ids, before, room, seen = zip(*chunks.values())
                of, positions = torch.tensor([running, before], device=self._stale.device)
                steps.feed(ids, positions, self._stale[of], seen)
                self._stale[of] = 0
                self._reported.difference_update(running)
                yield steps, of, max(room)

    def _read(self, row: int, text: list[int]) -> tuple[list[int], int, int, tuple[Later, ...]] | None:
        """Return the text that the model has to read before the row's next turn, the tokens before it, the room for the
        turn, and the images in it. The row's last token is part of it.

        Returns:
            None where the conversation is over.
        """
        answer = self._answers.pop(row)
        if not (room := self._responses.add_answer(answer)):
            return None
        read = [text[-1], *(answer.token_ids or ())]
        self._sampler.next_turn(row, [*text[:-1], *read])
        return read, self._prompt_lengths[row] + len(text) - 1, room, tuple(each.moved(1) for each in answer.seen)


def _split(steps: DecodingSteps, rows: Sequence[int], which: Sequence[int]) -> DecodingSteps:
    """Return decoding steps over some of the rows."""
    return steps if len(which) == len(rows) else steps.split(torch.tensor(which, device=steps.logits.device))
