"""Responses attend to their prompt's keys where they lie: only in models in which that is what attention is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_kinds import needs_sdpa
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, MistralConfig, Qwen2Config

from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling, select
from lit_rl.models import LanguageModel, Lora, shared_attention, shared_prefix
from lit_rl.models.forward import response_logprobs, score
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.shared_attention import FoldedCache
from lit_rl.ops import folded_attention as ops

REPEATED, FOLDED = ForwardOptions(folded_attention=False), ForwardOptions()
SHAPE = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


@pytest.fixture
def folded(monkeypatch):
    """The rows of every call that ran so, however few scores they have."""
    monkeypatch.setattr(ops, "WORTH", 0)
    rows, whole = [], FoldedCache.attend

    def attend(self, module, layer, query, scaling):
        if module.layer_idx == 0 and type(self) is FoldedCache:
            rows.append(len(query))
        return whole(self, module, layer, query, scaling)

    monkeypatch.setattr(FoldedCache, "attend", attend)
    return rows


def of_config(config, **how):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **how)


def result(model, completions, options):
    model.zero_grad()
    scores = score(model, completions, Sampling(temperature=0.7), options=options, entropy_gradient=True)
    mask = completions.response_mask
    (scores.logprobs[mask].sum() + 0.3 * scores.entropy[mask].sum()).backward()
    return scores.logprobs[mask].detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def assert_same(one, other, tolerance=1e-6):
    torch.testing.assert_close(one[0], other[0], rtol=tolerance, atol=tolerance)
    assert one[1].keys() == other[1].keys() and len(one[1]) > 0
    for name, part in one[1].items():
        scale = max(1e-3, float(other[1][name].abs().max()))
        assert float((part - other[1][name]).abs().max()) <= 10 * tolerance * scale, name


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "qwen3", "llama3.2", "gemma2"])
def test_known_models_run_so(make_model, completions, folded, kind):
    needs_sdpa(kind)
    model = LanguageModel(str(make_model(kind)), disable_dropout=True).load().double()
    wanted = result(model, completions, REPEATED)
    assert folded == []
    assert_same(result(model, completions, FOLDED), wanted)
    assert folded == [6]


def test_with_adapters_and_rows_in_any_order_in_several_calls(make_model, completions, folded, monkeypatch):
    monkeypatch.setattr("lit_rl.models.forward_inputs.CALL_ON_CPU", 0)
    model = LanguageModel(str(make_model()), lora=Lora(r=2)).load().double()
    for name, part in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(part, std=0.1)
    rows = select(completions, torch.tensor([5, 0, 3, 1, 2]))  # three rows of one prompt, two of the other
    assert_same(result(model, rows, FOLDED), result(model, rows, ForwardOptions(shared_prompts=False)))
    assert len(folded) > 1 and sum(folded) == 5


def test_attended_tokens_with_holes(make_model, completions, folded):
    model = LanguageModel(str(make_model())).load().double()
    attended = completions.response_mask.clone()
    attended[1, 1] = attended[5, 0] = False
    rows = dataclasses.replace(completions, response_mask=attended)
    assert_same(result(model, rows, FOLDED), result(model, rows, ForwardOptions(shared_prompts=False)))
    assert folded == [6]


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_in_bfloat16(make_model, completions, folded, how):
    model = LanguageModel(str(make_model()), dtype="bfloat16" if how == "weights" else "float32").load()
    found = []
    for options in (REPEATED, FOLDED):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            found.append(result(model, completions, options))
    assert folded == [6]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.05, atol=0.05)
    for name, part in found[0][1].items():
        assert float((part - found[1][1][name]).norm()) <= 0.05 * float(part.norm()) + 1e-3, name


def test_scoring_without_gradient_runs_so_too(make_model, completions, folded):
    model, mask = LanguageModel(str(make_model())).load(), completions.response_mask
    with torch.no_grad():
        one, other = (response_logprobs(model, completions, Sampling(), o)[mask] for o in (REPEATED, FOLDED))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert folded == [6]


def test_a_model_is_tried_once_and_left_as_it_was(make_model, completions, folded, monkeypatch):
    tried, whole = [], shared_prefix._trial
    monkeypatch.setattr(shared_prefix, "_trial", lambda base: tried.append(base) or whole(base))
    model = LanguageModel(str(make_model())).load().train()
    for _ in range(2):
        result(model, completions, FOLDED)
    assert tried == [model] and folded == [6, 6]
    assert model.training and model.config._attn_implementation == "sdpa"


# ------------------------------------------------------------------ where keys are repeated


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=3), {}),
        (Qwen2Config(**SHAPE, num_key_value_heads=2), {"attn_implementation": "eager"}),
        (Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8), {"attn_implementation": "eager"}),
        (GptOssConfig(**SHAPE, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1), {}),
    ],
    ids=["a window shorter than the text", "eager", "a soft cap", "sinks"],
)
def test_other_attention(completions, folded, config, how):
    model = of_config(config, **how)
    assert_same(result(model, completions, FOLDED), result(model, completions, REPEATED), tolerance=1e-12)
    assert folded == []


def test_a_trial_finds_a_bias_that_attention_adds(make_model, completions, folded):
    model = LanguageModel(str(make_model())).load().double()
    layer = model.model.layers[1].self_attn
    whole = layer.forward

    def biased(*args, **kwargs):
        return whole(*args, **kwargs, position_bias=torch.zeros(1, dtype=torch.float64))

    layer.forward = biased
    assert shared_prefix._proven(model) is False
    layer.forward = whole
    assert result(model, completions, FOLDED) and folded == []


def test_a_trial_finds_attention_that_is_wrong(make_model, monkeypatch):
    model = LanguageModel(str(make_model())).load()
    right = shared_attention.folded_attention
    monkeypatch.setattr(shared_attention, "folded_attention", lambda *a, **k: right(*a, **k) + 1e-6)
    assert not shared_prefix._proven(model)


@pytest.mark.parametrize(("scores", "runs"), [(360, [6]), (361, [])])
def test_groups_with_few_scores_have_their_keys_repeated(make_model, completions, folded, monkeypatch, scores, runs):
    """Three rows of a prompt times two query heads of a key head times 5 tokens that look at 7 + 5: 360."""
    assert completions.prompt_ids.shape == (6, 7) and completions.response_ids.shape == (6, 5)
    monkeypatch.setattr(ops, "WORTH", scores)
    result(LanguageModel(str(make_model())).load(), completions, FOLDED)
    assert folded == runs


def test_prompts_with_holes_have_their_keys_repeated(make_model, completions, folded):
    model = LanguageModel(str(make_model())).load().double()
    mask = completions.prompt_mask.clone()
    mask[:3, 3] = False
    rows = dataclasses.replace(completions, prompt_mask=mask)
    assert_same(result(model, rows, FOLDED), result(model, rows, REPEATED), tolerance=1e-12)
    assert folded == []


def test_what_a_model_asks_for_after_its_trial_is_refused_by_name(make_model, completions, folded):
    model = LanguageModel(str(make_model())).load()
    result(model, completions, FOLDED)
    layer = model.model.layers[0].self_attn
    whole = layer.forward
    layer.forward = lambda *args, **kwargs: whole(*args, **kwargs, position_bias=torch.zeros(1))
    with pytest.raises(ConfigError, match=r"model\.speedups\.folded_attention=true.*biases.*false"):
        result(model, completions, FOLDED)
    assert model.config._attn_implementation == "sdpa"
