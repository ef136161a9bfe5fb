"""The contract of ``generation.generator.Generator``, for every engine that runs on a CPU."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from generation_cases import EOS, PAD, VOCAB, all_logits, ask, build, next_logits, responses, spell
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import quick
from torch import Tensor, nn
from transformers import CompileConfig, GenerationConfig
from transformers.generation import logits_process as peer

from lit_rl.core.errors import ConfigError, GenerationError, NumericError
from lit_rl.core.rollout import Completions, Prompts, Sampling, Structured
from lit_rl.generation import hf
from lit_rl.generation.generator import Generator
from lit_rl.generation.hf import HFContinuousGenerator, HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.forward import score
from lit_rl.models.modes import recomputes, set_checkpointing

ENGINES: dict[str, Callable[[], Any]] = {
    "native": NativeGenerator,
    "native-groups": lambda: NativeGenerator(batch_size=7),  # two groups of three at a time
    "native-slices": lambda: NativeGenerator(batch_size=2),  # a group of three is cut
    "native-batches": lambda: NativeGenerator(batch_size=7, speedups={"continuous_batching": False}),
    "native-plain": lambda: NativeGenerator(speedups={"grouped_cache": False}),
    "hf": HFGenerator,
    "hf-groups": lambda: HFGenerator(batch_size=7),
    "hf-static": lambda: HFGenerator(static_cache=True),
    "hf_continuous": HFContinuousGenerator,
    "hf_continuous-2": lambda: HFContinuousGenerator(batch_size=2),
}
GREEDY = Sampling(temperature=0, max_new_tokens=12)
SAMPLED = Sampling(max_new_tokens=12)

_policies: dict[str, nn.Module] = {}


def shared(kind: str) -> nn.Module:
    return _policies.setdefault(kind, build(kind))


QUICK = {"native", "hf", "hf_continuous"}


@pytest.fixture(params=quick(["native", "native-plain", "hf", "hf-static", "hf_continuous"], QUICK))
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]()


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> nn.Module:
    return shared(request.param)


QUICK_PAIRS = {"native-qwen2", "native-gpt2", "hf-qwen2", "hf_continuous-qwen2"}
PAIRS = [(name, "qwen2") for name in ENGINES] + [
    (name, kind) for name in ("native", "hf") for kind in ("gpt2", "mistral")
]
"""One policy with every engine, and the policies of other positions or windows with two."""

of_both = pytest.mark.parametrize(
    ("engine", "policy"), quick([pytest.param(*pair, id="-".join(pair)) for pair in PAIRS], QUICK_PAIRS), indirect=True
)


@pytest.fixture
def qwen() -> nn.Module:
    return shared("qwen2")


def run(engine: Any, policy: nn.Module, prompts: Prompts, sampling: Sampling) -> Completions:
    engine.sync(policy, 3)
    return engine.generate(prompts, sampling)


def prompt_of(prompts: Prompts, row: int) -> list[int]:
    return prompts.token_ids[row // prompts.group_size]


def scored_rows(completions: Completions, prompts: Prompts) -> Iterator[tuple[list[int], list[int], Tensor]]:
    for row, response in enumerate(responses(completions)):
        yield prompt_of(prompts, row), response, completions.sampler_logprobs[row, : len(response)]


def same(ours: Completions, theirs: Completions, tolerance: float = 1e-4) -> None:
    for field in dataclasses.fields(Completions):
        left, right = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name in ("sampler_logprobs", "kept_logmass") and isinstance(left, Tensor):
            torch.testing.assert_close(left, right, atol=tolerance, rtol=0)
        elif isinstance(left, Tensor):
            assert torch.equal(left, right), field.name
        else:
            assert left == right, field.name


def test_engines_are_generators(engine: Any) -> None:
    assert isinstance(engine, Generator)
    assert engine.reports_kept_mass is True


@of_both
def test_greedy_equals_argmax_without_cache_or_padding(engine: Any, policy: nn.Module) -> None:
    prompts = ask(group_size=1)
    completions = run(engine, policy, prompts, GREEDY)
    for row, response in enumerate(responses(completions)):
        ids = list(prompt_of(prompts, row))
        for token in response:
            logits = next_logits(policy, ids)
            assert logits[token] > logits.max() - 1e-4
            ids.append(token)
        assert (response[-1] == EOS) == bool(completions.ended[row])
        assert EOS not in response[:-1]
        assert len(response) == 12 or completions.ended[row]


def test_layout(engine: Any, qwen: nn.Module) -> None:
    prompts = ask(group_size=3)
    out = run(engine, qwen, prompts, SAMPLED)
    assert [ids[mask].tolist() for ids, mask in zip(out.prompt_ids, out.prompt_mask)] == [
        ids for ids in prompts.token_ids for _ in range(3)
    ]
    assert out.group_id.tolist() == [i for i in range(5) for _ in range(3)]
    assert out.version == 3
    assert out.response_mask.any(0).all(), "no column is padding in every row"
    assert (out.response_mask.int().diff(dim=1) <= 0).all(), "padded on the right"
    assert (out.prompt_mask.int().diff(dim=1) >= 0).all(), "padded on the left"
    assert (out.response_ids[~out.response_mask] == PAD).all()
    assert (out.sampler_logprobs[~out.response_mask] == 0).all()
    assert out.sampler_logprobs.dtype == torch.float32
    assert out.response_ids.dtype == out.prompt_ids.dtype == out.group_id.dtype == torch.long
    assert not any(part.requires_grad or part.is_inference() for part in vars(out).values() if isinstance(part, Tensor))


def test_a_row_that_is_over_is_told_as_it_is_returned_once_or_not_at_all(engine: Any, qwen: nn.Module) -> None:
    told: list[tuple[int, list[int]]] = []
    asked = dataclasses.replace(ask(group_size=3), on_finished=lambda row, ids: told.append((row, ids)))
    out = run(engine, qwen, asked, SAMPLED)
    same(out, run(engine, qwen, ask(group_size=3), SAMPLED))
    assert sorted(told) == ([] if isinstance(engine, HFContinuousGenerator) else list(enumerate(responses(out))))


def test_eos_stays_in_the_mask_and_every_eos_id_ends(engine: Any, qwen: nn.Module) -> None:
    eos_ids = (EOS, 5, 17, 23)
    out = run(engine, qwen, ask(eos_ids=eos_ids, group_size=8), SAMPLED)
    last = [response[-1] for response in responses(out)]
    assert len(set(last) & set(eos_ids)) > 1, "the case needs several kinds of end"
    for response, ended in zip(responses(out), out.ended.tolist()):
        assert ended == (response[-1] in eos_ids)
        assert not set(response[:-1]) & set(eos_ids)
        assert ended or len(response) == 12


def test_response_of_eos_alone(engine: Any, qwen: nn.Module) -> None:
    out = run(engine, qwen, ask(eos_ids=tuple(range(VOCAB))), SAMPLED)
    assert out.response_mask.tolist() == [[True]] * 15
    assert out.ended.all()


def test_pad_token_that_is_also_eos(engine: Any, qwen: nn.Module) -> None:
    usual = run(engine, qwen, ask(group_size=8), SAMPLED)
    out = run(engine, qwen, dataclasses.replace(ask(group_size=8), pad_id=EOS), SAMPLED)
    assert responses(out) == responses(usual)
    assert torch.equal(out.ended, usual.ended)
    assert (out.response_ids[~out.response_mask] == EOS).all()
    assert {response[-1] == EOS for response in responses(out)} == {True, False}, "the case needs both kinds of end"


def test_one_token(engine: Any, qwen: nn.Module) -> None:
    prompts = ask()
    out = run(engine, qwen, prompts, Sampling(max_new_tokens=1))
    assert out.response_ids.shape == (15, 1)
    assert torch.equal(out.ended, out.response_ids[:, 0] == EOS)
    assert torch.equal(out.response_ids[:, 0], run(engine, qwen, prompts, SAMPLED).response_ids[:, 0])


DISTRIBUTIONS: dict[str, tuple[Sampling, list[Any]]] = {
    "plain": (Sampling(), []),
    "warm": (Sampling(temperature=1.7), [peer.TemperatureLogitsWarper(1.7)]),
    "cold": (Sampling(temperature=0.7), [peer.TemperatureLogitsWarper(0.7)]),
    "top_p": (Sampling(temperature=1.7, top_p=0.8), [peer.TemperatureLogitsWarper(1.7), peer.TopPLogitsWarper(0.8)]),
    "top_k": (Sampling(top_k=4), [peer.TopKLogitsWarper(4)]),
    "min_p": (Sampling(min_p=0.05), [peer.MinPLogitsWarper(0.05)]),
    "bias": (Sampling(logit_bias={3: 4.0, 20: -6.0}), [peer.SequenceBiasLogitsProcessor({(3,): 4.0, (20,): -6.0})]),
    "penalty": (Sampling(repetition_penalty=1.3), [peer.RepetitionPenaltyLogitsProcessor(1.3)]),
    "greedy": (Sampling(temperature=0), []),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("kind", ["hf", "hf_continuous"])
def test_logprobs_are_those_of_the_distribution_drawn_from(kind: str, qwen: nn.Module, name: str) -> None:
    """Of the two that decode by different code; `test_engines_agree_token_for_token` leads to the others."""
    sampling, processors = DISTRIBUTIONS[name]
    check_logprobs(ENGINES[kind](), qwen, dataclasses.replace(sampling, max_new_tokens=12), processors)


@of_both
def test_logprobs_equal_an_unpadded_forward(engine: Any, policy: nn.Module) -> None:
    check_logprobs(engine, policy, Sampling(temperature=1.7, max_new_tokens=12), [peer.TemperatureLogitsWarper(1.7)])


def check_logprobs(engine: Any, policy: nn.Module, sampling: Sampling, processors: list[Any]) -> None:
    prompts = ask()
    out = run(engine, policy, prompts, sampling)
    assert (out.kept_logmass is None) == (sampling.top_p == 1 and not sampling.top_k and not sampling.min_p)
    for prompt, response, logprobs in scored_rows(out, prompts):
        logits = all_logits(policy, prompt, response)
        for processor in processors:
            steps = range(len(response))
            logits = torch.cat([processor(torch.tensor([prompt + response[:t]]), logits[t : t + 1]) for t in steps])
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_kept_mass_leads_from_the_drawn_to_the_whole_distribution(qwen: nn.Module, name: str) -> None:
    prompts = ask(group_size=8)  # rows end at different steps, so some leave the batch
    out = run(NativeGenerator(), qwen, prompts, dataclasses.replace(DISTRIBUTIONS[name][0], max_new_tokens=12))
    mass, temperature = out.kept_logmass, DISTRIBUTIONS[name][0].temperature
    assert mass is not None and mass.dtype == torch.float32
    assert mass.shape == out.response_ids.shape
    assert (mass[~out.response_mask] == 0).all()
    assert (mass <= 0).all() and (mass < 0).any()
    for row, (prompt, response, logprobs) in enumerate(scored_rows(out, prompts)):
        whole = (all_logits(qwen, prompt, response) / temperature).log_softmax(-1)
        expected = whole.gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs + mass[row, : len(response)], expected, atol=1e-4, rtol=0)


def test_greedy_decoding_cuts_nothing(engine: Any, qwen: nn.Module) -> None:
    out = run(engine, qwen, ask(), dataclasses.replace(GREEDY, top_p=0.5, top_k=3, min_p=0.2))
    assert out.kept_logmass is None
    same(out, run(engine, qwen, ask(), GREEDY), tolerance=0)


DRAWN = given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.4, 2.5),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.1, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.5)),
)


@settings(max_examples=20)
@DRAWN
@pytest.mark.parametrize("name", ["native", "hf"])
def test_training_scores_what_the_engine_drew_from(name: str, seed: int, **cuts: Any) -> None:
    assert_training_scores_what_was_drawn(ENGINES[name](), seed, Sampling(**cuts, max_new_tokens=6))


@settings(max_examples=8)  # each starts the engine; that it cuts as `hf` does is a law of each cut
@DRAWN
def test_training_scores_what_continuous_batching_drew_from(seed: int, **cuts: Any) -> None:
    assert_training_scores_what_was_drawn(HFContinuousGenerator(), seed, Sampling(**cuts, max_new_tokens=6))


def assert_training_scores_what_was_drawn(engine: Any, seed: int, sampling: Sampling) -> None:
    """With equal weights both sides cut the same tokens and renormalise alike, and the whole softmax is in reach."""
    policy = shared("qwen2")
    out = run(engine, policy, ask(group_size=2, seed=seed), sampling)
    mask = out.response_mask
    scores = score(policy, out, sampling)
    close = {"atol": 1e-5 / min(sampling.temperature, 1), "rtol": 1e-5}  # it divides the rounding of logits too
    torch.testing.assert_close(scores.logprobs[mask], out.sampler_logprobs[mask], **close)
    if out.kept_logmass is not None:
        whole = score(policy, out, dataclasses.replace(sampling, top_k=0, top_p=1.0, min_p=0.0)).logprobs[mask]
        torch.testing.assert_close((out.sampler_logprobs + out.kept_logmass)[mask], whole, **close)


def test_keys_make_the_samples(engine: Any, qwen: nn.Module) -> None:
    first = run(engine, qwen, ask(), SAMPLED)
    same(run(engine, qwen, ask(), SAMPLED), first, tolerance=0)
    other = run(engine, qwen, ask(seed=1), SAMPLED)
    assert sum(a == b for a, b in zip(responses(first), responses(other))) < 5
    group = responses(first)[:3]
    assert len({tuple(response) for response in group}) > 1, "samples of a group differ"


def test_global_random_state_is_neither_read_nor_moved(engine: Any, qwen: nn.Module) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = run(engine, qwen, ask(), SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    same(run(engine, qwen, ask(), SAMPLED), first, tolerance=0)


@of_both
def test_batch_and_padding_change_nothing(engine: Any, policy: nn.Module) -> None:
    everything = run(engine, policy, ask(), SAMPLED)
    together = list(zip(responses(everything), everything.sampler_logprobs))
    for row in range(5):
        alone = run(engine, policy, ask(rows=[row]), SAMPLED)
        for sample in range(3):
            tokens, logprobs = together[3 * row + sample]
            assert responses(alone)[sample] == tokens
            torch.testing.assert_close(
                alone.sampler_logprobs[sample, : len(tokens)], logprobs[: len(tokens)], atol=1e-4, rtol=0
            )
    backwards = run(engine, policy, ask(rows=[4, 3, 2, 1, 0]), SAMPLED)
    assert [responses(backwards)[3 * (4 - i) + s] for i in range(5) for s in range(3)] == responses(everything)


def test_repetition_penalty_does_not_see_padding(engine: Any, qwen: nn.Module) -> None:
    sampling = Sampling(max_new_tokens=12, repetition_penalty=3.0)
    rows = [0, 2]  # one token and seven: the first is padded
    together = run(engine, qwen, ask(rows=rows), sampling)
    alone = [response for row in rows for response in responses(run(engine, qwen, ask(rows=[row]), sampling))]
    assert responses(together) == alone


AGREED = {
    "plain": SAMPLED,
    "greedy": GREEDY,
    "everything": Sampling(max_new_tokens=12, temperature=0.7, top_p=0.9, top_k=20, min_p=0.02, repetition_penalty=1.2),
    "stop": Sampling(max_new_tokens=12, min_new_tokens=6, stop=("f5", "1n")),
    "bans": Sampling(max_new_tokens=12, bad_words=("f5", "b1n3", "l1"), logit_bias={4: 3.0}, repetition_penalty=1.2),
}
OTHERS = sorted(ENGINES.keys() - {"hf", "hf-groups"})
AGREEING = [("qwen2", name) for name in AGREED] + [("llama", "plain"), ("gpt2", "everything"), ("mistral", "bans")]


@pytest.mark.parametrize(
    ("kind", "name"),
    quick(
        [pytest.param(*pair, id="-".join(pair)) for pair in AGREEING],
        {"qwen2-everything", "qwen2-stop", "gpt2-everything"},
    ),
)
def test_engines_agree_token_for_token(kind: str, name: str) -> None:
    prompts, policy = ask(eos_ids=(EOS, 9)), shared(kind)
    oracle = run(HFGenerator(), policy, prompts, AGREED[name])
    for other in OTHERS:
        same(run(ENGINES[other](), policy, prompts, AGREED[name]), oracle)


def test_a_static_cache_is_decoded_by_a_compiled_step(qwen: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers does it by itself on a GPU; its own switch has it compile here."""
    everywhere, blank = CompileConfig(backend="eager", mode="default"), hf._generation_config
    everywhere._compile_all_devices = True

    def compiling(*asked: Any) -> GenerationConfig:
        config = blank(*asked)
        config.compile_config = everywhere
        return config

    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(hf, "_generation_config", compiling)
    policy = copy.deepcopy(qwen)
    compiled = run(HFGenerator(static_cache=True), policy, ask(), SAMPLED)
    assert counters["stats"]["calls_captured"] > 0
    same(compiled, run(HFGenerator(), qwen, ask(), SAMPLED))


def test_hostile_generation_config_has_no_effect(engine: Any, qwen: nn.Module) -> None:
    clean = run(engine, qwen, ask(), SAMPLED)
    hostile = GenerationConfig(
        repetition_penalty=1.3,
        top_k=3,
        temperature=0.1,
        do_sample=True,
        suppress_tokens=list(range(2, 20)),
        begin_suppress_tokens=[21],
        forced_eos_token_id=EOS,
        min_new_tokens=5,
        max_length=4,
        no_repeat_ngram_size=1,
        bad_words_ids=[[30]],
        eos_token_id=[33, 34],
    )
    model: Any = copy.deepcopy(qwen)
    model.generation_config = hostile
    snapshot = hostile.to_dict()
    same(run(engine, model, ask(), SAMPLED), clean, tolerance=0)
    assert model.generation_config is hostile
    assert hostile.to_dict() == snapshot


def test_min_new_tokens(engine: Any, qwen: nn.Module) -> None:
    eos_ids = tuple(range(1, 30))
    out = run(engine, qwen, ask(eos_ids=eos_ids), Sampling(max_new_tokens=9, min_new_tokens=4))
    assert (out.lengths > 4).all()
    assert not set(out.response_ids[:, :4].flatten().tolist()) & set(eos_ids)
    assert (out.lengths == 5).any(), "and not one token more than asked"


def test_bad_words_are_never_completed_and_change_nothing_else(engine: Any, qwen: nn.Module) -> None:
    prompts = ask(group_size=6)
    free = run(engine, qwen, prompts, SAMPLED)
    long = [response for response in responses(free) if len(response) > 5]
    words = [long[0][2:4], long[1][1:4], long[2][3:4], [prompts.token_ids[0][-1], long[3][0]]]
    sampling = dataclasses.replace(SAMPLED, bad_words=tuple(spell(word) for word in words))
    out = run(engine, qwen, prompts, sampling)
    assert not any(contains(response, word) for response in responses(out) for word in words)
    untouched = 0
    for before, after in zip(responses(free), responses(out)):
        if not any(contains(before, word) for word in words):
            untouched += before == after
    assert untouched > 5
    oracle = peer.NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([EOS]))
    for prompt, response, logprobs in scored_rows(out, prompts):
        logits = all_logits(qwen, prompt, response)
        # The response alone: what the prompt ends with begins no word.
        logits = torch.cat([oracle(torch.tensor([response[:t]]).long(), row[None]) for t, row in enumerate(logits)])
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def contains(response: list[int], word: list[int]) -> bool:
    return any(response[i : i + len(word)] == word for i in range(len(response)))


def test_stop_string_across_tokens(engine: Any, qwen: nn.Module) -> None:
    free = responses(run(engine, qwen, ask(), SAMPLED))
    stop = tuple({spell(response)[3:5] for response in free if len(response) > 5})
    assert all(not text[0].isalpha() and text[1].isalpha() for text in stop), "each spans two tokens"
    out = run(engine, qwen, ask(), dataclasses.replace(SAMPLED, stop=stop))
    for full, response, ended in zip(free, responses(out), out.ended.tolist()):
        texts = [spell(full[: k + 1]) for k in range(len(full))]
        cut = next((k + 1 for k, text in enumerate(texts) if any(s in text for s in stop)), len(full))
        assert response == full[:cut]
        assert ended == (cut < len(full) or full[-1] == EOS or any(s in texts[-1] for s in stop))


def test_samples_follow_the_softmax(qwen: nn.Module) -> None:
    """Of one engine: the others draw the same tokens."""
    prompts = ask(rows=[2], group_size=2000)
    out = run(NativeGenerator(batch_size=500), qwen, prompts, Sampling(max_new_tokens=1, temperature=2.0))
    expected = 2000 * (next_logits(qwen, prompts.token_ids[0]) / 2).double().softmax(-1)
    counts = torch.bincount(out.response_ids[:, 0], minlength=VOCAB).double()
    common = expected > 5
    expected, counts = (torch.cat([x[common], x[~common].sum()[None]]) for x in (expected, counts))
    chi2 = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    assert chi2 < len(expected) - 1 + 4 * math.sqrt(2 * (len(expected) - 1))


def test_batches_in_bfloat16(qwen: nn.Module) -> None:
    """Rounded to 8 bits, products of another number of rows may flip a token, in a few rows (docs/generators.md)."""
    narrow = copy.deepcopy(qwen).bfloat16()
    for engine in (NativeGenerator(), HFGenerator()):
        out = run(engine, narrow, ask(), SAMPLED)
        assert out.sampler_logprobs.dtype == torch.float32 and out.sampler_logprobs.isfinite().all()
        alone = [row for number in range(5) for row in responses(run(engine, narrow, ask(rows=[number]), SAMPLED))]
        assert sum(one == other for one, other in zip(responses(out), alone, strict=True)) >= 12, "of 15"


def test_autocast(engine: Any, qwen: nn.Module) -> None:
    if getattr(engine, "static_cache", False):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="static_cache=true cannot decode"):
            run(engine, qwen, ask(), SAMPLED)
        return
    with torch.autocast("cpu", torch.bfloat16):
        out = run(engine, qwen, ask(), SAMPLED)
        ids = torch.tensor([[3, 4]])
        assert qwen(input_ids=ids).logits.requires_grad, "weights cast while generating must not enter training"
    assert out.sampler_logprobs.dtype == torch.float32
    assert out.sampler_logprobs.isfinite().all()


def test_runs_inside_the_inference_mode_of_a_validation_loop(engine: Any, qwen: nn.Module) -> None:
    with torch.inference_mode():
        out = run(engine, qwen, ask(), dataclasses.replace(SAMPLED, repetition_penalty=1.1, min_new_tokens=2))
    assert len(out) == 15


def test_peft_policy_generates_with_its_adapter(engine: Any, qwen: nn.Module) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    policy: Any = get_peft_model(copy.deepcopy(qwen), config)  # type: ignore[arg-type]
    held = policy.generation_config
    prompts = ask()
    out = run(engine, policy, prompts, SAMPLED)
    assert policy.generation_config is held
    for prompt, response, logprobs in scored_rows(out, prompts):
        expected = all_logits(policy, prompt, response).log_softmax(-1).gather(1, torch.tensor(response)[:, None])
        torch.testing.assert_close(logprobs, expected[:, 0], atol=1e-4, rtol=0)
    with policy.disable_adapter():
        assert responses(run(engine, policy, prompts, SAMPLED)) == responses(run(engine, qwen, prompts, SAMPLED))


def test_dropout_and_checkpointing_are_off_while_generating_and_back_after(engine: Any) -> None:
    model: Any = build("llama")
    clean = run(engine, model.eval(), ask(), SAMPLED)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    set_checkpointing(model, True)
    model.config.use_cache = False
    model.train()
    model.lm_head.eval()
    same(run(engine, model, ask(), SAMPLED), clean, tolerance=0)
    assert recomputes(model)
    assert model.config.use_cache is False
    assert model.training
    assert not model.lm_head.training


def test_weights_are_read_when_generating(engine: Any) -> None:
    model: Any = build("qwen2")
    before = run(engine, model, ask(), GREEDY)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1)
    engine.sync(model, 4)
    after = engine.generate(ask(), GREEDY)
    assert after.version == 4
    assert responses(after) != responses(before)


REFUSED: dict[str, tuple[Prompts, Sampling, type[Exception], str]] = {
    "no encoder": (dataclasses.replace(ask(), encode=None), Sampling(bad_words=("a0",)), ConfigError, r"\.bad_words"),
    "no decoder": (dataclasses.replace(ask(), decode=None), Sampling(stop=("x",)), ConfigError, r"sampling\.stop"),
    "no such token": (
        *(ask(), Sampling(max_new_tokens=3, logit_bias={VOCAB: 1.0}), ConfigError),
        rf"sampling\.logit_bias names the token {VOCAB}.* to {VOCAB - 1}",
    ),
    "a form": (
        *(ask(), Sampling(structured=Structured(regex="a+")), ConfigError),
        r"sampling\.structured\.regex.*generator=vllm or generator=vllm_server",
    ),
    "an empty prompt": (
        *(dataclasses.replace(ask(rows=[0, 1]), token_ids=[[3], []]), SAMPLED, GenerationError),
        "Prompt 1 ",
    ),
    "no prompts": (ask(rows=[]), SAMPLED, GenerationError, "keys"),
    "no samples": (ask(group_size=0), SAMPLED, GenerationError, "keys"),
    "too few keys": (dataclasses.replace(ask(), keys=[1]), SAMPLED, GenerationError, "keys"),
}


def test_what_cannot_be_drawn_is_refused(engine: Any, qwen: nn.Module) -> None:
    for prompts, sampling, error, match in REFUSED.values():
        with pytest.raises(error, match=match):
            run(engine, qwen, prompts, sampling)


def test_generate_before_sync_is_refused(engine: Any) -> None:
    with pytest.raises(GenerationError, match="before sync"):
        engine.generate(ask(), SAMPLED)


def test_a_copy_leaves_the_policy_behind(engine: Any, qwen: nn.Module) -> None:
    expected = run(engine, qwen, ask(), GREEDY)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(engine)))
    with pytest.raises(GenerationError, match="before sync"):
        twin.generate(ask(), GREEDY)
    same(run(twin, qwen, ask(), GREEDY), expected, tolerance=0)
    same(engine.generate(ask(), GREEDY), expected, tolerance=0)


@pytest.mark.parametrize(
    ("engine", "policy"),
    [("native", "gpt2"), ("native", "qwen2"), ("hf", "qwen2"), ("hf_continuous", "qwen2")],
    indirect=True,
)
def test_context_overflow_is_refused_with_the_numbers(engine: Any, policy: nn.Module) -> None:
    prompts = dataclasses.replace(ask(rows=[0], eos_ids=()), token_ids=[[3] * 54])
    assert run(engine, policy, prompts, Sampling(max_new_tokens=10)).response_ids.shape == (3, 10)
    with pytest.raises(ConfigError, match=r"54 tokens.*max_new_tokens=11.* 64\..* to 10 or less"):
        run(engine, policy, prompts, Sampling(max_new_tokens=11))


def test_nan_weights_are_an_error_and_the_policy_is_restored(engine: Any) -> None:
    model: Any = build("qwen2")
    model.train()
    held = model.generation_config
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(NumericError, match="diverged"):
        run(engine, model, ask(), SAMPLED)
    engine.sync(model, 0)
    with pytest.raises(NumericError, match="no step was taken yet.*the model's files"):
        engine.generate(ask(), SAMPLED)
    assert all(module.training for module in model.modules())
    assert model.generation_config is held
