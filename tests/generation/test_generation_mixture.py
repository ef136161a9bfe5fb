"""The geometric mixture of policy and reference under the native decode loop."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.decoding import GeometricMixture
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.references import AdapterBase, FrozenCopy

TEXTS = ["1+2=", "17+25=", "9+9=", "88+1=", "4+4="]


@pytest.fixture(scope="module")
def two() -> tuple[Any, Any, LanguageModel]:
    """The shipped policy moved a little, and as it was."""
    described = LanguageModel("tiny")
    policy = described.load()
    reference = copy.deepcopy(policy)
    moved(policy)
    return policy, reference, described


def moved(policy: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                width = 0.3 * parameter.std() if parameter.any() else 0.05
                parameter += width * torch.randn(parameter.shape, generator=generator)


def draw(model: Any, described: LanguageModel, *, batch_size: int | None = None, **sampling: Any) -> Completions:
    ids = [described.tokenizer.encode(text) for text in TEXTS]
    prompts = Prompts(ids, list(range(len(ids))), 6, described.eos_ids, described.pad_id)
    generator = NativeGenerator(batch_size)
    generator.sync(model, 3)
    return generator.generate(prompts, Sampling(max_new_tokens=7, **sampling))


def mixed(policy: Any, reference: Any, coefficient: float) -> GeometricMixture:
    return GeometricMixture(policy, partial(FrozenCopy().scoring, policy, reference), coefficient)


@torch.no_grad()
def by_hand(policy: Any, reference: Any, drawn: Completions, row: int, c: float, temperature: float) -> Any:
    """Log-probs of a row's tokens under the mixture, in one forward pass of each model, without cache and padding."""
    prompt = drawn.prompt_ids[row][drawn.prompt_mask[row]]
    response = drawn.response_ids[row][drawn.response_mask[row]]
    ids = torch.cat([prompt, response])[None]
    logits = [model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() for model in (policy, reference)]
    both = ((1 - c) * logits[0] + c * logits[1]) / temperature
    return both.log_softmax(-1).gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch_size", [None, 4, 12])
def test_tokens_are_drawn_from_the_mixture(two: Any, batch_size: int | None, temperature: float) -> None:
    policy, reference, described = two
    drawn = draw(mixed(policy, reference, 0.4), described, batch_size=batch_size, temperature=temperature)
    assert len(drawn.lengths.unique()) > 1  # so that rows were dropped on the way
    for row in range(len(drawn)):
        expected = by_hand(policy, reference, drawn, row, 0.4, temperature)
        torch.testing.assert_close(drawn.sampler_logprobs[row][drawn.response_mask[row]], expected, rtol=0, atol=2e-4)


def test_the_ends_of_the_mixture_are_the_two_models(two: Any) -> None:
    policy, reference, described = two
    for coefficient, alone in ((0.0, policy), (1.0, reference)):
        one, other = draw(mixed(policy, reference, coefficient), described), draw(alone, described)
        assert torch.equal(one.response_ids, other.response_ids)
    assert not torch.equal(draw(policy, described).response_ids, draw(reference, described).response_ids)


def test_a_reference_that_is_the_policy_without_its_adapters() -> None:
    described = LanguageModel("tiny", lora=Lora(r=4))
    policy = described.load()
    base = copy.deepcopy(policy).eval()
    moved(policy)
    policy.train()
    mixture = GeometricMixture(policy, partial(AdapterBase().scoring, policy, None), 0.4)
    drawn = draw(mixture, described)
    assert policy.training and any(p.requires_grad for p in policy.parameters())
    policy.eval()
    far = 0.0
    for row in range(len(drawn)):
        seen = drawn.sampler_logprobs[row][drawn.response_mask[row]]
        torch.testing.assert_close(seen, by_hand(policy, base, drawn, row, 0.4, 1.0), rtol=0, atol=2e-4)
        far = max(far, (seen - by_hand(policy, base, drawn, row, 0.0, 1.0)).abs().max().item())
    assert far > 0.01


@pytest.mark.parametrize("coefficient", [-0.1, 1.1, float("nan")])
def test_a_coefficient_outside_0_to_1_is_refused(two: Any, coefficient: float) -> None:
    with pytest.raises(ConfigError, match=r"mixture_coef.*\[0, 1\]"):
        mixed(two[0], two[1], coefficient)


def test_another_vocabulary_is_refused(two: Any) -> None:
    policy, _, described = two

    @contextmanager
    def scoring():
        other = copy.deepcopy(policy)
        other.resize_token_embeddings(policy.config.vocab_size + 8)
        yield other

    with pytest.raises(ConfigError, match="vocabulary"):
        draw(GeometricMixture(policy, scoring, 0.5), described)
