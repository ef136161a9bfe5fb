"""One training in this process, ours by the door of `train.py` or TRL's by its trainers, with the clock running.

What the benchmark on a CPU hangs around both (`bench.ours`, `bench.peer`) is hung around them here too: forced lengths,
completions that are given to the first step, phases. The GPU is waited for where a phase begins or ends: four times a
step.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench.bounds import Dims, train_flops
from bench.phases import Phases
from bench.workload import Spec, Workload, write

GPU = torch.cuda.is_available()
GIB = 2**30
PRETENDED = GPU and torch.cuda.get_device_name() == "Pretended GPU"
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
        """A step ended, and the next one begins. Peaks count from the first one on."""
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
    """What a training took."""

    clock: Clock
    work: Workload
    warmups: int
    peak: int = 0
    """Bytes of tensors on the GPU at most; 0 on a CPU."""
    planned: int = 0
    """Bytes that `lit-rl plan` promises; 0 for TRL's."""
    config: Any = None
    weights: int = 0
    """Parameters of the model."""
    phases: dict[str, float] = field(default_factory=dict)
    """Median seconds; "train" is what is left of a step."""

    @property
    def seconds(self) -> float:
        """Of a step, the median after the warm-up."""
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
        """Prompts and completions of a step, each row with its own prompt."""
        return self.work.rows * (self.work.prompt_tokens + self.work.completion_tokens)

    @property
    def flops(self) -> float:
        """Useful ones of learning: each row with its own prompt, attention counted causally, the head on completions.

        `bench.bounds` has the formula.
        """
        text = self.config.get_text_config()
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        head = text.vocab_size * text.hidden_size
        dims = Dims(
            self.weights - head,
            head,
            text.num_hidden_layers,
            width * text.num_attention_heads,
            width * text.num_key_value_heads,
        )
        lengths = [self.work.completion_tokens] * self.work.rows
        return train_flops(dims, len(lengths), self.work.prompt_tokens, lengths, shared=False)

    def flops_as_trl(self) -> float:
        """The same as TRL counts: attention not causally, the head on every token."""
        from trl.trainer.utils import compute_flops_per_token

        length = self.work.prompt_tokens + self.work.completion_tokens
        return compute_flops_per_token(self.config.get_text_config(), length) * self.tokens


def prepared(work: Workload, folder: Path, name: str, **settings: Any) -> Spec:
    """Write the workload's files to a folder, where stages share its model, and name a folder for this training."""
    write(work, folder)
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
    from lit_rl.commands.step_memory import planned

    trained, fit, environment = Trained(clock or Clock(), spec.workload, warmups), L.Trainer.fit, dict(os.environ)

    def hung(trainer: L.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
        trainer.callbacks.append(contender.Contender(spec, trained.clock))  # pyright: ignore
        fit(trainer, module, *args, **kwargs)
        trained.settle()
        trained.config = module.policy.config
        trained.weights = sum(weight.numel() for weight in module.policy.parameters())
        if (plan := planned(module)) is not None:
            trained.planned = plan.total
        raise _Over

    L.Trainer.fit, sys.argv = hung, ["train.py"]
    limits = [f"trainer.max_steps={steps}", f"run_dir={spec.work}/run"]
    try:
        code = cli.run([*contender.overrides(spec), ACCELERATOR, *overrides, *limits])
    except _Over:
        code = 0
    finally:
        L.Trainer.fit = fit
        os.environ.clear()
        os.environ.update(environment)
        GlobalHydra.instance().clear()
        free()
    if code:
        raise RuntimeError(f"train.py ended with {code}; its words stand in the log of the stage")
    return trained


def trl(spec: Spec, steps: int, warmups: int) -> Trained:
    """Train some steps by TRL; `spec.settings` holds arguments of its config."""
    from bench import peer

    spec.settings["config"]["max_steps"] = steps
    trained, trainer = Trained(Clock(), spec.workload, warmups), peer.trainer_of(spec)
    trained.config = trainer.model.config
    trained.weights = sum(weight.numel() for weight in trainer.model.parameters())
    trainer.add_callback(peer.Contender(spec, trained.clock, trainer))
    trainer.train()
    return trained.settle()
