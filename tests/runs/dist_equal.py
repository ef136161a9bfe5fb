"""Short runs in one process and in several: how they are started, what they leave, and that they did the same."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_rl.algorithms.rollouts.phase_costs import is_speed
from lit_rl.cli import schemas
from lit_rl.cli.build import build, plain
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.sharding import full_state_dict

SGD = ["optimizer=by_path", "optimizer.path=torch.optim.SGD", "optimizer.lr=0.3", "scheduler=constant"]
"""Plain SGD: the change of the weights is the gradient."""
SMALL_GRPO = [
    *("data.task.max_operand=9", "data.task.val_rows=4", "data.prompts_per_rollout=4", "algo.group_size=4"),
    *("algo.minibatches=2", "algo.beta=0.2", "reference=frozen_copy"),
]
GRPO = [*SMALL_GRPO, *SGD]
OFFLINE = ["data.task.max_operand=9", "data.task.val_rows=4", "data.batch_size=8", *SGD]
DPO = ["algo=dpo", *OFFLINE]
CLIP = 0.05
"""What gradients of these are longer than."""


def trainer(folder: Path, devices: int, **more: Any) -> L.Trainer:
    """A quiet Trainer, on the CPU unless told otherwise, that writes nothing and validates only when told to."""
    settings = {
        "accelerator": "cpu",
        "strategy": "ddp" if devices > 1 else "auto",
        "max_epochs": -1,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    return L.Trainer(
        devices=devices, default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        **{**settings, **more},
    )  # fmt: skip


def logged(runner: L.Trainer) -> dict[str, float]:
    """What callbacks see now."""
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def parts(*overrides: str) -> tuple[Any, Any]:
    """The module and the data module of a command line, run directory aside."""
    schemas.register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        tree = plain(compose("config", ["run_dir=run", *overrides]))
    return build(tree["algo"]), build(tree["data"])


def leave(module: Any, runner: L.Trainer, path: Path, **beside: Any) -> None:
    """Leave a file: the weights, as they are exported, and what the caller adds."""
    weights = full_state_dict(module.policy)
    if runner.is_global_zero:
        torch.save({"weights": weights, **beside}, path)
    runner.strategy.barrier()


def scorer_in(folder: Path) -> str:
    """A reward model of random weights, which rank 0 writes: it starts the other, or the two run already."""
    path = folder / "scorer"
    if int(os.environ.get("LOCAL_RANK", 0)):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return str(path)
    tiny = LanguageModel("tiny")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tiny.path, num_labels=1))
    model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return str(path)


def in_processes(script: str, folder: Path, *names: str) -> Path:
    """Run `python script folder names` to its end, in a session of its own; return the folder. It starts others."""
    with port_of_ours() as port:
        child = subprocess.Popen(
            [sys.executable, script, str(folder), *names],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = child.communicate(timeout=2400)
        finally:
            end_group(child)
    assert child.returncode == 0, output[-6000:]
    return folder


def end_group(child: subprocess.Popen[str]) -> None:
    """Kill what is left of a process that leads a group of its own, and of the ranks that it started there.

    They may be left where it has ended itself.
    """
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextlib.contextmanager
def port_of_ours() -> Iterator[int]:
    """A port where processes that are started meanwhile can meet, and which the system gives to nobody else.

    Lightning looks for a free one, lets it go and opens it again: another job of this machine may be given it between.
    A socket that holds it and does not listen lets a store of torch listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def left(folder: Path, name: str) -> Any:
    """What a run left in `name.pt`."""
    return torch.load(folder / f"{name}.pt", weights_only=True)


class Ones:
    """`ones(name, accumulate)`: what one process does, made when it is first asked for.

    Args:
        run: `run(name, folder, devices)`, or with the number of micro-batches of a step as a fourth, leaves `name.pt`.
        folder: An empty one.
    """

    def __init__(self, run: Callable[..., None], folder: Path) -> None:
        self.run, self.folder = run, folder
        self._made: dict[tuple[str, int], Any] = {}

    def __call__(self, name: str, accumulate: int = 1) -> Any:
        if (name, accumulate) not in self._made:
            folder = self.folder / str(accumulate)
            folder.mkdir(exist_ok=True)
            self.run(name, folder, 1, *([accumulate] if accumulate > 1 else []))
            self._made[name, accumulate] = left(folder, name)
        return self._made[name, accumulate]


def assert_equal_runs(
    first: Any, second: Any, *, share: float, beyond: float, moved: float, start: str = "tiny"
) -> None:
    """The same weights, and the same metrics less those of time and those that the run says belong to a batch.

    Args:
        first: What a run left: `weights`, `metrics`, and `cut`, the names of metrics that are not compared.
        second: What another left.
        share: How far weights may differ, as a share of how far they came from where they began (new ones: of them).
        beyond: The same as a number, for what did not move.
        moved: How far a weight must have come at least, else nothing was compared.
        start: The model that both began with.
    """
    assert_same_weights(first["weights"], second["weights"], share=share, beyond=beyond, moved=moved, start=start)
    assert_same_metrics(first["metrics"], second["metrics"], first.get("cut", ()))


def assert_same_weights(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    *,
    share: float,
    beyond: float,
    moved: float,
    start: str = "tiny",
) -> None:
    assert first.keys() == second.keys()
    begun, furthest = LanguageModel(start).load().state_dict(), 0.0
    for name, weight in first.items():
        before = begun.get(name.removeprefix("policy."))
        change = (weight if before is None else weight - before).norm().item()
        furthest = max(furthest, change)
        difference = (weight - second[name]).norm().item()
        assert difference <= share * change + beyond, (name, difference, change)
    assert furthest > moved, "nothing was learned, so nothing was compared"


def assert_same_metrics(first: Mapping[str, float], second: Mapping[str, float], cut: Any = ()) -> None:
    one, two = ({name for name in each if not is_speed(name)} for each in (first, second))  # nobody has timed them all
    assert one == two
    for name in one.difference(cut):
        value, other = first[name], second[name]
        same = math.isclose(value, other, rel_tol=1e-3, abs_tol=1e-5) or (math.isnan(value) and math.isnan(other))
        assert same, (name, value, other)
