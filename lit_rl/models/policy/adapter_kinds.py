"""Which kinds of PEFT's adapters a policy may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_rl.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig

MERGED = (
    "LORA",
    "BOFT",
    "C3A",
    "FOURIERFT",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "MISS",
    "OFT",
    "RANDLORA",
    "VBLORA",
    "VERA",
)
"""Kinds of adapters whose export is the policy: a test trains, exports and reloads each of them."""


def check_kind(key: str, config: PeftConfig) -> None:
    """Refuse an adapter that could not be merged, before anything is trained.

    Args:
        key: What the message calls it.
        config: Of the adapter.

    Raises:
        ConfigError: it puts something before the prompt, allots its ranks while it trains, or is not known to merge.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind in MERGED:
        return
    why = "is not among those whose merged export is known to be the policy"
    if config.is_prompt_learning:
        why = "puts learned vectors before the prompt, which cannot be merged into the weights"
    elif kind == "ADALORA":
        why = "allots its ranks by calls during the training, which no loop here makes"
    raise ConfigError(f"{key} is of PEFT's kind {kind}, which {why}. Allowed are {', '.join(MERGED)}.")
