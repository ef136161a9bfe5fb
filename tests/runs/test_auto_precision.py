"""`trainer.precision=auto`: what the device decides, what decides before it, and that a run keeps its precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
)
from runs_helpers import EVERY_STEP, SMALL, assert_same_run, interrupted, newest

import lit_rl.cli.trainer_settings as auto
from lit_rl import cli
from lit_rl.algorithms import GRPO
from lit_rl.algorithms.optim.master_weights import checkpoint_precision, multiplies_bfloat16
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.cli.trainer_settings import automatic_precision, precision_of, settle_precision, trainer_precision
from lit_rl.models import LanguageModel
from lit_rl.rewards import exact_match

LOCAL = ["model=local", "model.name=tiny", "sampling.max_new_tokens=6", "optimizer.lr=5e-4", "trainer.accelerator=cpu"]
"""The shipped policy without what its YAML recommends: its precision is then the default's."""
BF16, FLOAT32 = "bf16-true", "32-true"


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`units(yes)`: from now on the processor multiplies bfloat16 in hardware, or does not, whatever this one does."""
    return lambda yes: monkeypatch.setattr(auto, "multiplies_bfloat16", lambda device: yes)


# ---------------------------------------------------------------------- what is decided


@pytest.mark.parametrize(
    ("device", "has_units", "strategy", "dtype", "precision", "why"),
    [
        ("cpu", True, SingleDeviceStrategy, None, BF16, "this processor has units"),
        ("cpu", False, SingleDeviceStrategy, None, FLOAT32, "this processor has no units"),
        ("cuda", True, SingleDeviceStrategy, None, BF16, "this GPU has units"),
        ("cuda", False, DDPStrategy, None, FLOAT32, "this GPU has no units"),
        ("cuda", True, DDPStrategy, None, BF16, "this GPU has units"),
        ("cuda", True, FSDP2Strategy, None, BF16, "this GPU has units"),
        ("cuda", True, FSDPStrategy, None, FLOAT32, "FSDPStrategy keeps no float32 masters"),
        ("cuda", True, DeepSpeedStrategy, None, FLOAT32, "DeepSpeed"),
        ("mps", True, SingleDeviceStrategy, None, FLOAT32, "mps"),
        ("xla", True, SingleDeviceXLAStrategy, None, FLOAT32, "xla"),
        ("cpu", True, SingleDeviceStrategy, "float32", FLOAT32, "model.dtype=float32"),
        ("cuda", True, SingleDeviceStrategy, "float16", FLOAT32, "model.dtype=float16"),
        ("cuda", True, FSDP2Strategy, "bfloat16", FLOAT32, "model.dtype=bfloat16"),
    ],
)
def test_device_strategy_and_type_decide(device, has_units, strategy, dtype, precision, why):
    choice = automatic_precision(device, has_units, strategy, dtype)
    assert choice.precision == precision and why in choice.why


@pytest.mark.parametrize(
    ("known", "yes"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"architecture": "aarch64", "bf16": True}, True),
        ({"avx512_bf16": False, "amx_bf16": False, "avx512_f": True}, False),
        ({"architecture": "aarch64", "bf16": False}, False),
    ],
)
def test_a_processor_is_known_by_its_instructions(monkeypatch, known, yes):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert multiplies_bfloat16(torch.device("cpu")) is yes
    assert not multiplies_bfloat16(torch.device("mps"))


def test_the_type_counts_where_it_was_set():
    assert LanguageModel("tiny").dtype == LanguageModel("tiny", dtype="float32").dtype == "float32"
    assert not LanguageModel("tiny").dtype_was_set and LanguageModel("tiny", dtype="float32").dtype_was_set


def test_a_plugin_of_the_users_decides(units, tmp_path):
    units(True)
    plugin = MixedPrecision("bf16-mixed", "cpu")
    trainer = L.Trainer(accelerator="cpu", plugins=[plugin], default_root_dir=tmp_path, logger=False)
    assert settle_precision("auto", None, trainer, GRPO("tiny", exact_match)) is None
    assert trainer.precision_plugin is plugin


# ---------------------------------------------------------------------- what a run keeps


@pytest.mark.parametrize(
    ("has_units", "more"),
    [
        pytest.param(True, [], id="bf16"),
        pytest.param(False, ["model.lora.r=2"], marks=pytest.mark.all, id="float32-lora"),
    ],
)
def test_a_run_goes_on_in_the_precision_it_began_in_on_any_processor(train, tmp_path, capsys, units, has_units, more):
    """To the bit, and the record says which; the command does not."""
    whole, again, precision = tmp_path / "whole", tmp_path / "again", BF16 if has_units else FLOAT32
    words = [*SMALL, *LOCAL, *EVERY_STEP, "trainer.max_steps=3", *more]
    units(has_units)
    assert train(*words, f"run_dir={whole}") == 0
    assert capsys.readouterr().out.count(f"precision {precision}: this processor has") == 1
    assert yaml.safe_load((whole / "config.yaml").read_text())["trainer"]["precision"] == precision
    saved = newest(whole)
    assert checkpoint_precision(saved) == saved["precision"] == precision
    trained = {tensor.dtype for tensor in saved["state_dict"].values()}
    assert trained == {torch.bfloat16 if has_units and not more else torch.float32}
    interrupted(whole, again, 1)
    units(not has_units)
    assert train(*words, f"run_dir={again}", "ckpt_path=last") == 0
    assert f"precision {precision}: the checkpoint was made in it" in capsys.readouterr().out
    assert_same_run(whole, again)
    assert yaml.safe_load((again / "config.yaml").read_text())["trainer"]["precision"] == precision


def test_the_precision_of_a_checkpoint_is_the_one_it_names(tmp_path):
    file = tmp_path / "one.ckpt"
    for precision in (BF16, FLOAT32, "bf16-mixed"):
        torch.save({"state_dict": {}, "optimizer_states": [], "precision": precision}, file)
        assert precision_of(file) == trainer_precision({"precision": "auto", "plugins": None}, str(file)) == precision
    assert trainer_precision({"precision": "auto", "plugins": [MixedPrecision("bf16-mixed", "cpu")]}, str(file)) is None
    assert trainer_precision({"precision": FLOAT32, "plugins": None}, str(file)) == FLOAT32
    (tmp_path / "sharded").mkdir()
    torch.save({"precision": BF16}, tmp_path / "sharded" / "meta.pt")
    assert precision_of(tmp_path / "sharded") == BF16
    (tmp_path / "torn.ckpt").write_bytes(b"torn")
    assert precision_of(tmp_path / "torn.ckpt") is None


@pytest.mark.all
def test_lightning_cli_keeps_it_too_and_refuses_what_it_finds_too_late(tmp_path, monkeypatch, capsys, units):
    monkeypatch.setattr("sys.argv", ["lit-rl"])
    run, words = tmp_path / "run", ["fit", "--model=GRPO", "--model.model=tiny", "--model.sampling.max_new_tokens=4"]
    words += ["--data.task=lit_rl.data.tasks.Addition", "--data.prompts_per_rollout=2", "--data.task.val_rows=2"]
    words += ["--model.reward=lit_rl.rewards.exact_match", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    words += [f"--trainer.default_root_dir={run}", "--trainer.enable_progress_bar=false"]
    words += ["--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint"]
    words += ["--trainer.callbacks.save_last=true", "--trainer.callbacks.every_n_train_steps=1"]

    def fit(steps: int, *more: str) -> tuple[int, str, Any]:
        code, written = cli.run([*words, f"--trainer.max_steps={steps}", *more]), capsys.readouterr()
        config = yaml.safe_load((run / "lit_rl_config.yaml").read_text())
        return code, written.out + written.err, config["trainer"]["precision"]

    units(True)
    code, said, precision = fit(1)
    assert code == 0 and said.count("precision bf16-true: this processor has") == 1 and precision == BF16
    (last,) = (run / "checkpoints").glob("last.ckpt")
    units(False)
    code, said, _ = fit(2, "--ckpt_path=last")
    assert code == 7 and "made with trainer.precision=bf16-true, and trainer.precision=auto is 32-true" in said
    assert "masters would be lost" in fit(2, "--ckpt_path=last", "--trainer.precision=32-true")[1]
    code, said, precision = fit(2, f"--ckpt_path={last}")
    assert code == 0 and "precision bf16-true: the checkpoint was made in it" in said and precision == BF16


def test_a_named_precision_and_the_shipped_policys_are_left_alone(train, tmp_path, capsys, units):
    units(True)
    fast = [*SMALL, "trainer.max_steps=1", "trainer.limit_val_batches=0"]
    named = [*LOCAL, "trainer.precision=bf16-mixed"]
    for folder, words, precision in (("tiny", [], FLOAT32), ("named", named, "bf16-mixed")):
        assert train(*fast, *words, f"run_dir={tmp_path / folder}") == 0
        assert newest(tmp_path / folder)["precision"] == precision
    assert "precision " not in capsys.readouterr().out
