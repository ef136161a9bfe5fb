"""GRPO on a real pretrained model, ours and TRL's for the same seconds, and what each has learned: `make real-model`.

    python scripts/real_model.py OUT --peer-python .venv-peer/bin/python [--dtype float32|bfloat16] [--docs]
    python scripts/real_model.py --page           # writes docs/real-model.md's tables from docs/real-model.json

`experiment=smollm2_largest` trains SmolLM2-135M-Instruct (from `make smollm2`) with LoRA to name the largest of four
numbers. TRL then trains the same model on the same rows with the same settings for as many seconds, as the benchmark's
fastest tuning of it has them: no gradient checkpointing, all completions in one forward pass, threads and memory as
`train.py` sets them. Both compute in bfloat16 where the processor has units for it, and in float32 elsewhere: ours with
`trainer.precision=bf16-true`, TRL with bfloat16 weights, adapters in float32 on both sides. Each run is alone on the
machine. Both adapters and the model as it came answer the same held-out questions, greedily and four times at
temperature 1. What is finished in OUT is not run again; `real_model.json` has the numbers, and `--docs` puts them, the
tables and the picture where the page has them. Half an hour on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from bench.bounds import describe_machine, revision
from bench.suites import BRIEF, KEEP
from chain import answered, interval
from rich.console import Console
from rich.table import Table
from run_curves import BLUE, GREY, ORANGE, look, plt

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.cli.process import filter_warnings
from lit_rl.core.model_paths import copy_without_hub
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Largest
from lit_rl.models import LanguageModel

ROOT = Path(__file__).resolve().parents[1]
PAGE, NUMBERS = ROOT / "docs" / "real-model.md", ROOT / "docs" / "real-model.json"
PICTURE = ROOT / "docs" / "images" / "real_model.png"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HELD_OUT, DRAWS, NEW_TOKENS = 200, 4, 16
OURS = ("train.py", "experiment=smollm2_largest")
PHASES = ("generate", "reward", "update")
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
SETTINGS = {
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "max_completion_length": NEW_TOKENS,
    "temperature": 1.0,
    "beta": 0.0,
    "gradient_checkpointing": False,
}
"""What `experiment=smollm2_largest` is, as TRL calls it; and the last, which makes TRL faster here."""
PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-true"}
THEIR_PRECISIONS = {"float32": {"bf16": False}, "bfloat16": {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}}
UNITS = ("amx_bf16", "avx512_bf16")
"""Of a processor: one of them, and bfloat16 is the faster of the two."""
TABLE, PHASE_TABLE, END = "<!-- scripts/real_model.py -->\n", "<!-- scripts/real_model.py, phases -->\n", "<!-- end -->"


def ours(out: Path, dtype: str) -> None:
    """Train, unless that is done."""
    if not (out / "lit_rl" / "hf" / "adapter" / "adapter_config.json").is_file():
        run("lit_rl", [sys.executable, *OURS, f"trainer.precision={PRECISIONS[dtype]}", f"run_dir={out}/lit_rl"], out)


def theirs(out: Path, python: str, seconds: float, dtype: str) -> None:
    """Train the same with TRL, its process set as `train.py` sets ours."""
    if not (out / "trl" / "adapter" / "adapter_config.json").is_file():
        rows = out / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in Largest().train()))
        command = [python, "-m", "bench.peer", str(copy_without_hub(NAME)), str(rows), str(out / "trl")]
        told = json.dumps(SETTINGS | THEIR_PRECISIONS[dtype])
        settings = [f"--seconds={seconds:.0f}", f"--settings={told}", f"--lora={json.dumps(LORA)}"]
        run("trl", [*command, *settings], out, {"PYTHONPATH": str(ROOT / "scripts"), **BRIEF, **KEEP})


def run(name: str, command: list[str], out: Path, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run to the end, with its output in OUT and its peak of memory. Exits where it fails, with the end of its log."""
    print(f"{name}: {shlex.join(command)}", flush=True)
    began = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name} failed:\n{(out / f'{name}.log').read_text()[-3000:]}")
    (out / f"{name}.json").write_text(json.dumps({"peak_gib": usage.ru_maxrss / 2**20}))
    print(f"  {time.perf_counter() - began:.0f} s", flush=True)


def our_steps(out: Path) -> list[dict[str, float]]:
    """Return reward, seconds since the first step began, and seconds of each phase (`time/...`), by optimizer step."""
    lines = [json.loads(line) for line in (out / "lit_rl" / "metrics.jsonl").read_text().splitlines()]
    steps, passed = [], 0.0
    for line in lines:
        if "train/reward" in line:
            spent = {f"time/{phase}": line[f"time/{phase}"] for phase in PHASES}
            passed += sum(spent.values())
            steps.append({"reward": line["train/reward"], "seconds": passed, **spent})
    return steps


def their_steps(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "trl" / "steps.jsonl").read_text().splitlines()]


def shares(adapter: Path | None, temperature: float) -> np.ndarray:
    """Return, of each held-out question, the share of right replies among `DRAWS`; of one, where greedy."""
    draws = Evaluation(group_size=DRAWS if temperature else 1, temperature=temperature, limit=HELD_OUT)
    model = LanguageModel(NAME, adapter=str(adapter) if adapter else None)
    data = RolloutDataModule(task=Largest(), val_batch_size=50)
    return answered(
        lambda right: GRPO(model, right, sampling=Sampling(max_new_tokens=NEW_TOKENS), evaluation=draws),
        data,
        use_distributed_sampler=False,
    )


def measured(out: Path, dtype: str) -> dict[str, Any]:
    """Return steps, seconds and held-out accuracy of each; `gain` is that of ours over TRL's, prompt by prompt."""
    mine, others = our_steps(out), their_steps(out)
    adapters = {"as it came": None, "lit_rl": out / "lit_rl" / "hf" / "adapter", "TRL": out / "trl" / "adapter"}
    sampled = {name: shares(adapter, 1.0) for name, adapter in adapters.items()}
    greedy = {name: shares(adapter, 0.0) for name, adapter in adapters.items()}
    accuracy = {name: {"sampled": interval(sampled[name]), "greedy": interval(greedy[name])} for name in adapters}
    return {
        "machine": describe_machine()["processor"],
        "code": revision(),
        "dtype": dtype,
        "accuracy": accuracy,
        "gain": {"sampled": interval(sampled["lit_rl"] - sampled["TRL"])},
        "steps": {"lit_rl": len(mine), "TRL": len(others)},
        "seconds": {"lit_rl": mine[-1]["seconds"], "TRL": others[-1]["seconds"]},
        "peak_gib": {name: _peak(out / f"{file}.json") for name, file in (("lit_rl", "lit_rl"), ("TRL", "trl"))},
        "phases": {phase: sum(step[f"time/{phase}"] for step in mine) / len(mine) for phase in PHASES},
        "curves": {"lit_rl": _curve(mine), "TRL": _curve(others)},
    }


def _peak(file: Path) -> float:
    """Return the GiB that a run had resident at most."""
    return round(json.loads(file.read_text())["peak_gib"], 2)


def _curve(steps: list[dict[str, float]]) -> list[list[float]]:
    return [[round(step["seconds"], 1), round(step["reward"], 4)] for step in steps]


def show(found: dict[str, Any]) -> None:
    table = Table("policy", "steps", "seconds", "peak GiB", "sampled at 1", "greedy", title="Right replies, held out")
    for name, of in found["accuracy"].items():
        steps, seconds = found["steps"].get(name, ""), found["seconds"].get(name)
        cells = [_cell(of[kind]) for kind in ("sampled", "greedy")]
        memory = str(found["peak_gib"].get(name, ""))
        table.add_row(name, str(steps), f"{seconds:.0f}" if seconds else "", memory, *cells)
    Console(width=100, highlight=False).print(table)


def _cell(values: list[float]) -> str:
    mean, low, high = (format(min(max(value, 0.0), 1.0), ".2f") for value in values)  # no share is outside
    return f"{mean} [{low}, {high}]"


def rows(found: Mapping[str, Any]) -> str:
    """Return the page's table of what was learned."""
    lines = ["| | optimizer steps | seconds of training | peak memory, GiB | right, sampled | right, greedy |"]
    lines.append("|---|---|---|---|---|---|")
    for name, of in found["accuracy"].items():
        steps, seconds, peak = (found[what].get(name) for what in ("steps", "seconds", "peak_gib"))
        told = [steps or "", f"{seconds:.0f}" if seconds else "", f"{peak:.1f}" if peak else ""]
        called = {"TRL": "TRL 1.16, the same time", "as it came": "before training"}.get(name, name)
        lines.append(f"| {' | '.join(map(str, (called, *told, _cell(of['sampled']), _cell(of['greedy']))))} |")
    return "\n".join(lines) + "\n"


def phase_rows(found: Mapping[str, Any]) -> str:
    """Return the page's table of the seconds of our step."""
    lines = [f"| {phase} | {seconds:.3g} |" for phase, seconds in found["phases"].items()]
    return "\n".join(["| phase | mean seconds per step |", "|---|---|", *lines]) + "\n"


def with_tables(text: str, found: Mapping[str, Any]) -> str:
    """Return the page, its tables made anew."""
    for begin, table in ((TABLE, rows(found)), (PHASE_TABLE, phase_rows(found))):
        before, _, rest = text.partition(begin)
        text = before + begin + table + END + rest.partition(END)[2]
    return text


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the reward of the training rollouts over seconds, smoothed over ten steps."""
    look()
    figure, axes = plt.subplots(figsize=(6.4, 3.0))
    for name, color in (("lit_rl", BLUE), ("TRL", ORANGE)):
        seconds, reward = np.array(found["curves"][name]).T
        width = max(1, min(10, len(reward) // 4))
        smooth = np.convolve(reward, np.ones(width) / width, mode="valid")
        axes.plot(seconds / 60, reward, color=color, lw=0.5, alpha=0.35)
        axes.plot(seconds[width - 1 :] / 60, smooth, color=color, label=f"{name}, {found['steps'][name]} steps")
    before = found["accuracy"]["as it came"]["sampled"][0]
    axes.axhline(before, color=GREY, lw=1, ls=":", label="held out, before training")
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("share of right replies\n(64 a step; thick: running mean)")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--peer-python", help="interpreter of an environment with TRL and peft")
    parser.add_argument("--dtype", choices=list(PRECISIONS), help="of both sides; by default what the processor is for")
    parser.add_argument("--docs", action="store_true", help="write the page's numbers, tables and picture")
    parser.add_argument("--page", action="store_true", help="write the page's tables from its numbers, and leave")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(with_tables(PAGE.read_text(), json.loads(NUMBERS.read_text())))
        return
    if given.out is None or given.peer_python is None:
        parser.error("OUT and --peer-python are needed, or --page.")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (copy_without_hub(NAME) / "config.json").is_file():
        raise SystemExit("The model is not there: make smollm2")
    dtype = given.dtype or ("bfloat16" if any(describe_machine()["flags"][name] for name in UNITS) else "float32")
    ours(out, dtype)
    theirs(out, given.peer_python, our_steps(out)[-1]["seconds"], dtype)
    print("measuring ...", flush=True)
    filter_warnings()
    found = measured(out, dtype)
    (out / "real_model.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    draw(found, PICTURE if given.docs else out / "real_model.png")
    if given.docs:
        NUMBERS.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(with_tables(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
