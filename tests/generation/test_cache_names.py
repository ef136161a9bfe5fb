"""The cache goes by the name that the model's own forward pass has for it, and layers without one are no hindrance."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from generation_cases import SHARED, ask, build
from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.forward import score
from lit_rl.models.forward_inputs import cache_name
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.modes import recomputes
from lit_rl.models.shared_prefix import can_share

OTHER = {"cache": "past_key_values", "past_key_values": "cache"}


def renamed(model: Any, name: str | None) -> Any:
    """The same model, whose forward pass calls its cache `name`; None: it takes none."""
    own, forward = str(cache_name(model)), model.forward
    signature = inspect.signature(forward)

    def other(**given: Any) -> Any:
        if name in given:
            given[own] = given.pop(name)
        return forward(**given)

    parameters = [
        each.replace(name=name or "gone") if each.name == own else each for each in signature.parameters.values()
    ]
    other.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    model.forward = other
    return model


def drawn(model: nn.Module, generator: Any, **asked: Any) -> Completions:
    generator.sync(model, 0)
    return generator.generate(ask(**asked), Sampling(max_new_tokens=8))


def test_both_names_decode_and_score_alike() -> None:
    found = []
    for change in (False, True):
        model = build("qwen2")
        model = renamed(model, OTHER[str(cache_name(model))]) if change else model
        out = drawn(model, NativeGenerator(), group_size=4)
        assert can_share(model)
        shared, whole = (
            score(model, out, Sampling(), options=ForwardOptions(shared_prompts=each)).logprobs
            for each in (True, False)
        )
        torch.testing.assert_close(shared, whole, rtol=1e-5, atol=1e-6)
        found.append((out.response_ids, whole))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_model_without_a_cache_is_refused_by_the_names_that_it_could_have() -> None:
    model = renamed(build("qwen2"), None)
    assert cache_name(model) is None and not can_share(model)
    with pytest.raises(ConfigError, match=r"takes neither cache nor past_key_values.*generator=hf"):
        drawn(model, NativeGenerator())


def test_layers_that_read_the_keys_of_others_decode_and_share_their_prompts() -> None:
    """transformers 5.24 counts them among the layers of a cache."""
    torch.manual_seed(0)
    own: dict[str, Any] = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    own |= {"global_head_dim": 32, "sliding_window": 32, "vocab_size_per_layer_input": SHARED["vocab_size"]}
    own |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
    config = Gemma4TextConfig(**SHARED | own)
    model = Gemma4ForCausalLM(config).eval()
    native, hf = (drawn(model, each, group_size=2) for each in (NativeGenerator(), HFGenerator()))
    assert can_share(model) and torch.equal(native.response_ids, hf.response_ids)


@pytest.mark.parametrize("name", ["is_activation_checkpointing", "is_gradient_checkpointing"])
def test_either_name_says_whether_activations_are_recomputed(name: str) -> None:
    module = nn.Module()
    assert not recomputes(module)
    setattr(module, name, True)
    assert recomputes(module)
