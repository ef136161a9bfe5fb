"""What drawing ahead is worth: seconds of a rollout with `generator.lag=0`, `1` and `2`, the table of docs/scale.md.

    .venv-engines/bin/python scripts/overlap_speed.py [--rounds N] [--rollouts N] [--dry]

One vLLM server answers all runs. They take turns, round after round, so that a neighbour's load falls on all of them;
the table has medians over all rollouts of a run but the first two, and the last two, which no other is drawn beside.
Also measured: what the asking alone costs this process, which is what a process of its own for it could save.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from algorithm_pages import write

from lit_rl.algorithms import GRPO, AdamW, Constant
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.noise import prompt_key
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.models import LanguageModel
from lit_rl.rewards import exact_match

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
PROMPTS, COMPLETIONS, TOKENS = 16, 8, 64
LAGS = (0, 1, 2)
UNCOUNTED = 2
"""Rollouts at the beginning of a run: with a lag the first is drawn before anything is ahead of it."""
UNACCOMPANIED = max(LAGS) - 1
"""Rollouts before a run's last one, which has no end here: at the longest lag nothing is asked for in them."""
SAMPLING = Sampling(max_new_tokens=TOKENS, min_new_tokens=TOKENS)


class Seconds(L.Callback):
    """Of each rollout, from its beginning to that of the next: all, and those that were waited for the engine."""

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
    """A run of GRPO on the shipped policy; every response has the same length."""
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
    trainer.fit(module, datamodule=RolloutDataModule(task=Addition(val_rows=0), prompts_per_rollout=PROMPTS))
    return seconds


def asking(generator: VLLMServerGenerator, model: LanguageModel, rounds: int) -> tuple[float, float]:
    """Of a rollout that nothing else goes on beside: its seconds, and this process's CPU time; medians."""
    ids = torch.randint(5, 200, (PROMPTS, 8), generator=torch.Generator().manual_seed(0)).tolist()
    taken: list[tuple[float, float]] = []
    for round_ in range(rounds + 1):
        keys = [int(prompt_key(0, round_, row, 0)) for row in range(PROMPTS)]
        prompts = Prompts(ids, keys, COMPLETIONS, eos_ids=(), pad_id=model.pad_id)
        wall, cpu = time.perf_counter(), time.process_time()
        generator.generate(prompts, SAMPLING)
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    walls, cpus = zip(*taken[1:], strict=True)  # the first one warms up
    return statistics.median(walls), statistics.median(cpus)


def table(runs: dict[int, list[Seconds]], alone: tuple[float, float], load: tuple[float, float]) -> str:
    """Medians over the counted rollouts of all rounds, as Markdown."""
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
        f"The shipped policy, float32, GRPO: {PROMPTS} prompts, {COMPLETIONS} completions of {TOKENS} tokens each; "
        f"{len(runs[LAGS[0]])} alternating rounds, {len(whole[LAGS[0]])} rollouts of each. {os.cpu_count()} CPU cores "
        f"for trainer and engine together, {torch.get_num_threads()} thread(s) per process; load average {load[0]:.1f} "
        f"before and {load[1]:.1f} after. Drawing one rollout alone takes {wall:.2f} s, and "
        f"requesting it takes {1000 * cpu:.0f} ms of CPU time in the trainer's process.",
    ]
    return "\n".join(lines)


def measure(rounds: int, rollouts: int) -> str:
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
    return table(runs, alone, (load, os.getloadavg()[0]))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=10, help="of each run, 5 or more")
    parser.add_argument("--dry", action="store_true", help="print the table, and leave the page as it is")
    args = parser.parse_args(given)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    text = measure(args.rounds, args.rollouts)
    print(text)
    if not args.dry:
        write(PAGE, {"speed overlap": text})


if __name__ == "__main__":
    main()
