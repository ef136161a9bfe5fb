"""The formula of `lit_rl.models.model_costs` against what torch counts while a tiny model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import in_turn
from torch.utils.flop_counter import FlopCounterMode

from lit_rl.models.model_costs import Cost, ModelFlops, Span

COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 67,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"num_key_value_heads": 1}),
    "gemma3": ("Gemma3Text", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi": ("Phi", {}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, **EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 5, "moe_intermediate_size": 16, "decoder_sparse_step": 2, **EXPERTS}),
}
BATCH, TOKENS = 2, 9


def model_of(family: str) -> Any:
    """A random model that multiplies whole squares of scores, as the counter can see them."""
    name, own = FAMILIES[family]
    common = {key: COMMON[key] for key in ("vocab_size", "pad_token_id")} if family == "gpt2" else COMMON
    config = getattr(transformers, f"{name}Config")(**{**common, **own, "attn_implementation": "eager"})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def counted(model: Any, scored: int = TOKENS, **inputs: Any) -> Cost:
    """What torch counts in a forward and a backward pass."""
    ids = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % 61 + 3
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=scored, **inputs).logits
    with FlopCounterMode(display=False) as backward:
        logits.float().square().mean().backward()
    # Rotary angles are a product of positions and frequencies, of no weight.
    rotary = sum(sum(ops.values()) for name, ops in forward.get_flop_counts().items() if name.endswith("rotary_emb"))
    return Cost(forward.get_total_flops() - rotary, backward.get_total_flops())


def by_formula(model: Any, scored: int = TOKENS) -> Cost:
    """The formula, with all pairs of tokens in the place of those that a causal mask lets meet."""
    flops = ModelFlops.of_model(model)
    found = flops.of([], BATCH * scored) + flops.token * (BATCH * TOKENS)
    for cost in flops.pair.values():
        found += cost * (BATCH * TOKENS**2)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_trained_whole(family):
    model = model_of(family)
    assert by_formula(model) == counted(model)


def test_a_state_space_has_no_pairs_and_its_linear_layers_are_counted():
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=67, state_size=4)
    flops = ModelFlops.of_model(transformers.AutoModelForCausalLM.from_config(config))
    assert not flops.pair
    inner, rank = config.intermediate_size, config.time_step_rank
    products = 16 * 2 * inner + inner * (rank + 2 * 4) + rank * inner + inner * 16
    assert flops.token.forward == 2 * products and flops.scored.forward == 2 * 16 * 67


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "qwen3_moe"])
def test_the_head_works_on_the_scored_positions_alone(family):
    model = model_of(family)
    assert by_formula(model, scored=4) == counted(model, scored=4)


LORAS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "queries and values": {"target_modules": ["q_proj", "k_proj", "v_proj"]},
    "outputs": {"target_modules": ["o_proj"]},
    "the last of an MLP": {"target_modules": ["down_proj"]},
    "upper layers": {"target_modules": ["q_proj", "v_proj", "k_proj", "up_proj"], "layers_to_transform": [1]},
    "with a head": {"target_modules": ["v_proj", "k_proj", "q_proj"], "modules_to_save": ["lm_head"]},
}


@in_turn(family=["llama", "qwen3"], name=LORAS)
def test_adapters_need_no_gradient_of_frozen_weights_and_none_below_them(family, name):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of(family), LoraConfig(r=3, task_type="CAUSAL_LM", **LORAS[name]))
    assert by_formula(model) == counted(model)
    whole = by_formula(model_of(family))
    assert by_formula(model).backward < 0.8 * whole.backward


def test_only_the_adapter_that_is_active_is_counted():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model_of("llama"), config)
    alone = by_formula(model)
    model.add_adapter("other", LoraConfig(r=7, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert by_formula(model) == alone
    model.set_adapter("other")
    assert by_formula(model) == counted(model) != alone


def test_frozen_parts_need_no_gradient():
    model = model_of("llama")
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    assert by_formula(model) == counted(model)
    model.requires_grad_(False)
    assert by_formula(model).backward == 0


def test_what_checkpointing_computes_again_is_not_counted():
    model = model_of("llama")
    before = by_formula(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert by_formula(model) == before
    layers = ModelFlops.of_model(model).token.forward * BATCH * TOKENS
    assert counted(model).backward > before.backward + 0.8 * layers  # the pass itself computes most of them


def test_a_decode_sees_a_growing_cache():
    """Token by token, torch counts what the formula says of the spans of one token, and of one span of them all."""
    model, prompt, new = model_of("qwen2").eval(), 4, 5
    flops = ModelFlops.of_model(model)
    with torch.no_grad():
        past = model(input_ids=torch.arange(3, 3 + prompt)[None], use_cache=True, logits_to_keep=1).past_key_values
        with FlopCounterMode(display=False) as counter:
            for _ in range(new):
                past = model(input_ids=torch.full((1, 1), 3), past_key_values=past, use_cache=True).past_key_values
    rotary = sum(sum(o.values()) for name, o in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    one_by_one = flops.of([Span(prompt + i, 1) for i in range(new)], new).forward
    assert one_by_one == counter.get_total_flops() - rotary == flops.of([Span(prompt, new)], new).forward


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_trls_estimate_is_ours_of_all_pairs(family):
    """TRL 1.16 counts every token with as many keys as its text has: twice our pairs, and a pair a token less."""
    from trl.trainer.utils import compute_flops_per_token

    model, length = model_of(family), 11
    flops = ModelFlops.of_model(model)
    ours = flops.of([], length) + flops.token * length + flops.pair[None] * length**2
    assert ours.training == length * compute_flops_per_token(model.config, length)
    assert Span(0, length).pairs() == (length**2 + length) // 2


@settings(max_examples=60, deadline=None)
@given(past=st.integers(0, 30), new=st.integers(0, 30), window=st.one_of(st.none(), st.integers(1, 20)))
def test_pairs_are_those_of_the_mask(past, new, window):
    total = past + new
    query, key = torch.arange(total)[past:, None], torch.arange(total)[None]
    meets = (key <= query) & (key > query - (window or total + 1))
    assert Span(past, new).pairs(window) == int(meets.sum())


@settings(max_examples=30, deadline=None)
@given(prompt=st.integers(1, 40), responses=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_sharing_a_prompt_saves_its_copies_and_nothing_else(prompt, responses):
    flops = ModelFlops(Cost(3, 5), Cost(7, 11), {None: Cost(2, 4), 6: Cost(1, 2)})
    own = flops.of([Span(0, prompt + each) for each in responses], sum(responses))
    shared = flops.of([Span(0, prompt), *(Span(prompt, each) for each in responses)], sum(responses))
    copies = flops.of([Span(0, prompt)] * (len(responses) - 1), 0)
    assert shared + copies == own
