"""An engine with weights of its own, and the one way in which they are replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lit_rl.errors import GenerationError, LitRLError
from lit_rl.generation.base import EngineLost
from lit_rl.generation.vllm.requests import Answer, Request
from lit_rl.generation.vllm.work import Completing, Work
from lit_rl.models.export.shipping import base_weights, weight_shapes, whole_weights

Shapes = Mapping[str, tuple[int, ...]]
"""Whole shapes by the names of the plain Hugging Face model."""


@dataclass(frozen=True)
class Weights:
    """The weights for an engine, see `lit_rl.models.export.shipping`. Iterating is a collective where it is sharded."""

    policy: nn.Module
    dtype: torch.dtype
    """The engine's."""
    base_only: bool = False
    """Leave adapters out: the engine takes them by themselves."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return (base_weights if self.base_only else whole_weights)(self.policy, self.dtype)

    @property
    def shapes(self) -> Shapes:
        return weight_shapes(self.policy)


Heartbeat = Callable[[int, int], None]
"""A function of the numbers of done and requested completions, called repeatedly while they are made."""


@dataclass(frozen=True)
class Facts:
    """An engine's facts about itself: see `worker.WeightUpdates.lit_rl_facts`."""

    instance: str
    """A new value after every start."""
    version: int | None
    """The version of the last finished update; None before it."""
    model: dict[str, Any]
    """Architecture and sizes."""
    dtype: str
    max_model_len: int
    block_size: int
    """Tokens of a block of the key-value cache; a prefix is kept in whole blocks."""
    logprobs_mode: str
    max_num_seqs: int
    """Sequences that run at once; more wait."""
    max_lora_rank: int | None
    device: str

    @property
    def vocabulary(self) -> int:
        """The number of tokens of the model; ids are below it."""
        return self.model["vocab_size"]


class Engine(Protocol):
    """The interface of vLLM, here or elsewhere. `push_weights` and `push_adapter` alone call the verbs of an update."""

    def facts(self) -> Facts: ...

    def pause(self) -> None:
        """Accept no more requests, and wait for those that run."""
        ...

    def begin(self, shapes: Shapes) -> None:
        """Open an update of all weights; refuse names and shapes that are not this model's."""
        ...

    def load(self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None: ...

    def load_adapter(self, folder: str) -> None:
        """Replace the adapter; every later request runs with the new one."""
        ...

    def finish(self, version: int) -> None: ...

    def stamp(self, version: int) -> None:
        """Set the version of the weights, where an adapter alone was renewed."""
        ...

    def reset_caches(self) -> None:
        """Empty the caches with results of the old weights."""
        ...

    def resume(self) -> None: ...

    def run(self, work: Work, heartbeat: Heartbeat | None = None) -> None:
        """Answer requests as they come, many at a time, until all are done. See `complete`."""
        ...

    def sleep(self) -> None:
        """Release the memory of weights and cache. They are lost: an update has to follow."""
        ...

    def wake(self, what: str) -> None:
        """Allocate memory again: `weights` before an update, `kv_cache` after it."""
        ...

    def close(self) -> None: ...


def complete(engine: Engine, requests: Sequence[Request], heartbeat: Heartbeat | None = None) -> list[list[Answer]]:
    """Return the completions of each request, in order."""
    work = Completing(requests)
    engine.run(work, heartbeat)
    return work.answers


def push_weights(engine: Engine, weights: Weights, version: int) -> None:
    """Replace all weights of an engine: pause, update, finish, reset every cache, resume.

    To iterate `weights` may be a collective over ranks, so they are iterated to their end also where the engine fails:
    the other ranks would wait forever.

    Raises:
        GenerationError: the engine refused a weight, missed one, or failed. It then has no usable weights.
    """
    rest, begun = iter(weights), False
    try:
        engine.pause()
        engine.begin(weights.shapes)
        begun = True
        engine.load(rest, weights.dtype)
        engine.finish(version)
        engine.reset_caches()
        engine.resume()
    except Exception as error:
        for _ in rest:
            pass
        if not begun and not isinstance(error, EngineLost):  # it has its old weights, and others may use it
            with contextlib.suppress(GenerationError):
                engine.resume()
        if isinstance(error, LitRLError):
            raise
        raise GenerationError(f"The engine did not take over policy version {version}: {error}") from error


def push_adapter(engine: Engine, folder: str, version: int) -> None:
    """Replace the adapter of an engine whose base stays: the same order as `push_weights`.

    Raises:
        GenerationError: the engine refused the adapter, or failed.
    """
    try:
        engine.pause()
        engine.load_adapter(folder)
        engine.stamp(version)
        engine.reset_caches()
        engine.resume()
    except LitRLError:
        raise
    except Exception as error:
        raise GenerationError(f"The engine did not take over the adapter of version {version}: {error}") from error
