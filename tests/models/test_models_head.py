"""A pass that ends in log-probs: the same as from logits, hooks included; models that change logits keep them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from lit_rl.core.rollout import Sampling
from lit_rl.models import LanguageModel, Lora, head, loading
from lit_rl.models.forward import score
from lit_rl.models.language_model import ForwardOptions

KINDS = ["gpt2", "qwen2", "qwen3", "smollm2", "llama3.2", "gemma2"]
WHOLE, FUSED = ForwardOptions(False, False), ForwardOptions(True, False)
PROMPTS, RESPONSES = [[5, 6, 7, 8], [9], [10, 11]], [[1, 2], [3, 4, 5, 258], [258]]
SHAPE = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
SHAPE |= dict(num_key_value_heads=1, head_dim=16, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def result(model, completions, options, **terms):
    model.zero_grad()
    scores = score(model, completions, Sampling(temperature=0.7), entropy=True, options=options, **terms)
    mask = completions.response_mask
    (scores.logprobs[mask].sum() + scores.entropy[mask].sum()).backward()
    gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [scores.logprobs[mask].detach(), scores.entropy[mask].detach(), *gradient]


def assert_same(one, other, tolerance):
    assert len(one) == len(other) > 2
    for mine, theirs in zip(one, other):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


ON_HEAD = Lora(r=2, targets=["lm_head", "q_proj"])


@pytest.mark.parametrize(
    ("kind", "lora"), [*((kind, None) for kind in KINDS), ("qwen2", ON_HEAD), ("qwen2", Lora(r=2))]
)
def test_scores_and_gradients_are_those_of_logits(make_model, make_completions, kind, lora):
    model = LanguageModel(str(make_model(kind)), lora=lora, disable_dropout=True).load()
    completions = make_completions(PROMPTS, RESPONSES, left=1, right=2)
    for terms in ({}, {"entropy_gradient": True}):
        assert_same(result(model, completions, FUSED, **terms), result(model, completions, WHOLE, **terms), 2e-5)


def test_a_float32_head_multiplies_in_float32(make_model, make_completions):
    completions = make_completions(PROMPTS, RESPONSES)
    logprobs = {}
    for exact in (False, True):
        model = LanguageModel(str(make_model()), dtype="bfloat16", lm_head_fp32=exact).load()
        logprobs[exact], whole = (score(model, completions, Sampling(), options=o).logprobs for o in (FUSED, WHOLE))
        mask = completions.response_mask
        torch.testing.assert_close(logprobs[exact][mask], whole[mask], rtol=1e-5, atol=1e-5)
    assert (logprobs[True] - logprobs[False])[mask].abs().max() > 1e-4


def test_autocast_reaches_the_fused_head(make_model, make_completions):
    model, completions = LanguageModel(str(make_model())).load(), make_completions(PROMPTS, RESPONSES)
    mask = completions.response_mask
    with torch.autocast("cpu", torch.bfloat16):
        fused, whole = (score(model, completions, Sampling(), options=o).logprobs[mask] for o in (FUSED, WHOLE))
    torch.testing.assert_close(fused, whole, rtol=1e-5, atol=1e-5)
    exact = score(model, completions, Sampling()).logprobs[mask]
    assert 1e-4 < (fused - exact).abs().max() < 0.2


CHANGES_LOGITS = {
    "soft cap": Gemma2Config(**SHAPE, final_logit_softcapping=2.0),
    "scale": CohereConfig(**{name: value for name, value in SHAPE.items() if name != "head_dim"}, logit_scale=0.25),
    "divisor": GraniteConfig(**SHAPE, logits_scaling=4.0),
}


@pytest.mark.parametrize("config", CHANGES_LOGITS.values(), ids=CHANGES_LOGITS.keys())
def test_models_that_change_logits_after_the_head_keep_them(make_completions, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    assert not head._returns_head_output(model, model.get_output_embeddings())
    completions = make_completions(PROMPTS, RESPONSES)
    assert_same(result(model, completions, FUSED), result(model, completions, WHOLE), 0)


@pytest.mark.parametrize("adapted", [None, ["q_proj"], ["q_proj", "lm_head"]], ids=["full", "lora", "lora-on-head"])
@pytest.mark.parametrize("config", CHANGES_LOGITS.values(), ids=CHANGES_LOGITS.keys())
def test_a_placeholder_has_no_probability_whatever_follows_the_head(make_completions, config, adapted):
    """The other tokens are as probable as in the model as it came, given that it is none of these."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config.tie_word_embeddings, config.image_token_id = False, 9
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        came = model(input_ids=ids).logits
    came[..., 9] = -torch.inf
    loading.ban_placeholders(model)
    if adapted is not None:
        model = Lora(r=2, targets=adapted).apply(model).eval()
    said = make_completions([[5], [6]], [[9, 9], [7, 9]])
    for policy in (model, copy.deepcopy(model)):
        with torch.no_grad():
            found = policy(input_ids=ids).logits.log_softmax(-1)
        assert float(found[..., 9].max()) < -1e3
        torch.testing.assert_close(found.exp(), came.softmax(-1), rtol=1e-5, atol=1e-7)
        for options in (FUSED, WHOLE):
            found = score(policy, said, Sampling(temperature=2.0), options=options).logprobs.detach()
            assert float(found[:, 1].max()) < -1e3 < float(found[1, 0])
    with torch.no_grad():  # the copy computes with its own weights
        policy.get_input_embeddings().weight.zero_()
        assert not torch.equal(policy(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_model_is_tried_once_and_left_as_it_was(make_completions):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).train()
    rows = []
    model.get_output_embeddings().register_forward_pre_hook(lambda part, args: rows.append(tuple(args[0].shape[:2])))
    state = torch.get_rng_state()
    for _ in range(2):
        score(model, make_completions(PROMPTS, RESPONSES), Sampling(), options=FUSED)
    assert rows == [(1, 2), (3, 5), (3, 5)]
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(model.get_output_embeddings())


def test_the_head_is_put_back_after_an_error(make_completions):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    completions = make_completions([[300]], [[1, 2]])
    with pytest.raises(IndexError):
        score(model, completions, Sampling(), options=FUSED)
    assert "forward" not in vars(model.get_output_embeddings())


def test_a_forward_that_another_library_hung_on_the_head_is_there_afterwards(make_model, make_completions):
    model = LanguageModel(str(make_model())).load()
    theirs = model.lm_head.forward = lambda hidden: type(model.lm_head).forward(model.lm_head, hidden)
    score(model, make_completions(PROMPTS, RESPONSES), Sampling(), options=FUSED)
    assert model.lm_head.forward is theirs
