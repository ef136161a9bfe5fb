"""TRL 1.16 on the main command's work, without vLLM: a setting for one card, and as it comes.

The setting is what its documentation has for one card: weights in bfloat16, no recomputation where memory allows, and
32 rows a forward pass (of 640 tokens: 20 GB of logits; 16 where that does not fit). By arithmetic: 512 tokens of
`generate` at 25 to 30 ms, 15 s, and 5 to 8 s of learning are 20 to 25 s a step, of which two are timed after one on
given completions: 45 to 60 s, and 12 s for the start. As it comes (8 rows a pass, recomputation) a step is 30 s, one is
timed after one on given completions, and 3 s go to the start: 45 s, where the box of 110 s has them left.
"""

from __future__ import annotations

from pathlib import Path

import torch

from gpu import training
from gpu.main_command import G1, limits, mfu_as_trl, seconds
from gpu.result import Result, stage

BEST = {"model_init_kwargs": {"dtype": "bfloat16"}, "gradient_checkpointing": False}
ROWS = 32, 16
DEFAULT = 45
"""Seconds of TRL as it comes; where fewer are left, it is left out."""
NATS = 0.1
"""Of any token of the first step, from ours: two roundings to bfloat16 of 24 layers."""


def run(result: Result, work: Path) -> None:
    with result.part("TRL, best setting"):
        best(result, work)
    training.free()
    if result.left < DEFAULT:
        result.not_run("TRL, as it comes", f"{result.left:.0f} s are left")
        return
    with result.part("TRL, as it comes"):
        spec = training.prepared(G1, work / G1.shape, "trl_default", config={}, unrecorded=True)
        trained = training.trl(spec, steps=2, warmups=1)
        seconds(result, "TRL, as it comes", trained, limits(result))
        mfu_as_trl(result, "TRL, as it comes", trained)


def best(result: Result, work: Path) -> None:
    """The largest forward pass that fits."""
    for rows in ROWS:
        size = min(rows, G1.rows)
        more = {"per_device_train_batch_size": size, "gradient_accumulation_steps": G1.rows // size}
        spec = training.prepared(G1, work / G1.shape, "trl_best", config=BEST | more)
        trained = None
        try:
            trained = training.trl(spec, steps=3, warmups=1)
        except torch.OutOfMemoryError:
            result.not_run(f"TRL, {rows} rows a pass", "out of memory")
        if trained is None:
            training.free()  # not above, where the frames of the error still hold the model
            continue
        seconds(result, "TRL, best setting", trained, limits(result))
        ours = work / G1.shape / "main"
        if (ours / "first_step.json").is_file():
            found = training.agreement(spec, ours, gradients=False)
            note = f"of {found.tokens:,} tokens"
            result.check("log-probs of the first step, from ours", found.logprobs, most=NATS, unit="nats", note=note)
        else:
            result.not_run("log-probs of the first step, from ours", "the main command left none")
        mfu_as_trl(result, "TRL, best setting", trained)
        return


if __name__ == "__main__":
    stage(run)
