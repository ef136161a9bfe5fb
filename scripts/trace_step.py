"""How many files one training step crosses: a table of GRPO, PPO and DPO in their defaults, for docs/architecture.md.

    python scripts/trace_step.py            # the table
    python scripts/trace_step.py --calls    # and every call that is counted inside algorithms/
    python scripts/trace_step.py --check    # ends with 1 where one is above the table of docs/architecture.md
    python scripts/trace_step.py --config   # the modules that a run's config is passed through, in their order

A policy of a few layers is trained through `lit_rl.cli` without callbacks, and every Python call is watched from
Lightning's `on_train_batch_start` of the second rollout's first batch to `on_train_batch_end` of its last one (of an
offline method: of the second batch). What is counted:

- a **file** of `lit_rl` is crossed where a function of it runs;
- a **call between files** is a pair (function that calls, function that is called) in two files of `lit_rl`, counted
  once however often it happens. Who calls is the nearest frame of `lit_rl` below: what Torch or Lightning puts between
  does not hide it. Properties are functions; a comprehension is a part of the function that it stands in;
- **inside** are those with both files in `algorithms/`;
- a **back-call** is such a pair, of one file or of two, in which a helper, a function in `algorithms/` that is no
  method of the training LightningModule's own classes, calls a method or a property of that module. A function that a
  class takes over from another file as a method is called as one, and is no method itself where it calls.

`--config` follows the composed config of GRPO from the command line to the end of the run: a **stay** is a module of
`lit_rl` in which functions are called with the config (or a part of it) one after another, and a **return** is a stay
in a module that the config was in before.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import grimp
import lightning as L
from omegaconf import DictConfig

import lit_rl
from lit_rl import cli

PACKAGE = Path(lit_rl.__file__).parent
SMALL = [
    "data.task.max_operand=5",
    "data.task.val_rows=4",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.max_steps=12",
    "trainer.limit_val_batches=0",
    "callbacks=none",
    "logger=none",
]
METHODS = {
    "GRPO": ["algo=grpo", "algo.group_size=4", "data.prompts_per_rollout=4"],
    "PPO": ["algo=ppo", "data.prompts_per_rollout=4"],
    "DPO": ["algo=dpo", "data.batch_size=8"],
}

COMPREHENSION = re.compile(r"\.<locals>\.<(list|set|dict)comp>|\.<locals>\.<genexpr>")

Function = tuple[str, str]
"""A file below the package and a qualified name in it."""


@dataclass
class Seen:
    """What ran: functions, and pairs of them."""

    functions: set[Function] = field(default_factory=set)
    calls: set[tuple[Function, Function]] = field(default_factory=set)
    back: set[tuple[Function, Function]] = field(default_factory=set)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    @property
    def between_files(self) -> list[tuple[Function, Function]]:
        return sorted((a, b) for a, b in self.calls if a[0] != b[0])

    @property
    def inside(self) -> list[tuple[Function, Function]]:
        return [(a, b) for a, b in self.between_files if is_inside(a) and is_inside(b)]


def is_inside(function: Function) -> bool:
    return function[0].startswith("algorithms/")


class Watch(L.Callback):
    """Watches the second rollout, or the second batch, of a training."""

    def __init__(self) -> None:
        self.seen, self.watching = Seen(), False
        self.module: Any = None
        self.classes: set[Function] = set()
        self.taken_over: set[CodeType] = set()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._slots(pl_module):
            self.module = pl_module
            self.classes = {
                (str(Path(sys.modules[each.__module__].__file__ or "").relative_to(PACKAGE)), each.__qualname__)
                for each in type(pl_module).__mro__
                if each.__module__.partition(".")[0] == lit_rl.__name__
            }
            own = [value for each in type(pl_module).__mro__ for value in vars(each).values()]
            self.taken_over = {value.__code__ for value in own if isinstance(value, FunctionType)}
            self.watching = True
            sys.setprofile(self._called)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        if self.watching and rest[-1] == 2 * self._slots(pl_module) - 1:
            sys.setprofile(None)
            self.watching = False
            trainer.should_stop = True

    @staticmethod
    def _slots(module: L.LightningModule) -> int:
        """Batches a rollout; 1 where nothing is drawn."""
        return getattr(module, "slots_per_rollout", 1)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        called = function_of(frame) if event == "call" else None
        if called is None:
            return
        self.seen.functions.add(called)
        caller = next((found for found in map(function_of, below(frame)) if found), None)
        if caller is None:
            return
        self.seen.calls.add((caller, called))
        if is_inside(caller) and not self._is_method(caller) and self._is_attribute(frame) and self._of_module(frame):
            self.seen.back.add((caller, called))

    def _is_method(self, function: Function) -> bool:
        file, name = function
        return any(file == where and name.startswith(f"{owner}.") for where, owner in self.classes)

    def _is_attribute(self, frame: FrameType) -> bool:
        """Whether the function that runs is a method or a property of a class of the module, wherever it is written."""
        called = function_of(frame)
        return called is not None and (self._is_method(called) or frame.f_code in self.taken_over)

    def _of_module(self, frame: FrameType) -> bool:
        """Whether `self` is the module that trains."""
        code = frame.f_code
        return bool(code.co_argcount) and frame.f_locals.get(code.co_varnames[0]) is self.module


def function_of(frame: FrameType) -> Function | None:
    """The function that runs in a frame, if it is one of the package; a module's or a class's body is none."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE) or frame.f_code.co_name == "<module>":
        return None
    return str(path.relative_to(PACKAGE)), COMPREHENSION.sub("", frame.f_code.co_qualname)


def below(frame: FrameType) -> Iterator[FrameType]:
    """The frames that led to one, the nearest first."""
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def trace(overrides: list[str]) -> Seen:
    """What the second rollout of a run through the Hydra door crosses."""
    watch, fit = Watch(), L.Trainer.fit

    def watched(trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.callbacks.append(watch)  # pyright: ignore[reportAttributeAccessIssue]
        fit(trainer, *args, **kwargs)

    sys.argv = ["train.py"]  # what Hydra reads of the command line
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        L.Trainer.fit = watched
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = cli.run([*SMALL, *overrides, f"run_dir={folder}/run"])
        finally:
            L.Trainer.fit = fit
    if code or not watch.seen.calls or watch.watching:
        raise SystemExit(
            f"{' '.join(overrides)}: exit code {code}, the second rollout was not seen.\n{said.getvalue()}"
        )
    return watch.seen


def walk_of_config(overrides: list[str]) -> tuple[list[str], set[tuple[str, str]]]:
    """Return the modules whose functions are called with the config of a run, one entry a stay; and the calls with it
    that go up: from a module to one that imports it."""
    stays, calls = list[str](), set[tuple[str, str]]()

    def is_given_it(frame: FrameType) -> bool:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        return any(issubclass(type(frame.f_locals.get(name)), DictConfig) for name in names)

    def called(frame: FrameType, event: str, argument: Any) -> None:
        function = function_of(frame) if event == "call" else None
        if function is not None and is_given_it(frame):
            calls.update(
                (found[0], function[0]) for each in below(frame) if (found := function_of(each)) and is_given_it(each)
            )
            if stays[-1:] != [function[0]]:
                stays.append(function[0])

    sys.argv = ["train.py"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(called)
        try:
            cli.run([*SMALL, *overrides, f"run_dir={folder}/run"])
        finally:
            sys.setprofile(None)
    graph = grimp.build_graph("lit_rl")
    return stays, {(a, b) for a, b in calls if a != b and graph.chain_exists(_module(b), _module(a))}


def _module(file: str) -> str:
    return "lit_rl." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def numbers(found: Seen) -> tuple[int, ...]:
    """Return the row of the table."""
    inside = sum(file.startswith("algorithms/") for file in found.files)
    return len(found.files), inside, len(found.between_files), len(found.inside), len(found.back)


def committed() -> dict[str, tuple[int, ...]]:
    """Return the rows that stand in docs/architecture.md."""
    lines = (PACKAGE.parent / "docs" / "architecture.md").read_text().splitlines()
    rows = {name: [line for line in lines if line.startswith(f"| {name} | ")] for name in METHODS}
    return {name: tuple(map(int, line.split("|")[2:-1])) for name, (line,) in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="print the calls inside algorithms/ too")
    parser.add_argument("--check", action="store_true", help="compare with docs/architecture.md")
    parser.add_argument("--config", action="store_true", help="print the walk of a config instead")
    given = parser.parse_args()
    if given.config:
        stays, up = walk_of_config(METHODS["GRPO"])
        print(*stays, *(f"up: {a} -> {b}" for a, b in sorted(up)), sep="\n")
        print(f"{len(set(stays))} modules, {len(stays)} stays, {len(up)} ways back up")
        return
    seen = {name: trace(overrides) for name, overrides in METHODS.items()}
    print("| one step of | files | in `algorithms/` | calls between files | inside `algorithms/` | back-calls |")
    print("|---|---|---|---|---|---|")
    rows = {name: numbers(found) for name, found in seen.items()}
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(map(str, row))} |")
    for name, found in seen.items() if given.calls else []:
        for title, pairs in (("inside algorithms/", found.inside), ("back-calls", sorted(found.back))):
            print(f"\n{name}, {title}:")
            for (a, caller), (b, called) in pairs:
                print(f"  {a} {caller} -> {b} {called}")
    if given.check:
        least = committed()
        worse = [
            name for name, row in rows.items() if any(now > was for now, was in zip(row, least[name], strict=True))
        ]
        raise SystemExit(f"above docs/architecture.md: {', '.join(worse)}" if worse else 0)


if __name__ == "__main__":
    main()
