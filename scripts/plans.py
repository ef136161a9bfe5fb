"""Plans beside measurements: the tables of docs/hardware.md.

    python scripts/plans.py gpus                  # computes the plans of GPUs that nobody here has, into the page
    python scripts/plans.py gpus --check          # leaves with 1 where the page has another one
    python scripts/plans.py memory                        # memory, the table of the small shapes: minutes
    python scripts/plans.py memory --shapes 135m 0.5b     # of larger ones: 7 and 20 GB of memory, an hour
    python scripts/plans.py memory --plot FILE.svg        # peaks over 8 times as many completions a rollout
    python scripts/plans.py memory --phases 0.5b          # a GRPO step in bf16-true, phase by phase
    python scripts/plans.py seconds --rounds 3            # seconds a step

`memory`: each case is a process of its own that trains two optimizer steps of a model with random weights on one
thread. It does so twice, and counts beyond the end of the first time: what Python and the libraries take is not in the
plan, and oneDNN keeps a kernel of every shape in bfloat16 (100 MB). The peak is that of the resident set (VmHWM, which
Linux has) from the first step of the second time on.

`seconds`: plan and training take turns, so that a neighbour's load falls on both. A training's figure is the median of
its steps after the first: generation, reward and update. Its validation, checkpoints and export are no part of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import torch
from bench.workload import SHAPES, write_model
from transformers import Qwen2Config

from lit_rl.algorithms.checks.memory import Memory, RowLengths
from lit_rl.algorithms.checks.micro_batching import StepRows, fewest_micro_batches, memory_budget
from lit_rl.algorithms.checks.model_sizes import (
    gathered_weights,
    masters_at_once,
    number_sizes,
    policy_network,
    stored_bytes,
)
from lit_rl.algorithms.optim.optimizers import AdamW
from lit_rl.cli.process import keep_freed_memory
from lit_rl.core.errors import ConfigError, format_bytes
from lit_rl.models.adapters import Lora
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.model_costs import ModelShape
from lit_rl.ops.fused_head import part_numbers
from lit_rl.ops.logprobs import block_numbers
from lit_rl.ops.sampling_distribution import NO_TRUNCATION

# ------------------------------------------------------------------------------------------- GPUs that nobody here has


GPU = torch.device("cuda")

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hardware.md"
BEGIN, END = "<!-- computed by scripts/plans.py{} -->\n", "<!-- end -->"

PUBLISHED = {
    "qwen0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "qwen1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen2.5-7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
"""Width, MLP, layers, heads, heads of keys, vocabulary, tied head: from the public config.json of each Qwen2.5."""

WHOLE, ADAPTERS = (0, "bf16-true"), [(16, "bf16-true"), (16, "bf16-mixed")]
PLANNED_RUNS = [(name, *how) for name in ("qwen0.5b", "qwen1.5b") for how in (WHOLE, *ADAPTERS)]
PLANNED_RUNS += [("Qwen2.5-7B", *how) for how in ADAPTERS]
"""Model, rank of the adapters (0: none), `trainer.precision`."""
RANKS = (2, 8, 16)
"""GPUs over which FSDP2 spreads a run."""
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 512, 512
"""`data.prompts_per_rollout`, `algo.group_size`, `data.max_prompt_tokens`, `sampling.max_new_tokens`: the defaults."""


def shape_of(name: str) -> ModelShape:
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = PUBLISHED[name]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    return ModelShape.of(config)


def memory_of(name: str, rank: int, precision: str) -> Memory:
    """Return that of `algo=grpo`, with `model.lora.r=RANK` if not 0; `bf16-mixed` has the frozen base in bfloat16."""
    held = LanguageModel(dtype="bfloat16", lora=Lora(r=rank)) if rank else LanguageModel()  # its own sizes are not read
    numbers = number_sizes(held, precision, AdamW())
    policy = policy_network(held, shape_of(name), numbers, "fused")
    lengths = RowLengths(PROMPT_TOKENS, NEW_TOKENS, GROUP, shares=True)
    blocks = {"block": block_numbers(GPU, NO_TRUNCATION), "part": part_numbers(GPU)}
    blocks["masters"] = masters_at_once([policy], numbers, AdamW())
    return Memory(policy, numbers, lengths, decoding=lengths, **blocks, may_recompute=True, may_offload=True)


def spread(name: str, ranks: int) -> Memory:
    """Return what each rank of `algo=grpo strategy=fsdp trainer.precision=bf16-true` needs; FSDP2 shares no prompts."""
    alone, held = memory_of(name, *WHOLE), LanguageModel()
    numbers = number_sizes(held, WHOLE[1], AdamW(), shards=True)
    policy = policy_network(held, shape_of(name), numbers, "fused")
    lengths = replace(alone.lengths, shares=False)
    whole = gathered_weights(policy, numbers, None, reference=False, stored=stored_bytes(held, numbers))
    sizes = {"policy": policy, "numbers": numbers, "lengths": lengths, "decoding": lengths}
    return replace(alone, **sizes, masters=0, gathered=whole, spread_over=ranks, ranks=ranks)


def planned(needs: Memory, step: StepRows, room: int) -> str:
    """Return the columns of a run: how it is cut, or what its smallest micro-batch would take."""
    try:
        cut = fewest_micro_batches(step, needs, room)
    except ConfigError:
        least = needs.recomputing(offload=True).plan(1, 1, steps_in_parts=True).total
        return f"does not fit | | | one completion: {format_bytes(least)}"
    rows, decoded = step.cuts()[cut.micro_batches], min(cut.decoded or 0, step.sequences)
    sizes = needs.recomputing(cut.offload) if cut.recompute else needs
    recompute = "on the host" if cut.offload else "yes" if cut.recompute else "no"
    total = sizes.plan(rows, decoded, steps_in_parts=cut.micro_batches > 1).total
    return f"{rows} of {step.units * step.rows} | {recompute} | {decoded} | {format_bytes(total)}"


def step_of(ranks: int) -> StepRows:
    """Return the part of an optimizer step that each rank learns from."""
    return StepRows(PROMPTS // ranks, GROUP, PROMPTS * GROUP // ranks, slices=(1, 2, 4, 8))


COLUMNS = "completions a micro-batch | gradient checkpointing | decoded | a step needs |"


def one_gpu() -> str:
    """Return the table of one GPU."""
    lines = [f"| GPU | model | trains | precision | {COLUMNS}", "|" + "---|" * 8]
    for gigabytes in (24, 80):
        for name, rank, precision in PLANNED_RUNS:
            trains = f"LoRA r={rank}" if rank else "all weights"
            plan = planned(
                memory_of(name, rank, precision), step_of(1), memory_budget(torch.device("cuda"), gigabytes=gigabytes)
            )
            lines.append(f"| {gigabytes} GiB | {name} | {trains} | {precision} | {plan} |")
    return "\n".join(lines) + "\n"


def several_gpus() -> str:
    """Return the table of several: what each rank needs."""
    lines = [f"| each GPU | model | ranks | {COLUMNS}", "|" + "---|" * 7]
    for gigabytes in (24, 80):
        for name in ("qwen0.5b", "Qwen2.5-7B"):
            for ranks in RANKS:
                plan = planned(
                    spread(name, ranks), step_of(ranks), memory_budget(torch.device("cuda"), gigabytes=gigabytes)
                )
                lines.append(f"| {gigabytes} GiB | {name} | {ranks} | {plan} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, which: str, table: str) -> str:
    """Return the page with this table in its place."""
    before, begin, rest = text.partition(BEGIN.format(which))
    return before + begin + table + END + rest.partition(END)[2]


# ---------------------------------------------------------------------------------------------------- memory, measured


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
MEASURED_RUNS = (
    *((method, lora, precision) for method, precision, lora in product(METHODS, PRECISIONS, (0, 8))),
    ("grpo", 0, "bf16-mixed"),
)
"""Method, rank of the adapters (0: none), precision. CPUs without bfloat16 products take long for the latter."""


def cases(shapes: list[str]) -> Iterator[Case]:
    """Yield every run for these shapes."""
    for shape, (method, lora, precision) in product(shapes, MEASURED_RUNS):
        yield Case(shape, method, lora, precision, rows={"135m": 16, "0.5b": 8}.get(shape, 32))


def measured_memory(case: Case, *, returned: bool = True) -> dict[str, float]:
    """Return MiB by the plan and by the process, of a case in a new process.

    Args:
        case: What runs.
        returned: Whether glibc gives freed tensors back to the system, so that the peak is what tensors take. Otherwise
            the process keeps them, as ``train.py`` sets it to, and the holes that later tensors do not fill.
    """
    command = [
        sys.executable,
        __file__,
        "memory",
        "--case",
        json.dumps(asdict(case)),
        *([] if returned else ["--keep-freed"]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: Case) -> dict[str, float]:
    """Return the same, in this process."""
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
    """Take three GRPO steps of one micro-batch, 2 prompts of 64 tokens with 4 completions of 16, in this process."""
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
    module.micro_batches.memory_gb = 1000.0
    trainer.fit(module, datamodule=data)
    memory, step = module.memory(), module.micro_batches.step
    rows = step.units * step.rows // case.accumulate
    return memory.plan(rows, module.micro_batches.decoded_at_once, steps_in_parts=case.accumulate > 1).total


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
    """Return texts of nearly one length: every second prompt is a token shorter, so that some are padded."""
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
    """Return a model with random weights and a byte-level tokenizer."""
    from make_models import byte_tokenizer, make_random
    from transformers import AutoModelForCausalLM, Qwen2Config

    target = folder / f"model_{shape}"
    if target.is_dir():
        return target
    if shape in ("135m", "0.5b"):
        make_random({"135m": "smollm2-135m", "0.5b": "qwen2.5-0.5b"}[shape], target)
        return target
    tokenizer = byte_tokenizer()
    config = Qwen2Config(**SHAPES[shape], tie_word_embeddings=True)
    config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    config.bos_token_id = None
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def plot(file: Path) -> None:
    """Plot the peak memory of rollouts of 8 to 64 completions, with micro-batches of 8."""
    found = {rows: measured_memory(Case("7m", rows=rows, accumulate=rows // 8))["measured"] for rows in PLOTTED}
    print(found)
    draw(file, found)


def draw(file: Path, peaks: dict[int, float]) -> None:
    """Draw MiB by the completions of a rollout."""
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


# -------------------------------------------------------------------------------------------- seconds a step, measured


ROOT = Path(__file__).resolve().parents[1]
TIMED_STEPS = 6
TIMED_PHASES = ("time/generate", "time/reward", "time/update")
SMALL_ROLLOUT = ["data.prompts_per_rollout=4", "algo.group_size=8", "sampling.max_new_tokens=64"]


def trainings(folder: Path) -> dict[str, list[str]]:
    """Return words of the command line, by what they train."""
    write_model("7m", folder / "7m")
    return {
        "the shipped policy, `algo=grpo`": [],
        "the 7 M shape, 32 responses of at most 64 tokens": [
            "model=local",
            f"model.name={folder / '7m'}",
            *SMALL_ROLLOUT,
        ],
        "SmolLM2-135M, `experiment=smollm2_largest`": ["experiment=smollm2_largest"],
    }


def expected_seconds(words: list[str]) -> float:
    """Return seconds a step, as the plan says."""
    said = subprocess.run([sys.executable, "train.py", *words, "task=plan"], cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"expected: ([\d.]+) seconds", said.stdout)
    if found is None:
        raise SystemExit(said.stdout[-2000:] + said.stderr[-2000:])
    return float(found[1])


def measured_seconds(words: list[str], folder: Path) -> float:
    """Return seconds a step, as the median step of a training took, after its first.

    Args:
        words: Of the command line.
        folder: Of the run; a new one.
    """
    off = ["trainer.limit_val_batches=0", "logger=none", f"trainer.max_steps={TIMED_STEPS}", f"run_dir={folder}"]
    subprocess.run([sys.executable, "train.py", *words, *off], cwd=ROOT, capture_output=True, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(line[name] for name in TIMED_PHASES) for line in lines if TIMED_PHASES[-1] in line]
    return statistics.median(seconds[1:])


def write_gpus(given: argparse.Namespace) -> int:
    text = PAGE.read_text()
    written = with_table(with_table(text, "", one_gpu()), ", of several GPUs", several_gpus())
    if given.check:
        return int(written != text)
    PAGE.write_text(written)
    return 0


def print_memory(args: argparse.Namespace) -> int:
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
            found, kept = measured_memory(case), measured_memory(case, returned=False)["measured"]
            ratio = found["planned"] / found["measured"]
            numbers = f"{found['planned']:.0f} | {found['measured']:.0f} | {ratio:.2f} | {kept:.0f}"
            print(f"| {case.label} | {numbers} |", flush=True)
    return 0


def print_seconds(given: argparse.Namespace) -> int:
    print("| training | expected, s | measured, s | expected / measured |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, words in trainings(folder).items():
            pairs = [
                (expected_seconds(words), measured_seconds(words, folder / f"{label[:9]} {n}"))
                for n in range(given.rounds)
            ]
            plan, run = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"| {label} | {plan:.2f} | {run:.2f} | {plan / run:.2f} |", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    gpus = commands.add_parser("gpus", help="plans of GPUs that nobody here has")
    gpus.set_defaults(does=write_gpus)
    gpus.add_argument("--check", action="store_true")
    peaks = commands.add_parser("memory", help="memory, planned and measured")
    peaks.set_defaults(does=print_memory)
    peaks.add_argument("--shapes", nargs="+", default=["tiny", "7m"], choices=NAMES)
    peaks.add_argument("--plot", type=Path)
    peaks.add_argument("--phases", choices=NAMES)
    peaks.add_argument("--case", help="of a process that measures: the case, as JSON")
    peaks.add_argument("--keep-freed", action="store_true", help="keep freed memory, as train.py does")
    seconds = commands.add_parser("seconds", help="seconds a step, planned and measured")
    seconds.set_defaults(does=print_seconds)
    seconds.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    return given.does(given)


if __name__ == "__main__":
    sys.exit(main())
