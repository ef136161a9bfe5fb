"""Policy, critic, reference and reward model as adapters on one frozen base, trained by PPO."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_rollouts import trainer as quiet_trainer
from transformers import AutoModelForSequenceClassification

from lit_rl.algorithms import PPO, Evaluation
from lit_rl.algorithms.optim.optimizers import AdamW
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import AdapterCritic
from lit_rl.models.references import AdapterBase
from lit_rl.rewards import Rewards, exact_match


@pytest.fixture
def reward_model(tmp_path: Path, tiny_dir: Path) -> str:
    """A reward model trained elsewhere: a LoRA adapter and a score head on the shipped policy."""
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_dir, num_labels=1)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear", modules_to_save=["score"])
    get_peft_model(base, config).save_pretrained(str(tmp_path / "reward"))
    return str(tmp_path / "reward")


def test_four_models_on_one_base_train(reward_model: str, tmp_path: Path) -> None:
    module = PPO(
        LanguageModel("tiny", lora=Lora(r=2)),
        Rewards(exact_match, weights=[0.0]),
        critic=AdapterCritic(r=2),
        reference=AdapterBase(),
        reward_adapter=reward_model,
        reward_beta=0.1,
        iterations=2,
        sampling=Sampling(max_new_tokens=6),
        optimizer=AdamW(lr=1e-3),
        evaluation=Evaluation(limit=1),
    )
    trainer = quiet_trainer(tmp_path, max_steps=4, enable_checkpointing=True)
    trainer.fit(module, datamodule=RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=8))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["train/reward"] == pytest.approx(logged["train/rewards/reward_adapter/mean"])
    assert logged["train/objective/kl"] != 0

    models = [module.policy, module.critic, module.reward_adapter]
    frozen = [{p.data_ptr() for p in model.parameters() if not p.requires_grad} for model in models]
    large = {p.data_ptr() for p in module.policy.parameters() if not p.requires_grad and p.numel() > 1000}
    assert large <= frozen[0] and len(large & frozen[1]) > 10 and len(large & frozen[2]) > 10
    (saved,) = tmp_path.rglob("*.ckpt")
    names = torch.load(saved, weights_only=True)["state_dict"]
    assert {name.partition(".")[0] for name in names} == {"policy", "critic"}
