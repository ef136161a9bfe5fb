"""What a Lightning user's hand types works: each flag and callback, on real runs in this process."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from runs_helpers import SMALL, rows

from lit_rl.algorithms import GRPO, AdamW, Constant, Evaluation
from lit_rl.algorithms.checks.strategy_checks import check_trainable_settings, check_trainable_weights
from lit_rl.algorithms.optim.master_weights import MasterWeights
from lit_rl.algorithms.optim.split_adamw import join
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models import LanguageModel, Lora
from lit_rl.rewards import exact_match


def module(algorithm=GRPO, model="tiny", **changes):
    settings = {
        "sampling": Sampling(max_new_tokens=6),
        "optimizer": AdamW(lr=1e-4),
        "scheduler": Constant(),
        "group_size": 4,
        "evaluation": Evaluation(limit=4),
    }
    return algorithm(model, exact_match, **{**settings, **changes})


def data(**changes):
    return RolloutDataModule(task=Addition(max_operand=5, val_rows=4), **{"prompts_per_rollout": 4, **changes})


def trainer(path: Path, **changes):
    settings = {
        "accelerator": "cpu",
        "max_steps": 3,
        "default_root_dir": path,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**{**settings, **changes})


class Watch(L.Callback):
    """What the loop did."""

    def __init__(self) -> None:
        self.prompts: list[list[str]] = []
        self.slots: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.prompts.append(list(batch.prompts))
        self.slots.append(batch.slot)


def fit(path, grpo=None, **changes):
    watch, grpo = Watch(), grpo or module()
    one = trainer(path, **{**changes, "callbacks": [watch, *changes.get("callbacks", [])]})
    one.fit(grpo, datamodule=changes.pop("datamodule", None) or data())
    return one, grpo, watch


def test_max_steps_counts_optimizer_steps_and_global_step_agrees(tmp_path):
    one, grpo, watch = fit(tmp_path, module(minibatches=2, iterations=2), accumulate_grad_batches=2, max_steps=6)
    assert one.global_step == 6
    assert watch.slots == [*range(8), *range(4)]  # 8 micro-batches, 4 steps a rollout


def test_fast_dev_run_is_one_rollout_and_one_update(tmp_path):
    one, grpo, watch = fit(tmp_path, fast_dev_run=True)
    assert one.global_step == 1 and watch.slots == [0]
    assert not list(tmp_path.rglob("*"))


def test_overfit_batches_repeats_the_same_prompts(tmp_path):
    one, grpo, watch = fit(tmp_path, overfit_batches=2, max_steps=6)
    assert watch.prompts[0:2] == watch.prompts[2:4] == watch.prompts[4:6]


def test_limit_train_batches_ends_the_epoch(tmp_path):
    one, grpo, watch = fit(tmp_path, limit_train_batches=2, max_steps=-1, max_epochs=2)
    assert one.global_step == 4 and one.current_epoch == 2


def test_gradient_clip_val_bounds_what_the_optimizer_sees_and_reports_the_norm_before(tmp_path):
    seen = []

    class Norm(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            grads = [p.grad.flatten() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            seen.append(torch.cat(grads).norm().item())

    one, grpo, _ = fit(tmp_path, module(group_size=8), gradient_clip_val=0.01, callbacks=[Norm()], max_steps=4)
    assert max(seen) > 0.1  # Lightning calls that hook before it clips
    clipped = torch.cat([p.grad.flatten() for p in grpo.policy.parameters() if p.grad is not None]).norm().item()
    assert clipped <= 0.01 + 1e-6
    assert one.callback_metrics["train/grad_norm"] == pytest.approx(seen[-1], rel=1e-4)


@pytest.mark.parametrize(
    "model, precision", [("tiny", "bf16-true"), (LanguageModel("tiny", dtype="bfloat16"), "32-true")]
)
def test_weights_in_bfloat16_have_masters_and_nothing_else_is_narrow(tmp_path, model, precision):
    one, grpo, _ = fit(tmp_path, module(model=model, optimizer=AdamW(lr=1e-6), iterations=2), precision=precision)
    (optimizer,) = one.optimizers
    assert isinstance(optimizer, MasterWeights) and torch.get_default_dtype() == torch.float32
    assert {p.dtype for p in grpo.policy.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in grpo.policy.buffers() if b.is_floating_point()} == {torch.float32}  # of the positions
    for weight, state in optimizer.state.items():
        assert (state["remainder"].dtype, state["exp_avg"].dtype) == (torch.int16, torch.float32)
        master = join(weight.detach(), state["remainder"])
        assert ((weight - master).abs() == (master.bfloat16() - master).abs()).all(), "none is nearer"
    assert any(state["remainder"].any() for state in optimizer.state.values())
    scored = grpo.scored
    assert scored.scores.total.dtype == scored.completions.sampler_logprobs.dtype == torch.float32
    assert grpo.rollout.advantages.dtype == torch.float32


def test_weights_without_masters_are_refused_by_name_and_strategy():
    head = {"policy.lora_A": torch.zeros(2), "policy.score.weight": torch.zeros(2, dtype=torch.bfloat16)}
    check_trainable_weights(head, SingleDeviceStrategy())
    check_trainable_weights(head, DDPStrategy())
    for strategy, take in ((FSDPStrategy(), "FSDP2"), (FSDP2Strategy(), "bf16-true")):
        with pytest.raises(ConfigError, match=rf"bfloat16 \(policy.score.weight\).*{type(strategy).__name__}.*{take}"):
            check_trainable_weights(head, strategy)
        with pytest.raises(ConfigError, match=rf"model.dtype=bfloat16.*{type(strategy).__name__}.*{take}"):
            check_trainable_settings(LanguageModel("tiny", dtype="bfloat16"), "32-true", strategy)
        check_trainable_settings(LanguageModel("tiny", dtype="bfloat16", lora=Lora(r=2)), "32-true", strategy)
    with pytest.raises(ConfigError, match="bf16-true.*FSDPStrategy"):
        check_trainable_settings(LanguageModel("tiny"), "bf16-true", FSDPStrategy())
    check_trainable_settings(LanguageModel("tiny"), "bf16-true", FSDP2Strategy())
    packed = LanguageModel("tiny", quantization="nf4", lora=Lora(r=2))
    check_trainable_settings(packed, "32-true", DDPStrategy())
    for strategy in (FSDP2Strategy(), FSDPStrategy()):
        with pytest.raises(ConfigError, match=r"model\.quantization=nf4.*strategy=ddp"):
            check_trainable_settings(packed, "32-true", strategy)
    half = {name: tensor.half() for name, tensor in head.items()}
    with pytest.raises(ConfigError, match="float16"):
        check_trainable_weights(half, SingleDeviceStrategy())
    check_trainable_weights(half, DeepSpeedStrategy.__new__(DeepSpeedStrategy))  # which keeps float32 beside them


def test_adapters_of_a_half_precision_policy_are_float32_and_learn(tmp_path):
    _, grpo, _ = fit(tmp_path, module(model=LanguageModel("tiny", dtype="bfloat16", lora=Lora(r=2))))
    trained = {name: p for name, p in grpo.policy.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(p.abs().sum() > 0 for name, p in trained.items() if "lora_B" in name)  # these begin at 0


def test_model_checkpoint_follows_the_validation_reward(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="val/reward", mode="max", filename="{step}")
    one, grpo, _ = fit(tmp_path, callbacks=[best], enable_checkpointing=True, val_check_interval=2, max_steps=4)
    assert Path(best.best_model_path).exists() and best.best_model_score is not None
    saved = torch.load(best.best_model_path, weights_only=True)
    assert saved["global_step"] in (2, 4)


def test_early_stopping_on_the_reward_stops(tmp_path):
    stop = EarlyStopping("train/reward", mode="max", patience=1, min_delta=2.0, check_on_train_epoch_end=True)
    one, *_ = fit(tmp_path, callbacks=[stop], limit_train_batches=1, max_steps=-1, max_epochs=20)
    assert one.current_epoch == 2


def test_a_monitor_that_is_never_logged_is_an_error(tmp_path):
    for watcher in (
        EarlyStopping("val/rewrd", mode="max", check_on_train_epoch_end=False),
        ModelCheckpoint(tmp_path, monitor="val/rewrd", every_n_train_steps=1000),
    ):
        with pytest.raises(ConfigError, match="Did you mean 'val/reward'") as caught:
            fit(tmp_path, callbacks=[watcher], val_check_interval=1, enable_checkpointing=True)
        assert "train/loss" in str(caught.value)


def test_csv_and_tensorboard_loggers_get_every_metric(tmp_path):
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tb")]
    fit(tmp_path, logger=loggers, callbacks=[LearningRateMonitor("step")])
    text = next((tmp_path / "csv").rglob("metrics.csv")).read_text()
    for name in (
        "train/reward",
        "train/loss",
        "train/grad_norm",
        "time/generate",
        "tokens_per_second",
        "lr-AdamW/policy",
    ):
        assert name in text.splitlines()[0]
    assert list((tmp_path / "tb").rglob("events.out.tfevents.*"))


def test_test_and_predict(tmp_path):
    one, grpo, _ = fit(tmp_path)
    assert 0 <= one.test(grpo, datamodule=data(), verbose=False)[0]["test/reward"] <= 1
    (table,) = one.predict(grpo, datamodule=data())
    assert len(table["prompt"]) == len(table["completion"]) == len(table["reward"]) == 4


def test_fit_twice_in_one_process(tmp_path):
    _, grpo, _ = fit(tmp_path)
    one, *_ = fit(tmp_path, grpo)
    assert one.global_step == 3


def test_callbacks_change_no_weight(train, tmp_path):
    """They watch and save: without them the trained weights are the same."""
    overrides = [*(o for o in SMALL if not o.startswith("callbacks")), "trainer.max_steps=3"]
    assert train(*overrides, f"run_dir={tmp_path / 'with'}") == 0
    assert train(*overrides, f"run_dir={tmp_path / 'without'}", "callbacks=none") == 0
    a, b = (
        torch.load(tmp_path / "with" / "checkpoints" / "step_00000003.ckpt", weights_only=True)["state_dict"],
        _exported(tmp_path / "without"),
    )
    assert all(torch.equal(a[f"policy.{name}"], tensor) for name, tensor in b.items())


def _exported(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "hf" / "model.safetensors")


def test_a_changing_accumulation_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="accumulate_grad_batches"):
        fit(tmp_path, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


def test_other_loaders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="RolloutDataModule"):
        trainer(tmp_path).fit(module(), train_dataloaders=torch.utils.data.DataLoader(torch.zeros(4, 1)))


def test_a_finished_run_holds_what_the_design_promises(train, tmp_path):
    run = tmp_path / "run"
    overrides = [o for o in SMALL if not o.startswith("logger")]
    assert train(*overrides, "callbacks.samples.print=2", f"run_dir={run}") == 0
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "hf/config.json", "hf/README.md", "hf/tokenizer.json"):
        assert (run / name).is_file(), name
    assert [p.name for p in (run / "checkpoints").iterdir()] != []
    assert list((run / "samples").glob("step_*.parquet")) and list(run.glob("events.out.tfevents.*"))

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run)).Reload()
    assert "train/reward" in events.Tags()["scalars"]
    assert {"histograms/reward", "histograms/length"} <= set(events.Tags()["histograms"])
    assert any("samples" in tag for tag in events.Tags()["tensors"])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 12
    most = summary["peak_memory"]["process"]
    assert 2**27 < most < 2**40, "bytes, with torch in them"
    assert set(summary["phase_memory"]) == {"generate", "reward", "update"}
    assert summary["decode_steps"] == "lean_steps"
    assert all(2**27 < held <= most for held in summary["phase_memory"].values())
    assert {row["step"] for row in rows(run)} >= set(range(1, 13))


def test_the_export_is_the_trained_policy(train, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    assert train(*SMALL, "trainer.max_steps=2", f"run_dir={run}") == 0
    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    trained = torch.load(run / "checkpoints" / "step_00000002.ckpt", weights_only=True)["state_dict"]
    weights = model.state_dict()
    assert all(torch.equal(weights[name.removeprefix("policy.")], tensor) for name, tensor in trained.items())
    assert tokenizer.chat_template and tokenizer.decode(tokenizer("17+25=").input_ids) == "17+25="
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
