"""A frozen head, as LoRA has one, multiplies all rows of a batch at once."""

from __future__ import annotations

import torch
from generation_cases import VOCAB, ask, build, responses
from products import Products

from lit_rl.core.rollout import Sampling
from lit_rl.generation.decoding import DecodingSteps
from lit_rl.generation.generator import decode_batches
from lit_rl.generation.hf import HFGenerator


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


def test_so_it_is_where_transformers_decodes():
    policy = build("llama").eval().requires_grad_(False)
    engine, sampling = HFGenerator(), Sampling(max_new_tokens=5)
    engine.sync(policy, 0)
    with Products() as products:
        written = engine.generate(ask((0, 1, 2)), sampling)
    assert set(products.of_width(VOCAB)) == {"mm"}
    policy.requires_grad_(True)
    assert responses(engine.generate(ask((0, 1, 2)), sampling)) == responses(written)
