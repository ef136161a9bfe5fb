"""A run that another number of processes goes on with: from the end of a rollout it is the uninterrupted run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dist_equal
import lightning as L
import pytest
import torch
from dist_equal import left
from lightning.pytorch.callbacks import ModelCheckpoint
from runs_helpers import assert_same
from torch import nn

from lit_rl.algorithms import BCO
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.callbacks.exported_weights import AveragedWeights, BEMAWeights, EMAWeights
from lit_rl.core.errors import StorageError
from lit_rl.models.sharding import full_state_dict

pytestmark = [pytest.mark.dist, pytest.mark.all]

MOMENTUM = [
    *("optimizer=by_path", "optimizer.path=torch.optim.SGD", "optimizer.kwargs.momentum=0.9", "optimizer.lr=0.05"),
    *("scheduler=cosine", "scheduler.warmup_steps=0"),
]
"""No Adam: it makes steps of one size of gradients that are rounding errors."""

GRPO = [
    *("data.task.max_operand=5", "data.task.val_rows=4", "data.prompts_per_rollout=16", "algo.group_size=4"),
    *("algo.iterations=2", "algo.beta=0.1", "reference=ema", "algo/reward_norm=running", "algo/entropy=adaptive"),
    *("algo/kl_control=adaptive", "algo.kl_control.target=1e-3", "algo.kl_control.horizon=64"),
]
"""Two optimizer steps a rollout, two rollouts an epoch."""

SHAPES = {
    "grpo": [*MOMENTUM, *GRPO],
    "ppo": [*MOMENTUM, *GRPO[:5], "algo=ppo", "algo.group_size=2", "algo.critic_lr=0.05"],
    "sft": [*MOMENTUM, "algo=sft", "data.task.max_operand=9", "data.task.val_rows=6", "data.batch_size=8"],
    "bco": [*MOMENTUM, "algo=bco", "data.task.max_operand=9", "data.task.val_rows=6", "data.batch_size=8"],
}
STEPS, WHOLE, HALF = 6, 2, 3
"""Optimizer steps of a run; a step with which a rollout of `GRPO` ends, and one in the middle of the
epoch's last."""


class Seen(L.Callback):
    """Weights, their averages and the optimizer as the training begins, and the rows of each rollout or step over all
    ranks."""

    def __init__(self, averages: Sequence[AveragedWeights]) -> None:
        self.averages = averages
        self.begun: dict[str, Any] = {}
        self.rows: list[tuple[int, list[int]]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        weights = {name: tensor.clone() for name, tensor in full_state_dict(pl_module.policy).items()}
        kept: dict[str, Any] = trainer.strategy.optimizer_state(trainer.optimizers[0])
        momentum = {number: of["momentum_buffer"].clone() for number, of in kept.get("state", {}).items()}
        self.begun = {"weights": weights, "momentum": momentum}
        self.begun["averages"] = {
            average.state_key: {kind: average._whole(kind) for kind in average.kinds} for average in self.averages
        }
        self.begun["shift"] = pl_module.shift.state() if isinstance(pl_module, BCO) else {}

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        number = getattr(batch, "rollout", None)
        of_all = [row for rows in pl_module.ranks.objects(list(batch.rows)) for row in rows]
        if number is None:
            self.rows.append((batch.step, sorted(of_all)))
        elif batch.slot == 0:
            self.rows.append((number, of_all))


def run(
    name: str, folder: Path, devices: int, *, start: Path | None = None, label: str = "", sharded: bool = False
) -> None:
    """Train to the last step, on from a checkpoint if one is given, and leave `label.pt`; and `step=N.ckpt` of all
    steps in the folder `label`. One process cuts a step in two, as two processes share it."""
    module, data = dist_equal.parts(*SHAPES[name])
    averages = [EMAWeights(decay=0.5), BEMAWeights(every=1)]
    seen, label = Seen(averages), label or name
    keeps = ModelCheckpoint(folder / label, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = dist_equal.trainer(
        folder, devices, max_steps=STEPS, callbacks=[*averages, seen, keeps],
        accumulate_grad_batches=1 if devices > 1 else 2,
        log_every_n_steps=HALF if name in ("sft", "bco") else 1, enable_checkpointing=True,
        **({"strategy": FSDP2Strategy()} if sharded else {}),
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    left = {"metrics": dist_equal.logged(trainer), "begun": seen.begun, "rows": seen.rows}
    left |= {"weights": full_state_dict(module.policy), "steps": trainer.global_step, "epoch": trainer.current_epoch}
    if trainer.is_global_zero:
        torch.save(left, folder / f"{label}.pt")
    trainer.strategy.barrier()


def alone(folder: Path) -> None:
    """What one process leaves for two to go on with: before they begin."""
    for name in ("grpo", "sft", "bco"):
        run(name, folder / "one", 1)


def main(folder: Path) -> None:
    (folder / "two").mkdir(exist_ok=True)
    run("grpo", folder / "two", 2)
    run("sft", folder / "two", 2)
    run("ppo", folder / "two", 2, sharded=True)
    for step in (WHOLE, HALF):
        run("grpo", folder / "two", 2, start=folder / "one" / "grpo" / f"step={step}.ckpt", label=f"grpo-from-{step}")
    for name in ("sft", "bco"):
        start = folder / "one" / name / f"step={HALF}.ckpt"
        run(name, folder / "two", 2, start=start, label=f"{name}-from-one")
    start = folder / "one" / "grpo" / f"step={WHOLE}.ckpt"
    run("grpo", folder / "two", 2, start=start, label="grpo-sharded", sharded=True)


assert_equal_runs = partial(dist_equal.assert_equal_runs, share=2e-4, beyond=2e-6, moved=1e-4)


@pytest.fixture(scope="module")
def two(two_ranks: Path) -> Path:
    """What two processes left behind."""
    return two_ranks / "worlds" / "two"


@pytest.fixture(scope="module")
def one(two_ranks: Path) -> Path:
    """What one process left before they began, and leaves now."""
    return two_ranks / "worlds" / "one"


def saved(folder: Path, name: str, step: int) -> dict[str, Any]:
    return torch.load(folder / name / f"step={step}.ckpt", weights_only=True)


def assert_began_with(run: Any, checkpoint: dict[str, Any]) -> None:
    """The weights, their averages and the optimizer's numbers of the checkpoint, bit for bit."""
    trained = {name.removeprefix("policy."): tensor for name, tensor in checkpoint["state_dict"].items()}
    assert_same(run["begun"]["weights"], {name: trained[name] for name in run["begun"]["weights"]})
    (optimizer,) = checkpoint["optimizer_states"]
    before = [
        optimizer["state"][number]["momentum_buffer"]
        for group in optimizer["param_groups"]
        for number in group["params"]
    ]
    assert_same(list(run["begun"]["momentum"].values()), before)
    assert set(run["begun"]["averages"]) == {"EMAWeights", "BEMAWeights"}
    for name, kinds in run["begun"]["averages"].items():
        assert_same(kinds, {kind: checkpoint["callbacks"][name][kind] for kind in kinds})
        moved = (
            kinds[kind][each] - checkpoint["state_dict"][f"policy.{each}"] for kind in kinds for each in kinds[kind]
        )
        assert any(float(apart.abs().max()) > 1e-4 for apart in moved), "an average that lags behind the weights"


def test_one_process_goes_on_where_two_ended_a_rollout(two: Path, one: Path) -> None:
    start = two / "grpo" / f"step={WHOLE}.ckpt"
    run("grpo", one, 1, start=start, label="from-two")
    whole, again = left(two, "grpo"), left(one, "from-two")
    assert_began_with(again, saved(two, "grpo", WHOLE))
    assert again["steps"] == STEPS and again["rows"] == whole["rows"][1:]
    assert_equal_runs(whole, again)


def test_two_processes_go_on_where_one_ended_a_rollout(two: Path, one: Path) -> None:
    whole, again = left(one, "grpo"), left(two, f"grpo-from-{WHOLE}")
    assert_began_with(again, saved(one, "grpo", WHOLE))
    assert again["steps"] == STEPS and again["rows"] == whole["rows"][1:]
    assert_equal_runs(whole, again)


def test_two_processes_that_hold_parts_go_on_where_one_ended_a_rollout(two: Path, one: Path) -> None:
    again = left(two, "grpo-sharded")
    assert_began_with(again, saved(one, "grpo", WHOLE))
    assert_equal_runs(left(one, "grpo"), again)


def test_numbers_of_an_optimizer_that_would_mean_other_weights_are_refused(tmp_path: Path) -> None:
    """Of two weights the second one is trained: FSDP2 has it as number 1, and others as 0."""
    strategy, model = FSDP2Strategy(), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    strategy.model, strategy.optimizers = model, [torch.optim.SGD(model[1].parameters(), momentum=0.9)]
    path, state = tmp_path / "a.ckpt", strategy.optimizers[0].state_dict()
    with pytest.raises(StorageError, match="without FSDP2 .* model.name=<run_dir>/hf"):
        strategy._check_numbers(path, [state])
    state["param_groups"][0]["params"] = [1]
    strategy._check_numbers(path, [state])


def test_a_checkpoint_without_the_state_of_our_loader_is_refused() -> None:
    """It does not say how many batches a rollout has."""
    loops = {"fit_loop": {"state_dict": {"combined_loader": [{"position": 3, "epoch": 0, "fingerprint": ""}]}}}
    with pytest.raises(StorageError, match="written by 2 processes.*trainer.devices=2"):
        checkpoints.slots_when_written(loops, 2, 1)


def test_validation_reads_the_weights_of_any_number_of_processes(two: Path, tmp_path: Path) -> None:
    module, data = dist_equal.parts(*SHAPES["grpo"])
    runner = dist_equal.trainer(tmp_path, 1, limit_val_batches=1)
    start = two / "grpo" / f"step={HALF}.ckpt"
    runner.validate(module, datamodule=data, ckpt_path=start, weights_only=True, verbose=False)
    weights = saved(two, "grpo", HALF)["state_dict"]
    assert all(
        torch.equal(tensor, weights[f"policy.{name}"]) for name, tensor in full_state_dict(module.policy).items()
    )


def test_a_rollout_in_use_is_dropped_and_the_next_one_taken(
    two: Path, one: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ways it is one run: two processes learn as one does, and drop the same."""
    start = two / "grpo" / f"step={HALF}.ckpt"
    with caplog.at_level(logging.INFO):
        run("grpo", one, 1, start=start, label="half-from-two")
    assert "written by 2 processes, and this run has 1. The rollout in use is dropped after 1 of its 2" in caplog.text
    of_one, of_two = left(one, "half-from-two"), left(two, f"grpo-from-{HALF}")
    assert_began_with(of_one, saved(two, "grpo", HALF))
    assert_began_with(of_two, saved(one, "grpo", HALF))
    assert_equal_runs(of_one, of_two)
    whole = left(two, "grpo")
    for again in (of_one, of_two):
        assert again["steps"] == STEPS and again["epoch"] == whole["epoch"]
        assert [number for number, _ in again["rows"]] == [2, 3]  # steps 3 and 4; step 5
        assert again["rows"][0] == whole["rows"][2], "the prompts of the dropped rollout do not come again"


def test_rows_of_a_data_set_are_gone_on_with(two: Path, one: Path) -> None:
    """The last line of the log is of the steps since."""
    run("sft", one, 1, start=two / "sft" / f"step={HALF}.ckpt", label="sft-from-two")
    for whole, again in ((left(two, "sft"), left(one, "sft-from-two")), (left(one, "sft"), left(two, "sft-from-one"))):
        rows = {step: rows for step, rows in _steps(whole).items() if step >= HALF}
        assert _steps(again) == rows and len(rows) == STEPS - HALF
        assert_equal_runs(whole, again)


def test_the_shift_of_rewards_is_of_all_processes(two: Path, one: Path) -> None:
    whole, again = left(one, "bco"), left(two, "bco-from-one")
    checkpoint = saved(one, "bco", HALF)
    (of_rank,) = checkpoint["lit_rl"]
    assert_began_with(again, checkpoint)
    assert again["begun"]["shift"]["steps"] == HALF and again["begun"]["shift"]["shift"] != 0
    assert again["begun"]["shift"].items() <= of_rank["module"].items()
    assert_equal_runs(whole, again)


def _steps(run: Any) -> dict[int, list[int]]:
    """The rows of each step: one process has it in two batches."""
    found: dict[int, list[int]] = {}
    for step, rows in run["rows"]:
        found[step] = sorted([*found.get(step, []), *rows])
    return found


def test_one_process_goes_on_where_two_held_parts(two: Path, one: Path) -> None:
    """FSDP2's checkpoint holds whole tensors; actor and critic."""
    run("ppo", one, 1, start=two / "ppo" / f"step={WHOLE}.ckpt", label="ppo-from-two")
    whole, again = left(two, "ppo"), left(one, "ppo-from-two")
    assert_began_with(again, saved(two, "ppo", WHOLE))
    assert again["rows"] == whole["rows"][1:]
    assert_equal_runs(whole, again)
