"""What steps need, as the memory plan says it and as it is measured: the table of docs/hardware.md, and its plot.

    python scripts/memory_peaks.py                        # the table of the small shapes: minutes
    python scripts/memory_peaks.py --shapes 135m 0.5b     # of larger ones: 7 and 20 GB of memory, an hour
    python scripts/memory_peaks.py --plot FILE.svg        # peaks over 8 times as many completions a rollout
    python scripts/memory_peaks.py --phases 0.5b          # a GRPO step in bf16-true, phase by phase

Each case is a process of its own that trains two optimizer steps of a model with random weights on one thread. It does
so twice, and counts beyond the end of the first time: what Python and the libraries take is not in the plan, and oneDNN
keeps a kernel of every shape in bfloat16 (100 MB). The peak is that of the resident set (VmHWM, which Linux has) from
the first step of the second time on.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench.workload import SHAPES

from lit_rl.cli.process import keep_freed_memory

MIB = 2**20
RETURNED = 2**16
"""Bytes from which glibc gives a freed tensor back to the system: nearly all are larger, and leave no holes."""
M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""
NAMES = ("tiny", "7m", "135m", "0.5b")
"""Of the shapes."""
PLOTTED = (8, 16, 32, 64)
"""Completions a rollout; a micro-batch has 8."""


@dataclass(frozen=True)
class Case:
    """A run to measure."""

    shape: str
    method: str = "grpo"
    lora: int = 0
    precision: str = "32-true"
    rows: int = 32
    """Completions of a rollout, four to a prompt; or rows of a step."""
    accumulate: int = 2
    prompt: int = 48
    response: int = 48
    beta: float = 0.1
    """Of GRPO's KL term; 0 has no reference."""

    @property
    def label(self) -> str:
        trains = f"LoRA r={self.lora}" if self.lora else "all weights"
        return f"{self.shape} | {self.method} | {trains} | {self.precision}"


METHODS = ("grpo", "ppo", "dpo", "sft")
PRECISIONS = ("32-true", "bf16-true")
RUNS = (
    *((method, lora, precision) for method, precision, lora in product(METHODS, PRECISIONS, (0, 8))),
    ("grpo", 0, "bf16-mixed"),
)
"""Method, rank of the adapters (0: none), precision. CPUs without bfloat16 products take long for the latter."""


def cases(shapes: list[str]) -> Iterator[Case]:
    """Every run for these shapes."""
    for shape, (method, lora, precision) in product(shapes, RUNS):
        yield Case(shape, method, lora, precision, rows={"135m": 16, "0.5b": 8}.get(shape, 32))


def measured(case: Case, *, returned: bool = True) -> dict[str, float]:
    """MiB by the plan and by the process, of a case in a new process.

    Args:
        case: What runs.
        returned: Whether glibc gives freed tensors back to the system, so that the peak is what tensors take. Otherwise
            the process keeps them, as ``train.py`` sets it to, and the holes that later tensors do not fill.
    """
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), *([] if returned else ["--keep-freed"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------- in the child


def measure(case: Case) -> dict[str, float]:
    """The same, in this process."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        _fit(case, Path(folder))
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = _memory("VmRSS")
        planned = _fit(case, Path(folder))
        return {"planned": planned / MIB, "measured": (_memory("VmHWM") - before) / MIB}


class _FromTheFirstStep(L.Callback):
    """The peak of the process is that of its steps: files of float32 weights, read to be narrowed, do not count."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        Path("/proc/self/clear_refs").write_text("5")


def print_phases(shape: str) -> None:
    """Three GRPO steps of one micro-batch, 2 prompts of 64 tokens with 4 completions of 16, in this process."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    case = Case(shape, precision="bf16-true", rows=8, accumulate=1, prompt=64, response=16, beta=0.0)
    with tempfile.TemporaryDirectory() as folder:
        maker = get_context("spawn").Process(target=_model, args=(shape, Path(folder)))  # its tensors end with it
        maker.start()
        maker.join()
        print(f"planned: {_fit(case, Path(folder), _Phases(), steps=3) / MIB:.0f} MiB beyond Python and its libraries")


class _Phases(L.Callback):
    """Prints the resident set at the end of each phase of a step, and its peak in it."""

    def _say(self, phase: str) -> None:
        sizes = f"{_memory('VmRSS') / MIB:6.0f} MiB at its end, {_memory('VmHWM') / MIB:6.0f} at most"
        print(f"{phase:20} {sizes}", flush=True)
        Path("/proc/self/clear_refs").write_text("5")

    def on_train_start(self, *args: Any) -> None:
        self._say("loading")

    def on_train_batch_start(self, *args: Any) -> None:
        self._say("rollout")

    def on_before_zero_grad(self, *args: Any) -> None:
        self._say("forward")

    def on_after_backward(self, *args: Any) -> None:
        self._say("backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self._say("optimizer")


def _memory(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found.group(1)) * 1024


def _fit(case: Case, folder: Path, *callbacks: L.Callback, steps: int = 2) -> int:
    """Train some steps; returns the bytes of the plan."""
    module, data = _built(case, folder)
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=case.accumulate,
        precision=case.precision,  # pyright: ignore
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[_FromTheFirstStep(), *callbacks],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    module.memory_gb = 1000.0
    trainer.fit(module, datamodule=data)
    memory, step = module.memory(), module.step
    rows = step.units * step.rows // case.accumulate
    return memory.plan(rows, module.decoded_at_once(step), steps_in_parts=case.accumulate > 1).total


def _built(case: Case, folder: Path) -> tuple[Any, Any]:
    from lit_rl import algorithms
    from lit_rl.core.rollout import Sampling
    from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
    from lit_rl.data.prompt_module import RolloutDataModule
    from lit_rl.models import LanguageModel, Lora

    model = LanguageModel(str(_model(case.shape, folder)), lora=Lora(r=case.lora) if case.lora else None)
    rows = _rows(case, folder)
    if case.method == "dpo":
        return algorithms.DPO(model), PreferenceDataModule(path=rows, batch_size=case.rows, val_fraction=0.0)
    if case.method == "sft":
        return algorithms.SFT(model), SupervisedDataModule(path=rows, batch_size=case.rows, val_fraction=0.0)
    sampling = Sampling(max_new_tokens=case.response)
    data = RolloutDataModule(path=rows, prompts_per_rollout=case.rows // 4, val_fraction=0.0)
    if case.method == "ppo":
        return algorithms.PPO(model, _reward, group_size=4, iterations=1, sampling=sampling), data
    return algorithms.GRPO(model, _reward, group_size=4, beta=case.beta, sampling=sampling), data


def _reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(i % 3) for i in range(len(completions))]


def _rows(case: Case, folder: Path) -> str:
    """Texts of nearly one length: every second prompt is a token shorter, so that some are padded."""
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choice("abcdefgh") for _ in range(length))

    keys = {"dpo": ("chosen", "rejected"), "sft": ("completion",)}.get(case.method, ())
    rows = [
        {"prompt": text(case.prompt - i % 2), **{key: text(case.response - 1) for key in keys}}
        for i in range(4 * case.rows)
    ]
    file = folder / f"{case.shape}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def _model(shape: str, folder: Path) -> Path:
    """A model with random weights and a byte-level tokenizer."""
    from make_random_model import byte_tokenizer, make
    from transformers import AutoModelForCausalLM, Qwen2Config

    target = folder / f"model_{shape}"
    if target.is_dir():
        return target
    if shape in ("135m", "0.5b"):
        make({"135m": "smollm2-135m", "0.5b": "qwen2.5-0.5b"}[shape], target)
        return target
    tokenizer = byte_tokenizer()
    config = Qwen2Config(**SHAPES[shape], tie_word_embeddings=True)
    config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    config.bos_token_id = None
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


# ---------------------------------------------------------------- the table and the plot


def plot(file: Path) -> None:
    """Peak memory of rollouts of 8 to 64 completions, with micro-batches of 8."""
    found = {rows: measured(Case("7m", rows=rows, accumulate=rows // 8))["measured"] for rows in PLOTTED}
    print(found)
    draw(file, found)


def draw(file: Path, peaks: dict[int, float]) -> None:
    """MiB by the completions of a rollout."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "lit_rl"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(list(peaks), list(peaks.values()), "o-", label="micro-batches of 8 completions")
    axes.set(xlabel="completions a rollout (one optimizer step)", ylabel="peak memory, MiB")
    axes.set_ylim(0, 1.5 * max(peaks.values()))
    axes.set_xticks(list(peaks))
    axes.legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["tiny", "7m"], choices=NAMES)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--phases", choices=NAMES)
    parser.add_argument("--case", help="of a process that measures: the case, as JSON")
    parser.add_argument("--keep-freed", action="store_true", help="keep freed memory, as train.py does")
    args = parser.parse_args()
    if args.keep_freed:
        keep_freed_memory()
    elif args.case or args.phases:
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, RETURNED)
    if args.case:
        print(json.dumps(measure(Case(**json.loads(args.case)))))
    elif args.phases:
        print_phases(args.phases)
    elif args.plot:
        plot(args.plot)
    else:
        columns = ("shape", "method", "trains", "precision", "planned, MiB", "tensors, MiB", "planned / tensors")
        print(f"| {' | '.join([*columns, 'as train.py, MiB'])} |\n|{'---|' * 8}")
        for case in cases(args.shapes):
            found, kept = measured(case), measured(case, returned=False)["measured"]
            ratio = found["planned"] / found["measured"]
            numbers = f"{found['planned']:.0f} | {found['measured']:.0f} | {ratio:.2f} | {kept:.0f}"
            print(f"| {case.label} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
