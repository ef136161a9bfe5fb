"""Tokens a second of every generator on the same prompts and lengths: the tables of docs/generators.md.

    python scripts/generator_speed.py [CASE ...] [--rounds N] [--dry]

Without a case: all of them. Generators take turns, round after round, so that a neighbour's load falls on all of them;
a table has medians. No response ends early. The rows of vLLM need an environment that has it (`make engines`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from algorithm_pages import write
from make_random_model import make

from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.generation.generator import Generator
from lit_rl.generation.hf import HFContinuousGenerator, HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.noise import prompt_key
from lit_rl.generation.vllm.in_process import VLLMGenerator
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.models import LanguageModel

PAGE = Path(__file__).resolve().parents[1] / "docs" / "generators.md"


@dataclass(frozen=True)
class Case:
    """What is generated: `completions` of `new_tokens` for each of `prompts`, `rounds` times."""

    model: str
    """"tiny", or a name of make_random_model."""
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
    """The model, made for the time of the measurement."""
    if case.model == "tiny":
        yield LanguageModel("tiny", dtype=case.dtype)
        return
    with tempfile.TemporaryDirectory(prefix="lit_rl_speed_") as folder:
        make(case.model, Path(folder), case.dtype)
        yield LanguageModel(folder, dtype=case.dtype)


def prompts_of(case: Case, model: LanguageModel, round_: int) -> Prompts:
    """Other prompts every round: nobody may answer from a cache of the round before. Responses end by length alone."""
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
    """The medians, their range, and the ratio to native, as Markdown."""
    medians = {one.name: statistics.median(one.speeds) for one in measured if one.speeds}
    lines = [
        "| generator | tokens a second: median | lowest to highest | to `native` | start, s |",
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
        f"{case.completions} completions of {case.new_tokens} each, {case.rounds} rounds in turns. "
        f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} thread(s) a process; load average {load[0]:.1f} before "
        f"and {load[1]:.1f} after.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, help="rounds that count, in place of the case's own")
    parser.add_argument("--dry", action="store_true", help="print the tables, and leave the page as it is")
    args = parser.parse_args()
    if unknown := set(args.cases) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    for name in args.cases or CASES:
        case = CASES[name] if args.rounds is None else replace(CASES[name], rounds=args.rounds)
        print(f"{name}: {case}", flush=True)
        before = os.getloadavg()[0]
        text = table(case, measure(case), (before, os.getloadavg()[0]))
        print(text)
        if not args.dry:
            write(PAGE, {f"speed {name}": text})
    sys.stdout.flush()


if __name__ == "__main__":
    main()
