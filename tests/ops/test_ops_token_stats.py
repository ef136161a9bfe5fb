"""Statistics of logits: numbers worked out on paper, blocks, precision, no gradient."""

from math import log

import pytest
import torch

from lit_rl.ops import logprobs
from lit_rl.ops.logprobs import token_stats


def test_by_hand():
    """Probabilities 1/2, 1/4, 1/4 and certainty: sums of squares 3/8 and 1."""
    logits = torch.tensor([[[log(2) + 5, 5.0, 5.0], [0.0, 200.0, -200.0]]])
    out = token_stats(logits, torch.tensor([[0, 2]]))
    assert out.log_sum_sq.flatten().tolist() == pytest.approx([log(3 / 8), 0.0], abs=1e-6)
    assert out.correct.tolist() == [[True, False]]
    assert out.mean_logit.flatten().tolist() == pytest.approx([5 + log(2) / 3, 0.0], abs=1e-6)


def test_blocks_change_nothing(monkeypatch):
    logits, ids = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    whole = token_stats(logits, ids)
    monkeypatch.setattr(logprobs, "CPU_BLOCK", 22)
    parts = token_stats(logits, ids)
    assert torch.equal(whole.correct, parts.correct)
    assert torch.allclose(whole.log_sum_sq, parts.log_sum_sq) and torch.allclose(whole.mean_logit, parts.mean_logit)


def test_half_precision_is_summed_in_float32_and_without_gradient():
    logits = torch.randn(2, 3, 1000).bfloat16().requires_grad_()
    ids = logits.argmax(-1)
    out, exact = token_stats(logits, ids), token_stats(logits.float(), ids)
    assert out.correct.all() and not out.log_sum_sq.requires_grad
    assert torch.equal(out.log_sum_sq, exact.log_sum_sq) and torch.equal(out.mean_logit, exact.mean_logit)
