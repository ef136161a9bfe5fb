"""What a rollout and its update take in this checkout beside another one: short runs of train.py in turns.

    python scripts/same_speed.py ../untouched --rounds 3

A ratio is the median over rounds, with the lowest and the highest. The interpreter is the one that runs this script.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from plan_seconds import ROOT, measured

STEPS = 40
METHODS = ("grpo", "rloo", "ppo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("| `algo=` | seconds here | there | here / there |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            pairs = [
                [
                    measured([f"algo={method}"], Path(folder) / f"{method} {n} {place}", checkout, STEPS)
                    for place, checkout in enumerate((ROOT, given.other.resolve()))
                ]
                for n in range(given.rounds)
            ]
            here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"| `{method}` | {here:.3f} | {there:.3f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
