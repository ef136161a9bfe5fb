"""A small model with random weights in a folder, as a user would have a large one: byte-level, with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen2Config

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]


def save_tokenizer(
    folder: Path, *, pad: str | None = "<pad>", eos: str | None = "<|im_end|>", template: str | None = TEMPLATE
) -> Path:
    """A tokenizer alone, with config.json: what is known of a model before its weights are read."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    _config().save_pretrained(folder)
    return folder


def save_model(folder: Path, *, generation: dict[str, Any] | None = None, **tokenizer: Any) -> Path:
    """Config, weights and tokenizer; `generation` are the fields of generation_config.json."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config())
    for name, value in (generation or {}).items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    return save_tokenizer(folder, **tokenizer)


def save_speaker(folder: Path, prompt: str, says: str) -> Path:
    """A model that says one thing behind a plain prompt, and nothing in later turns: each position has its token.

    Args:
        folder: Of the model.
        prompt: Of so many characters, ASCII.
        says: Its first turn, ASCII; with the prompt shorter than `POSITIONS`.
    """
    save_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer.encode(says, add_special_tokens=False)
    end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    config = GPT2Config(
        vocab_size=264, n_positions=POSITIONS, n_embd=POSITIONS, n_layer=1, n_head=1, tie_word_embeddings=False,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(POSITIONS))
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.ln_f.bias.fill_(POSITIONS**-0.5)  # of what is normalised, all but the position's own is 0
        model.lm_head.weight.zero_()
        for position in range(POSITIONS):
            said = position - len(prompt) + 1
            model.lm_head.weight[ids[said] if 0 <= said < len(ids) else end, position] = 10.0
    model.save_pretrained(folder)
    return folder


POSITIONS = 256
"""Of the model of `save_speaker`."""


def _config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
        architectures=["Qwen2ForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
