"""Both sides of a comparison with TRL's `DPOTrainer`: its own collator and loss on one batch of pairs, and ours on it.

Nothing of TRL is rebuilt. A trainer is made once for a kind of policy, and what it reads when it takes a loss is set.
"""

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

from lit_rl.algorithms import DPO
from lit_rl.core.examples import PairBatch, TokenBatch, Totals
from lit_rl.models import LanguageModel
from lit_rl.models.references import AdapterBase, FrozenCopy
from lit_rl.ops import preference_losses

ROWS = [
    {"prompt": "one", "chosen": " yes", "rejected": " nope"},
    {"prompt": "a longer one", "chosen": " long", "rejected": " n"},
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": "to be", "chosen": " or", "rejected": " so"},
    {"prompt": "2+2=", "chosen": "4", "rejected": "222"},
    {"prompt": "up", "chosen": "down", "rejected": "dawn"},
]
"""Completions of equal and of other lengths; short, since float32 rounds a sum of log-probs by its size."""

BASE: dict[str, Any] = {
    "loss_types": ["sigmoid"],
    "loss_weights": None,
    "beta": 0.1,
    "label_smoothing": 0.0,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "ld_alpha": None,
    "use_weighting": False,
    "router_aux_loss_coef": 0.0,
}

SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
"""Losses in which TRL reads the label smoothing."""

LOSSES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
)  # fmt: skip

MODEL = LanguageModel("tiny")
"""Lends its tokenizer; its weights are never loaded."""


def make_trainer(folder: Path, *, lora: bool) -> Any:
    """A trainer whose policy is away from its reference, so that no log ratio is 0."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    tokenizer = save_policy(folder / "model")
    args = DPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(ROWS),
        use_weighting=True,  # makes the head compute what the weights need
        router_aux_loss_coef=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer: Any = DPOTrainer(
        model=str(folder / "model"),
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=3, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            width = 0.1 if lora else 0.1 * parameter.detach().std()
            parameter.data += width * torch.randn(parameter.shape, generator=generator)
    trainer.model.train()
    return trainer


def theirs(trainer: Any, settings: Mapping[str, Any]) -> Outcome:
    """TRL's loss of one batch, its gradient, and what it logs."""
    merged = BASE | dict(settings)
    for name, value in merged.items():
        setattr(trainer, name, value)
    trainer.loss_weights = merged["loss_weights"] or [1.0] * len(merged["loss_types"])
    trainer.aux_loss_enabled = merged["router_aux_loss_coef"] > 0
    trainer._metrics["train"].clear()
    outcome = backward(trained(trainer.model), [trainer.compute_loss(trainer.model, their_batch(trainer))])
    outcome.metrics = {name: list(values) for name, values in trainer._metrics["train"].items() if name != "num_tokens"}
    return outcome


def their_batch(trainer: Any) -> dict[str, Tensor]:
    return trainer.data_collator([trainer.train_dataset[i] for i in range(len(trainer.train_dataset))])


def our_module(settings: Mapping[str, Any], *, lora: bool, **further: Any) -> DPO:
    """The module that TRL's settings are."""
    trl = BASE | dict(settings)
    divergence = getattr(preference_losses, trl["f_divergence_type"])
    if trl["f_divergence_type"] == "alpha_divergence":
        divergence = partial(divergence, alpha=trl["f_alpha_divergence_coef"])
    return DPO(
        MODEL,
        beta=trl["beta"],
        preference={name: loss_of(name, trl["label_smoothing"]) for name in trl["loss_types"]},
        preference_weights=dict(zip(trl["loss_types"], trl["loss_weights"])) if trl["loss_weights"] else None,
        divergence=divergence,
        tail_weight=1.0 if trl["ld_alpha"] is None else trl["ld_alpha"],
        likelihood_weights=trl["use_weighting"],
        router_aux_loss_coef=trl["router_aux_loss_coef"],
        reference=AdapterBase() if lora else FrozenCopy(),
        **further,
    )


def loss_of(name: str, smoothing: float) -> Any:
    function = getattr(preference_losses, name)
    return partial(function, label_smoothing=smoothing) if name in SMOOTHED else function


def our_batch(trainer: Any) -> PairBatch:
    """TRL's batch as ours."""
    batch = their_batch(trainer)
    mask = batch["completion_mask"].bool()
    tokens = TokenBatch(batch["input_ids"], batch["attention_mask"].bool(), mask)
    count = len(mask) // 2
    totals = Totals(rows=count, tokens=int(mask[:count].sum()), attended=int(batch["attention_mask"].sum()))
    return PairBatch(tokens, list(range(count)), totals)


def ours(trainer: Any, module: DPO) -> Outcome:
    """Our loss of that batch, its gradient, and what it logs."""
    module.policy, module.reference_policy = trainer.model, trainer.ref_model
    loss, metrics = module.loss(our_batch(trainer))
    outcome = backward(trained(trainer.model), [loss])
    outcome.metrics = {name: [(top / bottom).item()] for name, (top, bottom) in metrics.items()}  # pyright: ignore
    return outcome


def trained(model: Any) -> Any:
    """Stands for a model of which only what is trained is there."""
    return SimpleNamespace(
        parameters=lambda: [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
