"""What is shipped is the model that an export would write, one layer at a time, and the policy stays as it is."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain_scores import token_logits
from safetensors.torch import load_file
from shipping_cases import CHANGES, LORAS, QV, UNTIED, assert_unchanged, described, learn, state_of
from tiers import in_turn
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, MixtralConfig

from lit_rl.core.errors import ConfigError, NumericError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.engine_weights import adapter_only, base_weights, fingerprint, weight_shapes, whole_weights
from lit_rl.models.hf_export import export_policy
from lit_rl.models.sharding import full_state_dict, shard, unsharded


@pytest.fixture
def exported(tmp_path):
    """The tensors in the file that an export of the policy writes."""

    def export(model: LanguageModel, policy: nn.Module) -> dict[str, torch.Tensor]:
        return load_file(export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card="").folder / FILE)

    return export


FILE = "model.safetensors"


def assert_ships(policy: nn.Module, wanted: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    before = state_of(policy)
    found = dict(whole_weights(policy))
    assert_unchanged(policy, before)
    assert found.keys() == wanted.keys()
    assert not any(isinstance(tensor, DTensor) or tensor.requires_grad for tensor in found.values())
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)
    shapes = weight_shapes(policy)
    assert [(name, tuple(t.shape)) for name, t in whole_weights(policy)] == list(shapes.items())


@in_turn(kind=["gpt2", "qwen2", "qwen3", "smollm2", "gemma2"], tied=[True, False])
def test_a_plain_policy_is_shipped_as_its_folder_has_it(make_model, exported, kind, tied):
    model = LanguageModel(str(make_model(kind, tie_word_embeddings=tied)), lm_head_fp32=True)
    policy = model.load()
    learn(policy)
    wanted = exported(model, policy)
    assert ("lm_head.weight" in wanted) != tied
    assert_ships(policy, wanted, atol=0)


def test_experts_are_shipped_one_by_one_as_files_have_them(tmp_path):
    """transformers holds them in one tensor; vLLM, like every file, knows each by its name."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3, "eos_token_id": 1}
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not policy.state_dict().keys() & {name for name in load_file(tmp_path / FILE) if ".experts." in name}
    assert_ships(policy, load_file(tmp_path / FILE), atol=0)


@pytest.mark.parametrize(
    "kind, tied", [*((k, at % 2 == 0) for at, k in enumerate(LORAS)), *((k, False) for k in UNTIED)]
)
def test_adapters_are_merged_as_an_export_merges_them(make_model, make_completions, exported, tmp_path, kind, tied):
    folder = make_model(tie_word_embeddings=tied)
    model = described(folder, {**LORAS, **UNTIED}[kind])
    policy = model.load().eval()
    learn(policy)
    assert_ships(policy, exported(model, policy))
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not plain.load_state_dict(dict(whole_weights(policy)), strict=False).unexpected_keys
    completions = make_completions([[5, 6, 7]], [[1, 2]])
    wanted = token_logits(policy, completions)
    torch.testing.assert_close(token_logits(plain, completions), wanted, rtol=1e-4, atol=1e-4)
    if adapter_only(policy) is None:
        stored = load_file(folder / FILE)
        assert [name for name, _ in base_weights(policy)] == list(weight_shapes(policy))
        assert all(torch.equal(tensor, stored[name]) for name, tensor in base_weights(policy))


def test_gpt2s_transposed_layers_are_merged(make_model, exported):
    model = LanguageModel(str(make_model("gpt2")), lora=Lora(r=2, targets=["c_attn"]))
    policy = model.load()
    learn(policy)
    assert_ships(policy, exported(model, policy))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_trained_rows_of_new_tokens_are_shipped(make_model, exported, tmp_path, tied):
    other = LanguageModel(str(make_model(folder="other"))).tokenizer
    other.add_special_tokens({"additional_special_tokens": ["<|role|>", "<|end|>"]})
    other.save_pretrained(tmp_path / "source")
    folder = str(make_model(vocab_size=261, tie_word_embeddings=tied))
    model = LanguageModel(folder, lora=Lora(r=2), chat_template=str(tmp_path / "source"))
    policy = model.load()
    assert len(model.new_tokens) == 2
    learn(policy)
    assert_ships(policy, exported(model, policy))


def test_an_adapter_that_was_merged_in_place_is_not_merged_again(make_model):
    policy = LanguageModel(str(make_model()), lora=Lora(r=2)).load()
    learn(policy)
    wanted = {name: tensor.clone() for name, tensor in whole_weights(policy)}
    policy.merge_adapter()
    assert_ships(policy, wanted)


@pytest.mark.parametrize("lora", [*UNTIED.values(), {**QV, "modules_to_save": ["lm_head"]}])
def test_an_adapter_on_half_of_a_tied_weight_is_refused(make_model, lora):
    """A policy of one is refused when it is loaded; so one made around that has no engine either."""
    base = AutoModelForCausalLM.from_pretrained(make_model(tie_word_embeddings=True))
    policy = get_peft_model(base, LoraConfig(**lora))
    for ask in (whole_weights, weight_shapes):
        with pytest.raises(ConfigError, match="tied"):
            ask(policy)


@pytest.mark.parametrize("lora", [None, Lora(r=2), Lora(r=2, dora=True)], ids=["full", "lora", "dora"])
def test_weights_are_cast_on_the_way(make_model, lora):
    policy = LanguageModel(str(make_model()), lora=lora).load()
    learn(policy)
    for (name, exact), (other, cast) in zip(
        whole_weights(policy), whole_weights(policy, dtype=torch.bfloat16), strict=True
    ):
        assert name == other and exact.dtype == torch.float32
        assert torch.equal(exact.bfloat16(), cast), "merged first, then cast"


@in_turn(lora=[None, Lora(r=2)], sharded=[False, True])
def test_no_more_than_a_layer_is_held_at_a_time(make_model, mesh, lora, sharded):
    folder = make_model(num_hidden_layers=8, hidden_size=64, intermediate_size=96, vocab_size=264)
    policy = LanguageModel(str(folder), lora=lora).load()
    if sharded:
        shard(policy, mesh)
    largest = max(p.numel() for p in policy.parameters()) * 4
    everything = sum(p.numel() for p in policy.parameters()) * 4
    with Alive() as alive:
        for _, tensor in whole_weights(policy, dtype=torch.float64):
            del tensor
    # The weight as it is, its sum with the adapter, and the cast one, twice as wide.
    assert largest < alive.most <= 4 * largest < everything / 3


def storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [(t._local_tensor if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]


class Alive(TorchDispatchMode):
    """Counts the bytes that operations have made since it was entered and that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {storage._cdata for storage in storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in known:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self.made.values()))
        return out


@in_turn(kind=["full", "lora", "dora", "modules-to-save"], tied=[True, False])
def test_a_sharded_policy_is_gathered_weight_by_weight(make_model, make_completions, mesh, kind, tied):
    policy = described(make_model(tie_word_embeddings=tied), LORAS.get(kind)).load()
    learn(policy)
    wanted = {name: tensor.clone() for name, tensor in whole_weights(policy)}
    base = {name: tensor.clone() for name, tensor in base_weights(policy)}
    shard(policy, mesh)
    assert all(isinstance(p, DTensor) for p in policy.parameters())
    ships = lambda: all(torch.equal(tensor, wanted[name]) for name, tensor in whole_weights(policy))  # noqa: E731
    assert list(weight_shapes(policy).items()) == [(name, tuple(t.shape)) for name, t in wanted.items()]
    assert ships()
    with unsharded(policy):
        assert ships()
    with torch.no_grad():  # leaves the root gathered
        token_logits(policy, make_completions([[5, 6, 7]], [[1, 2]]))
    assert ships()
    assert all(torch.equal(tensor, base[name]) for name, tensor in base_weights(policy))
    before = fingerprint(policy)
    assert before == fingerprint(policy)
    next(p for p in policy.parameters() if p.requires_grad).data.mul_(1.5)
    assert before != fingerprint(policy)


class _Gathering(types.ModuleType):
    """DeepSpeed's part in it: a parameter is whole within `zero.GatheredParameters`, and empty outside."""

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.zero = types.SimpleNamespace(GatheredParameters=self.gathered)
        self.whole: dict[int, torch.Tensor] = {}

    def take_apart(self, parameter: nn.Parameter) -> None:
        self.whole[id(parameter)] = parameter.data
        parameter.ds_id, parameter.ds_shape = len(self.whole), parameter.shape  # pyright: ignore
        parameter.ds_tensor = parameter.data.flatten()[: parameter.numel() // 2]  # pyright: ignore
        parameter.data = torch.empty(0)

    @contextmanager
    def gathered(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        for parameter in parameters:
            parameter.data = self.whole[id(parameter)].clone()
        yield
        for parameter in parameters:
            parameter.data.zero_()  # its memory is used for others
            parameter.data = torch.empty(0)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_zero_stage_3_has_taken_apart_is_gathered_weight_by_weight(make_model, monkeypatch, kind):
    policy = described(make_model(tie_word_embeddings=True), LORAS.get(kind)).load()
    learn(policy)
    wanted = {name: tensor.clone() for name, tensor in whole_weights(policy)}
    stage3 = _Gathering()
    monkeypatch.setitem(sys.modules, "deepspeed", stage3)
    for parameter in policy.parameters():
        stage3.take_apart(parameter)
    assert weight_shapes(policy) == {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    found = dict(whole_weights(policy))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    assert all(parameter.numel() == 0 for parameter in policy.parameters())
    before = fingerprint(policy)
    next(p for p in policy.parameters() if p.requires_grad).ds_tensor[0] += 1
    assert before != fingerprint(policy)


@pytest.mark.parametrize("flat", ["within", "around"])
def test_classic_fsdp_is_refused(make_model, mesh, flat):
    policy = LanguageModel(str(make_model())).load()
    settings = {"device_id": torch.device("cpu"), "use_orig_params": True}
    if flat == "within":
        policy.model.layers[0] = FullyShardedDataParallel(policy.model.layers[0], **settings)
    else:  # as Lightning does it, around the module that has the policy
        FullyShardedDataParallel(nn.ModuleDict({"policy": policy}), **settings)
    for ask in (whole_weights, weight_shapes):
        with pytest.raises(ConfigError, match="strategy=fsdp"):
            ask(policy)


def test_quantised_weights_are_refused(make_model):
    """As bitsandbytes holds them, which itself runs in tests/vision/test_vision_quantised.py."""
    policy = LanguageModel(str(make_model()), lora=Lora(r=2)).load()
    layer = policy.get_base_model().model.layers[0].mlp.up_proj.base_layer
    layer.weight = nn.Parameter(torch.zeros(96, 64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="quantised"):
        whole_weights(policy)


def test_an_adapter_that_diverged_is_named(make_model):
    policy = LanguageModel(str(make_model()), lora=Lora(r=2)).load()
    layer = policy.get_base_model().model.layers[1].self_attn.v_proj
    layer.lora_B["default"].weight.data[0, 0] = float("nan")
    with pytest.raises(NumericError, match=r"model\.layers\.1\.self_attn\.v_proj"):
        dict(whole_weights(policy))


def test_an_adapter_that_cannot_be_merged_says_why(make_model):
    """Its bias would need one of the base, and Llama has none."""
    lora = {"r": 2, "target_modules": ["q_proj"], "lora_bias": True, "task_type": "CAUSAL_LM"}
    with pytest.warns(UserWarning, match="lora_bias"):
        policy = get_peft_model(AutoModelForCausalLM.from_pretrained(make_model("smollm2")), LoraConfig(**lora))
    with pytest.raises(ConfigError, match=r"q_proj cannot be merged .* no bias"):
        dict(whole_weights(policy))


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_sees_every_change(make_model, change):
    policy = LanguageModel(str(make_model()), lora=Lora(r=4)).load()
    learn(policy)
    before, trained = fingerprint(policy), [p for p in policy.parameters() if p.requires_grad and p.dim() == 2]
    for parameter in (trained[0], trained[-1]):
        kept = parameter.detach().clone()
        CHANGES[change](parameter.data)
        assert not torch.equal(parameter, kept)
        assert fingerprint(policy) != before
        parameter.data.copy_(kept)
        assert fingerprint(policy) == before


def test_the_fingerprint_is_the_same_where_nothing_has_changed(make_model, make_completions):
    policy = LanguageModel(str(make_model()), dtype="bfloat16").load()
    before = fingerprint(policy)
    token_logits(policy, make_completions([[5, 6, 7]], [[1, 2]])).float().sum().backward()
    dict(whole_weights(policy, dtype=torch.float32))
    assert fingerprint(policy) == before
    assert len(before) == len(list(policy.parameters()))


def test_the_fingerprint_sees_buffers_and_odd_pieces_of_memory():
    """Buffers that are stored, numbers of every width, and shards that begin in the middle of a word."""
    module = nn.Module()
    for width in (torch.int8, torch.bfloat16, torch.float32, torch.float64):
        module.register_buffer(str(width).replace("torch.", "as_"), torch.arange(100_003).to(width)[3:])
    module.register_buffer("passing", torch.zeros(3), persistent=False)
    module.register_buffer("scalar", torch.tensor(1.0))
    before = fingerprint(module)
    assert {name for name, *_ in before} == {"as_int8", "as_bfloat16", "as_float32", "as_float64", "scalar"}
    module.get_buffer("passing").add_(1)
    assert fingerprint(module) == before
    for name, tensor in module.state_dict().items():
        for index in (0, -1, 50_000):
            one = tensor.view(-1)[index % tensor.numel()]
            one += 1
            changed = [key for (key, *sums), (_, *old) in zip(fingerprint(module), before, strict=True) if sums != old]
            one -= 1
            assert changed in ([name], [] if name == "as_bfloat16" else [name]), (name, index)


@pytest.mark.parametrize("distance", [1, 4096, 3 * 4096])
def test_the_fingerprint_sees_values_that_change_places(distance):
    """Within a row of what is summed, and within a column."""
    module = nn.Module()
    module.register_buffer("numbers", torch.arange(5 * 4096.0, dtype=torch.float64))
    before, numbers = fingerprint(module), module.get_buffer("numbers")
    numbers[[7, 7 + distance]] = numbers[[7 + distance, 7]]
    assert fingerprint(module) != before


def test_nothing_trained_has_an_empty_fingerprint():
    assert fingerprint(nn.Linear(2, 2).requires_grad_(False)) == ()
