"""Methods that learn from a data set go through `lit-rl fit` too: the keys of `data` are those of their data module."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml

import lit_rl.cli
from lit_rl.algorithms import CPO, DPO, KTO, AdamW, Linear
from lit_rl.cli.lightning_app import CONFIG_NAME, WithKeywords, command_line
from lit_rl.cli.lightning_arguments import data_module_of
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import AdditionPairs
from lit_rl.ops.preference_losses import alphapo, aot, apo_zero_unpaired, ipo, kto
from lit_rl.rewards import RewardJudge

METHODS = {
    "SFT": ("AdditionText", ["--data.packing=best_fit", "--data.max_length=32"]),
    "DPO": ("AdditionPairs", ["--model.preference=lit_rl.ops.preference_losses.ipo"]),
    "CPO": ("AdditionPairs", ["--model.nll_coef=0.5"]),
    "ORPO": ("AdditionPairs", []),
    "KTO": ("AdditionPairs", []),
    "BCO": ("AdditionPairs", []),
    "RewardModeling": ("AdditionPairs", ["--model.center_coef=0.01"]),
    "ProcessRewardModeling": ("AdditionSteps", []),
}
GENERATE = ["--model.sampling.max_new_tokens=4"]
QUICK = [
    "--data.task.max_operand=6",
    "--data.task.val_rows=2",
    "--data.batch_size=4",
    "--trainer.max_steps=2",
    "--trainer.logger=false",
    "--trainer.accelerator=cpu",
    "--trainer.default_root_dir=run",
    "--trainer.enable_progress_bar=false",
]


def arguments(method: str) -> list[str]:
    task, own = METHODS[method]
    own = own if method.endswith("Modeling") else [*own, *GENERATE]
    return [f"--model={method}", "--model.model=tiny", f"--data.task=lit_rl.data.tasks.{task}", *own, *QUICK]


def test_every_method_is_built_of_its_arguments(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for method in METHODS:
        line = command_line(arguments(method), run=False)
        assert type(line.model).__name__ == method and line.datamodule.batch_size == 4


@pytest.mark.parametrize("method", ["SFT", "KTO"])
def test_a_method_fits(method, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-rl"])
    assert lit_rl.cli.run(["fit", *arguments(method)]) == 0, capsys.readouterr().err
    saved = yaml.safe_load((tmp_path / "run" / CONFIG_NAME).read_text())
    assert saved["data"]["batch_size"] == 4 and saved["model"]["class_path"].endswith(method)


def test_it_trains_as_the_plain_constructors_do(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-rl"])
    precision = "--trainer.precision=32-true"  # as Lightning's own Trainer; the command line would ask the processor
    line = command_line(["fit", *arguments("DPO"), "--optimizer=AdamW", "--optimizer.lr=1e-3", precision])
    module = DPO(
        "tiny", preference=ipo, optimizer=AdamW(lr=1e-3), scheduler=Linear(), sampling=Sampling(max_new_tokens=4)
    )
    trainer = L.Trainer(
        max_steps=2, gradient_clip_val=1.0, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=1,
        num_sanity_val_steps=0, inference_mode=False,
    )  # fmt: skip
    data = PreferenceDataModule(task=AdditionPairs(max_operand=6, val_rows=2), batch_size=4)
    trainer.fit(module, datamodule=data)
    ours = line.model.policy.state_dict()
    assert all(bool((weight == ours[name]).all()) for name, weight in module.policy.state_dict().items())


@pytest.mark.parametrize("method", ["SFT", "OnlineDPO"])
def test_a_judge_is_a_class_with_settings(method):
    data = "AdditionText" if method == "SFT" else "Addition"
    reward = ["--model.reward=lit_rl.rewards.exact_match"] if method == "OnlineDPO" else []
    line = command_line(
        [f"--model={method}", "--model.model=tiny", "--model.judge=lit_rl.rewards.RewardJudge",
         "--model.judge.soft=true", f"--data.task=lit_rl.data.tasks.{data}", *reward],
        run=False,
    )  # fmt: skip
    assert isinstance(line.model.judge, RewardJudge) and line.model.judge.soft


def test_the_data_module_is_that_of_the_last_algorithm_named(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("model: {class_path: lit_rl.algorithms.SFT}\n")
    assert data_module_of(["fit", f"--config={config}"]) is SupervisedDataModule
    assert data_module_of(["fit", "--config", str(config), "--model", "KTO"]) is PreferenceDataModule
    assert data_module_of(["fit", f"--config={config}", "--model=GRPO"]) is RolloutDataModule
    assert data_module_of(["fit", f"--config={Path('no.yaml')}"]) is RolloutDataModule


def test_a_key_of_another_data_module_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-rl"])
    assert lit_rl.cli.run(["fit", *arguments("DPO"), "--data.prompts_per_rollout=4"]) == 2
    assert "prompts_per_rollout" in capsys.readouterr().err


def test_settings_of_a_config_hide_nothing_of_a_loss():
    """`WithKeywords` stands for `functools.partial`: what a loss says of itself is seen through it."""
    smoothed = WithKeywords(aot, {"label_smoothing": 0.1})
    assert DPO("tiny", preference=smoothed).couples_rows
    with pytest.raises(ConfigError, match="likelihood_weights"):
        DPO("tiny", preference=smoothed, likelihood_weights=True)
    assert not KTO("tiny", verdict=WithKeywords(apo_zero_unpaired, {"desirable_weight": 2.0})).couples_rows
    module = KTO("tiny", verdict=WithKeywords(kto, {"desirable_weight": 2.0}))
    with pytest.warns(UserWarning, match="weigh 2 to 1"):
        module._warn_of_imbalance(10, 10)
    reward = CPO("tiny", preference=WithKeywords(alphapo, {"alpha": 0.5})).reward_of
    assert reward is not None and float(reward(torch.tensor([0.25]).log())) == pytest.approx((1 - 2) / 0.5)


def test_a_stream_is_a_key_here_too(monkeypatch, tmp_path, capsys):
    rows = "".join(f'{{"prompt": "{i}+1=", "completion": "{i + 1}"}}\n' for i in range(9))
    (tmp_path / "a.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    own = ["--data.path=a.jsonl", "--data.stream_buffer=4", "--data.max_length=32", "--data.val_fraction=0"]
    quick = [argument for argument in QUICK if not argument.startswith("--data.task")]

    def fit(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["lit-rl"])
        return lit_rl.cli.run(["fit", "--model=SFT", "--model.model=tiny", *own, *quick, *more])

    assert fit() == 0
    assert fit("--trainer.max_steps=-1", "--trainer.max_epochs=1", "--trainer.default_root_dir=another") == 2
    assert "a stream has no end" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["DPO", "GRPO"])
def test_a_step_that_does_not_divide_over_the_processes_is_refused_before_one_is_started(
    method, monkeypatch, tmp_path, capsys
):
    rollouts = ["--model=GRPO", "--model.model=tiny", "--model.reward=lit_rl.rewards.exact_match"]
    rollouts += ["--data.task=lit_rl.data.tasks.Addition", "--data.prompts_per_rollout=4"]
    rollouts += [argument for argument in QUICK if "batch_size" not in argument]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-rl"])
    monkeypatch.setattr("subprocess.Popen", None)
    own = rollouts if method == "GRPO" else arguments(method)
    assert lit_rl.cli.run(["fit", *own, "--trainer.devices=3", "--trainer.strategy=ddp"]) == 2
    said, key = capsys.readouterr().err, "prompts_per_rollout" if method == "GRPO" else "batch_size"
    assert f"data.{key}=4 must be divisible by" in said and "data-parallel size 3" in said
    assert not list(tmp_path.iterdir())
