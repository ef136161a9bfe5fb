"""Scoring: padding is invisible, the head sees response positions only, log-probs are the plain ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import token_logits, token_logprobs
from lit_rl.rollout import trim

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
RESPONSES = [[1, 2], [3, 4, 5, 258], [258]]
KINDS = ["gpt2", "qwen2", "qwen3", "smollm2", "llama3.2", "gemma2"]


@pytest.mark.parametrize("lora", [None, Lora(r=2)])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_logprob_and_no_entropy(make_model, make_completions, kind, lora):
    if kind == "gpt2" and lora is not None:
        lora = Lora(r=2, targets=["c_attn"])
    policy = LanguageModel(str(make_model(kind)), lora=lora).load().eval()
    padded = make_completions(PROMPTS, RESPONSES, left=3, right=2)
    logprobs, entropy = token_logprobs(policy, padded, temperature=0.7)
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
        logprobs, entropy = token_logprobs(policy, completions, temperature=1.0)
        assert not entropy.requires_grad
        policy.zero_grad()
        logprobs[completions.response_mask].sum().backward()
        gradients.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_trimmed_columns_change_nothing(make_model, make_completions):
    policy = LanguageModel(str(make_model())).load()
    wide = make_completions(PROMPTS, RESPONSES, left=3, right=2)
    p, t = trim(wide)
    narrow = dataclasses.replace(
        wide,
        prompt_ids=wide.prompt_ids[:, p],
        prompt_mask=wide.prompt_mask[:, p],
        response_ids=wide.response_ids[:, t],
        response_mask=wide.response_mask[:, t],
    )
    wanted, got = token_logits(policy, wide)[:, t], token_logits(policy, narrow)
    mask = narrow.response_mask
    torch.testing.assert_close(got[mask], wanted[mask], rtol=1e-5, atol=1e-5)


def test_tokens_that_the_policy_did_not_write_are_read_where_they_are_attended(make_model, make_completions):
    policy = LanguageModel(str(make_model())).load()
    completions = make_completions([[5, 6]], [[1, 2, 3, 4]])
    sampled = torch.tensor([[True, False, True, True]])
    attended = dataclasses.replace(completions, response_mask=sampled, attended=torch.ones(1, 4, dtype=torch.bool))
    assert torch.equal(token_logits(policy, attended), token_logits(policy, completions))
    skipped = dataclasses.replace(completions, response_mask=sampled)
    wanted = policy(input_ids=torch.tensor([[5, 6, 1, 3, 4]])).logits[0, -2]
    torch.testing.assert_close(token_logits(policy, skipped)[0, 3], wanted, rtol=1e-5, atol=1e-5)


def test_the_head_never_sees_the_prompt(make_model, make_completions):
    policy = LanguageModel(str(make_model())).load()
    seen = []
    policy.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    token_logits(policy, make_completions([[5] * 50], [[1, 2, 3]]))
    assert seen == [4]


def test_extra_inputs_of_the_rows_reach_the_model(make_completions):
    class Spy(torch.nn.Module):
        def forward(self, **inputs):
            self.seen = inputs
            return type("Output", (), {"logits": torch.zeros(1, 4, 8)})

    spy = Spy()
    completions = dataclasses.replace(make_completions([[5]], [[1, 2, 3]]), model_inputs={"pixels": torch.ones(1, 2)})
    token_logits(spy, completions)
    assert torch.equal(spy.seen["pixels"], torch.ones(1, 2))
