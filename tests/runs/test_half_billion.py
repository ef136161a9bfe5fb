"""The real Qwen2.5-0.5B shape with random weights: two GRPO steps on a CPU (docs/hardware.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs_helpers import rows

pytestmark = pytest.mark.slow

RUN = [
    "model=local",
    "data=jsonl",
    "reward=length",
    "data.prompts_per_rollout=4",
    "algo.group_size=4",
    "data.val_fraction=0",
    "trainer.accumulate_grad_batches=4",
    "trainer.max_steps=2",
    "sampling.max_new_tokens=32",
    "trainer.enable_checkpointing=false",
    "optimizer.lr=1e-5",
]
"""16 completions of 32 tokens a step, in micro-batches of one group."""


@pytest.fixture(scope="module")
def folder(root: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("half_billion") / "qwen2.5-0.5b"
    subprocess.run([sys.executable, root / "scripts" / "make_models.py", "random", "qwen2.5-0.5b", out], check=True)
    return out


@pytest.mark.parametrize("lora", [[], ["model.lora.r=16"]], ids=["full", "lora"])
def test_two_grpo_steps(lora, folder, process, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about the number {i}."}) + "\n" for i in range(8)))
    run_dir = tmp_path / "run"
    with (tmp_path / "output").open("w+") as output:
        overrides = [*RUN, *lora, f"model.name={folder}", f"data.path={prompts}", f"run_dir={run_dir}"]
        child = process(*overrides, stdout=output)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        assert child.returncode == 0, output.read()
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows(run_dir)] == [1, 2]
    assert all(row["train/grad_norm"] is not None for row in steps)
    assert usage.ru_maxrss < 16 * 2**20  # kilobytes: what a 24 GB machine can spare
    with capsys.disabled():
        for row in steps:
            times = "  ".join(f"{phase} {row[f'time/{phase}']:.1f} s" for phase in ("generate", "reward", "update"))
            print(f"\n{'lora' if lora else 'full'} step {row['step']}: {times}", end="")
        print(f"\npeak memory: {usage.ru_maxrss / 2**20:.1f} GB")
