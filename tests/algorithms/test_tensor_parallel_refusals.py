"""What `strategy=fsdp_tp` was never compared with is refused before weights are loaded, by the name of its key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lit_rl.algorithms import DPO, GRPO, SFT, Reinforce
from lit_rl.algorithms.checks.strategy_checks import Feature, check_before_loading, check_optimizer
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.optim.optimizers import AdamW, ByPath
from lit_rl.algorithms.optim.strategies import FSDP2Strategy, FSDPTPStrategy, check_mesh, step_one_by_one, try_pickle
from lit_rl.algorithms.terms.groups import DynamicSampling, GroupReplay
from lit_rl.cli.build import check_trainer
from lit_rl.core.errors import ConfigError
from lit_rl.environments.user_environments import FunctionTools
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.models.adapters import Lora
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.references import EMA
from lit_rl.models.sharding import check_sharding_plan, norm_over_meshes
from lit_rl.ops.preference_losses import aot
from lit_rl.rewards.model_rewards import RewardModel


def set_up(module: PolicyModule, stage: str = "fit", trainer: L.Trainer | None = None, **changed: Any) -> None:
    """As a Trainer of two processes does, before it loads a weight; no process is started."""
    strategy = FSDPTPStrategy(tp_size=2)
    module.trainer = trainer or L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False, **changed
    )
    PolicyModule.setup(module, stage)


def grpo(model: Any = "tiny", tokenizer: Any = None, **settings: Any) -> GRPO:
    return GRPO(model, reward=lambda completions: [1.0] * len(completions), tokenizer=tokenizer, **settings)


def told(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return city


def loaded() -> tuple[Any, Any]:
    folder = LanguageModel("tiny").path
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


REFUSED = {
    "algo=Reinforce": lambda: Reinforce("tiny", reward=len),
    "model.lora=": lambda: grpo(LanguageModel("tiny", lora=Lora(r=2))),
    "model.dtype=bfloat16": lambda: grpo(LanguageModel("tiny", dtype="bfloat16")),
    "reference=EMA": lambda: grpo(beta=0.1, reference=EMA(0.9)),
    "algo.precompute_reference=true": lambda: DPO("tiny", precompute_reference=True),
    "algo/groups=DynamicSampling": lambda: grpo(groups=DynamicSampling()),
    "env=FunctionTools": lambda: grpo(env=FunctionTools([told], max_turns=2)),
    "A loss that couples the rows of a step": lambda: DPO("tiny", preference=aot),
    "eval.win_rate_against": lambda: grpo(evaluation=Evaluation(win_rate_against="tiny")),
    "model.use_liger_kernel=True": lambda: grpo(LanguageModel("tiny", use_liger_kernel=True)),
    "model.compile=True": lambda: grpo(LanguageModel("tiny", compile=True)),
    "model.name=.* is an object": lambda: grpo(*loaded()),
    "algo/replay": lambda: grpo(replay=GroupReplay()),
    "A reward model in this process": lambda: GRPO("tiny", reward=RewardModel("a/model")),
    "generator=VLLMServerGenerator with generator.lag=1": lambda: grpo(
        generator=VLLMServerGenerator(urls=["http://127.0.0.1:1"], lag=1)
    ),
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


def test_a_prediction_is_refused() -> None:
    with pytest.raises(ConfigError, match="lit-rl predict.*strategy=fsdp"):
        set_up(grpo(), stage="predict")


def test_an_optimizer_that_was_made_is_refused_where_it_looks_at_shapes() -> None:
    weights, strategy = [torch.nn.Parameter(torch.ones(2, 2))], FSDPTPStrategy(tp_size=2)
    check_optimizer(torch.optim.SGD(weights), strategy)
    check_optimizer(torch.optim.Adafactor(weights), FSDP2Strategy())
    with pytest.raises(ConfigError, match="optimizer=.*Adafactor.*strategy=fsdp"):
        check_optimizer(torch.optim.Adafactor(weights), strategy)


def test_what_a_strategy_takes_is_said_by_values_alone() -> None:
    settings = {"precision": "32-true", "gradient_clip_algorithm": None, "num_nodes": 1}
    given: dict[str, Any] = {"trainer": SimpleNamespace(strategy=FSDPTPStrategy(tp_size=2), **settings), "features": ()}
    given |= {"model": LanguageModel("tiny"), "optimizer": AdamW(), "stage": "fit", "reference": None}
    check_before_loading(method=GRPO, **given)
    with pytest.raises(ConfigError, match="algo=Reinforce"):
        check_before_loading(method=Reinforce, **given)
    replay = [Feature("replay", "algo/replay", "Leave it out")]
    with pytest.raises(ConfigError, match="algo/replay"):
        check_before_loading(method=GRPO, **given | {"features": replay})


def test_a_plan_that_cuts_in_another_way_is_refused() -> None:
    config = AutoConfig.for_model("llama")
    config.base_model_tp_plan = {**config.base_model_tp_plan, "layers.*.mlp.up_proj": "packed_colwise"}
    with pytest.raises(ConfigError, match="cuts modules as packed_colwise"):
        check_sharding_plan(config, 2)


@pytest.mark.parametrize("size", [2, "auto"])
def test_lightnings_own_mesh_is_refused_where_ranks_would_share_rows(size: Any) -> None:
    """Before processes are started its default is a word, which means all devices of a node."""
    strategy = ModelParallelStrategy(tensor_parallel_size=size)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    for refuse in (lambda: set_up(grpo(), trainer=trainer), lambda: check_trainer(trainer, "32-true")):
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=2.*strategy=fsdp_tp.*tp_size=2.*strategy=fsdp"):
            refuse()
    for allowed in (ModelParallelStrategy(tensor_parallel_size=1), FSDP2Strategy(), FSDPTPStrategy()):
        check_mesh(allowed)


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
        check_sharding_plan(AutoConfig.for_model(kind, **sizes), tp_size)


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


def test_the_norm_of_no_gradient_is_zero() -> None:
    """As of a rollout that nobody scored."""
    assert norm_over_meshes([]) == 0


def test_what_a_user_gave_may_not_be_sent() -> None:
    assert try_pickle(lambda: 0) is None and try_pickle(1) is not None


def test_an_optimizer_steps_each_weight_by_itself() -> None:
    """Weights on two meshes cannot be taken together."""
    optimizer = AdamW(lr=1e-3)([{"params": [torch.nn.Parameter(torch.ones(2))]}])
    step_one_by_one(optimizer)
    assert not optimizer.param_groups[0]["fused"] and not optimizer.param_groups[0]["foreach"]
