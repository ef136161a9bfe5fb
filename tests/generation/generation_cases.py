"""Small random policies, whose logits are spread enough that ties are rare, and slow references without cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lit_rl.core.rollout import Completions, Prompts
from lit_rl.generation.noise import prompt_key

VOCAB = 40
PAD, EOS = 0, 1
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(7)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3, bos_token_id=None
        )
        return GPT2LMHeadModel(config)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHARED))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SHARED, sliding_window=4))
    return Qwen2ForCausalLM(Qwen2Config(**SHARED))


def spell(ids: Sequence[int]) -> str:
    """Every token is two characters, so that a stop string can lie across two tokens."""
    return "".join(f"{chr(97 + i % 26)}{i % 10}" for i in ids)


def unspell(text: str) -> list[int]:
    """What `spell` spelled; spaces say nothing."""
    text = text.replace(" ", "")
    names = {spell([i]): i for i in range(VOCAB)}
    return [names[text[i : i + 2]] for i in range(0, len(text), 2)]


def ask(
    rows: Sequence[int] = (0, 1, 2, 3, 4), group_size: int = 3, *, seed: int = 0, eos_ids: tuple[int, ...] = (EOS,)
) -> Prompts:
    """Prompts of different lengths. Row ``i`` of the data set is always the same prompt with the same key."""
    token_ids = [[2 + (7 * row + 5 * j) % (VOCAB - 2) for j in range(1 + (3 * row) % 8)] for row in rows]
    keys = [prompt_key(seed, 0, row, 0) for row in rows]
    return Prompts(token_ids, keys, group_size, eos_ids, PAD, spell, unspell)


def responses(completions: Completions) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(completions.response_ids, completions.response_mask)]


@torch.no_grad()
def next_logits(policy: nn.Module, ids: Sequence[int]) -> Tensor:
    """Float32 ``(v,)``, by one row, without padding and without cache."""
    return policy.eval()(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1].float()


@torch.no_grad()
def all_logits(policy: nn.Module, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Float32 ``(t, v)``: the logits that each token of the response was drawn from, without padding and cache."""
    ids = torch.tensor([[*prompt, *response]])
    return policy.eval()(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
