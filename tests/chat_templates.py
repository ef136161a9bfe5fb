"""Chat templates of real model families, those that TRL ships, on a tokenizer of bytes with their control tokens."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from lit_rl.core.model_paths import TINY

CONTROL = re.compile(
    r"<\|[A-Za-z_0-9/]+\|>|<[｜][^｜>]+[｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>|<eos>|<bos>|</s>|<s>"
    r"|<SPECIAL_\d+>"
)
ENDS = {
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "lfm": ["<|im_end|>"],
    "nemotron": ["<|im_end|>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
    "gemma4": ["<turn|>", "<eos>", "<|tool_response>"],
    "diffusion_gemma": ["<turn|>", "<eos>", "<|tool_response>"],
    "gemma": ["<end_of_turn>", "<eos>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "glm": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "phi3": ["<|end|>", "<|endoftext|>"],
    "gptoss": ["<|return|>", "<|call|>", "<|end|>"],
    "cohere": ["<|END_OF_TURN_TOKEN|>", "<EOS_TOKEN>"],
    "smolvlm": ["<end_of_utterance>"],
    "idefics3": ["<end_of_utterance>"],
    "llava": ["<|im_end|>", "</s>"],
    "muse_glimmer": ["<|eot|>", "<|eom|>"],
}
"""What ends a turn of a model of the family, by its generation config."""


@cache
def templates() -> Path:
    import trl

    return Path(trl.__file__).parent / "chat_templates"


def names() -> list[str]:
    """Of the templates that models are used with; those for training are made of them."""
    found = sorted(path.stem for path in templates().glob("*.jinja"))
    return [name for name in found if not name.endswith("_training")]


@cache
def tokenizer_of(name: str) -> tuple[Any, tuple[int, ...]]:
    """Bytes and the control tokens of the template, which a model of the family has; and what ends a turn."""
    template = (templates() / f"{name}.jinja").read_text()
    ends = next((ids for family, ids in ENDS.items() if name.startswith(family)), ["</s>"])
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"extra_special_tokens": sorted({*CONTROL.findall(template), *ends})})
    tokenizer.chat_template = template
    tokenizer.eos_token = ends[0]
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    return tokenizer, tuple(tokenizer.convert_tokens_to_ids(end) for end in ends)
