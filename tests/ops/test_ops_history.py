"""What earlier tokens do to logits: by hand, by transformers' own processors, and its gradient by autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiers import in_turn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as peer

from lit_rl.ops import fused_head as of_heads
from lit_rl.ops import logprobs as of_logits
from lit_rl.ops.fused_head import Distribution, linear_logprobs
from lit_rl.ops.logprobs import score_tokens
from lit_rl.ops.sampling_distribution import NO_TRUNCATION, History, Truncation

V, P, T, D = 11, 4, 5, 6
ENDS, LEAST, PENALTY, TEMPERATURE = [1, 3], 2, 1.7, 0.8


def texts() -> Tensor:
    return torch.randint(V, (3, P + T), generator=torch.Generator().manual_seed(1)).clamp(min=4)


def history(penalty: float = PENALTY, ends: tuple[int, ...] = tuple(ENDS)) -> History:
    padded = texts()
    padded[0, :2] = -1  # the first prompt is shorter
    columns = torch.arange(T).expand(3, T)
    rows = torch.arange(3)[:, None].expand(3, T)
    return History(columns < LEAST, rows, P + columns, padded, torch.tensor(ends, dtype=torch.long), penalty)


def processed(logits: Tensor) -> Tensor:
    """Position by position, by the processors of transformers, which see the prompt as well."""
    rows = []
    penalises: Any = peer.RepetitionPenaltyLogitsProcessor(PENALTY)
    for row, padded in enumerate(history().texts):
        for column in range(T):
            before = padded[: P + column]
            before = before[before >= 0][None]
            once = before.unique()[None]  # autograd would count a token twice that stood there twice
            scores = penalises(once, logits[row, column][None])
            begin = int((padded[:P] >= 0).sum())
            held: Any = peer.MinNewTokensLengthLogitsProcessor(begin, LEAST, ENDS, device="cpu")
            rows.append(held(before, scores)[0])
    return torch.stack(rows).view(3, T, V)


def test_by_hand():
    """Logits 2 ln 3, -ln 3 and 0 of a token that stood before, one that did, and one that did not; a penalty of 2."""
    logits = torch.tensor([[[2 * math.log(3), -math.log(3), 0.0]]])
    past = History(
        early=torch.tensor([[False]]),
        row=torch.tensor([[0]]),
        place=torch.tensor([[2]]),
        texts=torch.tensor([[0, 1, 2]]),
        ends=torch.tensor([], dtype=torch.long),
        penalty=2.0,
    )
    logprobs, _ = score_tokens(logits, torch.tensor([[0]]), history=past)
    assert logprobs.item() == pytest.approx(math.log(3 / (3 + 1 / 9 + 1)))
    held = History(torch.tensor([[True]]), past.row, past.place, past.texts, torch.tensor([0, 2]))
    logprobs, entropy = score_tokens(logits, torch.tensor([[1]]), history=held, entropy=True)
    assert logprobs.item() == 0 and entropy is not None and entropy.item() == 0
    # A token that was drawn is never ruled out.
    logprobs, _ = score_tokens(logits, torch.tensor([[2]]), history=held)
    assert logprobs.item() == pytest.approx(math.log(3 / 4))


@in_turn(head=[False, True], numbers=[30, 2**22], truncation=[NO_TRUNCATION, Truncation(top_k=6, top_p=0.9)])
def test_scores_and_gradients_are_those_of_the_processed_logits(
    monkeypatch: pytest.MonkeyPatch, head: bool, numbers: int, truncation: Truncation
):
    monkeypatch.setattr(of_logits, "CPU_BLOCK", numbers)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=generator) for size in ((3 * T, D), (V, D)))
    ids, share = texts()[:, P:], torch.randn(2, 3, T, generator=generator)
    found, grads = [], []
    for ours in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = (h @ w.T).view(3, T, V)
        if ours and head:
            distribution = Distribution(TEMPERATURE, truncation, entropy=True, entropy_gradient=True)
            past = history().mapped(lambda field: field.flatten())
            scores = linear_logprobs(h, w, ids.flatten(), distribution, history=past)
            assert scores.entropy is not None
            value = scores.logprobs.view(3, T), scores.entropy.view(3, T)
        else:
            asked: dict[str, Any] = {"history": history()} if ours else {}
            value = score_tokens(
                logits if ours else processed(logits),
                ids,
                temperature=TEMPERATURE,
                truncation=truncation,
                entropy=True,
                entropy_gradient=True,
                **asked,
            )
        assert value[1] is not None
        (value[0] * share[0] + value[1] * share[1]).sum().backward()
        found.append(torch.stack([value[0].detach(), value[1].detach()]))
        grads.append((h.grad, w.grad))
    torch.testing.assert_close(*found)
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert float((found[0] - found[0].mean()).abs().max()) > 0.1


@pytest.mark.parametrize("head", [False, True], ids=["logits", "head"])
def test_with_and_without_gradient_the_bits_are_the_same(head: bool):
    hidden, weight = torch.randn(3 * T, D), torch.randn(V, D)
    ids, past = texts()[:, P:], history()

    def scored(h: Tensor) -> Tensor:
        if head:
            flat = past.mapped(lambda field: field.flatten())
            return linear_logprobs(h, weight, ids.flatten(), history=flat).logprobs
        return score_tokens((h @ weight.T).view(3, T, V), ids, history=past)[0]

    with torch.no_grad():
        still = scored(hidden)
    assert torch.equal(scored(hidden.clone().requires_grad_()), still)


def test_an_end_beyond_the_logits_is_no_token():
    """A tokenizer may know tokens that the model has no logits for."""
    logits = torch.randn(3, T, V)
    ids = texts()[:, P:]
    some, more = (score_tokens(logits, ids, history=history(1.0, ends))[0] for ends in ((1, 3), (1, 3, V + 4)))
    assert torch.equal(some, more)


def test_no_float32_tensor_of_the_size_of_the_logits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of_logits, "CPU_BLOCK", 64 * 4)
    monkeypatch.setattr(of_heads, "KEPT", 0)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and tensor.ndim > 1:
                    largest = max(largest, tensor.numel())
            return out

    logits = torch.randn(4, 8, 16).bfloat16().requires_grad_()
    ids, columns = torch.zeros(4, 8, dtype=torch.long), torch.arange(8).expand(4, 8)
    rows = torch.arange(4)[:, None].expand(4, 8)
    past = History(columns < 3, rows, 1 + columns, torch.zeros(4, 9, dtype=torch.long), torch.tensor([2]), 1.5)
    with Watch():
        score_tokens(logits, ids, history=past)[0].sum().backward()
    assert 32 <= largest <= 64


def test_blocks_of_the_same_texts_share_what_is_made_of_them():
    whole = history()
    blocks = [whole.at((slice(None), part)) for part in (slice(0, 1), slice(1, T))]
    first, later = (block.over(V) for block in blocks)
    assert first.first is not None and first.first is later.first and first.is_end is later.is_end
    apart = history().over(V)
    assert apart.first is not None and torch.equal(first.first, apart.first) and first.over(V) is first
    assert whole.over(V + 1).first is not first.first, "of another vocabulary"
