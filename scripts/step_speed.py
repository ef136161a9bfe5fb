"""What a micro-batch costs beside the model: callbacks, records, loggers and the moving of batches, in ms of CPU time.

    python scripts/host_share.py [METHOD ...] [--micro-batches 4] [--steps 40]

Without a method: all of them. The tiny policy is trained through `lit_rl.cli` with the callbacks and the logger that
are shipped, and without any. What the main thread spends in each part is added up (of a part inside another the outer
one counts), from the fifth optimizer step on, and divided by the micro-batches. Threads that write are not counted. A
checkpoint is written where one is due; validation is off.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from lit_rl import cli
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.records import OfflineRecords, RolloutRecords

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
        """A training step: from the first one that counts on, until the last one begins."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], help="which; all without any")
    parser.add_argument("--micro-batches", type=int, default=4, help="of an optimizer step")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps that count")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for method in args.methods or METHODS:
        shipped, bare = (measured(method, args.micro_batches, args.steps, more) for more in ([], NONE))
        print(f"{method}, ms a micro-batch, {args.micro_batches} of them a step: shipped | no callbacks, no logger")
        parts = {part: [1e3 * w.seconds[part] / w.micro_batches for w in (shipped, bare)] for part in PARTS}
        parts["together"] = [sum(column) for column in zip(*parts.values())]
        parts["the whole micro-batch"] = [1e3 * w.total / w.micro_batches for w in (shipped, bare)]
        for part, (one, other) in parts.items():
            print(f"    {part:24} {one:7.2f} | {other:7.2f}")


if __name__ == "__main__":
    main()
