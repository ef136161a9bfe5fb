"""What `strategy=fsdp_tp` was never compared with is refused before weights are loaded, by the name of its key."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoConfig

from lit_rl.algorithms import DPO, GRPO, SFT, Reinforce
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.optim.optimizers import AdamW, ByPath
from lit_rl.algorithms.optim.strategies import FSDPTPStrategy, pickled, step_one_by_one
from lit_rl.algorithms.terms.groups import DynamicSampling
from lit_rl.errors import ConfigError
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.lora import Lora
from lit_rl.models.policy.tensor_parallel import check_plan, norm_over_meshes
from lit_rl.models.reference.moving import EMA


def set_up(module: PolicyModule, stage: str = "fit", **changed: Any) -> None:
    """As a Trainer of two processes does, before it loads a weight; no process is started."""
    strategy = FSDPTPStrategy(tp_size=2)
    module.trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False, **changed
    )
    PolicyModule.setup(module, stage)


def grpo(model: Any = "tiny", **settings: Any) -> GRPO:
    return GRPO(model, reward=lambda completions: [1.0] * len(completions), **settings)


REFUSED = {
    "algo=Reinforce": lambda: Reinforce("tiny", reward=len),
    "model.lora=": lambda: grpo(LanguageModel("tiny", lora=Lora(r=2))),
    "model.dtype=bfloat16": lambda: grpo(LanguageModel("tiny", dtype="bfloat16")),
    "reference=EMA": lambda: grpo(beta=0.1, reference=EMA(0.9)),
    "algo.precompute_reference=true": lambda: DPO("tiny", precompute_reference=True),
    "algo/groups=DynamicSampling": lambda: grpo(groups=DynamicSampling()),
    "eval.win_rate_against": lambda: grpo(evaluation=Evaluation(win_rate_against="tiny")),
    "optimizer=torch.optim.Adafactor": lambda: SFT("tiny", optimizer=ByPath("torch.optim.Adafactor", lr=1e-3)),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_was_never_compared_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*[Ss]trategy=fsdp"):
        set_up(REFUSED[key]())


@pytest.mark.parametrize("changed", [{"precision": "bf16-mixed"}, {"gradient_clip_algorithm": "value"}])
def test_settings_of_the_trainer_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"trainer.{next(iter(changed))}={next(iter(changed.values()))}"):
        set_up(grpo(), **changed)


def test_what_was_compared_passes() -> None:
    for module in (grpo(beta=0.1), DPO("tiny"), SFT("tiny")):
        set_up(module)


@pytest.mark.parametrize(
    ("kind", "sizes", "tp_size", "said"),
    [
        ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2}, 4, "num_key_value_heads=2.*divide it: 1, 2"),
        ("llama", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}, 2, "num_attention_heads=3"),
        ("llama", {"intermediate_size": 33}, 2, "intermediate_size=33"),
        ("gpt2", {}, 2, "types llama, qwen2, qwen3"),
        ("qwen2_moe", {}, 2, "types llama, qwen2, qwen3"),
        ("llama", {"attention_dropout": 0.1}, 2, "attention_dropout=0.1"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(kind: str, sizes: dict[str, int], tp_size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.strategy.tp_size={tp_size}.*{said}"):
        check_plan(AutoConfig.for_model(kind, **sizes), tp_size)


@pytest.mark.parametrize(
    ("settings", "devices", "said"),
    [
        ({"tp_size": 2}, 3, "tp_size=2 does not divide trainer.devices=3"),
        ({"tp_size": 2, "fsdp_size": 3}, 4, "fsdp_size=3.*Take fsdp_size=2"),
    ],
)
def test_a_mesh_of_another_size_than_the_run_is_refused(settings: dict[str, Any], devices: int, said: str) -> None:
    strategy = FSDPTPStrategy(**settings)
    strategy.parallel_devices = [torch.device("cpu")] * devices
    with pytest.raises(ConfigError, match=said):
        strategy.check_sizes()


def test_offloaded_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_offload=true.*strategy=fsdp"):
        FSDPTPStrategy(cpu_offload=True)


def test_the_norm_of_no_gradient_is_zero() -> None:
    """As of a rollout that nobody scored."""
    assert norm_over_meshes([]) == 0


def test_what_a_user_gave_may_not_be_sent() -> None:
    assert pickled(lambda: 0) is None and pickled(1) is not None


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp_size=1.*strategy=fsdp"):
        FSDPTPStrategy(tp_size=1)


def test_an_optimizer_steps_each_weight_by_itself() -> None:
    """Weights on two meshes cannot be taken together."""
    optimizer = AdamW(lr=1e-3)([{"params": [torch.nn.Parameter(torch.ones(2))]}])
    step_one_by_one(optimizer)
    assert not optimizer.param_groups[0]["fused"] and not optimizer.param_groups[0]["foreach"]
