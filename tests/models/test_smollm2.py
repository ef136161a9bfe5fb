"""The one real pretrained model that needs no hub, SmolLM2-135M-Instruct: read, asked, scored."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lit_rl.core.model_paths import copy_without_hub
from lit_rl.core.rollout import Sampling
from lit_rl.generation.collect import Vocabulary, texts_of
from lit_rl.generation.hf import HFContinuousGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel
from lit_rl.models.forward import score

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
THERE = (copy_without_hub(NAME) / "config.json").is_file()
pytestmark = [
    pytest.mark.all,
    pytest.mark.real,
    pytest.mark.xdist_group("smollm2"),
    pytest.mark.skipif(not THERE, reason="needs the model: make smollm2"),
]
QUESTIONS = ["What is the capital of France?", "Which is the larger number: 7 or 3? Reply with just the number."]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(NAME)


@pytest.fixture(scope="module")
def policy(model: LanguageModel) -> Any:
    return model.load().eval()


def prompts_of(model: LanguageModel, group_size: int) -> Any:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [model.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    return Vocabulary.of(model).prompts(ids, [3, 4], group_size)


def test_what_it_is_and_that_the_run_says_where_it_was_read(model, caplog):
    assert not hasattr(model.config, "quantization_config")
    assert (model.label, model.context_length, len(model.tokenizer)) == ("SmolLM2-135M-Instruct", 8192, 49152)
    assert model.tokenizer.convert_ids_to_tokens(list(model.eos_ids)) == ["<|im_end|>"]
    with caplog.at_level(logging.INFO):
        assert sum(p.numel() for p in model.load().parameters()) == 134_515_008
    assert caplog.text.count("whose weights are not the hub's") == 1


@pytest.mark.parametrize("kind", [NativeGenerator, HFContinuousGenerator])
def test_it_answers_and_what_is_sampled_is_scored_alike(kind, model, policy):
    generator = kind()
    generator.sync(policy, 0)
    greedy = generator.generate(prompts_of(model, 1), Sampling(temperature=0.0, max_new_tokens=16))
    assert "Paris" in texts_of(greedy, model.tokenizer)[0]
    drawn = Sampling(max_new_tokens=16)
    completions = generator.generate(prompts_of(model, 3), drawn)
    with torch.no_grad():
        scores = score(policy, completions, drawn)
    mask = completions.response_mask
    torch.testing.assert_close(scores.logprobs[mask], completions.sampler_logprobs[mask], atol=1e-4, rtol=0)
    generator.close()
