"""Biases, bad words and forms of a `Sampling`, and which tokens a bad word stands for."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
from generation_cases import EOS, PAD, ask

from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import LogitBias, Prompts, Sampling, Structured
from lit_rl.generation.token_sampler import bad_word_ids


def test_a_bias_is_a_mapping_of_integers_that_can_be_hashed_and_not_changed() -> None:
    bias = LogitBias({"5": -1, 7: 2.5})
    assert dict(bias) == {5: -1.0, 7: 2.5}
    assert {Sampling(logit_bias={5: -1, 7: 2.5}), Sampling(logit_bias={"7": 2.5, 5: -1.0})} == {  # type: ignore[dict-item]
        Sampling(logit_bias=bias)
    }
    assert pickle.loads(pickle.dumps(Sampling(logit_bias=bias))) == copy.deepcopy(Sampling(logit_bias=bias))
    with pytest.raises(TypeError):
        bias[5] = 1.0  # type: ignore[index]
    source = {5: -1.0}
    sampling = Sampling(logit_bias=source)
    source[5] = 9.0
    assert sampling.logit_bias[5] == -1
    assert dataclasses.replace(sampling, top_k=3).logit_bias == {5: -1.0}


def test_settings_in_force_are_named() -> None:
    sampling = Sampling(bad_words=("no",), logit_bias={1: 2.0}, structured=Structured(choice=("a", "b")))
    assert sampling.reshaped == ["bad_words", "logit_bias", "structured"]
    assert Sampling().reshaped == Sampling(logit_bias={}).reshaped == []


FORMS: dict[str, Any] = {
    "regex": r"\d+",
    "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "grammar": 'root ::= "a" | "b"',
    "choice": ["yes", "no"],
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_is_one_of_four_and_can_be_hashed(kind: str) -> None:
    form = Structured(**{kind: FORMS[kind]})
    assert form.kind == kind
    twin = pickle.loads(pickle.dumps(Sampling(structured=form)))
    assert hash(twin) == hash(Sampling(structured=form))
    if kind == "json_schema":
        assert json.loads(form.json_schema) == FORMS[kind]  # type: ignore[arg-type]
        assert Structured(json_schema=json.dumps(FORMS[kind])) == form
    if kind == "choice":
        assert form.choice == ("yes", "no")


WORDS = {
    "cat": [3],
    " cat": [4],
    "dog": [5, 6],
    " dog": [7, 6],
    "cow": [8, 9],
    " cow": [10],
    "ant": [11],
    " ant": [2, 11],
}


@pytest.mark.parametrize(
    ("word", "sequences"),
    [
        ("cat", [[3], [4]]),
        ("  cat", [[3], [4]]),
        ("dog", [[5, 6], [7, 6]]),
        ("cow", [[8, 9]]),  # as many tokens with the space as without, or vLLM does not ban it
        ("ant", [[11]]),  # the word stands in it
    ],
)
def test_a_bad_word_stands_for_its_tokens_with_and_without_a_space(word: str, sequences: list[list[int]]) -> None:
    prompts = Prompts([[3]], [0], 1, (EOS,), PAD, None, WORDS.__getitem__)
    assert bad_word_ids(prompts, Sampling(bad_words=(word,))) == sequences


def test_a_word_of_no_token_is_refused() -> None:
    prompts = dataclasses.replace(ask(), encode=lambda text: [])
    with pytest.raises(ConfigError, match=r"sampling\.bad_words: .* no token of 'x'"):
        bad_word_ids(prompts, Sampling(bad_words=("x",)))
