"""`lit-rl plan`: micro-batches, memory of each part of a step, and time of a step. Writes nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from lit_rl.algorithms.checks.memory import MemoryPlan
from lit_rl.callbacks.display import plan_table
from lit_rl.core.errors import BackendError, StorageError, format_bytes
from lit_rl.runs.step_memory import planned_memory
from lit_rl.runs.train import Run


def plan(run: Run, *, memory_gb: float | None, probe: bool) -> int:
    """Print the plan, and after a few optimizer steps on this machine the seconds of one; return the exit code.

    Args:
        run: The training that is planned, without callbacks. Its weights are read for the probe only.
        memory_gb: Memory of another machine, in GiB; None is this one, as it is free now. Another one is not probed.
        probe: Take those steps. A run of several ranks takes none, since no other process is started.

    Raises:
        ConfigError: nothing fits, with what each part needs; or what `fit` would refuse.
    """
    batches, sizes, room = prepare_plan(run)
    plan_table(batches.table())
    if sizes is None or room is None:
        _print_line("What a step needs is not known: the model's config does not say, or DeepSpeed divides it.")
    else:
        Console().print(memory_table(sizes, room))
    ranks = run.trainer.world_size
    if ranks > 1:  # the tables count them, and this is the only one
        memory = run.module.memory()
        over = 1 if memory is None else memory.spread_over
        spread = f" Weights, gradients and optimizer state are divided over {over} ranks." if over > 1 else ""
        free = " Free memory is this machine's." if run.module.micro_batches.memory_gb is None else ""
        _print_line(f"Per rank, {ranks} ranks; no process was started for them.{spread}{free}")
    if probe and memory_gb is None:
        _print_line(
            _probe_line(run, batches) if ranks == 1 else "No step was timed: that would take all of these ranks."
        )
    return 0


def _print_line(text: str) -> None:
    Console().print(text, soft_wrap=True, markup=False, highlight=False)


def prepare_plan(run: Run) -> tuple[Any, MemoryPlan | None, int | None]:
    """Return the batches of a run as `fit` would cut them, its memory plan, and the bytes that may be used."""
    module, data, trainer = run.module, run.data, run.trainer
    module.trainer, data.trainer = trainer, trainer
    trainer.datamodule = data  # pyright: ignore
    trainer.strategy.connect(module)
    data.setup("fit")
    module.setup("fit")
    memory, sizes = module.memory(), planned_memory(module)
    room = None if memory is None else memory.budget
    return (module.plan, None, None) if sizes is None or room is None else (module.plan, sizes, room)


def memory_table(sizes: MemoryPlan, room: int) -> Table:
    """Return a table of bytes by part, while the policy learns and while it generates."""
    columns: dict[str, Mapping[str, int]] = {"learning": sizes.learning}
    if sizes.generating:
        columns["generating"] = sizes.generating
    table = Table(title="Memory of a step on each rank", title_justify="left")
    table.add_column("part")
    for name in columns:
        table.add_column(name, justify="right")
    for part in dict.fromkeys(part for parts in columns.values() for part in parts):
        table.add_row(part, *(format_bytes(parts[part]) if parts.get(part) else "" for parts in columns.values()))
    table.add_section()
    table.add_row("in all", *(format_bytes(sum(parts.values())) for parts in columns.values()))
    table.add_row("may be given out", *(format_bytes(room) for _ in columns))
    if sizes.host:
        table.add_row("on the host", format_bytes(sizes.host))
    return table


@dataclass(frozen=True)
class ProbedStep:
    """Seconds of an optimizer step."""

    whole: float
    of_rollout: Mapping[str, float]
    """Phases of a rollout that was made in it; none in a step that learns from an earlier step's rollout."""

    @property
    def rest(self) -> float:
        return self.whole - sum(self.of_rollout.values())


def expected_step(steps: Sequence[ProbedStep], steps_per_rollout: int) -> ProbedStep:
    """Return the expected step of a long run, judged by those after the first, which does some things once; by the
    first alone where it is the only one.

    A rollout's seconds are shared by the steps that learn from it.
    """
    later = steps[1:] or steps
    rollouts = [step.of_rollout for step in later if step.of_rollout] or [steps[0].of_rollout]
    shared = {
        name: statistics.median(rollout[name] for rollout in rollouts) / steps_per_rollout for name in rollouts[0]
    }
    return ProbedStep(statistics.median(step.rest for step in later) + sum(shared.values()), shared)


class StepProbe(L.Callback):
    """Times some optimizer steps, and ends the training.

    The first has to warm up: a step is tried in several ways, kernels are made for its shapes. So a second follows
    where that is no long wait, and more where they are short.
    """

    LONG, ENOUGH, MOST = 60.0, 10.0, 6
    """Seconds of a first step that is not followed by more; seconds of all that are; the most steps."""

    def __init__(self, steps_per_rollout: int) -> None:
        self.steps: list[ProbedStep] = []
        self._steps_per_rollout, self._last = steps_per_rollout, 0.0

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._last = self._last or time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any, **__: Any) -> None:
        if trainer.global_step == len(self.steps):
            return
        now = time.perf_counter()
        stopwatch: Any = getattr(module, "stopwatch", None)
        spent: dict[str, float] = {}
        if stopwatch is not None and len(self.steps) % self._steps_per_rollout == 0:
            spent = {name: stopwatch.seconds.get(name, 0.0) for name in ("generate", "reward")}
        self.steps.append(ProbedStep(now - self._last, spent))
        self._last = now
        first, *later = (step.whole for step in self.steps)
        enough = len(self.steps) >= self.MOST or sum(later) >= self.ENOUGH
        trainer.should_stop = first >= self.LONG or enough


def _probe_line(run: Run, batches: Any) -> str:
    """Take a few optimizer steps, and return a line with the expected seconds of one."""
    count = getattr(batches, "steps_per_rollout", 1)
    probe = StepProbe(count)
    run.trainer.callbacks.append(probe)  # pyright: ignore
    try:
        run.trainer.fit(run.module, datamodule=run.data)
    except (BackendError, StorageError) as error:
        return f"No step was taken: {error}"
    if not probe.steps:
        return "No step was taken: trainer.max_steps allows none."
    step, later = expected_step(probe.steps, count), len(probe.steps) - 1
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in step.of_rollout.items() if seconds)
    listed = f" ({parts}, the rest {step.rest:.2f})" if parts else ""
    by = f"the median of {later} after the first" if later else "the first one, in which some things are done once"
    return (
        f"expected: {step.whole:.2f} seconds an optimizer step{listed}, judged by {by}. The first took "
        f"{probe.steps[0].whole:.2f}."
    )
