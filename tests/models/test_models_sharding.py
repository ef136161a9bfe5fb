"""Sharding where there is nothing to shard; two real processes are in the distributed tests."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from lit_rl.core.errors import ConfigError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.sharding import decoder_layers, full_state_dict, move_all_but_shards, shard, unsharded


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


def test_what_is_moved_to_a_device_leaves_shards_on_the_host(make_model, mesh):
    """`meta` stands for a GPU. FSDP2 refuses to gather shards that `module.to` has taken off the host."""
    policy = LanguageModel(str(make_model())).load()
    module = L.LightningModule()
    module.policy = shard(policy, mesh, offload=CPUOffloadPolicy(pin_memory=False))
    module.head = nn.BatchNorm1d(2)
    move_all_but_shards(module, torch.device("meta"))
    assert {parameter.device.type for parameter in policy.parameters()} == {"cpu"}
    assert module.device.type == "meta"
    apart = [*module.head.parameters(), *module.buffers()]
    assert len(apart) > 5 and {tensor.device.type for tensor in apart} == {"meta"}
