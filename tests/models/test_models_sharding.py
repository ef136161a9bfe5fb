"""Sharding where there is nothing to shard; two real processes are in the distributed tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.policy.sharding import decoder_layers, full_state_dict, shard, unsharded


def test_a_plain_module_is_left_alone(make_model):
    policy = LanguageModel(str(make_model())).load()
    before = {name: parameter for name, parameter in policy.named_parameters()}
    with unsharded(policy):
        assert all(parameter is before[name] for name, parameter in policy.named_parameters())


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "qwen3", "smollm2", "gemma2"])
def test_the_units_are_the_decoder_layers_also_under_adapters(make_model, kind):
    folder = str(make_model(kind))
    targets = ["c_attn"] if kind == "gpt2" else "all-linear"
    for lora in (None, Lora(r=2, targets=targets)):
        layers = decoder_layers(LanguageModel(folder, lora=lora).load())
        assert len(layers) == 2
        assert len({type(layer) for layer in layers}) == 1


def test_a_module_without_layers_cannot_be_sharded():
    with pytest.raises(ConfigError, match="Use DDP"):
        shard(nn.Linear(2, 2), mesh=None)  # pyright: ignore[reportArgumentType]


def test_the_full_state_is_detached_and_complete(make_model):
    policy = LanguageModel(str(make_model(tie_word_embeddings=True)), lora=Lora(r=2)).load()
    state = full_state_dict(policy)
    assert state.keys() == policy.state_dict().keys()
    assert not any(tensor.requires_grad for tensor in state.values())
    assert all(torch.equal(tensor, policy.state_dict()[name]) for name, tensor in state.items())
