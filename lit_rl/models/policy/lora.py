"""Low-rank adapters (LoRA, 2106.09685) on a policy, through PEFT."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_rl.errors import ConfigError, in_range
from lit_rl.models.policy.vision_parts import layers_unasked

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def check_targets(key: str, targets: str | Sequence[str]) -> None:
    """Refuse targets that can name no layer, before a model is read.

    Args:
        key: What the message calls them.
        targets: As of `Lora`.

    Raises:
        ConfigError: they are empty, or a text that is no regular expression.
    """
    why = "names no layer" if not targets or (not isinstance(targets, str) and "" in targets) else ""
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            why = f"is no regular expression: {error}"
    if why:
        raise ConfigError(f'{key}={targets!r} {why}. Use "all-linear", or layer names.')


def asks_for(targets: str | Sequence[str], module: str) -> bool:
    """Tell whether targets other than "all-linear" name a module, as PEFT reads them.

    Args:
        targets: A regular expression of whole paths, or ends of paths.
        module: The path of the module in the model.
    """
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return f".{module}".endswith(tuple(f".{name}" for name in targets))


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, which are trained, while the weights of the model stay as they are.

    Args:
        r: Rank of the adapters, at least 1.
        alpha: The adapter's output is multiplied by alpha / r.
        dropout: Dropout in front of the adapters, in [0, 1).
        targets: Names of the linear layers that get an adapter; a regular expression of whole names; or "all-linear":
            every one but the head.
        rslora: Multiply by alpha / sqrt(r) instead (2312.03732).
        dora: Also learn the magnitude of each weight column (2402.09353).
        modules_to_save: Modules trained in full beside the adapters, by name.
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0  # not TRL's 0.05: a dropped unit alone moves log-probs, so the ratio at step 0 would not be 1
    targets: str | list[str] = "all-linear"
    rslora: bool = False
    dora: bool = False
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        in_range("model.lora.r", self.r, low=1)
        in_range("model.lora.alpha", self.alpha, low=0, open_low=True)
        in_range("model.lora.dropout", self.dropout, low=0, high=0.99)
        check_targets("model.lora.targets", self.targets)

    @property
    def engine_rank(self) -> int | None:
        """The rank, where an engine can hold the adapter beside the base; None where it takes merged weights."""
        return None if self.dora or self.modules_to_save else self.r

    def apply(
        self,
        model: PreTrainedModel,
        task_type: str = "CAUSAL_LM",
        *,
        head: Sequence[str] = (),
        new_tokens: Sequence[int] = (),
        frozen: Sequence[str] = (),
    ) -> PeftModel:
        """Return the model with fresh adapters, whose output equals the model's until the first update.

        Args:
            model: A language model or a classifier.
            task_type: PEFT's word for what the model does.
            head: Names of a classifier's head, which PEFT trains in full and which gets no adapter.
            new_tokens: Tokens whose embeddings mean nothing yet: their rows are trained too, and no others.
            frozen: Parts of a model over images that get no adapter.

        Raises:
            ConfigError: a name in ``targets`` or ``modules_to_save`` matches no module, or names a tied weight;
                ``targets`` are in frozen parts alone; or the
                head is of a kind of which single rows cannot be trained.
        """
        import torch
        from peft import LoraConfig, PeftModel, get_peft_model

        from lit_rl.models.policy.pieces import check_merge

        self._check_names(model)
        unasked = layers_unasked(model, self.targets, frozen)
        self._check_reached(model, unasked, frozen)
        config = LoraConfig(
            task_type=task_type,
            r=self.r,
            lora_alpha=self.alpha,  # pyright: ignore[reportArgumentType]  # PEFT says int and only ever divides it
            lora_dropout=self.dropout,
            target_modules=self.targets if isinstance(self.targets, str) else list(self.targets),
            use_rslora=self.rslora,
            use_dora=self.dora,
            modules_to_save=None if self.modules_to_save is None else list(self.modules_to_save),
            trainable_token_indices=self._rows(model, new_tokens),
            # "all-linear" would take the head of a token classifier too, and what sees.
            exclude_modules=[*head, *unasked] or None,
        )
        try:
            with torch.device("cpu"):  # the same adapters on every device; PEFT puts them beside their layers
                adapted = get_peft_model(model, config)
        except ValueError as error:
            read = " A text is read as a regular expression of whole names; a list, [q_proj], holds layer names."
            how = read if isinstance(self.targets, str) else ""
            raise ConfigError(f"model.lora.targets={self.targets!r}: {error}{how}{_modules(model)}") from error
        assert isinstance(adapted, PeftModel)
        check_merge(adapted, "model.lora")
        return adapted

    def _check_reached(self, model: PreTrainedModel, unasked: Sequence[str], frozen: Sequence[str]) -> None:
        """Refuse targets that are in frozen parts alone."""
        if self.targets == "all-linear":
            return
        matches = [name for name, _ in model.named_modules() if asks_for(self.targets, name)]
        if matches and set(matches) <= set(unasked):
            asked = self.targets if isinstance(self.targets, str) else list(self.targets)
            raise ConfigError(
                f"model.lora.targets={asked!r} names layers of frozen parts alone "
                f"({', '.join(matches[:4])}{', ...' if len(matches) > 4 else ''}). Name layers of the text, or let "
                f"model.freeze={list(frozen)} leave these parts out."
            )

    def _rows(self, model: PreTrainedModel, tokens: Sequence[int]) -> dict[str, list[int]] | None:
        """Return the rows to train, by module. Those of a module that is trained in full are among them anyway."""
        from torch import nn

        from lit_rl.models.policy.loading import RulingHead

        if not tokens:
            return None
        head = model.get_output_embeddings()
        if isinstance(head, RulingHead):
            raise ConfigError(
                "model.chat_template brings new tokens, and model.lora cannot train their rows in the head of a policy "
                "over images. Name a template without new tokens, or train in full (model.lora=null)."
            )
        if type(head) is not nn.Linear or head.bias is not None:
            raise ConfigError(
                f"model.chat_template brings new tokens, and model.lora trains their rows of the head, which must be "
                f"a plain linear layer without bias; this one is {type(head).__name__}, bias={head.bias is not None}. "  # pyright: ignore
                "Set model.lm_head_fp32=false, or name a template without new tokens."
            )
        tables = (model.get_input_embeddings(), head)
        names = [name for name, module in model.named_modules() if any(module is table for table in tables)]
        saved = self.modules_to_save or []
        return {name: list(tokens) for name in names if name.rpartition(".")[2] not in saved} or None

    def _check_names(self, model: PreTrainedModel) -> None:
        names = {name for name, _ in model.named_modules()}
        last = names | {name.rpartition(".")[2] for name in names}
        listed = {"targets": [] if isinstance(self.targets, str) else self.targets}
        listed["modules_to_save"] = self.modules_to_save or []
        for key, wanted in listed.items():
            for name in wanted:
                if name not in last and not any(known.endswith(f".{name}") for known in names):
                    raise ConfigError(f"model.lora.{key} names {name!r}, which matches no module.{_modules(model)}")


def _modules(model: PreTrainedModel) -> str:
    from torch import nn

    kinds = (nn.Linear, nn.Embedding)
    found = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}
    return f" Modules of this model: {', '.join(sorted(found))}."
