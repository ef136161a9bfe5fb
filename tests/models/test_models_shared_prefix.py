"""A group's prompt is computed once: the same log-probs and gradients, and the plain pass where that would not hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_kinds import needs_sdpa
from tiers import in_turn
from transformers import AutoModelForCausalLM, BloomConfig, Lfm2Config, LlamaConfig, MistralConfig, Qwen3MoeConfig

from lit_rl.core.rollout import Sampling, select
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import response_logprobs, score
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.shared_prefix import can_share, shared_prompts

KINDS = ["gpt2", "qwen2", "qwen3", "smollm2", "llama3.2", "gemma2"]
SAMPLING = Sampling(temperature=0.7)
PLAIN, SHARED = ForwardOptions(shared_prompts=False), ForwardOptions()
SHAPE = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


def calls_of(model):
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen


def result(model, completions, options):
    model.zero_grad()
    scores = score(model, completions, SAMPLING, options=options, entropy_gradient=True)
    mask = completions.response_mask
    (scores.logprobs[mask].sum() + 0.3 * scores.entropy[mask].sum()).backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return scores.logprobs[mask].detach(), scores.entropy[mask].detach(), gradient


def assert_same(one, other, *, value, gradient):
    for mine, theirs in zip(one[:2], other[:2]):
        torch.testing.assert_close(mine, theirs, rtol=value, atol=value)
    assert one[2].keys() == other[2].keys() and len(one[2]) > 0
    for name, part in one[2].items():
        scale = max(1e-3, float(other[2][name].abs().max()))
        assert float((part - other[2][name]).abs().max()) <= gradient * scale, name


@in_turn(kind=KINDS, lora=[None, Lora(r=2)])
def test_scores_and_gradients_are_those_of_whole_rows(make_model, completions, kind, lora):
    """In float64: what is left is the float32 in which some models compute norms and softmaxes."""
    needs_sdpa(kind)
    if kind == "gpt2" and lora is not None:
        lora = Lora(r=2, targets=["c_attn"])
    model = LanguageModel(str(make_model(kind)), lora=lora, disable_dropout=True).load().double()
    for name, part in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(part, std=0.1)
    wanted = result(model, completions, PLAIN)
    seen = calls_of(model)
    assert_same(result(model, completions, SHARED), wanted, value=1e-6, gradient=1e-5)
    assert seen[-2:] == [(2, 7), (6, 3)]  # after the trial of a model


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 4, 2], [0, 3, 4, 5], [2, 1, 5]])
def test_rows_may_stand_in_any_order_and_groups_be_of_any_size(make_model, completions, order):
    model = LanguageModel(str(make_model())).load().double()
    rows = select(completions, torch.tensor(order))
    assert shared_prompts(model, rows) is not None
    assert_same(result(model, rows, SHARED), result(model, rows, PLAIN), value=1e-6, gradient=1e-5)


ANGLES = {"dynamic": {"factor": 2.0}, "longrope": {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8, "factor": 4.0}}


@pytest.mark.parametrize("limit", [9, 64], ids=["beyond the limit", "below it"])
@pytest.mark.parametrize("kind", ANGLES)
def test_angles_that_change_with_the_length_of_a_text_are_those_of_the_whole(completions, kind, limit):
    """A prompt by itself is shorter than the limit of this model, and its rows are not."""
    torch.manual_seed(0)
    angles = ANGLES[kind] | {"rope_type": kind, "rope_theta": 10_000.0}
    if kind == "longrope":
        angles["original_max_position_embeddings"] = limit
    config = LlamaConfig(**SHAPE, max_position_embeddings=limit, rope_parameters=angles)
    model = AutoModelForCausalLM.from_config(config).double()
    assert (shared_prompts(model, completions) is None) == (limit == 9)
    whole = ForwardOptions(rows_by_length=False)
    plain = ForwardOptions(shared_prompts=False, rows_by_length=False)
    assert_same(result(model, completions, whole), result(model, completions, plain), value=1e-6, gradient=1e-5)


def test_a_window_shorter_than_the_text_is_kept(completions):
    results = {}
    for window in (3, 64):
        torch.manual_seed(0)
        config = MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=window)
        model = AutoModelForCausalLM.from_config(config).double()
        results[window] = result(model, completions, SHARED)
        assert_same(results[window], result(model, completions, PLAIN), value=1e-6, gradient=1e-5)
    assert not torch.allclose(results[3][0], results[64][0], atol=1e-3)


def test_tokens_of_an_environment_are_read_where_they_are_attended(make_model, completions):
    model = LanguageModel(str(make_model())).load().double()
    sampled = completions.response_mask.clone()
    sampled[1, 1], sampled[5, 2] = False, False
    rows = dataclasses.replace(completions, response_mask=sampled, attended=completions.response_mask)
    assert_same(result(model, rows, SHARED), result(model, rows, PLAIN), value=1e-6, gradient=1e-5)


def test_without_gradient_too(make_model, completions):
    model = LanguageModel(str(make_model())).load()
    mask = completions.response_mask
    with torch.no_grad():
        one, other = (response_logprobs(model, completions, Sampling(), options)[mask] for options in (PLAIN, SHARED))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------ where each row runs its own prompt


def test_rows_that_share_little_run_for_themselves(make_model, make_completions, completions):
    model = LanguageModel(str(make_model())).load()
    assert shared_prompts(model, completions) is not None
    assert shared_prompts(model, select(completions, torch.tensor([0, 3]))) is None
    short, long = [[5]] * 4, [[1] * 30] * 4
    of_one = dataclasses.replace(make_completions(short, long), group_id=torch.zeros(4, dtype=torch.long))
    assert shared_prompts(model, of_one) is None


def test_a_group_with_different_prompts_runs_for_itself(make_model, completions):
    model = LanguageModel(str(make_model())).load()
    assert shared_prompts(model, dataclasses.replace(completions, group_id=torch.zeros(6, dtype=torch.long))) is None


def test_dropout_is_drawn_for_each_row(make_model, completions):
    model = LanguageModel(str(make_model("gpt2"))).load()
    assert not can_share(model.train())
    assert can_share(model.eval())


def test_gradient_checkpointing_keeps_no_cache(make_model, completions):
    model = LanguageModel(str(make_model()), gradient_checkpointing=True).load()
    assert not can_share(model.train())
    assert can_share(model.eval())


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=264, hidden_size=32, n_layer=2, n_head=2),
        Lfm2Config(**SHAPE, num_key_value_heads=1, layer_types=["conv", "full_attention"]),
    ],
    ids=["positions are made of the mask", "a convolution remembers"],
)
def test_models_whose_past_is_more_than_keys_and_values_by_position(config):
    assert not can_share(AutoModelForCausalLM.from_config(config))


def test_a_routers_loss_counts_every_row(completions):
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, **experts, num_key_value_heads=1))
    assert_same(result(model, completions, SHARED), result(model, completions, PLAIN), value=1e-4, gradient=1e-3)
    losses = [score(model, completions, SAMPLING, options=o, router_aux=True).aux_loss for o in (PLAIN, SHARED)]
    assert torch.equal(*losses)
