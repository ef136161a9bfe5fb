"""The main command: seconds by phase, tokens a second, MFU, peak memory against the plan, share of the limits.

Qwen2.5-0.5B's shape, 32 prompts of 128 tokens x 8 completions of 512, `train.py`'s defaults. By arithmetic, on a card
of 800 TFLOP/s: a step has 4.7e14 useful FLOPs of learning, 0.6 s at the limit and 2 to 6 s at 10 to 30 % of it; 512
tokens of decoding at 5 to 10 ms a token of 24 layers, whose launches cost more than their bytes, 3 to 5 s. Seven steps
of 5 to 11 s and a start of 12 s are 47 to 89 s. Where the box of 120 s has time left, five steps follow with
`generator.cuda_graphs=true`, 40 s at 5 s a step, and with `model.compile=true`, 65 s with Triton.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.bounds import Work
from bench.workload import Workload

from gpu import training
from gpu.result import SMALL, Result, stage
from gpu.training import GIB, REAL, Trained
from lit_rl.algorithms.rollouts.phase_costs import peak_of

G1 = Workload("G1", shape="0.5b", prompts=32, group=8, prompt_tokens=128, completion_tokens=512)
if SMALL:
    G1 = replace(G1, shape="tiny", prompts=2, group=4, prompt_tokens=8, completion_tokens=16)
WARMUPS, STEPS = 2, 4 if SMALL else 7
"""The first step's completions are given; the second warms up what draws them."""
AGAIN = 5
"""Steps with a switch, of which three are timed."""
SWITCHES = {"CUDA graphs": ("generator.cuda_graphs=true", 15), "compiled": ("model.compile=true", 40)}
"""What is run again, and the seconds that are no step's: the start, and Triton."""
AS_PLANNED = 0.15
"""Of the plan, that the peak may be above or below it."""


def run(result: Result, work: Path) -> None:
    spec = training.prepared(G1, work / G1.shape, "main")
    trained = training.ours(spec, "trainer.precision=auto", steps=STEPS, warmups=WARMUPS)
    rates = limits(result)
    seconds(result, "lit_rl", trained, rates)
    result.figure("lit_rl: decode steps", trained.decoded or "unknown", note="NativeGenerator.steps")
    passes = f"{sum(trained.shared)} of {len(trained.shared)}"
    result.figure("lit_rl: training passes that compute a prompt once", passes)
    for key, said in trained.trials.items():
        result.figure(f"lit_rl: trial of {key}", "not taken" if said else "taken", note=said)
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
    mfu_as_trl(result, "lit_rl", trained)
    again(result, work, trained.seconds)


def again(result: Result, work: Path, step: float) -> None:
    """Run the same with a switch that is off by default, if there is time."""
    for name, (setting, more) in SWITCHES.items():
        who, needed = f"lit_rl, {name}", AGAIN * step + more
        if not REAL:
            result.not_run(who, "it needs a real card")
        elif result.left < needed:
            result.not_run(who, f"{result.left:.0f} s are left, {needed:.0f} s are needed")
        else:
            with result.part(who):
                spec = training.prepared(G1, work / G1.shape, f"main_{name.replace(' ', '_')}", unrecorded=True)
                trained = training.ours(spec, "trainer.precision=auto", setting, steps=AGAIN, warmups=WARMUPS)
                seconds(result, who, trained, limits(result))
                result.figure(f"{who}: decode steps", trained.decoded or "unknown", note="NativeGenerator.steps")


def seconds(result: Result, who: str, trained: Trained, rates: tuple[float, float] | None) -> None:
    """Add the figures by which ours and TRL's are compared."""
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
    """Add the MFU of the learning alone."""
    if rates:
        note = "our formula: causal attention, head on completions; of the measured matrix rate"
        result.figure(f"{who}: MFU of learning", trained.flops / trained.phases["train"] / rates[0], note=note)


def mfu_as_trl(result: Result, who: str, trained: Trained) -> None:
    """Add the MFU by TRL's formula, whose import takes seconds and may fail: so it comes last."""
    peak = peak_of(torch.device("cuda"), half=True) if training.GPU else None
    if peak is None:
        return
    what = f"{who}: MFU of learning, as TRL counts"
    with result.part(what):
        sheet = f"of the data sheet's {peak / 1e12:.0f} TFLOP/s (lit_rl's table of cards)"
        note = f"TRL's formula: full attention, head on every token; {sheet}"
        result.figure(what, trained.flops_as_trl() / trained.phases["train"] / peak, note=note)


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
