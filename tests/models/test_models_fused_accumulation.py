"""Embedding and head add what all calls of a pass give them to one sum: the gradients stay as they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_kinds import needs_sdpa
from live_tensors import Live
from tiers import in_turn

from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Sampling
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import score, score_texts
from lit_rl.models.forward_inputs import noisy_embeddings
from lit_rl.models.head import summed_weight
from lit_rl.models.language_model import ForwardOptions

KINDS = ["gpt2", "qwen2", "qwen3", "smollm2", "llama3.2", "gemma2"]
"""Tied and not, with a scaled embedding (gemma2) and a head that is capped."""
SUMMED, APART = ForwardOptions(), ForwardOptions(fused_accumulation=False)


@pytest.fixture
def texts():
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, 5:] = mask[2, 2:] = False
    ids = torch.tensor([[5, 6, 5, 7, 5, 9, 1, 2], [3, 4, 3, 4, 3, 0, 0, 0], [8, 9, 0, 0, 0, 0, 0, 0]])
    return TokenBatch(ids, mask, mask)


def gradients(model, score_with, options):
    model.zero_grad()
    score_with(options).logprobs.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one, other):
    assert one.keys() == other.keys() and len(one) > 0
    for name, part in one.items():
        scale = max(1e-3, float(other[name].abs().max()))
        assert float((part - other[name]).abs().max()) <= 1e-5 * scale, name  # some models compute in float32 inside


@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "rows by length"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_rollouts(make_model, completions, kind, shared):
    needs_sdpa(kind)
    model = LanguageModel(str(make_model(kind)), disable_dropout=True).load().double()
    one, other = (
        gradients(
            model,
            lambda options: score(model, completions, Sampling(temperature=0.7), options=options),
            dataclasses.replace(options, shared_prompts=shared),
        )
        for options in (SUMMED, APART)
    )
    assert_same(one, other)


@in_turn(kind=KINDS, noise=[0.0, 5.0])
def test_gradients_of_texts(make_model, texts, kind, noise):
    """With NEFTune, whose hook on the embedding still runs."""
    model = LanguageModel(str(make_model(kind)), disable_dropout=True).load().double()
    plain = score_texts(model, texts).logprobs

    def noisy(options):
        with noisy_embeddings(model, texts, noise, [1, 2, 3]):
            found = score_texts(model, texts, options=options)
        assert torch.equal(found.logprobs, plain) == (noise == 0.0)
        return found

    assert_same(*(gradients(model, noisy, options) for options in (SUMMED, APART)))


def test_what_is_frozen_or_adapted_gets_none(make_model, completions):
    sampling = Sampling(temperature=1.0)
    adapted = LanguageModel(str(make_model("qwen2")), lora=Lora(r=2)).load()
    found = gradients(adapted, lambda options: score(adapted, completions, sampling, options=options), SUMMED)
    assert found and all("lora" in name for name in found)

    model = LanguageModel(str(make_model("llama3.2"))).load()
    model.get_input_embeddings().weight.requires_grad_(False)
    one, other = (
        gradients(model, lambda options: score(model, completions, sampling, options=options), options)
        for options in (SUMMED, APART)
    )
    assert_same(one, other)


def test_sums_are_open_inside_a_pass_only_and_only_with_a_gradient(make_model, completions):
    model = LanguageModel(str(make_model("smollm2"))).load()
    embedding, seen = model.get_input_embeddings(), []
    embedding.register_forward_hook(lambda module, *_: seen.append(summed_weight(module.weight) is not None))
    sampling = Sampling(temperature=1.0)
    score(model, completions, sampling)
    assert all(seen) and len(seen) > 1
    with torch.no_grad():
        score(model, completions, sampling)
    score(model, completions, sampling, options=APART)
    assert not seen[-1] and summed_weight(embedding.weight) is None and "forward" not in vars(embedding)


@pytest.mark.parametrize("options", [SUMMED, APART])
def test_two_calls_and_lookups_take_the_memory_of_one_gradient(make_model, completions, options):
    """A vocabulary that outweighs all else."""
    model = LanguageModel(str(make_model("smollm2", vocab_size=40_000, num_hidden_layers=1))).load()
    weight = model.get_input_embeddings().weight
    with Live() as live:
        gradients(model, lambda options: score(model, completions, Sampling(temperature=1.0), options=options), options)
    others = 0.6 * weight.nbytes
    assert (live.peak < weight.nbytes + weight.grad.nbytes + others) == (options is SUMMED)
