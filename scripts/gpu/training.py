"""One training in this process, ours by the door of `train.py` or TRL's by its trainers, with the clock running.

What the benchmark on a CPU hangs around both (`bench.ours`, `bench.peer`) is hung around them here too: forced lengths,
completions that are given to the first step, phases. The GPU is waited for where a phase begins or ends: four times a
step.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench.bounds import Agreement, compare, missing
from bench.protocol import Phases, read_first_step
from bench.workload import Spec, Workload, write

from lit_rl.models.model_costs import ModelFlops, Span

GPU = torch.cuda.is_available()
GIB = 2**30
PRETENDED = GPU and torch.cuda.get_device_name() == "Pretended GPU"
REAL = GPU and not PRETENDED
ACCELERATOR = "trainer.accelerator=" + ("auto" if PRETENDED else "gpu" if GPU else "cpu")
"""`gpu`, which never falls back to a CPU; the command line refuses it where PyTorch is built for CPUs."""


class Clock:
    """Stands between the steps of a trainer, as `bench.protocol.Steps` does."""

    def __init__(self) -> None:
        self.phases = Phases(wait)
        self.phases.exact = True
        self.seconds: list[float] = []
        self.parts: list[dict[str, float]] = []
        self._began: float | None = None

    def between(self) -> None:
        """End a step, and begin the next one. Peaks count from the first one on."""
        wait()
        if self._began is None:
            if GPU:
                torch.cuda.reset_peak_memory_stats()
        else:
            self.phases.close()
            self.seconds.append(time.perf_counter() - self._began)
            self.parts.append(self.phases.seconds)
        self.phases.clear()
        self._began = time.perf_counter()


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def free() -> None:
    """Give back what the last training held."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


class _Over(BaseException):
    """The training is over: the report, the export and the like are left out."""


@dataclass
class Trained:
    """The figures of a training."""

    clock: Clock
    work: Workload
    warmups: int
    peak: int = 0
    """Bytes of tensors on the GPU at most; 0 on a CPU."""
    planned: int = 0
    """Bytes that `lit-rl plan` promises; 0 for TRL's."""
    config: Any = None
    costs: ModelFlops | None = None
    """Of the model as it is trained."""
    decoded: str | None = None
    """Our generator's decode steps: `NativeGenerator.steps`."""
    shared: list[bool] = field(default_factory=list)
    """Of each training pass of ours, whether it computed the prompt of a group once."""
    trials: dict[str, str] = field(default_factory=dict)
    """By setting of ours, what its trial said where it was not taken; nothing where it was."""
    phases: dict[str, float] = field(default_factory=dict)
    """Median seconds; "train" is what is left of a step."""

    @property
    def seconds(self) -> float:
        """Return seconds of a step, the median after the warm-up."""
        return statistics.median(self.clock.seconds[self.warmups :])

    def settle(self) -> Trained:
        """Fill in what is known once the training is over."""
        self.peak = torch.cuda.max_memory_allocated() if GPU else 0
        parts = self.clock.parts[self.warmups :]
        names = ("generate", "reward", "optimize")
        self.phases = {name: statistics.median(part.get(name, 0.0) for part in parts) for name in names}
        self.phases["train"] = self.seconds - sum(self.phases.values())
        return self

    @property
    def tokens(self) -> int:
        """Return prompts and completions of a step, each row with its own prompt."""
        return self.work.rows * (self.work.prompt_tokens + self.work.completion_tokens)

    @property
    def flops(self) -> float:
        """Return useful ones of learning: rows with their own prompts, causal attention, the head on completions.

        By `lit_rl.models.model_costs`, which counts a window's keys alone, and no norm or bias. NaN without a model.
        """
        if self.costs is None:
            return math.nan
        prompt, completion = self.work.prompt_tokens, self.work.completion_tokens
        spans = [Span(0, prompt), Span(prompt, completion)] * self.work.rows
        return float(self.costs.of(spans, completion * self.work.rows).training)

    def flops_as_trl(self) -> float:
        """Return the same as TRL counts: attention not causally, the head on every token."""
        from trl.trainer.utils import compute_flops_per_token

        length = self.work.prompt_tokens + self.work.completion_tokens
        return compute_flops_per_token(self.config.get_text_config(), length) * self.tokens


def prepared(work: Workload, folder: Path, name: str, *, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Spec:
    """Write the workload's files to a folder, where stages share its model, and name a folder for this training.

    Weights are drawn on the card: a CPU draws some 50 million a second, 0.5B, 0.6B and 1B in 40 s. All but the kernels'
    steps are run in bfloat16, in which these are 4.2 GB on the disk together, beside 4 GB for two gradients of 0.5B.
    """
    write(work, folder, device="cuda" if GPU else "cpu", dtype=dtype)
    free()
    shutil.rmtree(folder / name, ignore_errors=True)
    spec = Spec(work, folder, folder / name, "cuda" if GPU else "cpu", settings)
    spec.write()
    return spec


def ours(spec: Spec, *overrides: str, steps: int = 1, warmups: int = 0, clock: Clock | None = None) -> Trained:
    """Train some steps by `train.py`'s door.

    Raises:
        RuntimeError: it ended with another exit code than 0.
    """
    import lightning as L
    from bench import ours as contender
    from hydra.core.global_hydra import GlobalHydra

    from lit_rl import cli
    from lit_rl.runs.step_memory import planned_memory

    trained, fit, environment = Trained(clock or Clock(), spec.workload, warmups), L.Trainer.fit, dict(os.environ)

    def hung(trainer: L.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
        trainer.callbacks.append(contender.Contender(spec, trained.clock))  # pyright: ignore
        fit(trainer, module, *args, **kwargs)
        trained.settle()
        trained.config = module.policy.config
        trained.costs = ModelFlops.of_model(module.policy)
        trained.decoded = getattr(getattr(module, "generator", None), "steps", None)
        if (plan := planned_memory(module)) is not None:
            trained.planned = plan.total
        raise _Over

    argv, L.Trainer.fit, sys.argv = sys.argv, hung, ["train.py"]
    limits = [f"trainer.max_steps={steps}", f"run_dir={spec.work}/run"]
    try:
        with watched(trained):
            code = cli.run([*contender.overrides(spec), ACCELERATOR, *overrides, *limits])
    except _Over:
        code = 0
    finally:
        L.Trainer.fit, sys.argv = fit, argv
        os.environ.clear()
        os.environ.update(environment)
        GlobalHydra.instance().clear()
        free()
    if code:
        raise RuntimeError(f"train.py ended with {code}; its words stand in the log of the stage")
    return trained


@contextmanager
def watched(trained: Trained) -> Iterator[None]:
    """Write down meanwhile what passes share and what trials of quicker ways say; then all is as it was."""
    from lightning.pytorch import utilities

    from lit_rl.generation import noise
    from lit_rl.models import forward
    from lit_rl.models.trial import EquivalenceTrial

    share, passes, said = forward.shared_prompts, EquivalenceTrial.passes, []

    def shares(*given: Any) -> Any:
        trained.shared.append((groups := share(*given)) is not None)
        return groups

    def tried(trial: EquivalenceTrial, *given: Any) -> bool:
        said.clear()
        taken = passes(trial, *given)
        trained.trials[trial.key] = "" if taken else " ".join(said)
        return taken

    def heard(tell: Callable[..., Any]) -> Callable[..., Any]:
        def told(text: Any, *more: Any, **named: Any) -> Any:
            said.append(str(text))
            return tell(text, *more, **named)

        return told

    with ExitStack() as stack:
        for name in ("rank_zero_info", "rank_zero_warn"):  # a trial imports them as it speaks
            stack.enter_context(mock.patch.object(utilities, name, heard(getattr(utilities, name))))
        stack.enter_context(mock.patch.object(forward, "shared_prompts", shares))
        stack.enter_context(mock.patch.object(EquivalenceTrial, "passes", tried))
        stack.enter_context(mock.patch.object(noise, "uniform", noise.uniform))  # `bench.ours` puts its own in place
        yield


def agreement(spec: Spec, reference: Path, *, gradients: bool = True) -> Agreement:
    """Return how far the first step of a training is from that of another one of the same work, by its folder.

    Raises:
        RuntimeError: completions that teach something were not scored.
    """
    sides = read_first_step(reference), read_first_step(spec.work)
    for who, side in zip((reference, spec.work), sides):
        if lost := missing(spec.workload, spec.given(), side):
            raise RuntimeError(f"{who.name} did not score {lost} completions that teach something")
    return compare(*sides, gradients=gradients)


def trl(spec: Spec, steps: int, warmups: int) -> Trained:
    """Train some steps by TRL; `spec.settings` holds arguments of its config."""
    from bench import peer

    spec.settings["config"]["max_steps"] = steps
    trained, trainer = Trained(Clock(), spec.workload, warmups), peer.trainer_of(spec)
    trained.config = trainer.model.config
    trained.costs = ModelFlops.of_model(trainer.model)
    trainer.add_callback(peer.Contender(spec, trained.clock, trainer))
    trainer.train()
    return trained.settle()
