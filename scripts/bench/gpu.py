"""The benchmark on one GPU, in one command and under ten minutes.

    python scripts/bench/gpu.py --peer-python .venv-peer/bin/python                        # one round
    python scripts/bench/gpu.py --peer-python .venv-peer/bin/python --rounds 5 --steps 5   # the protocol's: two hours

Qwen2.5-0.5B's shape with random weights, 32 prompts of 128 tokens x 8 completions of 512, fixed and variable lengths.
It takes the options of `bench.run`: rounds, workloads, contenders. Without TRL in the peer's environment ours is
measured alone, and each setting is held against the first. Written for one GPU and not run on one yet, so both times
are estimates: the CPU's benchmark takes every path of it but what asks for CUDA.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from bench import run

    sys.argv.insert(1, "gpu")
    run.main()


if __name__ == "__main__":
    main()
