"""`generator.generation_kwargs`: what engines take beside `Sampling`, and what of it training refuses."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from generation_cases import all_logits, ask, build, responses
from transformers import GenerationConfig
from transformers.generation import logits_process as peer
from turn_cases import Scripted, reply

from lit_rl.algorithms import GRPO, OnlineDPO
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.generation.engine_kwargs import VLLM_NAMES, transformers_names
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import for_another_policy
from lit_rl.generation.vllm.engine import requests_of
from lit_rl.generation.vllm.engine_generator import ConversationWork
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.ops import engine_mismatch

NO_BIGRAM_TWICE = {"no_repeat_ngram_size": 2}


def server(**kwargs: Any) -> VLLMServerGenerator:
    return VLLMServerGenerator(urls=["http://127.0.0.1:8000"], generation_kwargs=kwargs)


def test_transformers_processors_have_their_say_and_are_in_the_log_probs():
    """A bigram that stood in prompt or response is never drawn again; log-probs are those after its processor."""
    policy, sampling, prompts = build("qwen2"), Sampling(max_new_tokens=16, temperature=0.7), ask()
    # One at a time: transformers' processors see the padding of a batch, too.
    generator = HFGenerator(batch_size=1, generation_kwargs=NO_BIGRAM_TWICE)
    generator.sync(policy, 1)
    out = generator.generate(prompts, sampling)
    bans: Any = peer.NoRepeatNGramLogitsProcessor(2)
    twice = 0
    for row, said in enumerate(responses(out)):
        prompt = list(prompts.token_ids[row // 3])
        pairs = list(pairwise([*prompt, *said]))
        assert len(set(pairs[len(prompt) - 1 :])) == len(said)
        logits = all_logits(policy, prompt, said)
        for place, token in enumerate(said):
            before = torch.tensor([[*prompt, *said[:place]]])
            allowed = bans(before, logits[place][None])[0]
            twice += int(allowed.isinf().any())
            expected = (allowed / 0.7).log_softmax(-1)[token]
            assert float(out.sampler_logprobs[row, place]) == pytest.approx(float(expected), abs=1e-4)
    assert twice > 5, "the case needs bigrams that come again"


def test_what_changes_the_distribution_is_weighed_for_or_refused():
    generator = HFGenerator(generation_kwargs=NO_BIGRAM_TWICE)
    assert GRPO("tiny", len, generator=generator).engine_correction.correction is not None, "auto weighs"
    GRPO("tiny", len, generator=generator, correction=engine_mismatch.token_mask)
    with pytest.raises(ConfigError, match=r"generation_kwargs\.no_repeat_ngram_size.*algo/correction=token_truncate"):
        GRPO("tiny", len, generator=generator, correction=None)
    with pytest.raises(ConfigError, match=r"generation_kwargs\.no_repeat_ngram_size"):
        OnlineDPO("tiny", len, generator=generator)
    assert for_another_policy(generator) is generator, "a teacher or an opponent is drawn so too"
    with pytest.raises(ConfigError, match=r"generation_kwargs\.presence_penalty"):
        GRPO("tiny", len, generator=server(presence_penalty=0.5), correction=None)
    GRPO("tiny", len, generator=server(presence_penalty=0.5))


def test_what_changes_nothing_of_it_passes_everywhere():
    assert HFGenerator(generation_kwargs={"prefill_chunk_size": 8}).exact
    GRPO("tiny", len, generator=server(spaces_between_special_tokens=False), correction=None)


def test_every_name_of_transformers_has_a_place():
    names = transformers_names(vars(GenerationConfig()))
    assert names.knows(name for name in vars(GenerationConfig()) if not name.startswith("_"))
    parts = [names.own, names.free, names.reshaping, set(names.keys)]
    assert sum(map(len, parts)) == len(set().union(*parts)), "one place each"
    assert not names.reshaping - vars(GenerationConfig()).keys()


def test_vllm_is_asked_with_them_in_every_turn():
    prompts, sampling, given = ask(), Sampling(max_new_tokens=3), {"presence_penalty": 0.5}
    assert all(each.fields["presence_penalty"] == 0.5 for each in requests_of(prompts, sampling, given))
    talking = dataclasses.replace(prompts, responder=Scripted(reply))
    asked = ConversationWork(talking, sampling, 1, kwargs=given).requests(wait=False)
    assert asked and all(request.fields["presence_penalty"] == 0.5 for _, request in asked)
    assert "presence_penalty" not in requests_of(prompts, sampling)[0].fields and not VLLM_NAMES.knows(["new_in_vllm"])
