"""An adapter as a config of PEFT describes it, of any kind that can be merged into the weights."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_rl.errors import ConfigError
from lit_rl.models.policy.lora import Lora, check_targets
from lit_rl.models.policy.vision_parts import layers_unasked

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
        from lit_rl.models.policy.adapter_kinds import check_kind

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

        from lit_rl.models.policy.adapter_kinds import check_start
        from lit_rl.models.policy.pieces import check_merge  # which needs torch

        check_start("model.lora", self.config, trained=False)
        config = copy.deepcopy(self.config)
        config.task_type, config.inference_mode = task_type, False
        if new_tokens and not getattr(config, "trainable_token_indices", None):
            raise ConfigError(
                "model.chat_template brings new tokens, and an adapter of PEFT trains their rows only where its config "
                "says so (trainable_token_indices of LoraConfig). Use lit_rl.models.Lora, which does, or name a "
                "template without new tokens."
            )
        unasked = [*head, *layers_unasked(model, self.targets, frozen)]
        if unasked and hasattr(config, "exclude_modules"):
            theirs = config.exclude_modules
            config.exclude_modules = (
                # Theirs comes first and as it is: flags, "(?i)", are allowed at the start of an expression alone.
                "|".join([theirs, *(rf"(?:.*\.)?{re.escape(name)}" for name in unasked)])
                if isinstance(theirs, str)
                else [*(theirs or ()), *unasked]
            )
        try:
            with torch.device("cpu"):  # as `Lora` does; VeRA, RandLoRA and FourierFT draw by a CPU's generator alone
                adapted = get_peft_model(model, config)
        except (ValueError, TypeError, re.error) as error:
            raise ConfigError(f"model.lora={type(config).__name__}(...) does not fit this model: {error}") from error
        assert isinstance(adapted, PeftModel)
        check_merge(adapted, f"model.lora={type(config).__name__}(...)")
        return adapted


def as_adapter(given: Any) -> Lora | PeftAdapter | None:
    """Return the value of `lora` as an object with `apply`. PEFT is not imported here unless it already is.

    Raises:
        ConfigError: it is neither `Lora` nor a config of PEFT.
    """
    if given is None or isinstance(given, Lora | PeftAdapter):
        return given
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(given, peft.PeftConfig):
        return PeftAdapter(given)
    found = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    raise ConfigError(
        f"model.lora is {found}. Allowed is lit_rl.models.Lora(r=16, alpha=32, dropout=0, targets='all-linear', "
        "rslora=False, dora=False, modules_to_save=None), or a config of PEFT, such as peft.LoraConfig(r=16)."
    )
