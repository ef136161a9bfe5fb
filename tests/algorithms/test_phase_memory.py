"""Memory by phase: what is held at a phase's end, and more where it held more than anything before."""

from __future__ import annotations

import subprocess
import sys

import torch

from lit_rl.algorithms.rollouts.phase_costs import PhaseMemory, current_memory

SIZE = 2**28


def test_a_phase_that_holds_more_has_more() -> None:
    memory, before = PhaseMemory(), current_memory()
    memory.begin()
    held = torch.ones(SIZE, dtype=torch.uint8)
    memory.end("update")
    assert memory.held["update"] - before > 0.9 * SIZE
    del held
    memory.begin()
    memory.end("reward")
    assert memory.held["update"] - memory.held["reward"] > 0.9 * SIZE


def test_what_was_let_go_within_a_phase_counts_for_it_alone() -> None:
    """In a process of its own, which has held nothing like it before."""
    program = f"""
import torch
from lit_rl.algorithms.rollouts.phase_costs import PhaseMemory, current_memory
memory = PhaseMemory()
for phase, size in (("generate", {SIZE}), ("reward", 1), ("update", {2 * SIZE}), ("update", 1)):
    memory.begin()
    torch.ones(size, dtype=torch.uint8)
    memory.end(phase)
now = current_memory()
memory.end("gone on with")
print(*((memory.held[phase] - now) / {SIZE} for phase in ("generate", "reward", "update", "gone on with")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    generate, reward, update, rest = map(float, done.stdout.split())
    assert 0.8 < generate < 1.2 and abs(reward) < 0.1 and 1.8 < update < 2.2 and abs(rest) < 0.1
