"""Short runs under ZeRO over two processes, or in one without. `python zero_runs.py FOLDER` starts the two once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "runs"), str(HERE.parent / "algorithms")]

import dist_equal  # noqa: E402
import lightning as L  # noqa: E402
from dist_equal import scorer_in  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from runs_helpers import interrupted  # noqa: E402
from zero_on_cpu import ZeROOnCPU  # noqa: E402

from lit_rl.algorithms.optim import strategies  # noqa: E402
from lit_rl.core import durable_files  # noqa: E402
from lit_rl.core.errors import ConfigError, StorageError  # noqa: E402
from lit_rl.models.sharding import full_state_dict  # noqa: E402

WORDS = [
    "data.task.max_operand=9",
    "data.task.val_rows=6",
    "optimizer=by_path",
    "optimizer.path=torch.optim.SGD",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
]
"""Plain SGD: the change of the weights is the gradient, clipped."""
DRAWN = ["sampling.max_new_tokens=4", "data.prompts_per_rollout=8", "algo.group_size=4", "optimizer.lr=0.3"]
ODD = ["reward=function", f"reward.fn={HERE / 'zero_rewards.py'}:odd"]
ONLINE = [*DRAWN, *ODD]
GRPO = ["algo=grpo", *ONLINE, "algo.beta=0.2", "reference=frozen_copy"]
PPO = ["algo=ppo", *DRAWN, "algo.beta=0.2", "algo.minibatches=1", "algo.iterations=2"]
OFFLINE = ["data.batch_size=8", "optimizer.lr=0.05"]
SCORED = "reward=reward_model"
"""One of random weights, which each run writes for itself."""
TURNS = [
    "env=environment",
    f"env.path={HERE / 'zero_rewards.py'}:Asks",
    "env.max_turns=2",
    "env.max_tokens=16",
    "env.max_observation_tokens=4",
]
MOMENTS = ["optimizer.kwargs={momentum: 0.9, weight_decay: 0.1}"]
"""What moves a weight in a step without gradients too, unless it is left out."""
ADAM = [
    "optimizer.path=torch.optim.AdamW",
    "optimizer.lr=0.01",
    "optimizer.kwargs={eps: 0.01, weight_decay: 0.1}",
]
"""Two moments a weight. With so large an epsilon roundings of small gradients are not made large."""

SHAPES: dict[str, list[str]] = {
    "grpo": GRPO,
    "grpo-lora": [*GRPO, "model.lora.r=4", "reference=adapter_base"],
    "grpo-moving": [*GRPO, "reference=ema"],
    "grpo-left-out": [*GRPO, *MOMENTS, f"reward.fn={HERE / 'zero_rewards.py'}:not_in_the_second_rollout"],
    "grpo-adam": [*GRPO, *ADAM],
    "grpo-turns": [*GRPO, *TURNS, "optimizer.lr=0.1"],  # with 0.3 roundings grow from step to step
    "rloo": ["algo=rloo", *ONLINE, "generator=hf"],
    "ppo-scored": [*PPO, SCORED],
    "ppo-shared": [*PPO, *ODD, "algo/critic=shared_trunk"],
    "dpo": ["algo=dpo", *OFFLINE],
    "dpo-recomputed": ["algo=dpo", *OFFLINE, "model.gradient_checkpointing=true"],
    "dpo-precomputed": ["algo=dpo", *OFFLINE, "algo.precompute_reference=true"],
    "sft": ["algo=sft", *OFFLINE],
    "sft-packed": ["algo=sft", *OFFLINE, "data.packing=best_fit", "data.max_length=24", "algo.neftune_alpha=5"],
}
OFFLOADS = ["grpo-adam"]
FORWARD_ONLY = ["grpo-turns", "dpo-precomputed", "sft-packed"]
"""What is other in forward passes alone, where DeepSpeed has a part at stage 3 only."""
EVERYWHERE = [name for name in SHAPES if name not in (*OFFLOADS, *FORWARD_ONLY)]
STEPS = 4
LIMIT = 0.25
"""Of the gradient's norm; what the runs say of it is above."""

OFFLOADED = {
    1: {"offload_optimizer": True},
    2: {"offload_optimizer": True},
    3: {"offload_optimizer": True, "offload_parameters": True},
}
JOBS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "zero1": (1, EVERYWHERE, {}),
    "zero2": (2, EVERYWHERE, {}),
    "zero3": (3, [name for name in (*EVERYWHERE, *FORWARD_ONLY) if name != "grpo-moving"], {}),
    "zero1-offloaded": (1, OFFLOADS, OFFLOADED[1]),
    "zero2-offloaded": (2, OFFLOADS, OFFLOADED[2]),
    "zero3-offloaded": (3, OFFLOADS, OFFLOADED[3]),
}
"""Stage, shapes, and further settings of the strategy, by the folder that the runs leave."""


class Breaks(L.Callback):
    """Makes the loss of one optimizer step NaN on one rank."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        whole = pl_module.training_step

        def broken(*given: Any) -> torch.Tensor:
            breaks = trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1
            return whole(*given) * (torch.nan if breaks else 1.0)

        pl_module.training_step = broken


class Sees(L.Callback):
    """What was logged of each rollout, and whole weights in the middle of a fit, which are apart."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append(dist_equal.logged(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.weights = full_state_dict(pl_module.policy)


def run(name: str, folder: Path, devices: int, accumulate: int = 1, **more: Any) -> None:
    """Train, validate, and leave `name.pt` there."""
    scorer = [f"reward.functions.reward_model.name={scorer_in(folder)}"] if SCORED in SHAPES[name] else []
    module, data = dist_equal.parts(*WORDS, *SHAPES[name], *scorer)
    meanwhile = Sees()
    callbacks = [meanwhile, *([Breaks(2)] if name == "grpo-left-out" else [])]
    trainer = dist_equal.trainer(
        folder, devices, max_steps=STEPS, accumulate_grad_batches=accumulate, gradient_clip_val=LIMIT,
        callbacks=callbacks, val_check_interval=STEPS * accumulate, check_val_every_n_epoch=None,
        limit_val_batches=1, **more,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    metrics = dist_equal.logged(trainer)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    metrics |= dist_equal.logged(trainer)
    parts = {part: full_state_dict(getattr(module, part)) for part in ("policy", *module.trained_beside)}
    weights = {f"{part}.{key}": value for part, state in parts.items() for key, value in state.items()}
    if trainer.is_global_zero:
        same = all(torch.equal(parts["policy"][key], value) for key, value in meanwhile.weights.items())
        seen = getattr(trainer.strategy, "seen", {})
        left = {"weights": weights, "metrics": metrics, "gathered": same and bool(meanwhile.weights)}
        torch.save({**left, "steps": meanwhile.steps, **seen}, folder / f"{name}.pt")
    trainer.strategy.barrier()


class FindsRoom(L.Callback):
    """Saves at the end where a share of the bytes is free that a checkpoint takes, and notes what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.came: dict[float, str] = {}

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        first, durable_files.RETRY_WAITS, usage = self.folder / "first.ckpt", (), shutil.disk_usage
        trainer.save_checkpoint(first)
        size = sum(path.stat().st_size for path in first.rglob("*"))
        for share in (0.9, 1.1):
            shutil.disk_usage = lambda _, free=int(size * share): (10**12, 10**12 - free, free)
            try:
                trainer.save_checkpoint(self.folder / f"{share}.ckpt")
            except StorageError as error:
                self.came[share] = str(error)
            shutil.disk_usage = usage


def with_room(stage: int, folder: Path) -> None:
    """Leave `room.pt`: by rank, what it was told for each share."""
    folder.mkdir(exist_ok=True)
    module, data = dist_equal.parts(*WORDS[:2], "algo=sft", "data.batch_size=8")
    room = FindsRoom(folder)
    trainer = dist_equal.trainer(
        folder, 2, max_steps=1, strategy=ZeROOnCPU(stage), callbacks=[room], limit_val_batches=0
    )
    trainer.fit(module, datamodule=data)
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, room.came)
    if trainer.is_global_zero:
        torch.save(told, folder / "room.pt")
    trainer.strategy.barrier()


class OtherDisk(ZeROOnCPU):
    """Of node 1 the same path is another folder."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        obj = super().broadcast(obj, src)
        if isinstance(obj, tuple) and self.global_rank == 1:
            return tuple(each and each.replace("/node0/", "/node1/") for each in obj)
        return obj


def as_two_nodes(folder: Path) -> None:
    """Leave `nodes.pt`: by rank, what a process that is a node by itself was told, with a disk of its own and without.

    A process of Lightning's knows its node by these two variables.
    """
    before = os.environ["LOCAL_RANK"], os.environ.get("NODE_RANK", "0")
    os.environ["LOCAL_RANK"], os.environ["NODE_RANK"] = "0", str(torch.distributed.get_rank())
    strategies.SEEN_WITHIN, said = 1.0, {}
    for name, strategy in {"apart": OtherDisk(2), "shared": ZeROOnCPU(2)}.items():
        for node in ("node0", "node1"):
            (folder / name / node).mkdir(parents=True, exist_ok=True)
        module, data = dist_equal.parts(*WORDS[:2], "algo=sft", "data.batch_size=8")
        saves = ModelCheckpoint(folder / name / "node0" / "checkpoints", filename="last", every_n_train_steps=1)
        trainer = dist_equal.trainer(
            folder, 1, num_nodes=2, max_steps=1, strategy=strategy, callbacks=[saves], enable_checkpointing=True
        )
        try:
            trainer.fit(module, datamodule=data)
        except ConfigError as error:
            said[name] = str(error)
    os.environ["LOCAL_RANK"], os.environ["NODE_RANK"] = before
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, said)
    if torch.distributed.get_rank() == 0:
        torch.save(told, folder / "nodes.pt")
    torch.distributed.barrier()


ROLLOUTS = ["data.prompts_per_rollout=4", "algo.group_size=4"]
WHOLE_RUNS: dict[str, tuple[int, list[str]]] = {
    "rloo": (1, ["algo.iterations=2", *ROLLOUTS]),
    "ppo": (2, ["algo.minibatches=1", "algo.iterations=2", *ROLLOUTS]),
    "grpo": (3, ["algo.iterations=2", "algo.beta=0.1", "reference=frozen_copy", *ROLLOUTS]),
    "dpo": (3, ["data.batch_size=4"]),
    "sft": (2, ["data.batch_size=4"]),
}
"""Stage and words of `train.py`: validate, train, validate, export; a checkpoint a step, some in mid-rollout."""
SMALL = [
    "data.task.max_operand=5", "data.task.val_rows=4", "sampling.max_new_tokens=4", "trainer.max_steps=4",
    "callbacks.samples.print=0", "logger=none", "eval.limit=2", "callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.checkpoint.save_top_k=-1", "optimizer.lr=0.01",
]  # fmt: skip


def command(
    name: str,
    folder: Path,
    checkpoint: Path | None = None,
    *,
    alone: bool = False,
    words: Sequence[str] = (),
    ends: int = 0,
) -> None:
    """`train.py`, less its parsing of words, in a process that another run has started already."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    from lit_rl.cli import schemas
    from lit_rl.cli.hydra_app import assemble
    from lit_rl.runs.run_dir import RunDir
    from lit_rl.runs.train import train

    stage, own = WHOLE_RUNS[name]
    words = [*SMALL, f"algo={name}", *own, *words]
    if not alone:
        target = f"trainer.strategy._target_={ZeROOnCPU.__module__}.{ZeROOnCPU.__qualname__}"
        words += [f"strategy=deepspeed_{stage}", target, "trainer.devices=2", "trainer.accelerator=cpu"]
        words += [f"allow_targets=[{ZeROOnCPU.__module__}]"]
    schemas.register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        words = [*words, f"run_dir={folder}"]
        HydraConfig.instance().set_config(compose("config", words, return_hydra_config=True))
        config = compose("config", words)
    config.ckpt_path = None if checkpoint is None else str(checkpoint)
    new = "new" if checkpoint is None and os.environ.get("LOCAL_RANK", "0") == "0" else "resumed"
    assert train(assemble(config, RunDir(folder), new)) == ends


def whole_runs(folder: Path, name: str) -> None:
    """A run, and the same one killed, in the middle of a rollout where there is one, and gone on with."""
    whole, again = folder / f"whole-{name}", folder / f"again-{name}"
    command(name, whole)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        interrupted(whole, again, 3)
    torch.distributed.barrier()
    command(name, again, again / "checkpoints" / "step_00000003.ckpt")


def signalled(folder: Path) -> None:
    """A run at stage 3 of which one rank is sent SIGTERM while weights are whole. Every rank ends with its code."""
    command(
        "grpo", folder, words=[f"reward.fn={HERE / 'zero_rewards.py'}:ending_one_rank", "reward=function"], ends=143
    )


def main(folder: Path) -> None:
    for where, (stage, names, settings) in JOBS.items():
        (folder / where).mkdir(exist_ok=True)
        for name in names:
            print(where, name, flush=True)  # what is at work when it hangs
            run(name, folder / where, 2, accumulate=2, strategy=ZeROOnCPU(stage, **settings))
    for stage in (2, 3):
        with_room(stage, folder / f"room{stage}")
    as_two_nodes(folder / "nodes")
    signalled(folder / "signalled")
    for name in WHOLE_RUNS:
        whole_runs(folder, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
