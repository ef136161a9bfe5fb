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


_SETTINGS = {
    "alora_invocation_tokens": "lets the adapter wake up at certain tokens",
    "arrow_config": "lets every token choose among several adapters",
    "layer_replication": "lets several layers stand on the weights of one, each with an adapter of its own",
    "monteclora_config": "lets the adapter be drawn anew in every step",
}
"""Settings of LoRA of which no plain model is the same, or none was ever seen to be."""

_FROM_DATA = ("corda", "eva", "lora_ga")
"""Ways to initialise an adapter by what the model does on data."""


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
        for name, does in _SETTINGS.items():
            if getattr(config, name, None):
                raise ConfigError(
                    f"{key} has {name}={getattr(config, name)!r}, which {does}: no merged export is that policy. Leave "
                    f"{name} out."
                )
        return
    why = "is not among those whose merged export is known to be the policy"
    if config.is_prompt_learning:
        why = "puts learned vectors before the prompt, which cannot be merged into the weights"
    elif kind == "ADALORA":
        why = "allots its ranks by calls during the training, which no loop here makes"
    raise ConfigError(f"{key} is of PEFT's kind {kind}, which {why}. Allowed are {', '.join(MERGED)}.")


def check_start(key: str, config: PeftConfig, *, trained: bool) -> None:
    """Refuse an adapter whose base, or whose first values, nobody could make again from the config.

    Some ways to initialise an adapter change the base under it, and PEFT changes it again, by the config, wherever the
    adapter is loaded: in a resumed run, and over the base by itself.

    Args:
        key: What the message calls it.
        config: Of an adapter that is to be made, or loaded.
        trained: It is loaded, with weights of its own.

    Raises:
        ConfigError: it draws random numbers for the base, or needs data.
    """
    how = getattr(config, "init_lora_weights", None)
    if not isinstance(how, str):
        return
    if how.startswith("pissa_niter"):
        raise ConfigError(
            f"{key} has init_lora_weights={how!r}, which changes the base by random numbers: neither a resumed run nor "
            "the exported adapter would stand on the same base. Use 'pissa', which is exact, or 'olora'."
        )
    if how == "corda" or (how in _FROM_DATA and not trained):
        raise ConfigError(
            f"{key} has init_lora_weights={how!r}, which is made from data, and none are at hand here. Make the "
            "adapter with PEFT's own functions and give the PeftModel as model (with tokenizer=), or use true, "
            "'orthogonal' or 'pissa'."
        )
