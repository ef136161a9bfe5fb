"""Rows of like length run together: every row once, never more tokens than in one call, the same numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_kinds import needs_sdpa
from hypothesis import given
from hypothesis import strategies as st
from tiers import in_turn

from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Sampling
from lit_rl.models import LanguageModel, forward_inputs
from lit_rl.models.forward import score, score_texts
from lit_rl.models.forward_inputs import CALL_ON_CPU, MAX_BUCKETS, bucket_by_length, join_buckets
from lit_rl.models.language_model import ForwardOptions

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=40)


def cost(calls):
    return sum(len(call.rows) * call.width + CALL_ON_CPU for call in calls)


@given(LENGTHS)
def test_every_row_runs_once_and_fits_and_no_number_of_calls_is_cheaper(lengths):
    calls = bucket_by_length(torch.tensor(lengths), CPU)
    assert sorted(row for call in calls for row in call.rows.tolist()) == list(range(len(lengths)))
    for call in calls:
        assert call.width == max(lengths[row] for row in call.rows.tolist())
    falling = sorted(lengths, reverse=True)
    for number in range(1, min(MAX_BUCKETS, len(lengths)) + 1):
        parts = torch.tensor(falling).tensor_split(number)
        assert cost(calls) <= sum(len(part) * int(part[0]) + CALL_ON_CPU for part in parts)


def test_rows_of_one_length_run_in_one_call():
    assert len(bucket_by_length(torch.full((64,), 100), CPU)) == 1
    assert [call.width for call in bucket_by_length(torch.tensor([400, 10] * 8), CPU)] == [400, 10]


@given(LENGTHS)
def test_what_was_found_goes_back_to_its_row(lengths):
    width = max(lengths)
    values = torch.arange(len(lengths) * width).view(-1, width) + 1
    calls = bucket_by_length(torch.tensor(lengths), CPU)
    back = join_buckets([values[call.rows, : call.width] for call in calls], calls, width)
    for row, length in enumerate(lengths):
        assert torch.equal(back[row, :length], values[row, :length])


@pytest.fixture
def eager_to_cut(monkeypatch):
    monkeypatch.setattr(forward_inputs, "CALL_ON_CPU", 0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def calls_of(model):
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@in_turn(shared=[False, True], kind=["gpt2", "qwen2", "gemma2"])
def test_scores_of_completions_and_their_gradients_are_those_of_one_call(
    make_model, make_completions, eager_to_cut, kind, shared
):
    needs_sdpa(kind)
    model = LanguageModel(str(make_model(kind)), disable_dropout=True).load().double()
    responses = [[1] * 9, [2, 3], [258], [4] * 7, [5, 6], [7] * 8]
    completions = make_completions([[5, 6, 7, 8, 9]] * 3 + [[9, 10]] * 3, responses, left=1, right=2)
    completions = dataclasses.replace(completions, group_id=torch.tensor([0, 0, 0, 1, 1, 1]))
    mask, found = completions.response_mask, []
    for by in (False, True):
        shapes = calls_of(model)
        options = ForwardOptions(shared_prompts=shared, rows_by_length=by)
        scores = score(model, completions, Sampling(temperature=0.7), options=options, entropy_gradient=True)
        loss = scores.logprobs[mask].sum() + 0.3 * scores.entropy[mask].sum()
        found.append([scores.logprobs[mask], scores.entropy[mask], *gradients(model, loss)])
        assert scores.logprobs.shape == mask.shape
    assert len(shapes) > 1 + shared, "several calls"
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "gemma2"])
def test_scores_of_texts_and_their_gradients_are_those_of_one_call(make_model, eager_to_cut, kind):
    model = LanguageModel(str(make_model(kind)), disable_dropout=True).load().double()
    lengths = torch.tensor([12, 3, 5, 11, 2])
    ids = torch.randint(250, (5, 13), generator=torch.Generator().manual_seed(0))
    attended = torch.arange(13) < lengths[:, None]
    learned = attended & (torch.arange(13) >= 1) & (torch.arange(13) % 3 > 0)
    tokens = TokenBatch(ids, attended, learned)
    found = []
    for by in (False, True):
        shapes = calls_of(model)
        scores = score_texts(model, tokens, entropy=True, stats=True, options=ForwardOptions(rows_by_length=by))
        mask, stats = tokens.learned, scores.stats
        loss = scores.logprobs[mask].sum()
        values = scores.logprobs, scores.entropy, stats.log_sum_sq, stats.correct.double(), stats.mean_logit
        found.append([*(value[mask] for value in values), *gradients(model, loss)])
        assert scores.logprobs.shape == mask.shape
    assert len(shapes) > 1
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@in_turn(packed=[False, True], by=[False, True])
def test_without_gradient_no_call_has_more_rows_than_it_may(make_model, by, packed):
    model = LanguageModel(str(make_model()), disable_dropout=True).load().double().eval()
    ids = torch.randint(250, (5, 12), generator=torch.Generator().manual_seed(0))
    attended = torch.arange(12) < torch.tensor([12, 4, 9, 12, 5])[:, None]
    learned = attended & (torch.arange(12) % 3 > 0)
    tokens = TokenBatch(ids, attended, learned, (torch.arange(12) >= 3).long().expand(5, 12) if packed else None)
    options = ForwardOptions(rows_by_length=by)
    bounded = dataclasses.replace(options, most_rows=2)
    shapes = calls_of(model)
    with torch.no_grad():
        whole = score_texts(model, tokens, entropy=True, stats=True, options=options)
        shapes.clear()
        found = score_texts(model, tokens, entropy=True, stats=True, options=bounded)
    assert len(shapes) >= 3 and all(rows <= 2 for rows, _ in shapes)
    mask = tokens.learned
    for one, other in [(whole.logprobs, found.logprobs), (whole.entropy, found.entropy)]:
        torch.testing.assert_close(one[mask], other[mask])
    shapes.clear()
    assert score_texts(model, tokens, options=bounded).logprobs.requires_grad
    assert sum(rows for rows, _ in shapes) == 5 and (by or len(shapes) == 1)


def test_texts_that_share_a_row_stay_in_one_call(make_model, eager_to_cut):
    model = LanguageModel(str(make_model())).load()
    ids = torch.randint(250, (3, 12), generator=torch.Generator().manual_seed(0))
    attended = torch.arange(12) < torch.tensor([12, 4, 9])[:, None]
    segment = (torch.arange(12) >= 3).long().expand(3, 12)
    learned = attended & (torch.arange(12) % 3 > 0)
    score_texts(model, TokenBatch(ids, attended, learned, segment))
    shapes = calls_of(model)
    score_texts(model, TokenBatch(ids, attended, learned, segment))
    assert shapes == [(3, 12)]


def test_one_call_keeps_every_other_choice():
    asked = ForwardOptions(fused_head=False, folded_attention=False, most_rows=3)
    assert asked.in_one_call == dataclasses.replace(asked, shared_prompts=False, rows_by_length=False)
