"""Folded attention is plain causal attention over repeated keys: its values and every gradient, however it is cut."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lit_rl.ops import folded_attention as module
from lit_rl.ops.folded_attention import Sharers, folded_attention

N, P, B, K, R, D, E = 3, 70, 7, 2, 3, 8, 6
GROUPS = [Sharers(1, 0, 4, padding=40), Sharers(0, 4, 5), Sharers(2, 5, 7, padding=3)]


def tensors(t, dtype=torch.float64):
    """Query, the prompts' keys and values, and the rows' own."""
    torch.manual_seed(0)
    shapes = (B, K * R, t, D), (N, K, P, D), (N, K, P, E), (B, K, t, D), (B, K, t, E)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def plain(query, prompt_keys, prompt_values, keys, values, seen):
    prompt_of_row, t = torch.tensor([1, 1, 1, 1, 0, 2, 2]), query.shape[2]
    padding = torch.tensor([40, 40, 40, 40, 0, 3, 3])
    mask = torch.ones(t, P + t, dtype=torch.bool).tril(P).repeat(B, 1, 1, 1)
    mask[..., :P] &= (torch.arange(P) >= padding[:, None])[:, None, None]
    if seen is not None:
        mask[..., P:] &= seen[:, None, None]
    both = (prompt_keys, keys), (prompt_values, values)
    repeated = [torch.cat([of[prompt_of_row], own], 2).repeat_interleave(R, 1) for of, own in both]
    return F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)


@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("block", [2**19, 2**10], ids=["a block a prompt", "many blocks"])
@pytest.mark.parametrize("t", [1, 11, 45], ids=["one token", "weights are kept", "weights are computed anew"])
def test_it_is_plain_attention_over_repeated_keys(monkeypatch, t, block, holes):
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "COLUMNS", 8 if block < 2**19 else 32)
    assert module.keeps_weights(t, D, E) == (t <= 11)
    inputs = tensors(t)
    seen = torch.rand(B, t, generator=torch.manual_seed(1)) > 0.3 if holes else None
    wanted = plain(*inputs, seen)
    found = folded_attention(*inputs, GROUPS, seen=seen, scaling=0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(wanted)
    for mine, theirs in zip(*(torch.autograd.grad(out, inputs, weights) for out in (found, wanted))):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_in_bfloat16_narrow_heads_of_several_prompts_are_near_sdpa():
    exact = tensors(40)
    narrow = [part.detach().bfloat16().requires_grad_() for part in exact]
    wide = [part.detach().double().requires_grad_() for part in narrow]
    weights = torch.randn(B, K * R, 40, E).bfloat16()

    def found(out, inputs):
        return [out, *torch.autograd.grad(out, inputs, weights.to(out.dtype))]

    wanted = found(plain(*wide, None), wide)
    theirs = found(plain(*narrow, None), narrow)
    ours = found(folded_attention(*narrow, GROUPS, scaling=0.3), narrow)
    for truth, their, our in zip(wanted, theirs, ours):
        errors = [float((part - truth).detach().abs().mean()) for part in (our, their)]
        assert errors[0] <= 4 * errors[1], errors


@pytest.mark.parametrize("block", [2**19, 2**14], ids=["one block", "many blocks"])
def test_in_bfloat16_it_is_about_as_exact_as_sdpa(monkeypatch, block):
    """Heads are as wide as models have them, and scores so large that rounded ones would be off by much."""
    monkeypatch.setattr(module, "BLOCK", block)
    draw = torch.Generator().manual_seed(0)
    shapes = (8, 4, 64, 64), (1, 2, 64, 64), (1, 2, 64, 64), (8, 2, 64, 64), (8, 2, 64, 64)
    narrow = [(1.5 * torch.randn(shape, generator=draw)).bfloat16().requires_grad_() for shape in shapes]
    wide = [part.detach().double().requires_grad_() for part in narrow]
    slopes = torch.randn(shapes[0], generator=draw).bfloat16()

    def whole(query, prompt_keys, prompt_values, keys, values):
        both = (prompt_keys, keys), (prompt_values, values)
        repeated = [torch.cat([of.expand(8, -1, -1, -1), own], 2).repeat_interleave(2, 1) for of, own in both]
        mask = torch.ones(64, 128, dtype=torch.bool).tril(64)[None, None]
        return F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.125)

    def found(out, inputs):
        return [out, *torch.autograd.grad(out, inputs, slopes.to(out.dtype))]

    wanted, theirs = found(whole(*wide), wide), found(whole(*narrow), narrow)
    ours = found(folded_attention(*narrow, [Sharers(0, 0, 8)], scaling=0.125), narrow)
    for truth, their, our in zip(wanted, theirs, ours):
        errors = [float((part - truth).detach().norm() / truth.detach().norm()) for part in (our, their)]
        assert errors[0] <= 2 * errors[1], errors


@pytest.mark.parametrize("t", [11, 45])
def test_the_backward_pass_keeps_less_than_repeated_keys_would_take(t):
    inputs = tensors(t)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(id(x), x), lambda x: x):
        folded_attention(*inputs, GROUPS, scaling=0.3)
    given = {x.untyped_storage().data_ptr() for x in inputs}
    numbers = sum(x.numel() for x in kept.values() if x.untyped_storage().data_ptr() not in given)
    # A prompt's padding is cut in steps of 32 columns: the first prompt has 38 left.
    widths = sum(rows * (P - cut + t) for rows, cut in ((4, 32), (1, 0), (2, 0)))
    assert numbers == (K * R * t * widths if t == 11 else 0)
    assert numbers <= K * R * (D + E) * B * (P + t)
