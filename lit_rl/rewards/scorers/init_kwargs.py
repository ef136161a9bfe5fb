"""What a user may add when a reward model is loaded and its chat template rendered; the rest is fixed, and said so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_rl.errors import ConfigError

OTHERWISE = {
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "revision": "revision",
    "code_revision": "revision",
    "device_map": "device",
    "token": "the HF_TOKEN environment variable, which no config file records",
    "cache_dir": "the HF_HOME environment variable",
    "local_files_only": "the HF_HUB_OFFLINE environment variable",
    "trust_remote_code": "nothing: a reward model runs no code of its repository",
    "auto_map": "nothing: a reward model runs no code of its repository",
    "use_safetensors": "nothing: safetensors files alone are read",
    "quantization_config": "dtype: reward models are not quantised",
    **dict.fromkeys(("num_labels", "id2label", "label2id"), "label, which chooses among the labels that it has"),
    **dict.fromkeys(("architectures", "model_type"), "nothing: they are those of its files"),
}
"""Arguments of `from_pretrained` that are settings of their own, are fixed, or would undo a safety."""

BESIDE = ("attn_implementation",)
"""Arguments of `from_pretrained` that are no field of a config."""

_RENDERED = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "padding", "return_dict"),
    *("return_tensors", "tokenize", "truncation", "max_length"),
)
"""Arguments of `apply_chat_template` that the rendering of a row fixes."""


def check_init_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that are set elsewhere or fixed.

    Raises:
        ConfigError: names the key, and the setting to use instead.
    """
    for key in kwargs:
        if key in OTHERWISE:
            raise ConfigError(f"init_kwargs.{key} is not taken: use {OTHERWISE[key]}.")


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse keywords of the chat template that are not the user's to set.

    Raises:
        ConfigError: names them.
    """
    if taken := sorted(kwargs.keys() & set(_RENDERED)):
        raise ConfigError(
            f"chat_template_kwargs: {', '.join(taken)} cannot be set, since every row is rendered alike: remove it. "
            "A template of your own is chat_template."
        )
