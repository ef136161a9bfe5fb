"""A step whose gradient is not finite moves nothing, is counted and kept; several in a row end the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_rollouts import trainer as quiet_trainer

from lit_rl.algorithms import GRPO, AdamW, Constant
from lit_rl.algorithms.optim.broken_steps import LIMIT
from lit_rl.algorithms.terms.regularizers import FixedEntropy
from lit_rl.core.errors import NumericError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.ops.kl import k3
from lit_rl.ops.policy_losses import clipped_policy_loss


class LossThatBreaks:
    """The clipped surrogate; infinite or NaN in the given calls, as an overflow in a forward pass would make it."""

    def __init__(self, *calls: int, value: float = math.nan) -> None:
        self.calls, self.value, self.called = calls, value, -1

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        per_token, metrics = clipped_policy_loss(logprobs, old_logprobs, advantages, mask)
        self.called += len(mask) > 1  # a module tries its loss on one row when it is made
        return per_token * (self.value if self.called in self.calls else 1.0), metrics


class Weights(L.Callback):
    """All weights and the optimizer's moments after each step, and what is logged."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.seen.append([tensor.detach().clone() for tensor in (*pl_module.policy.parameters(), *moments)])
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def varied(completions: list[str]) -> list[float]:
    return [float(len(text) % 2) for text in completions]


def fit(folder: Path, loss: Any, steps: int, *callbacks: L.Callback, accumulate: int = 1, **settings: Any) -> Weights:
    weights = Weights()
    module = GRPO(
        "tiny", varied, loss=loss, group_size=4, sampling=Sampling(max_new_tokens=4), optimizer=AdamW(lr=1e-4),
        scheduler=Constant(), **settings,
    )  # fmt: skip
    trainer = quiet_trainer(
        folder,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=bool(callbacks),
        callbacks=[weights, *callbacks],
        gradient_clip_val=1.0,
    )
    trainer.fit(module, datamodule=RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=4))
    return weights


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_step_moves_nothing_and_the_next_one_does(value, tmp_path):
    with pytest.warns(UserWarning, match=r"step 3 is skipped.*bad_batch\.pt"):
        weights = fit(tmp_path, LossThatBreaks(2, value=value), 4)
    first, second, broken, after = weights.seen
    assert all(torch.equal(a, b) for a, b in zip(second, broken, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(broken, after, strict=True))
    assert all(bool(tensor.isfinite().all()) for tensor in after)
    assert [row["train/skipped_steps"] for row in weights.logged] == [0, 0, 1, 0]
    assert math.isnan(weights.logged[2]["train/grad_norm"]) and weights.logged[3]["train/grad_norm"] > 0
    kept = torch.load(tmp_path / "bad_batch.pt", weights_only=True)
    assert kept["step"] == 3 and not math.isfinite(kept["grad_norm"])
    assert kept["rollout"]["completions"]["response_ids"].shape[0] == 16


def test_a_spike_that_is_finite_moves_no_more_than_any_clipped_step(tmp_path):
    """It is no broken step: nothing is left out or kept, the norm before clipping is in the log, and a spike a thousand
    times as high moves the same."""
    low, high = (fit(tmp_path, LossThatBreaks(2, value=value), 4) for value in (1e3, 1e6))
    assert [row["train/skipped_steps"] for row in high.logged] == [0, 0, 0, 0] and not list(tmp_path.iterdir())
    norms = [row["train/grad_norm"] for row in high.logged]
    assert norms[2] > 1e4 and norms[2] == pytest.approx(1e3 * low.logged[2]["train/grad_norm"], rel=1e-3)
    for ours, theirs in zip(high.seen, low.seen, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-7)
    moved = max(float((a - b).abs().max()) for a, b in zip(high.seen[1][:20], high.seen[2][:20], strict=True))
    assert 0 < moved < 4 * 1e-4  # AdamW's largest step at this rate, however large the gradient


def test_a_spike_whose_norm_overflows_is_a_broken_step(tmp_path):
    with pytest.warns(UserWarning, match=r"step 3 is skipped, as the norm of its gradient is inf"):
        weights = fit(tmp_path, LossThatBreaks(2, value=1e30), 3)
    assert [row["train/skipped_steps"] for row in weights.logged] == [0, 0, 1]
    assert all(torch.equal(a, b) for a, b in zip(weights.seen[1], weights.seen[2], strict=True))


def test_a_kl_beyond_the_range_of_float32_is_a_broken_step(tmp_path):
    def far(logprobs, ref_logprobs, old_logprobs):
        return k3(logprobs, ref_logprobs + 88.8, old_logprobs)

    with pytest.warns(UserWarning, match=r"step 1 is skipped"):
        weights = fit(tmp_path, clipped_policy_loss, 1, beta=0.1, kl=far)
    assert [row["train/skipped_steps"] for row in weights.logged] == [1]


def test_one_broken_micro_batch_breaks_its_step(tmp_path):
    with pytest.warns(UserWarning, match="is skipped"):
        weights = fit(tmp_path, LossThatBreaks(3), 2, accumulate=2)  # the last micro-batch of the second step
    assert len(weights.seen) == 4
    assert all(torch.equal(a, b) for a, b in zip(weights.seen[1], weights.seen[3], strict=True))


def test_an_entropy_controller_is_told_nothing_of_a_broken_step(tmp_path):
    controller = FixedEntropy(0.1)
    told: list[float] = []
    controller.update = told.append  # pyright: ignore
    with pytest.warns(UserWarning, match="is skipped"):
        fit(tmp_path, LossThatBreaks(1), 3, entropy=controller)
    assert len(told) == 2


def test_several_in_a_row_end_the_run_and_leave_the_checkpoint(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with (
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(NumericError, match=f"{LIMIT}th in a row") as error,
    ):
        fit(tmp_path, LossThatBreaks(1, *range(3, 20)), 20, saved)
    assert error.value.exit_code == 6 and "optimizer.lr" in str(error.value)
    last = torch.load(tmp_path / f"step={2 + LIMIT}.ckpt", weights_only=True)  # one broken, one good, then four broken
    good = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert not (tmp_path / f"step={3 + LIMIT}.ckpt").exists()
    assert all(torch.equal(good["state_dict"][name], tensor) for name, tensor in last["state_dict"].items())
    assert last["lit_rl"] != good["lit_rl"]


def test_fast_dev_run_leaves_no_file(tmp_path):
    module = GRPO("tiny", varied, loss=LossThatBreaks(0), group_size=4, sampling=Sampling(max_new_tokens=4))
    trainer = L.Trainer(fast_dev_run=True, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    with pytest.warns(UserWarning, match="is skipped"):
        trainer.fit(module, datamodule=RolloutDataModule(task=Addition(max_operand=9, val_rows=4)))
    assert not list(tmp_path.iterdir())


def test_a_gradient_scaler_leaves_out_its_own_steps(tmp_path):
    """Under 16-mixed an infinite norm is how the scale is found: no step of ours, and no count."""
    from types import SimpleNamespace

    module: Any = GRPO("tiny", varied)
    scaled = SimpleNamespace(scaler=object())
    module._trainer = SimpleNamespace(precision_plugin=scaled, strategy=None)
    weight = torch.nn.Parameter(torch.ones(1))
    for _ in range(2 * LIMIT):
        weight.grad = torch.tensor([math.inf])
        module.configure_gradient_clipping(torch.optim.SGD([weight]))
    assert module.broken_steps.in_a_row == 0 and not module.broken_steps.last
