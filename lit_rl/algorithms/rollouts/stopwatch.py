"""How long the phases of a rollout took, and what was held in them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.profiler import record_function

from lit_rl.algorithms.rollouts.phase_memory import PhaseMemory


class Stopwatch:
    """Seconds by phase, added up until `reset`.

    Args:
        phases: The phases that are there from the start.
        memory: Is told when they begin and end.
    """

    def __init__(self, *phases: str, memory: PhaseMemory) -> None:
        self._memory = memory
        self.seconds = dict.fromkeys(phases, 0.0)
        self.parts: dict[str, float] = {}
        """Seconds of what lies within a phase, by name."""

    def reset(self) -> None:
        """All phases back to 0."""
        self.seconds, self.parts = dict.fromkeys(self.seconds, 0.0), {}

    def load(self, seconds: Mapping[str, float], parts: Mapping[str, float]) -> None:
        """Go on from the seconds of a checkpoint."""
        self.seconds, self.parts = dict(seconds), dict(parts)

    def add_part(self, name: str, seconds: float) -> None:
        """Of a phase that is measured anyway."""
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add what the block takes. What fails took no time."""
        self._memory.begin()
        started = time.perf_counter()
        with record_function(phase):  # its name in a trace
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
        self._memory.end(phase)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is measured inside does not count."""
        before, parts = dict(self.seconds), dict(self.parts)
        yield
        self.seconds, self.parts = before, parts

    def take(self, phase: str) -> float:
        """The seconds of a phase, which begins anew."""
        seconds, self.seconds[phase] = self.seconds[phase], 0.0
        return seconds
