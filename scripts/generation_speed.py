"""Speeds of drawing completions: every generator, drawing ahead, and places that are taken anew.

    python scripts/generation_speed.py generators [CASE ...] [--rounds N] [--dry]
    .venv-engines/bin/python scripts/generation_speed.py overlap [--rounds N] [--rollouts N] [--dry]
    python scripts/generation_speed.py places [7m|135m] [--rounds N]

All take turns, round after round, so that a neighbour's load falls on all of them; a table has medians.

`generators`: tokens a second of every generator on the same prompts and lengths, the tables of docs/generators.md.
Without a case: all of them. No response ends early. The rows of vLLM need an environment that has it (`make engines`).

`overlap`: what drawing ahead is worth: seconds of a rollout with `generator.lag=0`, `1` and `2`, the table of
docs/scale.md. One vLLM server answers all runs; the table has medians over all rollouts of a run but the first two, and
the last two, which no other is drawn beside. Also measured: what the asking alone costs this process, which is what a
process of its own for it could save.

`places`: what `generator.speedups.continuous_batching` brings, against one batch after another. Random weights,
`generator=native`, four times as many rows as places. The share of tokens that end a response is set so that lengths
differ as they do in training: geometrically, 1 to `max_new_tokens`.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from algorithm_pages import write
from make_models import make_random
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.algorithms import GRPO, AdamW, Constant
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.generator import Generator
from lit_rl.generation.hf import HFContinuousGenerator, HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.noise import prompt_key
from lit_rl.generation.vllm.in_process import VLLMGenerator
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.models import LanguageModel
from lit_rl.rewards import exact_match

# ----------------------------------------------------------------------------------------------------- every generator


GENERATORS_PAGE = Path(__file__).resolve().parents[1] / "docs" / "generators.md"


@dataclass(frozen=True)
class Case:
    """The completions of a measurement: `completions` of `new_tokens` for each of `prompts`, `rounds` times."""

    model: str
    """"tiny", or a name of `make_models.shapes`."""
    dtype: str
    prompts: int
    completions: int
    prompt_tokens: int
    new_tokens: int
    rounds: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.completions * self.new_tokens


CASES = {
    "tiny": Case("tiny", "float32", prompts=8, completions=8, prompt_tokens=24, new_tokens=64, rounds=7),
    "half_b_bfloat16": Case("qwen2.5-0.5b", "bfloat16", 8, 4, prompt_tokens=32, new_tokens=32, rounds=3),
}

GENERATORS: dict[str, Callable[[], Generator]] = {
    "native": NativeGenerator,
    "hf": HFGenerator,
    "hf_continuous": HFContinuousGenerator,
    "vllm": lambda: VLLMGenerator(max_model_len=512, heartbeat=None),
    "vllm_server": lambda: VLLMServerGenerator(launch=True, max_model_len=512, heartbeat=None),
}
NEED_VLLM = ("vllm", "vllm_server")


@dataclass(frozen=True)
class Measured:
    """One generator's tokens a second in each round; None: it cannot run here."""

    name: str
    speeds: list[float] | None
    start: float = 0.0
    """Seconds of the first sync: loading, starting, the first weights."""


@contextmanager
def model_of(case: Case) -> Iterator[LanguageModel]:
    """Make the model for the time of the measurement."""
    if case.model == "tiny":
        yield LanguageModel("tiny", dtype=case.dtype)
        return
    with tempfile.TemporaryDirectory(prefix="lit_rl_speed_") as folder:
        make_random(case.model, Path(folder), case.dtype)
        yield LanguageModel(folder, dtype=case.dtype)


def prompts_of(case: Case, model: LanguageModel, round_: int) -> Prompts:
    """Return other prompts every round: nobody may answer from a cache of the round before. Responses end by length
    alone."""
    generator = torch.Generator().manual_seed(round_)
    ids = torch.randint(5, 200, (case.prompts, case.prompt_tokens), generator=generator).tolist()
    keys = [int(prompt_key(0, round_, row, 0)) for row in range(case.prompts)]
    return Prompts(ids, keys, case.completions, eos_ids=(), pad_id=model.pad_id)


def measure(case: Case, names: Sequence[str] = tuple(GENERATORS)) -> list[Measured]:
    """Start all of them, let each warm up, then take turns."""
    missing = [name for name in names if name in NEED_VLLM and importlib.util.find_spec("vllm") is None]
    sampling = Sampling(max_new_tokens=case.new_tokens)
    with ExitStack() as stack:
        model = stack.enter_context(model_of(case))
        policy = model.load()
        running: dict[str, Any] = {}
        starts: dict[str, float] = {}
        speeds: dict[str, list[float]] = {}
        for name in names:
            if name in missing:
                continue
            generator: Any = GENERATORS[name]()
            if hasattr(generator, "prepare"):
                generator.prepare(model)
            if hasattr(generator, "close"):
                stack.callback(generator.close)
            before = time.perf_counter()
            generator.sync(policy, 0)
            running[name], speeds[name], starts[name] = generator, [], time.perf_counter() - before
        for round_ in range(case.rounds + 1):
            for name, generator in running.items():
                prompts, before = prompts_of(case, model, round_), time.perf_counter()
                completions = generator.generate(prompts, sampling)
                seconds = time.perf_counter() - before
                assert int(completions.lengths.sum()) == case.tokens, name
                if round_:  # the first one warms up
                    speeds[name].append(case.tokens / seconds)
                    print(f"  round {round_}: {name:14s} {case.tokens / seconds:8.0f} tokens/s", flush=True)
    return [Measured(name, speeds.get(name), starts.get(name, 0.0)) for name in names]


def table(case: Case, measured: Sequence[Measured], load: tuple[float, float]) -> str:
    """Return the medians, their range, and the ratio to native, as Markdown."""
    medians = {one.name: statistics.median(one.speeds) for one in measured if one.speeds}
    lines = [
        "| generator | tokens per second: median | lowest to highest | relative to `native` | start, s |",
        "|---|---|---|---|---|",
    ]
    for one in measured:
        if not one.speeds:
            lines.append(f"| `{one.name}` | not measured: vLLM is not installed | | | |")
            continue
        ratio = f"{medians[one.name] / medians['native']:.2f}" if "native" in medians else ""
        spread = f"{min(one.speeds):.0f} to {max(one.speeds):.0f}"
        lines.append(f"| `{one.name}` | {medians[one.name]:.0f} | {spread} | {ratio} | {one.start:.1f} |")
    shape = "the shipped policy" if case.model == "tiny" else f"the shape of {case.model} with random weights"
    lines += [
        "",
        f"{shape[0].upper()}{shape[1:]}, {case.dtype}: {case.prompts} prompts of {case.prompt_tokens} tokens, "
        f"{case.completions} completions of {case.new_tokens} each, {case.rounds} alternating rounds. "
        f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} thread(s) per process; load average {load[0]:.1f} "
        f"before and {load[1]:.1f} after.",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- drawing ahead


SCALE_PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
ROLLOUT_PROMPTS, COMPLETIONS, TOKENS = 16, 8, 64
LAGS = (0, 1, 2)
UNCOUNTED = 2
"""Rollouts at the beginning of a run: with a lag the first is drawn before anything is ahead of it."""
UNACCOMPANIED = max(LAGS) - 1
"""Rollouts before a run's last one, which has no end here: at the longest lag nothing is asked for in them."""
SAMPLING = Sampling(max_new_tokens=TOKENS, min_new_tokens=TOKENS)


class Seconds(L.Callback):
    """Seconds of each rollout, to the beginning of the next: all, and those that were waited for the engine."""

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.waited: list[float] = []
        self._began: float | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()  # the rollout before is over; this one is not drawn yet
        if self._began is not None:
            self.whole.append(now - self._began)
            self.waited.append(pl_module.stopwatch.seconds["generate"])
        self._began = now


def trained(url: str, lag: int, rollouts: int) -> Seconds:
    """Return a run of GRPO on the shipped policy; every response has the same length."""
    seconds = Seconds()
    module = GRPO(
        "tiny",
        exact_match,
        generator=VLLMServerGenerator(urls=[url], lag=lag, heartbeat=None),
        group_size=COMPLETIONS,
        sampling=SAMPLING,
        optimizer=AdamW(lr=1e-5),
        scheduler=Constant(),
        skip_zero_advantages=False,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=rollouts,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[seconds],
    )
    trainer.fit(module, datamodule=RolloutDataModule(task=Addition(val_rows=0), prompts_per_rollout=ROLLOUT_PROMPTS))
    return seconds


def asking(generator: VLLMServerGenerator, model: LanguageModel, rounds: int) -> tuple[float, float]:
    """Return seconds of a rollout that nothing else goes on beside, and this process's CPU time; medians."""
    ids = torch.randint(5, 200, (ROLLOUT_PROMPTS, 8), generator=torch.Generator().manual_seed(0)).tolist()
    taken: list[tuple[float, float]] = []
    for round_ in range(rounds + 1):
        keys = [int(prompt_key(0, round_, row, 0)) for row in range(ROLLOUT_PROMPTS)]
        prompts = Prompts(ids, keys, COMPLETIONS, eos_ids=(), pad_id=model.pad_id)
        wall, cpu = time.perf_counter(), time.process_time()
        generator.generate(prompts, SAMPLING)
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    walls, cpus = zip(*taken[1:], strict=True)  # the first one warms up
    return statistics.median(walls), statistics.median(cpus)


def overlap_table(runs: dict[int, list[Seconds]], alone: tuple[float, float], load: tuple[float, float]) -> str:
    """Return medians over the counted rollouts of all rounds, as Markdown."""
    whole = {lag: [s for run in each for s in run.whole[UNCOUNTED:-UNACCOMPANIED]] for lag, each in runs.items()}
    waited = {lag: [s for run in each for s in run.waited[UNCOUNTED:-UNACCOMPANIED]] for lag, each in runs.items()}
    first = statistics.median(whole[LAGS[0]])
    lines = [
        "| `generator.lag` | rollouts per minute: median | lowest to highest | relative to `lag=0` "
        "| seconds per rollout | of these, waiting for the engine |",
        "|---|---|---|---|---|---|",
    ]
    for lag, each in whole.items():
        middle = statistics.median(each)
        spread = f"{60 / max(each):.0f} to {60 / min(each):.0f}"
        lines.append(
            f"| {lag} | {60 / middle:.1f} | {spread} | {first / middle:.2f} | {middle:.2f} "
            f"| {statistics.median(waited[lag]):.2f} |"
        )
    wall, cpu = alone
    lines += [
        "",
        f"The shipped policy, float32, GRPO: {ROLLOUT_PROMPTS} prompts, {COMPLETIONS} completions of {TOKENS} tokens "
        f"each; {len(runs[LAGS[0]])} alternating rounds, {len(whole[LAGS[0]])} rollouts of each. {os.cpu_count()} CPU "
        f"cores for trainer and engine together, {torch.get_num_threads()} thread(s) per process; load average "
        f"{load[0]:.1f} before and {load[1]:.1f} after. Drawing one rollout alone takes {wall:.2f} s, and requesting "
        f"it takes {1000 * cpu:.0f} ms of CPU time in the trainer's process.",
    ]
    return "\n".join(lines)


def measure_overlap(rounds: int, rollouts: int) -> str:
    """Start a server, let every lag take turns on it, and make the table."""
    load = os.getloadavg()[0]
    model = LanguageModel("tiny")
    server = VLLMServerGenerator(launch=True, max_model_len=512, heartbeat=None)
    server.prepare(model)
    try:
        server.sync(model.load(), 0)
        alone = asking(server, model, rounds=5)
        engine: Any = server.engine
        (client,) = engine.clients
        runs: dict[int, list[Seconds]] = {lag: [] for lag in LAGS}
        for round_ in range(rounds):
            for lag in LAGS if round_ % 2 == 0 else reversed(LAGS):
                runs[lag].append(trained(client.url, lag, rollouts))
                print(f"  round {round_}: lag={lag}: {statistics.median(runs[lag][-1].whole):.2f} s", flush=True)
    finally:
        server.close()
    return overlap_table(runs, alone, (load, os.getloadavg()[0]))


# -------------------------------------------------------------------------------------------------------------- places


GROUP, PLACE_PROMPTS, PLACES, NEW_TOKENS, MEAN_LENGTH = 8, 16, 32, 128, 48

SHAPES: dict[str, dict[str, int]] = {
    "7m": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6},
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
}
HEADS = {"7m": (8, 2), "135m": (9, 3)}


def policy_of(shape: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads, key_heads = HEADS[shape]
    sizes: dict[str, Any] = SHAPES[shape] | {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512)).eval()


def prompts_for_places(vocabulary: int) -> Prompts:
    lengths = [40 + 13 * i % 25 for i in range(PLACE_PROMPTS)]
    token_ids = [[vocabulary - 1 - (7 * i + j) % 999 for j in range(length)] for i, length in enumerate(lengths)]
    keys = [prompt_key(0, 0, i, 0) for i in range(PLACE_PROMPTS)]
    return Prompts(token_ids, keys, GROUP, eos_ids=tuple(range(vocabulary // MEAN_LENGTH)), pad_id=0)


def write_generators(given: argparse.Namespace) -> None:
    for name in given.cases or CASES:
        case = CASES[name] if given.rounds is None else replace(CASES[name], rounds=given.rounds)
        print(f"{name}: {case}", flush=True)
        before = os.getloadavg()[0]
        text = table(case, measure(case), (before, os.getloadavg()[0]))
        print(text)
        if not given.dry:
            write(GENERATORS_PAGE, {f"speed {name}": text})
    sys.stdout.flush()


def write_overlap(given: argparse.Namespace) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    text = measure_overlap(given.rounds, given.rollouts)
    print(text)
    if not given.dry:
        write(SCALE_PAGE, {"speed overlap": text})


def print_places(given: argparse.Namespace) -> None:
    policy, prompts = policy_of(given.shape), prompts_for_places(SHAPES[given.shape]["vocab_size"])
    ways = {
        "one batch after another": NativeGenerator(PLACES, speedups={"continuous_batching": False}),
        "places are taken": NativeGenerator(PLACES),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = 0
    for turn in range(given.rounds + 1):
        for name, generator in ways.items():
            generator.sync(policy, 0)
            began = time.perf_counter()
            tokens = int(generator.generate(prompts, Sampling(max_new_tokens=NEW_TOKENS)).lengths.sum())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    rows = GROUP * PLACE_PROMPTS
    table = Table(title=f"{given.shape}: {rows} rows, {tokens} tokens in all, {PLACES} places")
    for column in ("", "seconds, median", "lowest", "highest"):
        table.add_column(column)
    for name, times in seconds.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(times), min(times), max(times))))
    Console().print(table)
    slow, fast = (statistics.median(times) for times in seconds.values())
    print(f"ratio of medians {slow / fast:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    every = commands.add_parser("generators", help="every generator")
    every.set_defaults(does=write_generators)
    every.add_argument("cases", nargs="*", metavar="CASE", choices=[[], *CASES], help=f"of {', '.join(CASES)}")
    every.add_argument("--rounds", type=int, help="rounds that count, in place of the case's own")
    overlap = commands.add_parser("overlap", help="drawing ahead")
    overlap.set_defaults(does=write_overlap)
    overlap.add_argument("--rounds", type=int, default=4)
    overlap.add_argument("--rollouts", type=int, default=10, help="of each run, 5 or more")
    for each in (every, overlap):
        each.add_argument("--dry", action="store_true", help="print the tables, and leave the page as it is")
    places = commands.add_parser("places", help="places that are taken anew")
    places.set_defaults(does=print_places)
    places.add_argument("shape", nargs="?", choices=list(SHAPES), default="7m", help="135m is that of SmolLM2-135M")
    places.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    given.does(given)


if __name__ == "__main__":
    main()
