"""What was never proven with DeepSpeed is refused by name, before a weight is loaded or a process waits for another."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import dist_equal
import pytest
import torch
from torch import nn

deepspeed = pytest.importorskip("deepspeed")

from lightning.pytorch.accelerators import CPUAccelerator  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy  # noqa: E402
from zero_on_cpu import ZeROOnCPU  # noqa: E402

from lit_rl.algorithms.checks.strategy_checks import check_zero_model, check_zero_optimizer, check_zero_settings  # noqa: E402
from lit_rl.algorithms.optim.strategies import FACTS, ZeROStrategy, check_facts  # noqa: E402
from lit_rl.core.errors import BackendError, ConfigError, StorageError  # noqa: E402
from lit_rl.models.language_model import LanguageModel  # noqa: E402

pytestmark = pytest.mark.all


class Alone(ZeROOnCPU):
    """Waits for no other process: what is refused is refused before one is needed."""

    def setup_distributed(self) -> None:
        self.set_world_ranks()


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Launchers write into it, and processes that are started later would read that."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Loaded(Exception):
    """The weights would be loaded now."""


REFUSED: dict[str, tuple[int, list[str], dict[str, Any], list[str]]] = {
    "bf16-true": (2, [], {"precision": "bf16-true"}, ["trainer.precision=bf16-true", "32-true", "strategy=fsdp"]),
    "bf16-mixed": (2, [], {"precision": "bf16-mixed"}, ["trainer.precision=bf16-mixed", "32-true"]),
    "narrow": (2, ["model.dtype=bfloat16"], {}, ["model.dtype=bfloat16", "float32"]),
    "by-value": (2, [], {"gradient_clip_algorithm": "value"}, ["clip_algorithm=value", "norm"]),
    "moving": (3, ["algo.beta=0.1", "reference=ema"], {}, ["reference=EMA", "frozen_copy", "deepspeed_2"]),
    "split": (2, ["optimizer=adamw_split"], {}, ["adamw_split", "optimizer=adamw"]),
    "matrices": (2, ["optimizer=by_path", "optimizer.path=torch.optim.Adafactor"], {}, ["optim.Adafactor", "adamw"]),
    "engine": (3, ["generator=hf_continuous"], {}, ["HFContinuousGenerator", "generator=native or hf"]),
    "replay": (2, ["algo/replay=buffer"], {}, ["algo/replay was never", "algo/replay=none", "strategy=fsdp"]),
    "groups": (2, ["algo/groups=dynamic"], {}, ["algo/groups=DynamicSampling was never", "algo/groups=all"]),
    "curriculum": (2, ["data.curriculum.unseen=1"], {}, ["data.curriculum was never", "strategy=fsdp"]),
    "coupled": (2, ["algo=aot"], {}, ["couples the rows of a step was never"]),
    "win-rate": (2, ["eval.win_rate_against=base"], {}, ["eval.win_rate_against was never"]),
    "adapter": (3, ["algo=ppo", "algo/critic=adapter", "model.lora.r=4"], {}, ["algo/critic=adapter was never"]),
    "warmup": (3, ["algo=ppo", "algo.critic_warmup=1"], {}, ["algo.critic_warmup was never"]),
    "kto": (2, ["algo=kto"], {}, ["KTO", "strategy=ddp"]),
    "images": (2, ["model=digits", "data=digits", "reward=exact_match"], {}, ["digits", "strategy=fsdp"]),
}  # fmt: skip


@pytest.mark.parametrize(("stage", "words", "settings", "said"), REFUSED.values(), ids=REFUSED)
def test_settings_that_were_never_proven(stage, words, settings, said, tmp_path, monkeypatch):
    if "optimizer" not in " ".join(words):  # which is made of loaded weights
        monkeypatch.setattr(LanguageModel, "load", lambda self: (_ for _ in ()).throw(Loaded()))
    module, data = dist_equal.parts(*words)
    trainer = dist_equal.trainer(tmp_path, 1, strategy=Alone(stage), max_steps=1, **settings)
    with pytest.raises(ConfigError) as refusal:
        trainer.fit(module, datamodule=data)
    assert all(word in str(refusal.value) for word in said), refusal.value


def test_the_same_settings_without_what_is_refused_reach_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModel, "load", lambda self: (_ for _ in ()).throw(Loaded()))
    module, data = dist_equal.parts("algo.beta=0.1", "reference=ema")
    with pytest.raises(Loaded):
        dist_equal.trainer(tmp_path, 1, strategy=Alone(2), max_steps=1).fit(module, datamodule=data)


def test_lightnings_own_strategy_and_machines_without_a_gpu():
    plain, ours = DeepSpeedStrategy(stage=2), ZeROStrategy(3)
    with pytest.raises(ConfigError, match="divides the loss.*strategy=deepspeed_1, deepspeed_2 or deepspeed_3"):
        check_zero_settings(LanguageModel("tiny"), "32-true", plain)
    ours.accelerator = CPUAccelerator()
    with pytest.raises(BackendError, match="deepspeed_3 needs GPUs.*strategy=ddp or fsdp"):
        check_zero_settings(LanguageModel("tiny"), "32-true", ours)


def test_settings_of_the_strategy():
    for settings, said in (
        ({"stage": 4}, "stage=4.*1, 2 and 3"),
        ({"config": {"fp16": {"enabled": True}}}, "offload_optimizer"),
        ({"offload_optimizer": True, "offload_optimizer_device": "nvme"}, "NVMe.*to the CPU"),
    ):
        with pytest.raises(ConfigError, match=said):
            ZeROStrategy(**settings)


def test_checkpoints_of_other_runs(tmp_path):
    here = {"stage": 2, "processes": 2, "trained": {"policy.a": [2, 3]}}
    file = tmp_path / FACTS
    for there, said in (
        (here | {"stage": 3}, "stage=3.*this run has 2"),
        (here | {"processes": 4}, "processes=4.*trainer.devices"),
        (here | {"trained": {"policy.a": [2, 3], "critic.b": [1]}}, "not of this model.*critic.b"),
        (here | {"trained": {"policy.a": [3, 2]}}, "not of this model.*policy.a"),
        ({"stage": 2}, "no complete checkpoint.*ckpt_path"),
    ):
        file.write_text(json.dumps(there))
        with pytest.raises(StorageError, match=said):
            check_facts(file, here)
    file.write_text(json.dumps(here))
    check_facts(file, here)
    with pytest.raises(StorageError, match="no complete checkpoint"):
        check_facts(tmp_path / "none", here)


def test_only_optimizers_that_move_each_number_by_itself():
    weight = nn.Parameter(torch.ones(2, 2))
    for moved in (torch.optim.AdamW([weight]), torch.optim.SGD([weight])):
        check_zero_optimizer(moved)
    for looks in (torch.optim.Adafactor([weight]), torch.optim.LBFGS([weight])):
        with pytest.raises(ConfigError, match=f"{type(looks).__name__}.*optimizer=adamw"):
            check_zero_optimizer(looks)


def test_experts_that_ranks_would_wait_for():
    policy = LanguageModel("tiny").load()
    check_zero_model(policy, ZeROOnCPU(3))
    policy.config.num_local_experts = 4
    check_zero_model(policy, ZeROOnCPU(2))
    with pytest.raises(ConfigError, match="mixture of experts.*strategy=fsdp or strategy=deepspeed_2"):
        check_zero_model(policy, ZeROOnCPU(3))
