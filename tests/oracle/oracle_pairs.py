"""Both sides of a comparison with TRL's trainers of pairs without a reference: their collator and loss, and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from oracle_cases import Outcome, backward
from oracle_trl import save_policy
from oracle_verdicts import move, trained

from lit_rl.algorithms import CPO, ORPO
from lit_rl.core.examples import PairBatch, TokenBatch, Totals

ROWS = [
    {"prompt": "one", "chosen": " answer", "rejected": " other answer"},
    {"prompt": "a longer one", "chosen": " yes, this is long", "rejected": " no"},
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": "2+2=", "chosen": "4", "rejected": "22222"},
]
"""Completions of equal and of very different lengths on either side."""

UNLIKE = ("logits/chosen", "logits/rejected")
"""TRL averages these over prompts and padding too, here; ours are over completions, as in its DPO and KTO."""


def make_trainer(kind: Any, config: Any, folder: Path, *, lora: bool, rows: list[dict[str, str]] = ROWS) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    tokenizer = save_policy(folder / "model")
    args = config(
        output_dir=str(folder),
        per_device_train_batch_size=len(rows),
        max_length=64,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=3, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    move(trainer.model, lora=lora)
    return trainer


def theirs(trainer: Any, settings: dict[str, Any]) -> Outcome:
    """TRL's loss of one batch, its gradient, and what it logs; `settings` are what it reads when it takes a loss."""
    for name, value in settings.items():
        setattr(trainer, name, value)
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, their_batch(trainer))
    outcome = backward(trained(trainer.model), [loss])
    outcome.metrics = {name: [float(value)] for name, value in metrics.items() if name not in UNLIKE}
    return outcome


def their_batch(trainer: Any) -> dict[str, Any]:
    return trainer.data_collator([trainer.train_dataset[i] for i in range(len(ROWS))])


def our_batch(trainer: Any) -> PairBatch:
    """TRL's batch as ours."""
    batch = trainer.concatenated_inputs(their_batch(trainer), padding_value=trainer.processing_class.pad_token_id)
    attended = batch["concatenated_attention_mask"].bool()
    learned = (batch["concatenated_labels"] != -100) & attended
    count = len(ROWS)
    totals = Totals(
        rows=count,
        tokens=int(learned[:count].sum()),
        attended=int(attended.sum()),
        chosen_attended=int(attended[:count].sum()),
    )
    return PairBatch(TokenBatch(batch["concatenated_input_ids"], attended, learned), list(range(count)), totals)


def ours(trainer: Any, module: CPO | ORPO) -> Outcome:
    """Our loss of that batch, its gradient, and what it logs."""
    module.policy = trainer.model
    loss, metrics = module.loss(our_batch(trainer))
    outcome = backward(trained(trainer.model), [loss])
    outcome.metrics = {name: [float((top / bottom).detach())] for name, (top, bottom) in metrics.items()}  # pyright: ignore
    return outcome
