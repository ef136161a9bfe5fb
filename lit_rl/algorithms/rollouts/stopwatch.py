"""Seconds and memory of the phases of a rollout."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.profiler import record_function

from lit_rl.algorithms.rollouts.phase_memory import PhaseMemory


class Stopwatch:
    """A stopwatch of seconds by phase, summed until `reset`.

    Args:
        phases: The initial phases.
        memory: The memory meter of the phases.
    """

    def __init__(self, *phases: str, memory: PhaseMemory) -> None:
        self._memory = memory
        self.seconds = dict.fromkeys(phases, 0.0)
        self.parts: dict[str, float] = {}
        """Seconds of parts within a phase, by name."""

    def reset(self) -> None:
        """Set all phases back to 0."""
        self.seconds, self.parts = dict.fromkeys(self.seconds, 0.0), {}

    def load(self, seconds: Mapping[str, float], parts: Mapping[str, float]) -> None:
        """Restore the seconds of a checkpoint."""
        self.seconds, self.parts = dict(seconds), dict(parts)

    def add_part(self, name: str, seconds: float) -> None:
        """Add the seconds of a part within a measured phase."""
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to a phase; a failed block does not count."""
        self._memory.begin()
        started = time.perf_counter()
        with record_function(phase):  # its name in a trace
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
        self._memory.end(phase)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Discard what is measured inside."""
        before, parts = dict(self.seconds), dict(self.parts)
        yield
        self.seconds, self.parts = before, parts

    def take(self, phase: str) -> float:
        """Return the seconds of a phase, and set it back to 0."""
        seconds, self.seconds[phase] = self.seconds[phase], 0.0
        return seconds
