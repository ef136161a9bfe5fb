"""Decode steps replayed as CUDA graphs (``cuda_graphs``), and the proof that a model may be decoded so.

A lean step is some thousand operations on few rows, and the host takes longer to launch them than a GPU to compute
them. A graph holds the launches of one step: the newest tokens are given to the model, the next ones are drawn and
written, and turns that an EOS or a length ends are marked. It is replayed by one call, as often as there are steps
between two looks of the decode loop. Looks, stop strings, rows that leave, join or read an answer, and growth of the
buffer for own tokens stay with the host.

A graph reads and writes the memory that it was captured with, by shapes that it was captured with. So

- keys and values are read in all of their room (`GroupedLayer`), and written at a column that stands on the device;
- it serves for as long as rows and room stay. Then a few steps are launched one by one, which also prepares libraries,
  and the next is captured. As a rule rows change when a quarter of them is over and room when it doubles: a rollout has
  a graph for each number of rows and each room that it comes to, one at a time, in the order in which it comes to them;
- whatever the host counts of a step is counted again at each replay.

A model is proven before its first batch: it takes a few of the same steps launched and replayed, and its logits have
to agree. A number that the host baked into a graph, such as a position, shows at the second replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.generation.batches import DecodeBatch
from lit_rl.generation.grouped_steps import probe
from lit_rl.generation.lean_steps import LeanModel, LeanSteps
from lit_rl.models.policy.trial import Trial, Unfit

_PLAIN = 4
"""Steps that are launched one by one before one is captured: of rows and room that stay for so few a graph would cost
more than it saves. An estimate: to capture a step takes the host about as long as to launch it, and to make a graph of
it some milliseconds. The last of them runs on the stream of the capture, as PyTorch asks for."""

_TRIAL = Trial("generator.cuda_graphs", "The host launches each operation of its decode steps", most=1e-3)
"""The same kernels on the same shapes: the logits of the two ways are equal."""

_PROVEN = 8
"""Steps of a proof: one to make room, those that are launched before a capture, and three replays."""


class GraphedSteps(LeanSteps):
    """Lean steps that can be captured: no shape depends on the number of tokens of a row."""

    whole = True

    @property
    def room_left(self) -> int:
        """The own tokens of each row that fit before new memory is allocated."""
        layer: Any = self._cache.layers[0]
        return layer.room_left

    @property
    def moved(self) -> int:
        """The number of times that the rows' own tokens got new memory: whenever rows leave or join, and when it
        grows."""
        layer: Any = self._cache.layers[0]
        return layer.moved

    @property
    def own_length(self) -> int:
        """The columns of the rows' own tokens."""
        return self._cache.own_length

    def capture(self, step: Callable[[], None], column: Tensor) -> None:
        """Take a step whose tokens go to a column that stands on the device, long ``(1,)``."""
        with self._cache.writing_at(column):
            step()

    def replayed(self) -> None:
        """Count a replayed step."""
        self._cache.wrote()


class StepGraphs:
    """Steps that are launched one by one, or replayed by a graph once rows and buffer have stayed for a few of them.

    Args:
        device: The device of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: tuple[Any, int] | None = None
        self._plain = 0
        self._graph: _StepGraph | None = None
        self.replays = 0
        """Number of replayed steps."""

    def __call__(
        self,
        step: Callable[[Tensor], Tensor],
        replayed: Callable[[], None],
        steps: Any,
        tokens: Tensor,
    ) -> Tensor:
        """Return the next tokens of the rows, long ``(b,)``; the next call may overwrite their memory.

        Args:
            step: Gives the rows their newest tokens, long ``(b,)``, and returns the next ones.
            replayed: Updates the host's counters of a step, except for those of the model.
            steps: The `GraphedSteps` that it advances.
            tokens: The newest ones.
        """
        if self._of is None or self._of[0] is not steps or self._of[1] != steps.moved:
            self._of, self._plain, self._graph = (steps, steps.moved), 0, None
        if self._graph is not None and steps.room_left:
            replayed()
            steps.replayed()
            return self._replay(tokens, steps.own_length)
        if steps.room_left < _PLAIN or self._plain < _PLAIN - 1:
            self._plain += 1
            return step(tokens)
        if self._plain == _PLAIN - 1:
            self._plain += 1
            return self._beside(step, tokens)
        self._graph = _StepGraph(step, steps, tokens, self._device)  # which the host has counted
        return self._replay(tokens, steps.own_length)

    def _replay(self, tokens: Tensor, length: int) -> Tensor:
        assert self._graph is not None
        self.replays += 1
        return self._graph.replay(tokens, length)

    def _beside(self, step: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Take a step on the stream of the capture."""
        here, there = torch.cuda.current_stream(self._device), _stream(self._device)
        there.wait_stream(here)
        with torch.cuda.stream(there):
            drawn = step(tokens)
        here.wait_stream(there)
        return drawn


class _StepGraph:
    """A captured step, not executed yet."""

    def __init__(
        self, step: Callable[[Tensor], Tensor], steps: GraphedSteps, tokens: Tensor, device: torch.device
    ) -> None:
        self._tokens = tokens.clone()
        self._column = torch.full((1,), steps.own_length, dtype=torch.long, device=device)
        self._at = steps.own_length
        self._graph = torch.cuda.CUDAGraph()

        def captured() -> None:
            self._tokens.copy_(step(self._tokens))

        # The outer stream, as a capture that fails leaves its own the current one. Other threads may go on meanwhile:
        # rewards are computed while there is decoding.
        beside = torch.cuda.graph(self._graph, stream=_stream(device), capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(torch.cuda.current_stream(device)), beside:
                steps.capture(captured, self._column)
        except Exception as error:  # at its end all that CUDA says is that something went wrong before
            raise error.__context__ or error from None

    def replay(self, tokens: Tensor, length: int) -> Tensor:
        """Return the next tokens. ``length``: columns of the rows' own tokens after this step."""
        if tokens is not self._tokens:  # others were launched in between
            self._tokens.copy_(tokens)
        if self._at != length - 1:
            self._column.fill_(length - 1)
        self._at = length
        self._graph.replay()
        return self._tokens


@functools.cache
def _stream(device: torch.device) -> Any:
    """Return the one stream of captures: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


def proven(policy: nn.Module, *, lean: bool) -> bool:
    """Decode a few tokens of two prompts both ways, and compare. Call it in evaluation mode, without gradient.

    ``lean``: True where it takes lean steps.
    """
    return _TRIAL.passes(policy, lambda: _both_ways(policy, lean))


def _both_ways(policy: nn.Module, lean: bool) -> tuple[Tensor, Tensor]:
    batch = probe(policy)
    if not lean:
        raise Unfit("it takes no lean steps")
    if batch.keys.device.type != "cuda":
        raise Unfit(f"CUDA graphs are of CUDA devices, and it is on {batch.keys.device.type}")
    room = _PROVEN + _PLAIN
    model = LeanModel(policy, batch.prompt_ids.shape[1] + room)
    graphs = StepGraphs(batch.keys.device)
    launched, replayed = (_decoded(GraphedSteps(model, policy, batch, room), batch, way) for way in (None, graphs))
    assert graphs.replays > 1, graphs.replays  # the first takes the very numbers of the capture
    return replayed, launched


def _decoded(steps: GraphedSteps, batch: DecodeBatch, graphs: StepGraphs | None) -> Tensor:
    """Return logits ``(s, 4, v)`` of a few steps, each with tokens that depend on those before."""
    tokens, size, logits = batch.keys + 1, steps.logits.shape[-1], []

    def step(tokens: Tensor) -> Tensor:
        steps.advance(tokens)
        return (tokens * 5 + 3) % size

    for _ in range(_PROVEN):
        tokens = step(tokens) if graphs is None else graphs(step, lambda: None, steps, tokens)
        logits.append(steps.logits.clone())
    return torch.stack(logits)
