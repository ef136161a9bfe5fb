"""Small models of several families, made on the spot: random weights, a byte-level tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from lit_rl.core.rollout import Completions

PAD, START, END, EXTRA = "<pad>", "<|im_start|>", "<|im_end|>", "<|eot|>"
VOCABULARY = 264

SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=128,
    initializer_range=0.2,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_IDS: dict[str, Any] = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def small_config(kind: str, **changes: Any) -> PreTrainedConfig:
    without_head_dim = {key: value for key, value in SMALL.items() if key != "head_dim"}
    gpt2 = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=128, initializer_range=0.2)
    makers: dict[str, Callable[[], PreTrainedConfig]] = {
        "gpt2": lambda: GPT2Config(**{**gpt2, **NO_IDS, **changes}),
        "qwen2": lambda: Qwen2Config(**{**without_head_dim, **NO_IDS, **changes}),
        "qwen3": lambda: Qwen3Config(**{**SMALL, **NO_IDS, **changes}),
        "smollm2": lambda: LlamaConfig(**{**SMALL, **NO_IDS, "tie_word_embeddings": True, **changes}),
        "llama3.2": lambda: LlamaConfig(**{**SMALL, **NO_IDS, "rope_parameters": LLAMA3_ROPE, **changes}),
        "gemma2": lambda: Gemma2Config(**{**SMALL, **NO_IDS, "sliding_window": 64, **changes}),
    }
    return makers[kind]()


def byte_tokenizer(*, pad: str | None = PAD, eos: str | None = END) -> PreTrainedTokenizerFast:
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END, EXTRA])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos)
    fast.chat_template = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    return fast


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """``make_model("qwen2", tie_word_embeddings=True)`` -> a folder with config, safetensors and tokenizer."""

    def make(
        kind: str = "qwen2",
        folder: str | None = None,
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        generation: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        **changes: Any,
    ) -> Path:
        target = tmp_path / (folder or kind)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(kind, **changes), dtype=dtype)
        # Zeros and ones of a fresh model would hide a bias or a norm that is lost on the way.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
        if generation is not None:
            model.generation_config = GenerationConfig(**generation)
        model.save_pretrained(target)
        (tokenizer or byte_tokenizer()).save_pretrained(target)
        return target

    return make


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE=1 does, for this process that has read it already."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def completions_of(
    prompts: list[list[int]], responses: list[list[int]], *, left: int = 0, right: int = 0, pad: int = 256
) -> Completions:
    """Completions of unpadded token lists, with ``left`` and ``right`` columns of padding to spare."""
    p, t = max(map(len, prompts)) + left, max(map(len, responses)) + right
    prompt_ids = torch.tensor([[pad] * (p - len(row)) + row for row in prompts])
    response_ids = torch.tensor([row + [pad] * (t - len(row)) for row in responses])
    prompt_mask = torch.tensor([[False] * (p - len(row)) + [True] * len(row) for row in prompts])
    response_mask = torch.tensor([[True] * len(row) + [False] * (t - len(row)) for row in responses])
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        response_mask=response_mask,
        sampler_logprobs=torch.zeros(response_ids.shape),
        ended=torch.ones(len(prompts), dtype=torch.bool),
        group_id=torch.zeros(len(prompts), dtype=torch.long),
    )


@pytest.fixture
def make_completions() -> Callable[..., Completions]:
    return completions_of


@pytest.fixture
def completions() -> Completions:
    """Two prompts of different lengths with three completions each; padding on both sides."""
    responses = [[1, 2], [3, 4, 5, 258], [258], [9, 9, 9], [2, 258], [7, 1, 4, 2]]
    rows = completions_of([[5, 6, 7, 8, 9, 10]] * 3 + [[11, 12, 13]] * 3, responses, left=1, right=1)
    return dataclasses.replace(rows, group_id=torch.tensor([4, 4, 4, 7, 7, 7]))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One device of a process group that is this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
