"""What a step of this checkout takes beside one of another: short runs of train.py in turns.

    python scripts/same_speed.py ../untouched --rounds 3

A figure is the median of a run's steps after the first: generation, reward and update. A ratio is the median over
rounds, with the lowest and the highest. Both checkouts run in the interpreter that runs this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
STEPS = 40
METHODS = ("grpo", "rloo", "ppo")
PHASES = ("time/generate", "time/reward", "time/update")
QUIET = ("eval.limit=8", "trainer.val_check_interval=null", "trainer.check_val_every_n_epoch=null")


def seconds(checkout: Path, method: str) -> float:
    """Of a step of the shipped policy."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(checkout / "train.py"), f"algo={method}", f"trainer.max_steps={STEPS}"]
        done = subprocess.run([*command, *QUIET, f"run_dir={folder}/run"], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{checkout}: {' '.join(command)}\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [sum(row[name] for name in PHASES) for row in rows if all(name in row for name in PHASES)]
    return statistics.median(steps[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("| `algo=` | s a rollout here | there | here / there |\n|---|---|---|---|")
    for method in METHODS:
        here, there = [], []
        for _ in range(given.rounds):
            here.append(seconds(HERE, method))
            there.append(seconds(given.other.resolve(), method))
        ratios = sorted(mine / theirs for mine, theirs in zip(here, there))
        middle = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| `{method}` | {statistics.median(here):.3f} | {statistics.median(there):.3f} | {middle} |", flush=True)


if __name__ == "__main__":
    main()
