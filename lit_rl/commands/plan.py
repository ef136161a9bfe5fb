"""`lit-rl plan`: how a run is cut, what memory each part of a step needs, and what a step takes. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from lit_rl.algorithms.preflight.memory import MemoryPlan, in_words
from lit_rl.callbacks.text import plan_table
from lit_rl.commands.train import Run
from lit_rl.errors import BackendError, StorageError


def plan(run: Run, *, memory_gb: float | None, probe: bool) -> int:
    """Print the plan, and after one optimizer step on this machine the seconds of a step; returns the exit code.

    Args:
        run: Of the training that is planned, without callbacks. Its weights are read for the probe only.
        memory_gb: Memory of another machine, in GiB; None is this one, as it is free now. Another one is not probed.
        probe: Whether to take that step.

    Raises:
        ConfigError: nothing fits, with what each part needs; or what `fit` would refuse.
    """
    batches, sizes, room = prepared(run)
    plan_table(batches.table())
    if sizes is None or room is None:
        Console().print("What a step needs is not known: the model's config does not say, or the strategy divides it.")
    else:
        Console().print(memory_table(sizes, room))
    if probe and memory_gb is None:
        Console().print(_seconds(run, batches), soft_wrap=True, markup=False, highlight=False)
    return 0


def prepared(run: Run) -> tuple[Any, MemoryPlan | None, int | None]:
    """The batches of a run as `fit` would cut them, its memory plan, and the bytes that may be given out."""
    module, data, trainer = run.module, run.data, run.trainer
    module.trainer, data.trainer = trainer, trainer
    trainer.datamodule = data  # pyright: ignore
    trainer.strategy.connect(module)
    data.setup("fit")
    module.setup("fit")
    memory, room, step = module.memory(), module.room(), module.step
    if memory is None or room is None or step is None:
        return module.plan, None, None
    count = trainer.accumulate_grad_batches
    decoded = module.decoded_at_once(step)
    sizes = memory.plan(step.units * step.rows // count, decoded, steps_in_parts=count > 1)
    return module.plan, sizes, room


def memory_table(sizes: MemoryPlan, room: int) -> Table:
    """Bytes by part, while the policy learns and while it generates."""
    columns: dict[str, Mapping[str, int]] = {"learning": sizes.learning}
    if sizes.generating:
        columns["generating"] = sizes.generating
    table = Table(title="Memory of a step on each rank", title_justify="left")
    table.add_column("part")
    for name in columns:
        table.add_column(name, justify="right")
    for part in dict.fromkeys(part for parts in columns.values() for part in parts):
        table.add_row(part, *(in_words(parts[part]) if parts.get(part) else "" for parts in columns.values()))
    table.add_section()
    table.add_row("in all", *(in_words(sum(parts.values())) for parts in columns.values()))
    table.add_row("may be given out", *(in_words(room) for _ in columns))
    if sizes.host:
        table.add_row("on the host", in_words(sizes.host))
    return table


class _OneStep(L.Callback):
    """Ends the training after its first optimizer step, and takes the time."""

    seconds = 0.0

    def __init__(self) -> None:
        self._started = 0.0

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._started = self._started or time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step:
            self.seconds = time.perf_counter() - self._started
            trainer.should_stop = True


def _seconds(run: Run, batches: Any) -> str:
    """Take one optimizer step, and say what it took and what one of many will."""
    clock = _OneStep()
    run.trainer.callbacks.append(clock)  # pyright: ignore
    try:
        run.trainer.fit(run.module, datamodule=run.data)
    except (BackendError, StorageError) as error:
        return f"No step was taken: {error}"
    stopwatch = getattr(run.module, "stopwatch", None)
    spent = {name: stopwatch.seconds.get(name, 0.0) for name in ("generate", "reward")} if stopwatch else {}
    per_rollout = sum(spent.values())
    steps = getattr(batches, "steps_per_rollout", 1)
    expected = clock.seconds - per_rollout + per_rollout / steps
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items() if seconds)
    listed = f" ({parts}, the rest {clock.seconds - per_rollout:.2f})" if parts else ""
    return (
        f"expected: {expected:.2f} seconds an optimizer step, judged by the first one, in which some things are done "
        f"once. That took {clock.seconds:.2f}{listed}."
    )
