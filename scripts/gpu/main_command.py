"""The main command: seconds by phase, tokens a second, MFU, peak memory against the plan, share of the limits.

Qwen2.5-0.5B's shape, 32 prompts of 128 tokens x 8 completions of 512, `train.py`'s defaults. By arithmetic, on a card
of 800 TFLOP/s: a step has 4.7e14 useful FLOPs of learning, 0.6 s at the limit and 2 to 6 s at 10 to 30 % of it; 512
tokens of decoding at 5 to 10 ms a token of 24 layers, whose launches cost more than their bytes, 3 to 5 s. Seven steps
of 5 to 11 s and a start of 20 s are 55 to 100 s.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.bounds import Work
from bench.workload import Workload

from gpu import training
from gpu.result import SMALL, Result, stage
from gpu.training import GIB, Trained

G1 = Workload("G1", shape="0.5b", prompts=32, group=8, prompt_tokens=128, completion_tokens=512)
if SMALL:
    G1 = replace(G1, shape="tiny", prompts=2, group=4, prompt_tokens=8, completion_tokens=16)
WARMUPS, STEPS = 2, 4 if SMALL else 7
"""The first step's completions are given; the second warms up what draws them."""
AS_PLANNED = 0.15
"""Of the plan, that the peak may be above or below it."""


def run(result: Result, work: Path) -> None:
    spec = training.prepared(G1, work / G1.shape, "main")
    trained = training.ours(spec, "trainer.precision=auto", steps=STEPS, warmups=WARMUPS)
    rates = limits(result)
    seconds(result, "lit_rl", trained, rates)
    if trained.planned and trained.peak:
        result.figure("lit_rl: the plan", trained.planned / GIB, "GiB")
        share = trained.peak / trained.planned
        result.check("lit_rl: peak over the plan", share, least=1 - AS_PLANNED, most=1 + AS_PLANNED)
    if rates:
        bound = Work.of(G1, WARMUPS).bound(*rates)
        parts = {"decode": ("generate", bound.prefill + bound.decode), "learning": ("train", bound.train)}
        parts["optimizer"] = ("optimize", bound.optimizer)
        for name, (phase, least) in parts.items():
            took = max(trained.phases[phase], 1e-9)
            result.figure(f"lit_rl: share of the limit, {name}", least / took, note=f"the limit is {least:.3g} s")
        result.figure("lit_rl: share of the limit, step", bound.step / trained.seconds, note="bench/bounds.py")


def seconds(result: Result, who: str, trained: Trained, rates: tuple[float, float] | None) -> None:
    """What ours and TRL's are compared by."""
    work = trained.work
    result.figure(f"{who}: a step", trained.seconds, "s", f"median of {len(trained.clock.seconds) - trained.warmups}")
    for phase, took in trained.phases.items():
        result.figure(f"{who}: {phase}", took, "s")
    if work.generates and trained.phases["generate"]:
        tokens = work.rows * work.completion_tokens
        result.figure(f"{who}: generated", tokens / trained.phases["generate"], "tokens/s")
    result.figure(f"{who}: learned", trained.tokens / trained.phases["train"], "tokens/s", "prompts and completions")
    result.figure(f"{who}: step", trained.tokens / trained.seconds, "tokens/s", "prompts and completions")
    mfu(result, who, trained, rates)
    if trained.peak:
        result.figure(f"{who}: peak of tensors", trained.peak / GIB, "GiB")


def mfu(result: Result, who: str, trained: Trained, rates: tuple[float, float] | None) -> None:
    """Of the learning alone, by two formulas."""
    import torch
    from trl.trainer.utils import get_peak_flops

    took = trained.phases["train"]
    if rates:
        note = "our formula: causal attention, head on completions; of the measured matrix rate"
        result.figure(f"{who}: MFU of learning", trained.flops / took / rates[0], note=note)
    peak = get_peak_flops(torch.cuda.get_device_name(), "bfloat16") if training.GPU else None
    if peak is not None:
        note = f"TRL's formula: full attention, head on every token; of the data sheet's {peak / 1e12:.0f} TFLOP/s"
        result.figure(f"{who}: MFU of learning, as TRL counts", trained.flops_as_trl() / took / peak, note=note)


def limits(result: Result) -> tuple[float, float] | None:
    """FLOP/s and bytes/s that `machine` measured; None where that stage was not run."""
    file = result.folder / "machine.json"
    if not file.is_file():
        return None
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    found = {row["what"]: row["value"] for row in rows}
    flops = [value for what, value in found.items() if what.startswith("matrix rate")]
    bytes_ = [found[what] for what in ("copy rate", "read rate") if what in found]
    return (1e12 * max(flops), 1e9 * max(bytes_)) if flops and bytes_ else None


if __name__ == "__main__":
    stage(run)
