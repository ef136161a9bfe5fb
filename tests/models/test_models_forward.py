"""Scoring: padding is invisible, the head sees response positions only, log-probs are the plain ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from plain_scores import token_logits
from tiers import in_turn
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from lit_rl.algorithms.rollouts.rollout_plan import frozen_logprobs, with_gradient_norms
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling, trim
from lit_rl.core.vision_inputs import PromptVision, Vision
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import response_logprobs, score
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.modes import set_checkpointing
from lit_rl.ops.logprobs import logprobs_and_entropy
from lit_rl.ops.sampling_distribution import Truncation

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
RESPONSES = [[1, 2], [3, 4, 5, 258], [258]]
KINDS = ["gpt2", "qwen2", "qwen3", "smollm2", "llama3.2", "gemma2"]


@in_turn(kind=KINDS, lora=[None, Lora(r=2)])
def test_padding_changes_no_logprob_and_no_entropy(make_model, make_completions, kind, lora):
    if kind == "gpt2" and lora is not None:
        lora = Lora(r=2, targets=["c_attn"])
    policy = LanguageModel(str(make_model(kind)), lora=lora).load().eval()
    padded = make_completions(PROMPTS, RESPONSES, left=3, right=2)
    scores = score(policy, padded, Sampling(temperature=0.7), entropy=True)
    logprobs, entropy = scores.logprobs, scores.entropy
    assert logprobs.shape == entropy.shape == (3, 6)
    assert torch.isfinite(logprobs).all()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        # The plain way, with nothing of ours: one unpadded row, all logits, softmax.
        logits = policy(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        wanted = (logits / 0.7).log_softmax(-1)
        picked = wanted.gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs[row, : len(response)], picked, rtol=1e-5, atol=1e-5)
        spread = -(wanted.exp() * wanted).sum(-1)
        torch.testing.assert_close(entropy[row, : len(response)], spread, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_padding_changes_no_gradient(make_model, make_completions, kind):
    policy = LanguageModel(str(make_model(kind)), disable_dropout=True).load()
    gradients = []
    for left, right in ((0, 0), (4, 3)):
        completions = make_completions(PROMPTS, RESPONSES, left=left, right=right)
        scores = score(policy, completions, Sampling(), entropy=True)
        assert not scores.entropy.requires_grad
        policy.zero_grad()
        scores.logprobs[completions.response_mask].sum().backward()
        gradients.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_trimmed_columns_change_nothing(make_model, make_completions):
    policy = LanguageModel(str(make_model())).load()
    wide = make_completions(PROMPTS, RESPONSES, left=3, right=2)
    narrow = trim(wide)
    assert narrow.prompt_ids.shape[1] == wide.prompt_ids.shape[1] - 3
    kept = narrow.response_ids.shape[1]
    assert kept == wide.response_ids.shape[1] - 2
    wanted, got = (response_logprobs(policy, given, Sampling())[:, :kept] for given in (wide, narrow))
    mask = narrow.response_mask
    torch.testing.assert_close(got[mask], wanted[mask], rtol=1e-5, atol=1e-5)


def test_tokens_that_the_policy_did_not_write_are_read_where_they_are_attended(make_model, make_completions):
    policy = LanguageModel(str(make_model())).load()
    completions = make_completions([[5, 6]], [[1, 2, 3, 4]])
    sampled = torch.tensor([[True, False, True, True]])
    attended = dataclasses.replace(completions, response_mask=sampled, attended=torch.ones(1, 4, dtype=torch.bool))
    sampling = Sampling()
    found, whole = (response_logprobs(policy, given, sampling) for given in (attended, completions))
    torch.testing.assert_close(found[sampled], whole[sampled], rtol=1e-6, atol=1e-6)
    skipped = dataclasses.replace(completions, response_mask=sampled)
    wanted = policy(input_ids=torch.tensor([[5, 6, 1, 3, 4]])).logits[0, -2]
    found = response_logprobs(policy, skipped, sampling)[0, 3]
    torch.testing.assert_close(found, wanted.log_softmax(-1)[4], rtol=1e-5, atol=1e-5)


def test_the_head_never_sees_the_prompt(make_model, make_completions):
    policy = LanguageModel(str(make_model())).load()
    seen = []
    policy.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    completions, options = make_completions([[5] * 50], [[1, 2, 3]]), ForwardOptions(fused_head=False)
    response_logprobs(policy, completions, Sampling(), options)
    assert seen == [4]


def test_what_rows_see_reaches_the_model(make_completions):
    class Spy(torch.nn.Module):
        def forward(self, **inputs):
            self.seen = inputs
            return type("Output", (), {"logits": torch.zeros(1, 4, 8)})

    spy = Spy()
    vision = Vision.of([PromptVision({"pixels": torch.ones(1, 2)})], 1)
    completions = dataclasses.replace(make_completions([[5]], [[1, 2, 3]]), vision=vision)
    response_logprobs(spy, completions, Sampling(), ForwardOptions(fused_head=False))
    assert torch.equal(spy.seen["pixels"], torch.ones(1, 2))


@in_turn(cut=[{}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}], entropy_gradient=[False, True])
def test_scores_are_those_of_the_distribution_that_sampling_draws_from(
    make_model, make_completions, cut, entropy_gradient
):
    policy = LanguageModel(str(make_model())).load()
    completions = make_completions(PROMPTS, RESPONSES, left=1, right=1)
    asked = {"entropy": True, "entropy_gradient": entropy_gradient}
    scores = score(policy, completions, Sampling(temperature=0.7, **cut), **asked)
    wanted = logprobs_and_entropy(
        token_logits(policy, completions), completions.response_ids, temperature=0.7, truncation=Truncation(**cut)
    )
    mask = completions.response_mask
    torch.testing.assert_close(scores.logprobs[mask], wanted[0][mask], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scores.entropy[mask], wanted[1][mask], rtol=1e-6, atol=1e-6)
    assert scores.aux_loss is None
    assert scores.logprobs.requires_grad
    assert scores.entropy.requires_grad == entropy_gradient


@in_turn(cut=[{}, {"top_k": 20}], fused=[False, True])
def test_without_entropies_all_else_has_the_same_bits(make_model, make_completions, cut, fused):
    policy = LanguageModel(str(make_model())).load()
    completions = make_completions(PROMPTS, RESPONSES, left=1, right=1)
    found = []
    for asked in (True, False):
        policy.zero_grad()
        options = ForwardOptions(fused_head=fused)
        scores = score(policy, completions, Sampling(temperature=0.7, **cut), entropy=asked, options=options)
        assert (scores.entropy is not None) == asked
        scores.logprobs[completions.response_mask].sum().backward()
        found.append([scores.logprobs, *(p.grad for p in policy.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_settings_of_the_end_of_a_response_have_no_part_in_scores(make_model, make_completions):
    policy = LanguageModel(str(make_model())).load()
    completions = make_completions(PROMPTS, RESPONSES)
    plain = score(policy, completions, Sampling())
    other = score(policy, completions, Sampling(max_new_tokens=9, stop=("x",)))
    assert torch.equal(plain.logprobs, other.logprobs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shared", [{}, {"folded_attention": False}, {"shared_prompts": False}])
def test_norms_of_gradients_are_those_of_autograd(make_model, make_completions, fused, shared):
    """Of the log-prob of each token by the logits over the temperature; two prompts of two rows, in two calls."""
    prompts, responses = [[5, 6, 7, 8]] * 2 + [[9]] * 2, [[1, 2], [3, 4, 5, 258], [258], [7, 7, 258]]
    policy = LanguageModel(str(make_model())).load()
    completions = make_completions(prompts, responses, left=1, right=2)
    completions = dataclasses.replace(completions, group_id=torch.tensor([0, 0, 1, 1]))
    asked = {"sampling": Sampling(temperature=0.7), "options": ForwardOptions(fused_head=fused, **shared)}
    logprobs, norms = with_gradient_norms(policy, completions, rows_at_once=2, **asked)
    plain, mask = frozen_logprobs(policy, completions, rows_at_once=4, **asked), completions.response_mask
    torch.testing.assert_close(logprobs[mask], plain[mask])
    assert norms.shape == logprobs.shape and not norms.requires_grad
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        logits = policy(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].detach() / 0.7
        logits.requires_grad_()
        picked = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum()
        (slopes,) = torch.autograd.grad(picked, logits)
        torch.testing.assert_close(norms[row, : len(response)], slopes.square().sum(1), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ mixtures of experts

MIXTURE = dict(
    vocab_size=264,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    initializer_range=0.3,
)
MIXTURES = {
    "mixtral": (MixtralConfig, {}),
    "qwen2_moe": (Qwen2MoeConfig, {"shared_expert_intermediate_size": 48}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 16}),
    "olmoe": (OlmoeConfig, {}),
    "gpt_oss": (GptOssConfig, {"head_dim": 16}),
}


def mixture(kind: str):
    config, extra = MIXTURES[kind]
    torch.manual_seed(0)
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    settings = {name: value for name, value in MIXTURE.items() if hasattr(config(), name)}
    return AutoModelForCausalLM.from_config(config(**settings, **extra, **ids))


def router_gradients(policy) -> list[torch.Tensor]:
    routers = [p for name, p in policy.named_parameters() if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == 2, "one for each layer"
    return [p.grad for p in routers]


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_routers_loss_is_the_same_with_padding_and_trains_the_routers(make_completions, kind):
    policy = mixture(kind)
    losses = []
    for left, right in ((0, 0), (4, 3)):
        completions = make_completions(PROMPTS[:1], RESPONSES[:1], left=left, right=right)
        scores = score(policy, completions, Sampling(), router_aux=True)
        assert torch.equal(scores.logprobs, score(policy, completions, Sampling()).logprobs)
        losses.append(scores.aux_loss)
    assert losses[0].shape == () and losses[0].isfinite() and losses[0] > 0
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    losses[1].backward()
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in router_gradients(policy))


def test_the_routers_loss_of_even_routers_is_the_number_of_experts_per_token(make_completions):
    """E * sum_e f_e P_e with equal P_e = 1 / E, and f_e that sum to the experts of a token."""
    policy = mixture("mixtral")
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith(".gate.weight"):
                parameter.zero_()
    scores = score(policy, make_completions(PROMPTS, RESPONSES, left=2), Sampling(), router_aux=True)
    assert scores.aux_loss.item() == pytest.approx(2.0)


def test_gradient_checkpointing_leaves_the_routers_gradient_as_it_is(make_completions):
    policy = mixture("qwen2_moe").train()
    completions, found = make_completions(PROMPTS, RESPONSES), []
    for checkpointing in (False, True):
        if checkpointing:
            set_checkpointing(policy, True)
        policy.zero_grad()
        scores = score(policy, completions, Sampling(), router_aux=True)
        (scores.aux_loss + scores.logprobs[completions.response_mask].sum()).backward()
        found.append([gradient.clone() for gradient in router_gradients(policy)])
    for plain, checkpointed in zip(*found):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-4, atol=1e-6)


def test_the_routers_loss_under_an_adapter(make_completions):
    from peft import LoraConfig, get_peft_model

    policy = mixture("mixtral")
    completions = make_completions(PROMPTS, RESPONSES)
    wanted = score(policy, completions, Sampling(), router_aux=True).aux_loss
    adapted = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"]))
    torch.testing.assert_close(score(adapted, completions, Sampling(), router_aux=True).aux_loss, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_model_has_no_routers_loss(make_model, make_completions, kind):
    policy = LanguageModel(str(make_model(kind))).load()
    with pytest.raises(ConfigError, match=rf"algo\.router_aux_loss_coef.*{type(policy).__name__}.*Set it to 0"):
        score(policy, make_completions(PROMPTS, RESPONSES), Sampling(), router_aux=True)
