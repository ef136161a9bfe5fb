"""The second table of `test_resume_cases.py`: parts that hold a state by themselves, and what a step of each is."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

sys.path += [str(Path(__file__).parents[1] / name) for name in ("algorithms", "data", "models")]

import test_data_curriculum
import test_data_loader
import test_master_weights
import test_offline_datamodule
import test_offline_stream
import test_split_adamw
import torch
from reference_cases import Two, train_a_little
from test_models_reference_moving import MAKE as REFERENCES
from test_replay_buffer import learned, rollout_of

from lit_rl.algorithms.optim.master_weights import with_masters
from lit_rl.algorithms.optim.optimizers import AdamW, AdamWSplit
from lit_rl.algorithms.optim.schedules import After, Cosine, Linear, scheduler_by_group
from lit_rl.algorithms.rollouts.checkpoints import to_plain
from lit_rl.algorithms.terms.credit import RunningNorm
from lit_rl.algorithms.terms.groups import GroupReplay
from lit_rl.algorithms.terms.regularizers import AdaptiveEntropy, AdaptiveKL


@dataclass(frozen=True)
class Part:
    """What holds a state.

    Attributes:
        make: Makes it as a new process has it, in a folder.
        step: Takes a step, given its number, with numbers that are drawn, and returns what the part says.
        steps: How many.
        first: The least number of steps that it stops after.
    """

    make: Callable[[Path], Any]
    step: Callable[[Any, int, Random], Any]
    steps: int = 6
    first: int = 0


def play(part: Any, _: int, draw: Random) -> Any:
    """Step an object that says what it makes of numbers, of which some are lacking and some are equal."""
    numbers = [draw.choice([math.nan, 0.5, 0.5, draw.uniform(-1e3, 1e3)]) for _ in range(draw.randint(1, 6))]
    return part(torch.tensor(numbers))


def control(part: Any, _: int, draw: Random) -> list[float]:
    part.update(*((draw.random(), 8) if isinstance(part, AdaptiveKL) else (draw.random(),)))
    return list(part.state().values())


def replayed(part: GroupReplay, number: int, draw: Random) -> Any:
    sizes = [draw.choice([0.0, 0.0, 0.5, 1.0, 2.0, 3.0]) for _ in range(draw.randint(1, 4))]
    return to_plain(learned(part, rollout_of(sizes, number)))


class Optimized:
    """Weights, an optimizer and its schedule."""

    def __init__(
        self, make: Any, groups: list[dict[str, Any]], take: Callable[..., None], schedules: Any = None
    ) -> None:
        self.weights, self.take = [weight for group in groups for weight in group["params"]], take
        self.optimizer = with_masters(make, groups)
        schedules = schedules or [Linear(warmup_steps=2)] * len(groups)
        self.schedule = scheduler_by_group(self.optimizer, 8, schedules)

    def step(self, number: int, _: Random) -> Any:
        self.take(self.optimizer, self.weights, range(number, number + 1))
        self.schedule.step()
        return [weight.detach().clone() for weight in self.weights], self.schedule.get_last_lr()

    def state(self) -> Any:
        weights = [weight.detach().clone() for weight in self.weights]
        return {"weights": weights, "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state(self, saved: Any) -> None:
        for weight, value in zip(self.weights, saved["weights"], strict=True):
            weight.data.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])


def with_remainders(make: Any) -> Optimized:
    groups = test_master_weights.groups(test_master_weights.weights(torch.bfloat16))
    return Optimized(make, groups, test_master_weights.take, [Linear(), After(1, Cosine())])


def split() -> Optimized:
    weights = test_split_adamw.parameters(torch.bfloat16)
    return Optimized(AdamWSplit(lr=1e-4), [{"params": weights}], test_split_adamw.take)


class Followed:
    """A policy of two numbers, and a reference that moves as it does."""

    def __init__(self, kind: str, dtype: torch.dtype, device: str | None) -> None:
        self.policy, self.reference = Two(0.3, -1.7).to(dtype), REFERENCES[kind](device=device)
        self.module = self.reference.module(self.policy)

    def step(self, number: int, _: Random) -> Any:
        train_a_little(self.policy, seed=number + 1)
        self.reference.update(self.policy, self.module, number + 1)
        return {name: value.clone() for name, value in self.reference.state(self.module).items()}

    def state(self) -> Any:
        return {"policy": self.policy.state_dict(), "reference": self.reference.state(self.module)}

    def load_state(self, saved: Any) -> None:
        self.policy.load_state_dict(saved["policy"])
        self.reference.load_state(self.module, saved["reference"])


class Loaded:
    """Batches as Lightning asks for them: some of each epoch, from an iterator that it makes anew for each.

    Args:
        loader: Of batches.
        told: What a batch says.
        epoch: How many of an epoch are asked for; none: all.
    """

    def __init__(self, loader: Any, told: Callable[[Any], Any], epoch: int | None = None) -> None:
        self.loader, self.told, self.epoch = loader, told, epoch or len(loader)
        self.batches: Iterator[Any] | None = None

    def step(self, number: int, _: Random) -> Any:
        if number % self.epoch == 0 or self.batches is None:
            self.batches = iter(self.loader)
        return self.told(next(self.batches))

    def state(self) -> Any:
        return self.loader.state_dict()

    def load_state(self, saved: Any) -> None:
        iter(self.loader)  # Lightning makes one while it sets up, and may never use it
        self.loader.load_state_dict(saved)


def prompts(limit: float | int, repeat: int) -> Part:
    made = partial(test_data_loader.make, repeat=repeat, limit=limit)

    def told(batch: Any) -> Any:
        return batch.rollout, batch.slot, list(batch.rows), list(batch.occurrences)

    epoch = int(len(made()) * limit) if isinstance(limit, float) else min(limit, len(made()))
    return Part(lambda _: Loaded(made(), told, epoch), Loaded.step, steps=3 * epoch, first=1)


def chosen(ahead: int) -> Part:
    """Prompts that a curriculum draws, some of them ahead of what is known of those before."""

    def made(_: Path) -> Loaded:
        loader = test_data_curriculum.loader(repeat=2, ahead=ahead)

        def told(batch: Any) -> Any:
            test_data_curriculum.learn(loader, batch)
            return batch.rollout, batch.slot, list(batch.rows), [list(each.rows) for each in batch.upcoming]

        return Loaded(loader, told)

    return Part(made, Loaded.step, steps=30, first=1)


def examples(_: Path) -> Loaded:
    loader = test_offline_datamodule.loader(test_offline_datamodule.pairs(20), accumulate=2)
    return Loaded(loader, lambda batch: (batch.step, batch.slot, list(batch.rows)))


def windows(buffer: int, batch_size: int, accumulate: int, shuffle: bool, *counts: int) -> Part:
    """Rows that are read as they are needed, of one file or of two."""
    stream = test_offline_stream

    def made(folder: Path) -> Loaded:
        sources = [
            {"path": stream.write(folder / f"{count}.jsonl", [stream.row("abc"[count % 3], i) for i in range(count)])}
            for count in counts
        ]
        data = stream.texts(sources=sources, stream_buffer=buffer, batch_size=batch_size)
        how = {"seed": 5, "shuffle": shuffle, "accumulate": accumulate}
        return Loaded(stream.loader(stream.windows_of(data), 12, **how), stream.told)

    return Part(made, Loaded.step, steps=24, first=1)


PARTS: dict[str, Part] = {
    "running-norm": Part(lambda _: RunningNorm(), play),
    "kl-control": Part(lambda _: AdaptiveKL(0.2, 50), control),
    "entropy-control": Part(lambda _: AdaptiveEntropy(0.1, 0, 1, 0.01, 0.5), control),
    "replay": Part(lambda _: GroupReplay(3), replayed),
    "adamw": Part(
        lambda _: Optimized(AdamW(lr=0.1), [{"params": test_master_weights.weights(torch.float32)}],
                            test_master_weights.take),
        Optimized.step,
    ),
    **{
        f"masters-{name}": Part(lambda _, make=make: with_remainders(make), Optimized.step, steps=8)
        for name, make in test_master_weights.MAKES.items()
    },
    "split": Part(lambda _: split(), Optimized.step, steps=5),
    **{
        f"{kind}-{dtype}": Part(
            lambda _, kind=kind, dtype=dtype, device=device: Followed(kind, getattr(torch, dtype), device),
            Followed.step, steps=8,
        )
        for kind in REFERENCES
        for dtype, device in (("bfloat16", None), ("float32", "cpu"))
    },
    **{f"prompts-{limit}-{repeat}": prompts(limit, repeat) for limit in (1.0, 0.5, 7) for repeat in (1, 3)},
    **{f"curriculum-{ahead}-ahead": chosen(ahead) for ahead in (0, 1, 3)},
    "examples": Part(examples, Loaded.step, steps=18, first=1),
    **{
        "-".join(["windows", *map(str, how)]): windows(*how)
        for how in ((4, 2, 1, True, 23), (9, 4, 2, True, 20, 7), (30, 4, 1, False, 20, 7), (8, 2, 2, False, 23))
    },
}  # fmt: skip
