"""The seconds a step that `lit-rl plan` expects, beside those that the steps of train.py take at the same settings.

    python scripts/plan_seconds.py --rounds 3

Plan and training take turns, so that a neighbour's load falls on both. A training's figure is the median of its steps
after the first: generation, reward and update. Its validation, checkpoints and export are no part of a step.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.workload import write_model

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6
PHASES = ("time/generate", "time/reward", "time/update")
SMALL = ["data.prompts_per_rollout=4", "algo.group_size=8", "sampling.max_new_tokens=64"]


def settings(folder: Path) -> dict[str, list[str]]:
    """Words of the command line, by what they train."""
    write_model("7m", folder / "7m")
    return {
        "the shipped policy, `algo=grpo`": [],
        "the 7 M shape, 32 responses of at most 64 tokens": ["model=local", f"model.name={folder / '7m'}", *SMALL],
        "SmolLM2-135M, `experiment=smollm2_largest`": ["experiment=smollm2_largest"],
    }


def expected(words: list[str]) -> float:
    """Seconds a step, as the plan says."""
    said = subprocess.run([sys.executable, "train.py", *words, "task=plan"], cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"expected: ([\d.]+) seconds", said.stdout)
    if found is None:
        raise SystemExit(said.stdout[-2000:] + said.stderr[-2000:])
    return float(found[1])


def measured(words: list[str], folder: Path, checkout: Path = ROOT, steps: int = STEPS) -> float:
    """Seconds a step, as the median step of a training took, after its first.

    Args:
        words: Of the command line.
        folder: Of the run; a new one.
        checkout: Whose train.py runs.
        steps: Of the training.
    """
    off = ["trainer.limit_val_batches=0", "logger=none", f"trainer.max_steps={steps}", f"run_dir={folder}"]
    subprocess.run([sys.executable, "train.py", *words, *off], cwd=checkout, capture_output=True, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(line[name] for name in PHASES) for line in lines if PHASES[-1] in line]
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    print("| training | expected, s | measured, s | expected / measured |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, words in settings(folder).items():
            pairs = [(expected(words), measured(words, folder / f"{label[:9]} {n}")) for n in range(rounds)]
            plan, run = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"| {label} | {plan:.2f} | {run:.2f} | {plan / run:.2f} |", flush=True)


if __name__ == "__main__":
    main()
