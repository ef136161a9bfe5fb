"""`RewardModeling` against TRL's `RewardTrainer`: loss, gradients and metrics of one batch, full and LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_trl import make_tokenizer

from lit_rl.algorithms import RewardModeling
from lit_rl.core.examples import PairBatch, TokenBatch, Totals
from lit_rl.ops.reductions import Highest, Lowest

ROWS = [
    {"prompt": "one", "chosen": " yes", "rejected": " nope"},
    {"prompt": "a longer one", "chosen": " long", "rejected": " n"},
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": "2+2=", "chosen": "4", "rejected": "222"},
]
MARGINS = [0.5, 0.0, 1.5, -0.25]


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    folder: Path = tmp_path_factory.mktemp("reward")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, initializer_range=0.2, **sizes, **ids)  # pyright: ignore
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lora = LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["q_proj", "v_proj"], modules_to_save=["score"])
    made = RewardTrainer(
        model=str(folder / "model"),
        args=RewardConfig(
            output_dir=str(folder), bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none"
        ),
        train_dataset=Dataset.from_list([row | {"margin": m} for row, m in zip(ROWS, MARGINS)]),
        processing_class=tokenizer,
        peft_config=lora if request.param else None,
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in made.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return made


def outcome(model: Any, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss.backward()
    return float(loss), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("center", [0.0, 0.05])
@pytest.mark.parametrize("margin", [False, True])
def test_one_batch(trainer: Any, center: float, margin: bool) -> None:
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(ROWS))])
    margins = batch.pop("margin")
    trainer.args.center_rewards_coefficient = center or None
    trainer._metrics["train"].clear()
    trainer.model.train()
    inputs = dict(batch) | ({"margin": margins} if margin else {})
    their_loss, their_gradients = outcome(trainer.model, trainer.compute_loss(trainer.model, inputs))

    module = RewardModeling("tiny", center_coef=center)
    module.policy = trainer.model
    mask = batch["attention_mask"].bool()
    tokens = TokenBatch(batch["input_ids"], mask, mask)
    totals = Totals(rows=len(ROWS), tokens=0, attended=int(mask.sum()))
    pairs = PairBatch(tokens, list(range(len(ROWS))), totals, margins=margins if margin else None)
    loss, metrics = module.loss(pairs)
    our_loss, our_gradients = outcome(trainer.model, loss)

    assert our_loss == pytest.approx(their_loss, rel=1e-5)
    assert our_gradients.keys() == their_gradients.keys() and len(their_gradients) > 3
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    seen = {name: values[0] for name, values in trainer._metrics["train"].items()}
    assert seen.pop("num_tokens") > 0  # ours counts them for every method: `OfflineRecords`
    assert metrics.keys() == seen.keys()
    for name, metric in metrics.items():
        value = metric.value if isinstance(metric, Highest | Lowest) else metric[0] / metric[1]
        assert float(value) == pytest.approx(seen[name], rel=1e-5, abs=1e-7), name
