"""What `generator.continuous_batching` brings: against one batch after another, interleaved.

    python scripts/decode_places.py                    # 7 M parameters; 135m for the shape of SmolLM2-135M
    python scripts/decode_places.py 135m rounds=5

Random weights, `generator=native`, four times as many rows as places. The share of tokens that end a response is set so
that lengths differ as they do in training: geometrically, 1 to `max_new_tokens`.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.noise import prompt_key

GROUP, PROMPTS, PLACES, NEW_TOKENS, MEAN_LENGTH = 8, 16, 32, 128, 48

SHAPES: dict[str, dict[str, int]] = {
    "7m": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6},
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
}
HEADS = {"7m": (8, 2), "135m": (9, 3)}


def policy_of(shape: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads, key_heads = HEADS[shape]
    sizes: dict[str, Any] = SHAPES[shape] | {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512)).eval()


def prompts_of(vocabulary: int) -> Prompts:
    lengths = [40 + 13 * i % 25 for i in range(PROMPTS)]
    token_ids = [[vocabulary - 1 - (7 * i + j) % 999 for j in range(length)] for i, length in enumerate(lengths)]
    keys = [prompt_key(0, 0, i, 0) for i in range(PROMPTS)]
    return Prompts(token_ids, keys, GROUP, eos_ids=tuple(range(vocabulary // MEAN_LENGTH)), pad_id=0)


def main(arguments: list[str]) -> None:
    shape = next((word for word in arguments if word in SHAPES), "7m")
    rounds = int(next((word.removeprefix("rounds=") for word in arguments if word.startswith("rounds=")), "5"))
    policy, prompts = policy_of(shape), prompts_of(SHAPES[shape]["vocab_size"])
    ways = {
        "one batch after another": NativeGenerator(PLACES, continuous_batching=False),
        "places are taken": NativeGenerator(PLACES),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = 0
    for turn in range(rounds + 1):
        for name, generator in ways.items():
            generator.sync(policy, 0)
            began = time.perf_counter()
            tokens = int(generator.generate(prompts, Sampling(max_new_tokens=NEW_TOKENS)).lengths.sum())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    table = Table(title=f"{shape}: {GROUP * PROMPTS} rows, {tokens} tokens in all, {PLACES} places")
    for column in ("", "seconds, median", "lowest", "highest"):
        table.add_column(column)
    for name, times in seconds.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(times), min(times), max(times))))
    Console().print(table)
    slow, fast = (statistics.median(times) for times in seconds.values())
    print(f"ratio of medians {slow / fast:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
