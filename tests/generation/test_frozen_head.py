"""A frozen head, as LoRA has one, multiplies all rows of a batch at once."""

from __future__ import annotations

import torch
from generation_cases import VOCAB, ask, build
from products import Products

from lit_rl.generation.batches import decode_batches
from lit_rl.generation.decoding import DecodingSteps


def test_reading_prompts_is_one_product_of_the_head_whether_it_is_trained_or_not():
    """torch makes one a row of rows that lie apart, by as many copies of the head, unless it is trained."""
    policy = build("llama").eval()
    (batch,) = decode_batches(ask((0, 1, 2)), None, torch.device("cpu"))
    seen = []
    for trained in (True, False):
        policy.requires_grad_(trained)
        with torch.no_grad(), Products() as products:
            seen.append(DecodingSteps(policy, batch, 4).logits)
        assert products.of_width(VOCAB) == ["mm"]
    assert torch.equal(*seen)
