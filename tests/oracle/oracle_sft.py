"""Both sides of a comparison with TRL's `SFTTrainer`: its own preparation, collator and loss on rows, and ours."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from oracle_cases import Outcome, backward
from oracle_trl import save_policy
from torch import Tensor

from lit_rl.algorithms import SFT
from lit_rl.core.examples import TextBatch
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.models import LanguageModel
from lit_rl.ops import imitation

Rows = Sequence[Mapping[str, Any]]

PAIRS: Rows = [
    {"prompt": "one", "completion": " yes"},
    {"prompt": "a longer one", "completion": " and a longer answer"},
    {"prompt": "q", "completion": "a"},
    {"prompt": "2+2=", "completion": "4"},
]
TEXTS: Rows = [{"text": "to be or not"}, {"text": "x"}, {"text": "a text that goes on for longer"}, {"text": "up"}]
CHATS: Rows = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "3"},
            {"role": "assistant", "content": "so 7"},
        ]
    },
    {"messages": [{"role": "user", "content": "a long question?"}, {"role": "assistant", "content": "n"}]},
]
TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)

MODEL = LanguageModel("tiny")
"""Lends its tokenizer; its weights are never loaded."""


def make_trainer(folder: Path, *, lora: bool) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer = save_policy(folder / "model")
    tokenizer.chat_template = TEMPLATE
    args = SFTConfig(
        output_dir=str(folder), bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none", max_length=64
    )
    trainer: Any = SFTTrainer(
        model=str(folder / "model"),
        args=args,
        train_dataset=Dataset.from_list([dict(row) for row in PAIRS]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=3, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad and lora:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    trainer.model.train()
    return trainer


def their_batches(trainer: Any, rows: Rows, learn: str, *, packed: int | None, micro: int) -> list[dict[str, Any]]:
    """What TRL's preparation and collator make of the rows, as micro-batches of `micro` rows."""
    from datasets import Dataset

    args = trainer.args
    trainer.completion_only_loss, args.assistant_only_loss = learn == "completion", learn == "assistant"
    args.packing, args.max_length = packed is not None, packed or 64
    trainer.data_collator.padding_free = packed is not None
    plain = Dataset.from_list([dict(row) for row in rows])
    data = trainer._prepare_dataset(plain, trainer.processing_class, args, args.packing, None, "train")
    every = [data[i] for i in range(len(data))]
    return [trainer.data_collator(every[i : i + micro]) for i in range(0, len(every), micro)]


def theirs(trainer: Any, batches: Sequence[dict[str, Any]], *, loss: str, aux: float) -> Outcome:
    """TRL's loss of an optimizer step, divided as its training loop divides it."""
    trainer.args.loss_type, trainer.router_aux_loss_coef, trainer.aux_loss_enabled = loss, aux, aux > 0
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer._metrics["train"].clear()
    tokens = sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)
    shares = [trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=tokens) for batch in batches]
    outcome = backward(Trained(trainer.model), shares)  # pyright: ignore
    outcome.metrics = {name: list(found) for name, found in trainer._metrics["train"].items() if name != "num_tokens"}
    return outcome


def our_batches(trainer: Any, rows: Rows, learn: Any, *, packed: int | None, micro: int) -> list[TextBatch]:
    data = SupervisedDataModule(
        rows=[dict(row) for row in rows],
        learn=learn,
        packing="none" if packed is None else "best_fit",
        max_length=packed or 64,
        val_fraction=0,
        batch_size=1,
        shuffle=False,
    )
    data.prepare(trainer.processing_class)
    train = data.corpus.train
    parts = [list(range(len(train)))[i : i + micro] for i in range(0, len(train), micro)]
    totals = train.totals(range(len(train)), len(parts))
    return [train.batch(part, part, totals, step=0, slot=slot) for slot, part in enumerate(parts)]  # pyright: ignore


def ours(trainer: Any, batches: Sequence[TextBatch], *, loss: str, aux: float) -> Outcome:
    function = {"nll": imitation.cross_entropy, "dft": imitation.dft}[loss]
    module = SFT(MODEL, imitation=function, router_aux_loss_coef=aux)
    module.policy = trainer.model
    shares, found = [], {}
    for batch in batches:
        share, metrics = module.loss(batch)
        shares.append(share)
        for name, (top, bottom) in metrics.items():  # pyright: ignore
            found.setdefault(name, []).append((top / bottom).item())
    outcome = backward(Trained(trainer.model), shares)  # pyright: ignore
    outcome.metrics = found
    return outcome


class Trained:
    """Looks like a model of which only what is trained is there."""

    def __init__(self, model: Any) -> None:
        self.parameters = functools.partial(_trained, model)


def _trained(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
