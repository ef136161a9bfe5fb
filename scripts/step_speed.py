"""What a training step takes beside the model: work of the host, padding, and this checkout beside another one.

    python scripts/step_speed.py host [METHOD ...] [--micro-batches 4] [--steps 40]
    python scripts/step_speed.py padding
    python scripts/step_speed.py checkout ../untouched --rounds 3

`host`: what a micro-batch costs beside the model: callbacks, records, loggers and the moving of batches, in ms of CPU
time. Without a method: all of them. The tiny policy is trained through `lit_rl.cli` with the callbacks and the logger
that are shipped, and without any. What the main thread spends in each part is added up (of a part inside another the
outer one counts), from the fifth optimizer step on, and divided by the micro-batches. Threads that write are not
counted. A checkpoint is written where one is due; validation is off.

`padding`: what it brings that rows of like length share a micro-batch: the tokens of forward passes, padding included,
counted. Nothing is run: `ExampleLoader` cuts steps of rows whose lengths are log-normal, as those of chat data are
roughly.

`checkout`: what a rollout and its update take in this checkout beside another one: short runs of train.py in turns. A
ratio is the median over rounds, with the lowest and the highest. The interpreter is the one that runs this script.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from plans import ROOT, measured_seconds
from rich.console import Console
from rich.table import Table

from lit_rl import cli
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.records import OfflineRecords, RolloutRecords
from lit_rl.data.example_set import Encoded, Example, ExampleSet
from lit_rl.data.loaders import ExampleLoader
from lit_rl.data.order import RolloutOrder
from lit_rl.models.forward_inputs import bucket_by_length

# ---------------------------------------------------------------------------------------------------- work of the host


METHODS = {
    "grpo": ["algo=grpo", "algo.group_size=8", "data.prompts_per_rollout=8", "sampling.max_new_tokens=8"],
    "dpo": ["algo=dpo", "data.batch_size=16", "trainer.log_every_n_steps=1"],
}
QUIET = [
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.limit_val_batches=0",
    "trainer.num_sanity_val_steps=0",
]
NONE = ["callbacks=none", "logger=none"]
WARM = 4
"""Optimizer steps that do not count."""

PARTS: dict[str, list[tuple[Any, str]]] = {
    "callbacks": [(call, "_call_callback_hooks")],
    "loggers": [(TensorBoardLogger, "log_metrics"), (CSVLogger, "log_metrics")],
    "records": [
        *((RolloutRecords, name) for name in ("open", "add", "add_step", "close")),
        *((OfflineRecords, name) for name in ("open", "add", "close", "line")),
        (PolicyModule, "publish_metrics"),
    ],
    "Lightning's own metrics": [
        (_LoggerConnector, name) for name in ("on_batch_start", "update_train_step_metrics", "on_batch_end")
    ],
    "moving batches": [(Strategy, "batch_to_device")],
}


class Watch:
    """CPU time of the main thread in each part, and in all, over the micro-batches that count."""

    def __init__(self, skipped: int) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.micro_batches = -skipped
        self.total = 0.0
        self._inside, self._since = False, 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or self.micro_batches < 0:
                return function(*args, **kwargs)
            self._inside, begun = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[part] += time.thread_time() - begun

        return timed

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step: from the first one that counts on, until the last one begins."""

        @functools.wraps(function)
        def counted(module: Any, batch: Any, batch_idx: int) -> Any:
            self.micro_batches += 1
            if self.micro_batches == 0:
                self._since = time.thread_time()
            self.total = time.thread_time() - self._since
            return function(module, batch, batch_idx)

        return counted

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        put = [
            (owner, name, self.timed(part, getattr(owner, name))) for part, at in PARTS.items() for owner, name in at
        ]
        put += [
            (owner, "training_step", self.counted(owner.training_step)) for owner in (OnPolicyModule, OfflineModule)
        ]
        with contextlib.ExitStack() as back:
            for owner, name, wrapped in put:
                back.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, wrapped)
            yield


def measured(method: str, micro_batches: int, steps: int, more: list[str]) -> Watch:
    watch = Watch(skipped=WARM * micro_batches)
    sizes = [f"trainer.accumulate_grad_batches={micro_batches}", f"trainer.max_steps={WARM + steps}"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), watch.installed():
        code = cli.run([*METHODS[method], *QUIET, *sizes, *more, f"run_dir={folder}"])
    assert code == 0, f"{method} ended with {code}"
    return watch


# ------------------------------------------------------------------------------------------------------------- padding


ROWS, MEDIAN, SPREAD, MOST = 6400, 250, 0.8, 1024
"""Of the set: its rows, tokens of the median row, standard deviation of the logarithm, and `data.max_length`."""

CUTS = [(16, 2), (64, 8), (64, 16), (64, 32)]
"""Rows of a step, and its micro-batches."""


def texts() -> ExampleSet:
    lengths = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, ROWS).astype(int).clip(8, MOST)
    rows = [Example((Encoded([1] * n, [True] * n, 0),), "") for n in lengths.tolist()]
    return ExampleSet("texts", rows, pad_id=0)


def tokens(data: ExampleSet, batch_size: int, accumulate: int, group_by_length: bool) -> list[float]:
    """Return tokens of an epoch as parts of those of its texts, and tokens of the largest micro-batch on the mean of
    steps: first where a micro-batch is one call, then where its rows run in calls by length on a CPU."""
    order = RolloutOrder((len(data),), batch_size)
    loader = ExampleLoader(data, order, accumulate=accumulate, group_by_length=group_by_length)
    texts, padded, in_calls = [], [], []
    for batch in loader:
        lengths = batch.tokens.attention_mask.sum(1)
        texts.append(int(lengths.sum()))
        padded.append(batch.tokens.input_ids.numel())
        in_calls.append(sum(call.width * len(call.rows) for call in bucket_by_length(lengths, lengths.device)))
    sums = [sum(found) / sum(texts) for found in (padded, in_calls)]
    return [*sums, *(float(np.reshape(found, (-1, accumulate)).max(1).mean()) for found in (padded, in_calls))]


# ------------------------------------------------------------------------------------ this checkout beside another one


COMPARED_STEPS = 40
COMPARED = ("grpo", "rloo", "ppo")


def print_host(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for method in args.methods or METHODS:
        shipped, bare = (measured(method, args.micro_batches, args.steps, more) for more in ([], NONE))
        print(f"{method}, ms a micro-batch, {args.micro_batches} of them a step: shipped | no callbacks, no logger")
        parts = {part: [1e3 * w.seconds[part] / w.micro_batches for w in (shipped, bare)] for part in PARTS}
        parts["together"] = [sum(column) for column in zip(*parts.values())]
        parts["the whole micro-batch"] = [1e3 * w.total / w.micro_batches for w in (shipped, bare)]
        for part, (one, other) in parts.items():
            print(f"    {part:24} {one:7.2f} | {other:7.2f}")


def print_padding(given: argparse.Namespace) -> None:
    data = texts()
    table = Table("rows", "cut into", "by length", "one call", "in calls", "largest, one call", "largest, in calls")
    for batch_size, accumulate in CUTS:
        for group_by_length in (False, True):
            one, calls, largest, in_calls = tokens(data, batch_size, accumulate, group_by_length)
            figures = f"{one:.2f}", f"{calls:.2f}", f"{largest:,.0f}", f"{in_calls:,.0f}"
            table.add_row(str(batch_size), str(accumulate), str(group_by_length).lower(), *figures)
    Console().print(table)


def print_checkout(given: argparse.Namespace) -> None:
    print("| `algo=` | seconds here | there | here / there |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for method in COMPARED:
            pairs = [
                [
                    measured_seconds(
                        [f"algo={method}"], Path(folder) / f"{method} {n} {place}", checkout, COMPARED_STEPS
                    )
                    for place, checkout in enumerate((ROOT, given.other.resolve()))
                ]
                for n in range(given.rounds)
            ]
            here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"| `{method}` | {here:.3f} | {there:.3f} | {ratio} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    host = commands.add_parser("host", help="work of the host")
    host.set_defaults(does=print_host)
    host.add_argument("methods", nargs="*", choices=[*METHODS, []], help="which; all without any")
    host.add_argument("--micro-batches", type=int, default=4, help="of an optimizer step")
    host.add_argument("--steps", type=int, default=40, help="optimizer steps that count")
    commands.add_parser("padding", help="tokens that are padding").set_defaults(does=print_padding)
    checkout = commands.add_parser("checkout", help="this checkout beside another one")
    checkout.set_defaults(does=print_checkout)
    checkout.add_argument("other", type=Path, help="a checkout of another commit")
    checkout.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    given.does(given)


if __name__ == "__main__":
    main()
