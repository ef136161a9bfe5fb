"""Both sides of a comparison with TRL's `KTOTrainer`: its own collator and loss on one batch of verdicts, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from oracle_cases import Outcome, backward
from oracle_trl import save_policy
from torch import Tensor

from lit_rl.algorithms import KTO
from lit_rl.core.examples import TokenBatch, Totals, VerdictBatch
from lit_rl.models import LanguageModel
from lit_rl.models.references import AdapterBase, FrozenCopy
from lit_rl.ops import preference_losses

ROWS = [
    {"prompt": "one", "completion": " answer", "label": True},
    {"prompt": "a longer one", "completion": " yes, this is long", "label": False},
    {"prompt": "q", "completion": "a", "label": True},
    {"prompt": "to be", "completion": " or not", "label": True},
    {"prompt": "2+2=", "completion": "22222", "label": False},
]

BASE: dict[str, Any] = {
    "loss_type": "kto",
    "beta": 0.1,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "router_aux_loss_coef": 0.0,
}

MODEL = LanguageModel("tiny")
"""Lends its tokenizer; its weights are never loaded."""


def make_trainer(folder: Path, *, lora: bool) -> Any:
    """A trainer whose policy is away from its reference, so that no log ratio is 0."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer

    tokenizer = save_policy(folder / "model")
    args = KTOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(ROWS),
        router_aux_loss_coef=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = KTOTrainer(
        model=str(folder / "model"),
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=3, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    move(trainer.model, lora=lora)
    return trainer


def move(model: Any, *, lora: bool) -> None:
    """Away from where it began."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            width = 0.05 if lora else 0.1 * parameter.detach().std()
            parameter.data += width * torch.randn(parameter.shape, generator=generator)
    model.train()


def theirs(trainer: Any, settings: Mapping[str, Any], rows: list[int]) -> Outcome:
    """TRL's loss of one batch, its gradient, and what it logs."""
    for name, value in (BASE | dict(settings)).items():
        setattr(trainer, name, value)
    trainer.calculate_KL = trainer.loss_type != "apo_zero_unpaired"
    trainer.aux_loss_enabled = trainer.router_aux_loss_coef > 0
    trainer._metrics["train"].clear()
    outcome = backward(trained(trainer.model), [trainer.compute_loss(trainer.model, their_batch(trainer, rows))])
    outcome.metrics = {name: list(values) for name, values in trainer._metrics["train"].items() if name != "num_tokens"}
    return outcome


def their_batch(trainer: Any, rows: list[int]) -> dict[str, Tensor]:
    return trainer.data_collator([trainer.train_dataset[row] for row in rows])


def our_module(settings: Mapping[str, Any], *, lora: bool) -> KTO:
    trl = BASE | dict(settings)
    weights = {name: trl[name] for name in ("desirable_weight", "undesirable_weight")}
    return KTO(
        MODEL,
        beta=trl["beta"],
        verdict=partial(getattr(preference_losses, trl["loss_type"]), **weights),
        router_aux_loss_coef=trl["router_aux_loss_coef"],
        reference=AdapterBase() if lora else FrozenCopy(),
    )


def our_batch(trainer: Any, rows: list[int]) -> VerdictBatch:
    """TRL's batch as ours."""
    batch = their_batch(trainer, rows)
    tokens = TokenBatch(batch["input_ids"], batch["attention_mask"].bool(), batch["completion_mask"].bool())
    names = ("KL_input_ids", "KL_attention_mask", "KL_completion_mask")
    ids, attended, learned = (batch[name] for name in names)
    desirable = batch["label"].bool()
    totals = Totals(
        rows=len(rows),
        tokens=int(tokens.loss_mask.sum()),
        attended=int(tokens.attention_mask.sum()),
        desirable=int(desirable.sum()),
    )
    mismatched = TokenBatch(ids, attended.bool(), learned.bool())
    return VerdictBatch(tokens, rows, totals, desirable=desirable, mismatched=mismatched)


def ours(trainer: Any, module: KTO, rows: list[int]) -> Outcome:
    """Our loss of that batch, its gradient, and what it logs."""
    module.policy, module.reference_policy = trainer.model, trainer.ref_model
    loss, metrics = module.loss(our_batch(trainer, rows))
    outcome = backward(trained(trainer.model), [loss])
    outcome.metrics = {name: [float((top / bottom).detach())] for name, (top, bottom) in metrics.items()}  # pyright: ignore
    return outcome


def trained(model: Any) -> Any:
    """Looks like the model, with only what is trained in it."""
    return SimpleNamespace(
        parameters=lambda: [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
