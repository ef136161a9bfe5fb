"""The moving average of the policy's weights: by hand over real steps, and exported."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from runs_helpers import SMALL, assert_same
from safetensors.torch import load_file

from lit_rl.callbacks import BEMAWeights, EMAWeights

pytestmark = pytest.mark.all

RUN = [
    *SMALL,
    "callbacks=ema",
    "callbacks.ema.decay=0.6",
    "trainer.max_steps=3",
    "trainer.limit_val_batches=0",
    "optimizer.lr=1e-3",
    "callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.checkpoint.save_top_k=-1",
]


def checkpoint(run_dir: Path, step: int) -> dict:
    return torch.load(run_dir / "checkpoints" / f"step_{step:08d}.ckpt", weights_only=True)


def average(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint(run_dir, step)["callbacks"]["EMAWeights"]["average"]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return {name.removeprefix("policy."): t for name, t in checkpoint(run_dir, step)["state_dict"].items()}


def assert_follows(run_dir: Path, steps: range) -> None:
    """Each step's average is that of the step before, and a share of the step's weights."""
    for step in steps:
        now, before, expected = weights(run_dir, step), average(run_dir, step - 1), average(run_dir, step)
        assert expected.keys() <= now.keys()
        for name, value in expected.items():
            torch.testing.assert_close(value, 0.6 * before[name] + 0.4 * now[name].float(), rtol=1e-6, atol=1e-7)
            assert value.dtype == torch.float32


def test_the_average_of_an_adapter_counts_steps(train, tmp_path):
    """With two micro-batches a step: the average counts optimizer steps, not batches."""
    whole = tmp_path / "whole"
    overrides = [*RUN, "model.lora.r=2", "trainer.accumulate_grad_batches=2"]
    assert train(*overrides, f"run_dir={whole}") == 0
    assert_follows(whole, range(2, 4))
    assert all("lora" in name for name in average(whole, 3))
    adapter = load_file(whole / "hf_ema" / "adapter" / "adapter_model.safetensors")
    for name, value in average(whole, 3).items():
        assert torch.equal(adapter[name.replace(".default", "")], value)


def test_the_export_is_the_average_and_the_run_is_the_run_without(train, tmp_path):
    """And a run that was without may be resumed with it: the average begins where it comes in."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    assert train(*RUN, f"run_dir={run}") == 0
    assert_follows(run, range(2, 4))
    exported, trained = load_file(run / "hf_ema" / "model.safetensors"), load_file(run / "hf" / "model.safetensors")
    assert exported.keys() == trained.keys()
    for name, value in average(run, 3).items():
        assert torch.equal(exported[name], value)
        assert not torch.equal(exported[name], trained[name])
    assert "moving average" in (run / "hf_ema" / "README.md").read_text()

    assert train(*[override for override in RUN if "ema" not in override], f"run_dir={plain}") == 0
    assert_same(load_file(plain / "hf" / "model.safetensors"), trained)
    (plain / "summary.json").unlink()
    with pytest.warns(UserWarning, match="begins with those of this step"):
        assert train(*RUN, "trainer.max_steps=4", f"run_dir={plain}", "ckpt_path=last") == 0
    for name, value in average(plain, 4).items():
        expected = 0.6 * weights(plain, 3)[name].float() + 0.4 * weights(plain, 4)[name].float()
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)


def test_a_small_share_is_not_lost_in_half_precision():
    """1.0 and its neighbour in bfloat16 are 1/128 apart: a bfloat16 average would never move."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.policy = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)

    module, callback, trainer = Module(), EMAWeights(decay=0.992), L.Trainer(logger=False, barebones=True)
    torch.nn.init.constant_(module.policy.weight, 1.0)
    callback.on_train_start(trainer, module)
    torch.nn.init.constant_(module.policy.weight, 1 + 1 / 128)
    for step in range(1, 101):
        trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        callback.on_train_batch_end(trainer, module, None, None, 0)
    expected = 1 + (1 - 0.992**100) / 128
    assert callback.averaged(module)["weight"].dtype == torch.bfloat16
    assert callback._whole("average")["weight"].item() == pytest.approx(expected, abs=1e-6)


class Numbers(L.LightningModule):
    """A policy of two numbers, and what TRL's callback can make a copy of."""

    class Policy(torch.nn.Module):
        def __init__(self, config: float) -> None:
            super().__init__()
            self.config = config
            self.weight = torch.nn.Parameter(torch.tensor([config, -config]))

    def __init__(self) -> None:
        super().__init__()
        self.policy = Numbers.Policy(1.5)


@pytest.mark.parametrize("every, burn_in, least", [(1, 0, 0.0), (3, 0, 0.4), (2, 3, 0.0), (2, 4, 0.3)])
def test_the_average_without_its_lag_is_trls(every, burn_in, least):
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    from transformers import TrainerControl, TrainerState

    settings = {"ema_power": 0.7, "bias_power": 0.3, "lag": 4, "multiplier": 2.0}
    theirs = callbacks.BEMACallback(update_freq=every, update_after=burn_in, min_ema_multiplier=least, **settings)
    ours = BEMAWeights(every=every, burn_in=burn_in, min_beta=least, **settings)
    module, trainer = Numbers(), L.Trainer(logger=False, barebones=True)
    state, control = TrainerState(), TrainerControl()
    theirs.on_train_begin(None, state, control, model=module.policy)
    ours.on_train_start(trainer, module)
    torch.manual_seed(0)
    for step in range(1, 12):
        module.policy.weight.data += torch.randn(2)
        state.global_step = step
        trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        theirs.on_step_end(None, state, control, model=module.policy)
        ours.on_train_batch_end(trainer, module, None, None, 0)
        if step == 6:  # resumed here
            checkpoint: dict = {"callbacks": {}}
            ours.on_save_checkpoint(trainer, module, checkpoint)
            ours = BEMAWeights(every=every, burn_in=burn_in, min_beta=least, **settings)
            ours.load_state_dict(checkpoint["callbacks"][ours.state_key])
            ours.on_train_start(trainer, module)
        torch.testing.assert_close(ours.averaged(module)["weight"], theirs.running_model.weight.data)
    assert not torch.equal(ours.averaged(module)["weight"], module.policy.weight.data)


def test_the_average_without_its_lag_is_exported(train, tmp_path):
    run = tmp_path / "run"
    overrides = ["callbacks=bema" if word == "callbacks=ema" else word for word in RUN if ".decay" not in word]
    assert train(*overrides, "callbacks.bema.every=2", "callbacks.bema.lag=1", f"run_dir={run}") == 0
    kept = checkpoint(run, 3)["callbacks"]["BEMAWeights"]
    exported, now = load_file(run / "hf_bema" / "model.safetensors"), weights(run, 2)
    for name, value in kept["corrected"].items():
        assert torch.equal(exported[name], value)
        moved = now[name] - kept["initial"][name]
        torch.testing.assert_close(value, kept["average"][name] + 3**-0.2 * moved, rtol=1e-5, atol=1e-6)
    assert "bias-corrected" in (run / "hf_bema" / "README.md").read_text()


def test_the_merged_weights_lie_between_the_first_and_the_last_ones(train, tmp_path, capsys):
    whole = tmp_path / "whole"
    overrides = ["callbacks=merge" if word == "callbacks=ema" else word for word in RUN if ".decay" not in word]
    overrides += ["callbacks.merge.share=0.25"]
    assert train(*overrides, f"run_dir={whole}") == 0
    assert f"average       {whole / 'hf_merged'}\n" in capsys.readouterr().out
    start = checkpoint(whole, 3)["callbacks"]["MergedWeights"]["initial"]
    merged, trained = (
        load_file(whole / "hf_merged" / "model.safetensors"),
        load_file(whole / "hf" / "model.safetensors"),
    )
    assert merged.keys() == trained.keys()
    for name, value in start.items():
        torch.testing.assert_close(merged[name], 0.75 * value + 0.25 * trained[name], rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(merged[name], trained[name]) for name in start)
    assert "0.25 of the way" in (whole / "hf_merged" / "README.md").read_text()


def test_a_merge_of_adapters_is_refused(train, tmp_path, capsys):
    overrides = ["callbacks=merge" if word == "callbacks=ema" else word for word in RUN if ".decay" not in word]
    assert train(*overrides, "model.lora.r=2", f"run_dir={tmp_path}") == 2
    assert "callbacks=merge interpolates weights" in capsys.readouterr().err
