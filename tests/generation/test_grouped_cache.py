"""Decoding with the keys and values of a prompt held once a group: equal to the plain way, or not taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from generation_cases import SHARED, VOCAB, ask, build, responses
from tiers import in_turn, quick
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from lit_rl.core.rollout import Completions, Sampling
from lit_rl.generation import grouped_cache, token_sampler
from lit_rl.generation.decoding import DecodingSteps, GeometricMixture
from lit_rl.generation.generator import DecodeBatch, decode_batches
from lit_rl.generation.grouped_cache import (
    GroupedCache,
    GroupedLayer,
    GroupedSteps,
    decode_probe,
    fits_grouped_cache,
    grouped_cache_proven,
    probe_batch,
)
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.forward import score
from lit_rl.models.forward_inputs import cache_name

WIDE = SHARED | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
OWN_SIZES = {name: value for name, value in WIDE.items() if name != "head_dim"}  # of models that have none to set


def model_of(kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).eval()  # type: ignore[arg-type]


def gemma3(window: int) -> nn.Module:
    settings: dict[str, Any] = WIDE | {"layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3TextConfig(**settings, sliding_window=window)
    torch.manual_seed(7)
    return transformers.Gemma3ForCausalLM(config).eval()


GROUPED: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: model_of("Qwen2", **WIDE),
    "llama-tied": lambda: model_of("Llama", **WIDE, tie_word_embeddings=True),
    "one key head": lambda: model_of("Llama", **WIDE | {"num_key_value_heads": 1}),
    "gpt2": lambda: build("gpt2").eval(),
    "gemma": lambda: model_of("Gemma", **WIDE),
    "gemma3": lambda: gemma3(64),
    "mistral": lambda: model_of("Mistral", **WIDE, sliding_window=64),
    "mixtral": lambda: model_of("Mixtral", **WIDE, num_local_experts=4),
    "neox": lambda: model_of("GPTNeoX", **OWN_SIZES, rotary_pct=0.5),
    "lora": lambda: with_lora(model_of("Qwen2", **WIDE)),
}


@pytest.fixture(params=quick(GROUPED, {"qwen2", "gpt2", "gemma3", "lora"}))
def policy(request: pytest.FixtureRequest) -> nn.Module:
    return GROUPED[request.param]()


def batch_of(group_size: int) -> DecodeBatch:
    (batch,) = decode_batches(ask(group_size=group_size), None, torch.device("cpu"))
    return batch


def head_outputs(policy: nn.Module) -> list[Tensor]:
    """What the head gives from now on, in its own type."""
    seen: list[Tensor] = []
    head: nn.Module = policy.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda module, inputs, output: seen.append(output[:, -1]))
    return seen


@torch.no_grad()
@pytest.mark.parametrize("group_size", [1, 4])
def test_both_ways_are_equal_in_float64(policy: nn.Module, group_size: int) -> None:
    """Prompts of one to seven tokens; rows leave so that groups of unequal size remain, then none of a prompt."""
    if hasattr(policy.config, "num_local_experts"):
        pytest.skip("transformers' experts have no float64")
    batch, seen = batch_of(group_size), head_outputs(policy.double())
    n = 5 * group_size
    drops = {3: [i for i in range(n) if i % 3 != 1], 6: [0, *range(n // 3, n // 2)]}
    ways = []
    for kind in (DecodingSteps, GroupedSteps):
        generator = torch.Generator().manual_seed(0)
        steps = kind(policy, batch, 40)
        for step in range(40):
            if step in drops:
                steps.keep(torch.tensor(drops[step]))
            rows = len(drops[6]) if step >= 6 else len(drops[3]) if step >= 3 else n
            steps.advance(torch.randint(VOCAB, (rows,), generator=generator))
        ways.append(list(seen))
        seen.clear()
    for plain, grouped in zip(*ways, strict=True):
        torch.testing.assert_close(grouped, plain, rtol=0, atol=1e-12)


def caches(model: nn.Module) -> list[type]:
    """The kinds of the caches that the model is given from now on."""
    seen: list[type] = []
    model.register_forward_pre_hook(lambda *a: seen.append(type(a[2].get(cache_name(model)))), with_kwargs=True)
    return seen


def drawn(generator: Any, policy: nn.Module, sampling: Sampling, **asked: Any) -> Completions:
    generator.sync(policy, 0)
    return generator.generate(ask(**asked), sampling)


@pytest.mark.parametrize("group_size", [1, 4])
def test_the_log_probs_are_the_policys_own(policy: nn.Module, group_size: int) -> None:
    sampling, seen = Sampling(max_new_tokens=12), caches(policy)
    out = drawn(NativeGenerator(), policy, sampling, group_size=group_size, eos_ids=tuple(range(1, 6)))
    assert GroupedCache in seen and len(out.lengths.unique()) > 1, "rows are dropped on the way"
    expected = score(policy, out, sampling).logprobs[out.response_mask]
    torch.testing.assert_close(out.sampler_logprobs[out.response_mask], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_option_changes_no_sample_but_where_it_rounds(dtype: torch.dtype) -> None:
    """In bfloat16 both ways are held against float64 weights of the same values."""
    policy = GROUPED["qwen2"]().to(dtype)
    exact = GROUPED["qwen2"]()
    exact.load_state_dict({name: value.float() for name, value in policy.state_dict().items()})
    off = {}
    for grouped in (True, False):
        seen = caches(policy)
        out = drawn(
            NativeGenerator(speedups={"grouped_cache": grouped}), policy, Sampling(max_new_tokens=12), group_size=8
        )
        assert (GroupedCache in seen) == grouped
        expected = score(exact.double(), out, Sampling()).logprobs[out.response_mask]
        off[grouped] = (out.sampler_logprobs[out.response_mask] - expected).abs().mean()
    assert off[True] < (1e-5 if dtype == torch.float32 else 1.5 * off[False])


def test_autocast_is_kept() -> None:
    policy = GROUPED["qwen2"]()
    sampling = Sampling(max_new_tokens=12)
    with torch.autocast("cpu", torch.bfloat16):
        seen = caches(policy)
        out = drawn(NativeGenerator(), policy, sampling, group_size=4)
        expected = score(policy, out, sampling).logprobs.detach()
    assert GroupedCache in seen
    assert (out.sampler_logprobs - expected)[out.response_mask].abs().mean() < 0.1


# ---------------------------------------------------------------------------------------------------- the plain way


class _ShiftedKeys(nn.Module):
    """An attention that reads other keys than it cached."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name = str(cache_name(self.attention))
        return self.attention(*args, **kwargs | {name: _Shifted(kwargs[name])})


class _Shifted:
    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.update(*args, **kwargs)
        return keys + 0.5, values


def shifted_keys() -> nn.Module:
    model: Any = GROUPED["qwen2"]()
    for layer in model.model.layers:
        layer.self_attn = _ShiftedKeys(layer.self_attn)
    return model


def eager() -> nn.Module:
    model: Any = GROUPED["qwen2"]()
    model.set_attn_implementation("eager")
    return model


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "window shorter than the text": lambda: model_of("Mistral", **WIDE, sliding_window=4),
    "some layers with such a window": lambda: gemma3(4),
    "eager attention": eager,
    "attention sinks": lambda: model_of("GptOss", **WIDE, num_local_experts=4, rope_parameters=None),
    "alibi": lambda: model_of("Bloom", vocab_size=VOCAB, hidden_size=64, n_head=4, n_layer=2),
    "no keywords for attention": lambda: model_of("StableLm", **OWN_SIZES),
    "other keys than the cache's": shifted_keys,
}


@pytest.mark.parametrize("kind", quick(PLAIN, {"some layers with such a window", "eager attention", "alibi"}))
def test_other_attention_goes_the_plain_way(kind: str) -> None:
    policy = PLAIN[kind]().eval()
    seen, sampling = caches(policy), Sampling(max_new_tokens=12)
    out = drawn(NativeGenerator(), policy, sampling)
    used = seen[-10:]
    assert used and GroupedCache not in used
    oracle = drawn(HFGenerator(), policy, sampling)
    assert responses(out) == responses(oracle)
    torch.testing.assert_close(out.sampler_logprobs, oracle.sampler_logprobs, atol=1e-4, rtol=0)


def test_an_sdpa_of_the_models_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A modeling file may put another function in the place of sdpa; only the comparison can tell."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.qwen2 import modeling_qwen2

    def halved(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query / 2, *args, **kwargs)

    policy = GROUPED["qwen2"]()
    with torch.no_grad():
        assert grouped_cache_proven(policy, 20)
        local = AttentionInterface()
        local["sdpa"] = halved
        monkeypatch.setattr(modeling_qwen2, "ALL_ATTENTION_FUNCTIONS", local)
        another = GROUPED["qwen2"]()
        assert fits_grouped_cache(another, 20)
        assert not grouped_cache_proven(another, 20)


def test_a_window_counts_only_where_the_text_is_as_long() -> None:
    policy = model_of("Mistral", **WIDE, sliding_window=20)
    for new_tokens, kind in ((13, GroupedCache), (14, None)):  # after prompts of up to seven tokens
        seen = caches(policy)
        out = drawn(NativeGenerator(), policy, Sampling(max_new_tokens=new_tokens), eos_ids=())
        assert (seen[-1] is GroupedCache) == (kind is GroupedCache)
        oracle = drawn(HFGenerator(), policy, Sampling(max_new_tokens=new_tokens), eos_ids=())
        assert responses(out) == responses(oracle)


def test_a_mixture_of_two_models_goes_the_plain_way() -> None:
    policy = GROUPED["qwen2"]()
    mixed = GeometricMixture(policy, lambda: torch.no_grad(), 0.0)
    assert not fits_grouped_cache(mixed, 20)


def test_a_model_is_proven_once_and_another_one_anew() -> None:
    policy, other = GROUPED["qwen2"](), shifted_keys()
    engine, sampling = NativeGenerator(), Sampling(max_new_tokens=2)
    seen = caches(policy)
    for version in range(3):
        engine.sync(policy, version)
        engine.generate(ask(eos_ids=()), sampling)
        if version == 0:
            seen.clear()
    assert len(seen) == 2 * 2, "two forward passes a call: no proof among them"
    others = caches(other)
    engine.sync(other, 3)
    engine.generate(ask(eos_ids=()), sampling)
    assert others[-1] is not GroupedCache


def test_the_models_attention_is_as_before_and_also_after_an_error() -> None:
    policy: Any = GROUPED["qwen2"]()
    drawn(NativeGenerator(), policy, Sampling(max_new_tokens=3))
    assert policy.config._attn_implementation == "sdpa"
    (batch,) = decode_batches(ask(), None, torch.device("cpu"))
    with torch.no_grad():
        steps = GroupedSteps(policy, batch, 4)
        with pytest.raises(IndexError):
            steps.advance(torch.full((15,), VOCAB))
    assert policy.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------------------------------------- what it holds


@torch.no_grad()
def test_a_prompt_is_held_once_and_goes_with_its_last_row() -> None:
    policy, group_size, new_tokens = GROUPED["qwen2"](), 4, 50
    steps: Any = GroupedSteps(policy, batch_of(group_size), new_tokens)
    layer: GroupedLayer = steps._cache.layers[0]
    assert layer.prompt_keys.shape == layer.prompt_values.shape == (5, 2, 7, 16)
    room = []
    for _ in range(new_tokens):
        steps.advance(torch.ones(20, dtype=torch.long))
        assert layer.keys is not None
        room.append(layer.keys.shape[2])
    assert room[-1] == new_tokens and len(set(room)) == 2, "memory is taken twice, and no more of it than needed"
    assert steps._cache.get_seq_length() == 7 + new_tokens
    steps.keep(torch.tensor([0, 1, 13]))
    assert layer.prompt_keys.shape[0] == 2, "of the prompts of rows 0 to 3 and 12 to 15"
    assert layer.keys.shape[0] == 3


# ---------------------------------------------------------------------------------------------------- rows that join


@torch.no_grad()
@pytest.mark.parametrize("kind", [DecodingSteps, GroupedSteps])
def test_rows_that_join_later_get_the_logits_that_they_get_alone(policy: nn.Module, kind: type[DecodingSteps]) -> None:
    """Three batches, with shorter and longer prompts than those before; some rows leave before each joins."""
    if hasattr(policy.config, "num_local_experts"):
        pytest.skip("transformers' experts have no float64")
    policy.double()
    new_tokens, seen = 12, head_outputs(policy)
    asked = [next(decode_batches(ask(rows), None, torch.device("cpu"))) for rows in ((1, 4), (0,), (2, 3))]
    batches = [dataclasses.replace(b, numbers=[10 * i + number for number in b.numbers]) for i, b in enumerate(asked)]

    def token(row: int, step: int) -> int:
        return (row * 7 + step * 5) % (VOCAB - 2) + 2

    alone: dict[tuple[int, int], Tensor] = {}
    for number, batch in enumerate(batches):
        steps, rows = kind(policy, batch, new_tokens), [10 * number + i for i in range(len(batch.rows))]
        if not steps.joinable:
            pytest.skip("a layer of its cache may drop tokens, so nothing joins")
        for step in range(new_tokens):
            steps.advance(torch.tensor([token(row, step) for row in rows]))
            alone |= {(row, step): logits for row, logits in zip(rows, seen[-1])}

    steps, rows, begun = kind(policy, batches[0], new_tokens), list(range(6)), dict.fromkeys(range(6), 0)
    row_counts = []
    for clock in range(20):
        steps.advance(torch.tensor([token(row, clock - begun[row]) for row in rows]))
        for row, logits in zip(rows, seen[-1], strict=True):
            torch.testing.assert_close(logits, alone[row, clock - begun[row]], rtol=0, atol=1e-12)
        row_counts.append(len(rows))
        if leaving := {3: {0, 2, 5}, 7: {10, 12, 1}, 11: {3, 4}, 15: {11}, 19: set(range(30))}.get(clock):
            kept = [i for i, row in enumerate(rows) if row not in leaving]
            rows = [rows[i] for i in kept]
            if kept:
                steps.keep(torch.tensor(kept))
        if number := {3: 1, 7: 2}.get(clock):
            fresh = [10 * number + i for i in range(len(batches[number].rows))]
            steps.join(kind(policy, batches[number], new_tokens))
            rows, begun = rows + fresh, begun | dict.fromkeys(fresh, clock + 1)
    assert row_counts[4] == 6 and row_counts[8] == 9


@torch.no_grad()
@pytest.mark.parametrize("seen", [True, False])
def test_room_that_is_not_written_is_not_seen(monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    """16-bit products on a CPU read all of the room: here float64 ones do, with rows that leave, join and read."""
    monkeypatch.setattr(grouped_cache, "_builds_kernels", lambda states: True)
    policy = GROUPED["qwen2"]().double()
    plain, whole = (decode_probe(kind(policy, probe_batch(policy), 5)) for kind in (DecodingSteps, GroupedSteps))
    torch.testing.assert_close(whole, plain, rtol=0, atol=1e-6)
    if seen:
        monkeypatch.setattr(GroupedCache, "_hidden", lambda *asked: None)
        shown = decode_probe(GroupedSteps(policy, probe_batch(policy), 5))
        assert not torch.allclose(shown, plain, atol=1e-3), "the case needs room that would be seen"
    else:
        test_rows_that_join_later_get_the_logits_that_they_get_alone(policy, GroupedSteps)


@pytest.mark.parametrize(
    ("grouped", "every", "stop"), [(True, 4, ("3", "g6")), (False, 4, ("3", "g6")), (True, 100, ())]
)
def test_looking_at_every_few_tokens_changes_no_response(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, every: int, stop: tuple[str, ...]
) -> None:
    """As on an accelerator, where a look waits for it."""
    policy, out = GROUPED["qwen2"](), []
    for looks in (1, every):
        monkeypatch.setattr(token_sampler, "_LOOK_ON_CPU", looks)
        generator = NativeGenerator(batch_size=6, speedups={"grouped_cache": grouped})
        asked = {"rows": list(range(8)), "group_size": 2, "eos_ids": tuple(range(1, 6))}
        out.append(drawn(generator, policy, Sampling(max_new_tokens=9, stop=stop), **asked))
    assert responses(out[0]) == responses(out[1])
    assert torch.equal(out[0].ended, out[1].ended)
    torch.testing.assert_close(out[0].sampler_logprobs, out[1].sampler_logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grouped", [True, False])
def test_waiting_groups_take_the_places_of_rows_that_end(grouped: bool) -> None:
    """Never more rows than places, and never more columns than the longest row could have: memory is bounded."""
    policy, seen = GROUPED["qwen2"](), []
    generator = NativeGenerator(batch_size=6, speedups={"grouped_cache": grouped})
    usual = GroupedSteps if grouped else DecodingSteps

    class Watched(usual):  # type: ignore[misc, valid-type]
        def advance(self, tokens: Tensor) -> None:
            super().advance(tokens)
            columns = self._cache.own_length if grouped else self._length - 8  # of the longest prompt
            seen.append((len(tokens), columns, self.full))

    generator._choose_steps = lambda policy, length: Watched  # type: ignore[method-assign]
    asked = {"rows": list(range(20)), "group_size": 2, "eos_ids": tuple(range(1, 6))}
    out = drawn(generator, policy, Sampling(max_new_tokens=9), **asked)
    assert responses(out) == responses(drawn(HFGenerator(), policy, Sampling(max_new_tokens=9), **asked))
    rows, columns, full = zip(*seen)
    assert max(rows) == 6 and max(columns) == 9 and any(full), "the case needs columns that have to be dropped"
    one_after_another = sum(int(out.lengths[i : i + 6].max()) for i in range(0, 40, 6))
    assert len(seen) < 0.85 * one_after_another


@in_turn(places=[1, 3, 6, None], grouped=[True, False])
def test_continuous_batching_changes_no_sample(grouped: bool, places: int | None) -> None:
    asked = {"rows": list(range(10)), "group_size": 2, "eos_ids": tuple(range(1, 6))}
    policy, sampling, out = GROUPED["qwen2"](), Sampling(max_new_tokens=9), []
    for continuous in (True, False):
        generator = NativeGenerator(places, {"grouped_cache": grouped, "continuous_batching": continuous})
        out.append(drawn(generator, policy, sampling, **asked))
    assert responses(out[0]) == responses(out[1]) == responses(drawn(HFGenerator(), policy, sampling, **asked))
    torch.testing.assert_close(out[0].sampler_logprobs, out[1].sampler_logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grouped", [True, False])
def test_without_it_one_batch_follows_another(grouped: bool) -> None:
    """A batch is as long as its longest response, whose last token needs no step more."""
    policy, steps = GROUPED["qwen2"](), []
    usual = GroupedSteps if grouped else DecodingSteps

    class Counted(usual):  # type: ignore[misc, valid-type]
        def __init__(self, policy: nn.Module, batch: DecodeBatch, max_new_tokens: int) -> None:
            super().__init__(policy, batch, max_new_tokens)
            steps.append((batch.rows, []))

        def advance(self, tokens: Tensor) -> None:
            super().advance(tokens)
            steps[-1][1].append(len(tokens))

    generator = NativeGenerator(6, {"grouped_cache": grouped, "continuous_batching": False})
    generator._choose_steps = lambda policy, length: Counted  # type: ignore[method-assign]
    asked = {"rows": list(range(20)), "group_size": 2, "eos_ids": tuple(range(1, 6))}
    out = drawn(generator, policy, Sampling(max_new_tokens=9), **asked)
    assert [len(rows) for rows, _ in steps] == [6] * 6 + [4]
    for rows, taken in steps:
        assert len(taken) == int(out.lengths[rows].max()) - 1 and taken == sorted(taken, reverse=True)
