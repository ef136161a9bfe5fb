"""Scores of texts: padding and packing change nothing, the head sees what is learned, leaky models are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_kinds import needs_sdpa
from tiers import in_turn
from transformers import AutoModelForCausalLM, BloomConfig, GptOssConfig, Lfm2Config, Mamba2Config, Qwen3MoeConfig

from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import TokenBatch
from lit_rl.models import LanguageModel, Lora
from lit_rl.models import forward as text_forward
from lit_rl.models.forward import refuse_leaks, score_texts

PAD = 256
TEXTS = [[5, 6, 7, 8, 1], [9, 2], [10, 11, 3, 4, 5, 258, 7], [258, 12, 13]]
KINDS = ["gpt2", "qwen2", "qwen3", "smollm2", "llama3.2", "gemma2"]


def token_batch(rows: list[list[list[int]]], *, right: int = 0, skip: int = 1) -> TokenBatch:
    """Rows of texts; all of a text is learned but its first `skip` tokens."""
    width = max(sum(map(len, texts)) for texts in rows) + right
    ids = torch.full((len(rows), width), PAD)
    attended, learned = (torch.zeros((len(rows), width), dtype=torch.bool) for _ in range(2))
    segment = torch.zeros((len(rows), width), dtype=torch.long)
    for row, texts in enumerate(rows):
        start = 0
        for number, text in enumerate(texts):
            stop = start + len(text)
            ids[row, start:stop] = torch.tensor(text)
            attended[row, start:stop] = True
            learned[row, start + skip : stop] = True
            segment[row, start:] = number
            start = stop
    packed = any(len(texts) > 1 for texts in rows)
    return TokenBatch(ids, attended, learned, segment if packed else None)


def by_text(values: torch.Tensor, tokens: TokenBatch) -> list[torch.Tensor]:
    """The learned values of each text, rows one after another."""
    segment = torch.zeros_like(tokens.input_ids) if tokens.segment is None else tokens.segment
    found = []
    for row in range(len(tokens)):
        for number in range(int(segment[row].max()) + 1):
            found.append(values[row][tokens.learned[row] & (segment[row, 1:] == number)])
    return found


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing_and_scores_are_the_plain_ones(make_model, kind):
    model = LanguageModel(str(make_model(kind)), disable_dropout=True).load()
    tokens = token_batch([[text] for text in TEXTS], right=3)
    scores = score_texts(model, tokens, entropy=True, stats=True)
    assert scores.logprobs.shape == scores.entropy.shape == scores.stats.correct.shape == (4, 9)
    for row, text in enumerate(TEXTS):
        # The plain way, with nothing of ours: one unpadded text, all logits, softmax.
        wanted = model(input_ids=torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        ids, mask = torch.tensor(text[1:]), tokens.learned[row]
        picked = wanted.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(scores.logprobs[row][mask], picked, rtol=1e-5, atol=1e-5)
        spread = -(wanted.exp() * wanted).sum(-1)
        torch.testing.assert_close(scores.entropy[row][mask], spread, rtol=1e-5, atol=1e-5)
        assert torch.equal(scores.stats.correct[row][mask], wanted.argmax(-1) == ids)
    assert (scores.logprobs[~scores.logprobs.isfinite()]).numel() == 0
    assert not scores.entropy.requires_grad


@in_turn(kind=KINDS, attention=["sdpa", "eager"])
def test_packed_texts_score_and_learn_as_they_do_alone(make_model, kind, attention):
    if attention == "sdpa":
        needs_sdpa(kind)
    model = LanguageModel(str(make_model(kind)), disable_dropout=True, attn_implementation=attention).load()
    alone = token_batch([[text] for text in TEXTS])
    wanted = score_texts(model, alone)
    wanted_gradients = gradients(model, wanted.logprobs[alone.learned].sum())
    packings = [[TEXTS[:2], TEXTS[2:]], [TEXTS[:3], TEXTS[3:]], [TEXTS]]
    for rows in packings:
        tokens = token_batch(rows, right=2)
        scores = score_texts(model, tokens)
        for ours, theirs in zip(by_text(scores.logprobs, tokens), by_text(wanted.logprobs, alone), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        found = gradients(model, scores.logprobs[tokens.learned].sum())
        assert len(found) == len(wanted_gradients) > 0
        for ours, theirs in zip(found, wanted_gradients):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@in_turn(attention=["sdpa", "eager"], kind=KINDS)
def test_families_that_keep_texts_apart_pass(make_model, kind, attention):
    if attention == "sdpa":
        needs_sdpa(kind)
    model = LanguageModel(str(make_model(kind)), attn_implementation=attention).load()
    refuse_leaks(model)
    assert model.training


def test_a_lora_policy_and_half_precision_pass(make_model):
    folder = str(make_model("qwen2"))
    refuse_leaks(LanguageModel(folder, lora=Lora(r=2)).load())
    refuse_leaks(LanguageModel(folder, dtype="bfloat16").load())


LEAKY: dict[str, Any] = {
    # A state space, a short convolution, distances that ignore positions, and masks that are built without them.
    "mamba2": lambda: Mamba2Config(
        hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, n_groups=1, state_size=8, **COMMON
    ),
    "lfm2": lambda: Lfm2Config(**SHAPE, num_key_value_heads=1, layer_types=["conv", "full_attention"]),
    "bloom": lambda: BloomConfig(hidden_size=32, n_layer=2, n_head=2, **COMMON),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE, num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=1, head_dim=16
    ),
}
COMMON: dict[str, Any] = dict(
    vocab_size=64, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None
)
SHAPE = dict(COMMON, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize("kind", LEAKY)
def test_a_family_that_lets_texts_see_each_other_is_refused(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LEAKY[kind](), attn_implementation="eager")
    with pytest.raises(ConfigError, match=rf"data\.packing.*{type(model).__name__}.*data\.packing=none"):
        refuse_leaks(model)


def test_a_model_without_positions_is_refused(make_model):
    model = LanguageModel(str(make_model())).load()
    plain = model.forward
    model.forward = lambda input_ids, attention_mask=None, logits_to_keep=0, use_cache=None: plain(input_ids)
    with pytest.raises(ConfigError, match=r"takes no position_ids.*data\.packing=none"):
        refuse_leaks(model)


def test_flash_attention_gets_all_texts_in_one_row(make_model, monkeypatch):
    """Flash attention has no CPU: its road is taken with sdpa, which must lead to the same scores."""
    model = LanguageModel(str(make_model())).load()
    tokens = token_batch([TEXTS[:2], TEXTS[2:3], TEXTS[1:]], right=2)
    wanted = score_texts(model, tokens, stats=True)
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    monkeypatch.setattr(text_forward, "_needs_one_row", lambda model: True)
    scores = score_texts(model, tokens, stats=True)
    assert shapes == [(1, tokens.input_ids.numel())]
    torch.testing.assert_close(scores.logprobs[tokens.learned], wanted.logprobs[tokens.learned], rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.stats.correct[tokens.learned], wanted.stats.correct[tokens.learned])
    one_text_a_row = token_batch([[text] for text in TEXTS])
    score_texts(model, one_text_a_row)
    assert shapes[-1] == one_text_a_row.input_ids.shape, "rows of one text keep their attention mask"


def test_which_attention_needs_one_row(make_model):
    model = LanguageModel(str(make_model())).load()
    assert not text_forward._needs_one_row(model)
    model.config._attn_implementation = "flash_attention_2"
    assert text_forward._needs_one_row(model)


def test_the_head_sees_learned_columns_only(make_model):
    model = LanguageModel(str(make_model())).load()
    seen = []
    score_texts(model, token_batch([TEXTS[:1]]))  # the first pass of a model tries its head
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    tokens = token_batch([[[5] * 40 + [1, 2]], [[6] * 40 + [3]]], skip=40)
    scores = score_texts(model, tokens)
    assert seen == [2]
    assert scores.logprobs[:, :39].abs().sum() == 0 and (scores.logprobs[:, 39] < 0).all()
    nothing = dataclasses.replace(tokens, loss_mask=torch.zeros_like(tokens.loss_mask))
    assert score_texts(model, nothing).logprobs.shape == (2, 41)


def test_the_routers_loss_counts_no_padding_and_needs_a_router(make_model):
    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_key_value_heads=1, head_dim=16)
    mixture = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**(SHAPE | experts | {"vocab_size": 264})))
    losses = [
        score_texts(mixture, token_batch([[TEXTS[0]]], right=right), router_aux=True).aux_loss for right in (0, 5)
    ]
    torch.testing.assert_close(*losses)
    dense = LanguageModel(str(make_model())).load()
    with pytest.raises(ConfigError, match=r"algo\.router_aux_loss_coef.*Set it to 0"):
        score_texts(dense, token_batch([[TEXTS[0]]]), router_aux=True)
