"""What keeps TRL's frozen head fast: one product instead of one a row, and the same logits."""

from __future__ import annotations

from typing import Any

import torch
from bench.peer import lay_rows_together
from products import Products
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 41


def logits(model: Any) -> tuple[Tensor, list[str]]:
    ids = torch.arange(12).view(3, 4)
    with torch.no_grad(), Products() as products:
        found = model(input_ids=ids, logits_to_keep=1).logits
    return found, products.of_width(VOCABULARY)


def test_rows_of_a_frozen_head_are_one_product_again():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=1, **sizes)).eval()
    trained, products = logits(model)
    assert products == ["mm"]
    model.requires_grad_(False)
    assert logits(model)[1] == ["bmm"]  # the handicap: where torch no longer has it, the hook may go
    lay_rows_together(model)
    frozen, products = logits(model)
    assert products == ["mm"] and torch.equal(frozen, trained)
