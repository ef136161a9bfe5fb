"""Figures that others publish of one H100, from the same shapes with random weights: tokens a second and memory.

prime-rl (its benchmarks/results): SFT and the learning of RL with Qwen3-0.6B's shape, all weights, bfloat16,
recomputation, with FlashAttention 3 and torch.compile. TRL 1.15 (its release notes): peak memory with Gemma-3-1B's
shape, 8,192 tokens, batch 1 (KTO 2), recomputation, sdpa, with its chunked head, on a card of 79 GiB. Our smallest
steps of GRPO, RLOO and KTO have more rows than theirs, as their names say. RL with one sequence of 16,384 tokens is
learned by REINFORCE, whose group may be of one; nothing but the arithmetic of a reward sets it apart.

By arithmetic: 16,384 tokens of 0.6B are 8e13 FLOPs with recomputation and as many of attention, 0.4 s at half of an
H100's rate; 8,192 of 1B 6e13, 0.15 s. So a row is its start, 5 to 7 s with reading 1.2 or 2 GB of weights in bfloat16.
Seven rows are 35 to 50 s, imports and drawing two models 10 s: the last may be left out in a box of 60 s.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from bench.workload import Workload

from gpu import training
from gpu.main_command import limits, mfu, mfu_as_trl
from gpu.result import SMALL, Result, stage
from gpu.training import GIB

SETTINGS = "trainer.precision=bf16-true", "model.gradient_checkpointing=true"
SECONDS = 8
"""Of a row, at most; where fewer are left, it is left out."""
PROMPT = 64
"""Tokens, of which nothing is learned; the published rows learn from all."""


@dataclass(frozen=True)
class Published:
    """A row of another project, and ours of the same work."""

    work: Workload
    tokens: float | None
    """A second, theirs."""
    memory: float
    """GiB, theirs."""
    whose: str
    algo: str | None = None
    """Where it is another than the work's method."""
    steps: int = 2
    """The peak is reached in the second, where optimizer state is there."""


def _work(method: str, shape: str, tokens: int, rows: int, group: int, micro_batches: int | None = None) -> Workload:
    name = f"{method} {shape} {tokens}"
    more = {"prompt_tokens": PROMPT, "completion_tokens": tokens - PROMPT, "micro_batches": micro_batches}
    return Workload(name, method, shape, prompts=rows // group, group=group, **more)  # pyright: ignore


PRIME, TRL = "prime-rl, H100", "TRL 1.15, 79 GiB"
ROWS = {
    "SFT, 0.6B, 2 rows of 8,192": Published(_work("sft", "0.6b", 8192, 2, 1, 2), 26.0e3, 31.7, PRIME, steps=4),
    "RL learning, 0.6B, 16,384": Published(
        _work("grpo", "0.6b", 16_384, 1, 1), 11.9e3, 12.5, PRIME, algo="reinforce", steps=4
    ),
    "SFT, 1B, 8,192": Published(_work("sft", "1b", 8192, 1, 1), None, 8.87, TRL),
    "DPO, 1B, a pair of 8,192": Published(_work("dpo", "1b", 8192, 2, 2), None, 12.0, TRL),
    "GRPO, 1B, 2 rows of 8,192": Published(_work("grpo", "1b", 8192, 2, 2), None, 10.3, TRL),
    "RLOO, 1B, 2 rows of 8,192": Published(_work("grpo", "1b", 8192, 2, 2), None, 14.02, TRL, algo="rloo"),
    "KTO, 1B, 2 pairs of 8,192": Published(_work("dpo", "1b", 8192, 4, 2), None, 11.98, TRL, algo="kto"),
}


def run(result: Result, work: Path) -> None:
    for number, (name, row) in enumerate(ROWS.items()):
        if result.left < SECONDS:
            result.not_run(name, f"{result.left:.0f} s are left")
            continue
        with result.part(name):
            measured(result, work / row.work.shape, f"figure_{number}", name, row)


def measured(result: Result, folder: Path, place: str, name: str, row: Published) -> None:
    """Ours, each figure with theirs in its note."""
    work = replace(row.work, shape="tiny", prompt_tokens=8, completion_tokens=24) if SMALL else row.work
    told = {"learns_alone": True, "unrecorded": True} | ({"algo": row.algo} if row.algo else {})
    spec = training.prepared(work, folder.parent / work.shape, place, **told)
    data = [] if work.generates else ["data.max_length=null"]
    try:
        trained = training.ours(spec, *SETTINGS, *data, steps=row.steps, warmups=1)
    finally:
        shutil.rmtree(spec.work)  # a run that fails exports its model
    if row.tokens is not None:
        rate = trained.tokens / trained.seconds
        result.figure(f"{name}: learned", rate, "tokens/s", f"{row.whose}: {row.tokens:,.0f}")
        mfu(result, name, trained, limits(result))
    if trained.peak:
        result.figure(f"{name}: peak of tensors", trained.peak / GIB, "GiB", f"{row.whose}: {row.memory:g}")
    if row.tokens is not None:
        mfu_as_trl(result, name, trained)


if __name__ == "__main__":
    stage(run)
