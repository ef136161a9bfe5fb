"""Adapters that are trained on a policy through PEFT: LoRA (2106.09685), or any config of PEFT that can be merged."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.models.vision_parts import excluded_layers
from lit_rl.ops.ranges import AtLeastOne, Positive, Range

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


def targets_match(targets: str | Sequence[str], module: str) -> bool:
    """Tell whether targets other than "all-linear" name a module, as PEFT reads them.

    Args:
        targets: A regular expression of whole paths, or ends of paths.
        module: The path of the module in the model.
    """
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return f".{module}".endswith(tuple(f".{name}" for name in targets))


@checked("model.lora")
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

    r: AtLeastOne = 16
    alpha: Positive = 32
    dropout: Annotated[float, Range(0, 0.99)] = (
        0.0  # not TRL's 0.05: a dropped unit alone moves log-probs, so the ratio at step 0 would not be 1
    )
    targets: str | list[str] = "all-linear"
    rslora: bool = False
    dora: bool = False
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
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

        from lit_rl.models.merging import check_merge

        unasked = excluded_layers(model, self.targets, frozen)
        self._check_names(model, unasked, frozen)
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

    def _rows(self, model: PreTrainedModel, tokens: Sequence[int]) -> dict[str, list[int]] | None:
        """Return the rows to train, by module. Those of a module that is trained in full are among them anyway."""
        from torch import nn

        from lit_rl.models.loading import BanningHead

        if not tokens:
            return None
        head = model.get_output_embeddings()
        if isinstance(head, BanningHead):
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

    def _check_names(self, model: PreTrainedModel, unasked: Sequence[str], frozen: Sequence[str]) -> None:
        """Raise ConfigError for names that match no module, and for targets that are in frozen parts alone."""
        names = {name for name, _ in model.named_modules()}
        last = names | {name.rpartition(".")[2] for name in names}
        listed = {"targets": [] if isinstance(self.targets, str) else self.targets}
        listed["modules_to_save"] = self.modules_to_save or []
        for key, wanted in listed.items():
            for name in wanted:
                if name not in last and not any(known.endswith(f".{name}") for known in names):
                    raise ConfigError(f"model.lora.{key} names {name!r}, which matches no module.{_modules(model)}")
        if self.targets == "all-linear":
            return
        matches = [name for name, _ in model.named_modules() if targets_match(self.targets, name)]
        if matches and set(matches) <= set(unasked):
            targets = self.targets if isinstance(self.targets, str) else list(self.targets)
            raise ConfigError(
                f"model.lora.targets={targets!r} names layers of frozen parts alone "
                f"({', '.join(matches[:4])}{', ...' if len(matches) > 4 else ''}). Name layers of the text, or let "
                f"model.freeze={list(frozen)} leave these parts out."
            )


def _modules(model: PreTrainedModel) -> str:
    from torch import nn

    kinds = (nn.Linear, nn.Embedding)
    found = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}
    return f" Modules of this model: {', '.join(sorted(found))}."


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    Adapter = Lora | PeftConfig
    """The type of `lora` of `LanguageModel`. Configs that are read from files know `Lora` alone."""
else:
    Adapter = Lora

_NOT_ALONE = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters")


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """Fresh adapters by a config of PEFT, which are trained, while the weights of the model stay as they are.

    Args:
        config: The config. It is copied: yours stays as it is.

    Raises:
        ConfigError: the kind cannot be merged, or target_modules are no regular expression.
    """

    config: Any

    def __post_init__(self) -> None:
        from lit_rl.models.merging import check_kind

        check_kind("model.lora", self.config)
        check_targets(f"model.lora={type(self.config).__name__}(...): target_modules", self.targets)

    @property
    def r(self) -> int:
        """The rank, or what is about as large: for the plan of memory."""
        return max(1, getattr(self.config, "r", 0) or 8)

    @property
    def targets(self) -> str | list[str]:
        """Names of layers, a regular expression, or "all-linear"."""
        named = getattr(self.config, "target_modules", None) or "all-linear"
        return named if isinstance(named, str) else sorted(named)

    @property
    def dropout(self) -> float:
        """The largest probability of dropout in the adapters."""
        every = vars(self.config).items()
        return max((value for key, value in every if "dropout" in key and isinstance(value, float)), default=0.0)

    @property
    def engine_rank(self) -> int | None:
        """Highest rank, where an engine can hold the adapter beside the base; None where it takes merged weights."""
        plain = self.config.peft_type == "LORA" and not any(getattr(self.config, key, None) for key in _NOT_ALONE)
        return max([self.config.r, *(self.config.rank_pattern or {}).values()]) if plain else None

    def apply(
        self,
        model: PreTrainedModel,
        task_type: str = "CAUSAL_LM",
        *,
        head: Sequence[str] = (),
        new_tokens: Sequence[int] = (),
        frozen: Sequence[str] = (),
    ) -> PeftModel:
        """Return the model with fresh adapters; see `Lora.apply`.

        Raises:
            ConfigError: PEFT cannot put the adapters on this model, they split a tied weight, or the vocabulary has new
                tokens that nothing trains.
        """
        import torch
        from peft import PeftModel, get_peft_model

        from lit_rl.models.merging import check_merge, check_start  # which need torch

        check_start("model.lora", self.config, trained=False)
        config = copy.deepcopy(self.config)
        config.task_type, config.inference_mode = task_type, False
        if new_tokens and not getattr(config, "trainable_token_indices", None):
            raise ConfigError(
                "model.chat_template brings new tokens, and an adapter of PEFT trains their rows only where its config "
                "says so (trainable_token_indices of LoraConfig). Use lit_rl.models.Lora, which does, or name a "
                "template without new tokens."
            )
        unasked = [*head, *excluded_layers(model, self.targets, frozen)]
        if unasked and hasattr(config, "exclude_modules"):
            excluded = config.exclude_modules
            config.exclude_modules = (
                # The config's own expression comes first, unchanged: flags, "(?i)", are allowed at the start of an
                # expression alone.
                "|".join([excluded, *(rf"(?:.*\.)?{re.escape(name)}" for name in unasked)])
                if isinstance(excluded, str)
                else [*(excluded or ()), *unasked]
            )
        try:
            with torch.device("cpu"):  # as `Lora` does; VeRA, RandLoRA and FourierFT draw by a CPU's generator alone
                adapted = get_peft_model(model, config)
        except (ValueError, TypeError, re.error) as error:
            raise ConfigError(f"model.lora={type(config).__name__}(...) does not fit this model: {error}") from error
        assert isinstance(adapted, PeftModel)
        check_merge(adapted, f"model.lora={type(config).__name__}(...)")
        return adapted


def as_adapter(value: Any) -> Lora | PeftAdapter | None:
    """Return the value of `lora` as an object with `apply`. PEFT is not imported here unless it already is.

    Raises:
        ConfigError: it is neither `Lora` nor a config of PEFT.
    """
    if value is None or isinstance(value, Lora | PeftAdapter):
        return value
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(value, peft.PeftConfig):
        return PeftAdapter(value)
    found = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    raise ConfigError(
        f"model.lora is {found}. Allowed is lit_rl.models.Lora(r=16, alpha=32, dropout=0, targets='all-linear', "
        "rslora=False, dora=False, modules_to_save=None), or a config of PEFT, such as peft.LoraConfig(r=16)."
    )
