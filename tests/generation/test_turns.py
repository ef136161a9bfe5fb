"""Conversations: the part of the generator's contract that has turns, for every engine that runs on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from generation_cases import EOS, PAD, VOCAB, all_logits, ask, build, spell, unspell
from tiers import quick
from torch import nn
from turn_cases import Scripted, assert_rows_are_what_was_told, reply, rows_of

from lit_rl.core.episode import EnvironmentTurn, PolicyTurn, Responder
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.rollout import Completions, PromptBatch, Prompts, Sampling
from lit_rl.environments.interaction import Interaction, OpenedPrompt
from lit_rl.generation import token_sampler
from lit_rl.generation.collect import RolloutRequest, Vocabulary, with_blocked_eos
from lit_rl.generation.hf import HFContinuousGenerator, HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.forward import score
from lit_rl.models.language_model import ForwardOptions

ENGINES: dict[str, Callable[[], Any]] = {
    "native": NativeGenerator,
    "native-places": lambda: NativeGenerator(batch_size=4),
    "native-batches": lambda: NativeGenerator(batch_size=8, speedups={"continuous_batching": False}),
    "native-plain": lambda: NativeGenerator(speedups={"grouped_cache": False}),
    "native-plain-places": lambda: NativeGenerator(batch_size=4, speedups={"grouped_cache": False}),
    "hf": HFGenerator,
    "hf-places": lambda: HFGenerator(batch_size=4),
    "hf_continuous": HFContinuousGenerator,
    "hf_continuous-places": lambda: HFContinuousGenerator(batch_size=4),
}
SAMPLED = Sampling(max_new_tokens=6)

_policies: dict[str, nn.Module] = {}


def shared(kind: str) -> nn.Module:
    return _policies.setdefault(kind, build(kind).eval())


KEPT = ["native", "native-batches", "native-plain-places", "hf", "hf_continuous-places"]
"""The others have other places: `test_engines_agree_token_for_token` has them all."""


@pytest.fixture(params=quick(KEPT, {"native", "native-plain-places", "hf"}))
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]()


@pytest.fixture(params=quick(["qwen2", "gpt2"], {"qwen2"}))
def policy(request: pytest.FixtureRequest) -> nn.Module:
    return shared(request.param)


PAIRS = [pytest.param(name, "qwen2", id=f"{name}-qwen2") for name in KEPT] + [
    pytest.param("native", "gpt2", id="native-gpt2")
]
of_both = pytest.mark.parametrize(
    ("engine", "policy"), quick(PAIRS, {"native-qwen2", "native-plain-places-qwen2", "hf-qwen2"}), indirect=True
)


def talk(
    engine: Any, policy: nn.Module, sampling: Sampling = SAMPLED, responder: Responder | None = None, **asked: Any
) -> tuple[Completions, Prompts]:
    prompts = dataclasses.replace(ask(**({"eos_ids": (EOS, 5, 9)} | asked)), responder=responder or Scripted(reply))
    engine.sync(policy, 3)
    return engine.generate(prompts, sampling), prompts


@of_both
def test_what_was_said_and_heard_stands_in_its_row(engine: Any, policy: nn.Module) -> None:
    responder = Scripted(reply)
    out, _ = talk(engine, policy, responder=responder)
    assert out.attended is not None and out.turn is not None
    turns = assert_rows_are_what_was_told(out, responder)
    for said in (each for told in responder.told.values() for each in told):
        assert said.ended == (said.token_ids[-1] in (EOS, 5, 9))
    assert set(turns) >= {1, 2, 3} and max(map(len, (row[0] for row in rows_of(out)))) > 15, "the case needs all kinds"
    assert (out.attended.int().diff(dim=1) <= 0).all(), "padded on the right"
    assert (out.response_mask <= out.attended).all()
    assert (out.response_ids[~out.attended] == PAD).all()
    assert (out.sampler_logprobs[~out.response_mask] == 0).all()


CASES = {
    "plain": SAMPLED,
    "greedy": Sampling(max_new_tokens=6, temperature=0),
    "truncated": Sampling(max_new_tokens=6, temperature=0.7, top_p=0.9, top_k=20, min_p=0.02),
    "penalty": Sampling(max_new_tokens=6, repetition_penalty=1.3),
    "stop": Sampling(max_new_tokens=6, min_new_tokens=3, stop=("f5", "1n")),
    "bans": Sampling(max_new_tokens=6, bad_words=("f5", "b1n3", "l1"), logit_bias={4: 3.0}),
}


NATIVE = sorted(name for name in ENGINES if name.startswith("native"))
AGREEING = {
    ("qwen2", "stop"): sorted(ENGINES.keys() - {"hf"}),
    ("qwen2", "penalty"): ["native-plain-places", "native-batches", "hf_continuous-places"],
    ("qwen2", "truncated"): ["native", "hf_continuous"],
    ("qwen2", "bans"): ["native-places", "hf-places"],
    ("qwen2", "greedy"): ["native-plain"],
    ("gpt2", "plain"): NATIVE,
}


@pytest.mark.parametrize(
    ("kind", "name"), quick([pytest.param(*pair, id="-".join(pair)) for pair in AGREEING], {"qwen2-stop"})
)
def test_engines_agree_token_for_token(kind: str, name: str) -> None:
    """Every engine in the case that has most; each other case with engines that share no code for it."""
    policy = shared(kind)
    oracle, _ = talk(HFGenerator(), policy, CASES[name])
    for engine in AGREEING[kind, name]:
        out, _ = talk(ENGINES[engine](), policy, CASES[name])
        assert rows_of(out) == rows_of(oracle), engine
        torch.testing.assert_close(out.sampler_logprobs, oracle.sampler_logprobs, atol=1e-4, rtol=0)
        if oracle.kept_logmass is not None:
            torch.testing.assert_close(out.kept_logmass, oracle.kept_logmass, atol=1e-4, rtol=0)


LOOKING = {
    "native": NativeGenerator,
    "native-plain-places": lambda: NativeGenerator(batch_size=7, speedups={"grouped_cache": False}),
    "hf": HFGenerator,
    "hf_continuous": HFContinuousGenerator,
}
LATE = Sampling(max_new_tokens=9, stop=("f5", "1n", "2"), repetition_penalty=1.2, bad_words=("f5", "b1n3"))


@pytest.mark.parametrize(("name", "every"), [("native", 100), *((name, 4) for name in LOOKING)])
def test_looking_at_every_few_tokens_changes_no_turn(monkeypatch: pytest.MonkeyPatch, name: str, every: int) -> None:
    """As on an accelerator, where a look waits for it: what was drawn behind a stop string is taken back."""
    told, rows, logprobs = [], [], []
    for looks in (1, every):
        monkeypatch.setattr(token_sampler, "_LOOK_ON_CPU", looks)
        responder = Scripted(reply)
        out, _ = talk(LOOKING[name](), shared("qwen2"), LATE, responder, rows=range(8))
        told.append(responder.told)
        rows.append(rows_of(out))
        logprobs.append(out.sampler_logprobs)
    assert told[0] == told[1] and rows[0] == rows[1]
    torch.testing.assert_close(*logprobs, atol=1e-5, rtol=1e-5)
    turns = [said for each in told[0].values() for said in each]
    stopped = [said for said in turns if said.ended and said.token_ids[-1] not in (EOS, 5, 9)]
    assert len(stopped) > 5 and max(said.turn for said in stopped) > 0, "the case needs stop strings in several turns"


@of_both
def test_log_probs_are_those_of_the_whole_text(engine: Any, policy: nn.Module) -> None:
    """Of an unpadded forward pass, and of the one that training scores with."""
    out, prompts = talk(engine, policy)
    scored = score(policy, out, SAMPLED).logprobs
    torch.testing.assert_close(out.sampler_logprobs[out.response_mask], scored[out.response_mask], atol=1e-4, rtol=0)
    for row, (ids, sampled, _, _) in enumerate(rows_of(out)):
        logits = all_logits(policy, prompts.token_ids[row // 3], ids).log_softmax(-1)
        expected = logits.gather(1, torch.tensor(ids)[:, None])[:, 0] * torch.tensor(sampled)
        torch.testing.assert_close(out.sampler_logprobs[row, : len(ids)], expected, atol=1e-4, rtol=0)


HISTORY = Sampling(max_new_tokens=6, temperature=0.8, min_new_tokens=3, repetition_penalty=1.6, top_p=0.95)


@pytest.mark.parametrize("options", [ForwardOptions(), ForwardOptions(False, False, False)], ids=["fast", "plain"])
def test_training_scores_by_what_each_turn_held_back_and_what_stood_before_it(
    policy: nn.Module, options: ForwardOptions
) -> None:
    out, prompts = talk(NativeGenerator(), policy, HISTORY)
    asked = with_blocked_eos(out, prompts.eos_ids, HISTORY)
    scored, mask = score(policy, asked, HISTORY, options=options).logprobs, out.response_mask
    torch.testing.assert_close(out.sampler_logprobs[mask], scored[mask], atol=2e-4, rtol=0)
    for name, off in {"min_new_tokens": 0, "repetition_penalty": 1.0}.items():
        other = score(policy, asked, dataclasses.replace(HISTORY, **{name: off}), options=options).logprobs.detach()
        assert float((other - out.sampler_logprobs)[mask].abs().max()) > 0.01, name
    assert out.turn is not None and int(out.turn.max()) > 1


@of_both
def test_neither_batch_nor_order_of_answers_changes_a_sample(engine: Any, policy: nn.Module) -> None:
    together = rows_of(talk(engine, policy)[0])
    assert rows_of(talk(engine, policy, responder=Scripted(reply, at_once=1))[0]) == together
    backwards = rows_of(talk(engine, policy, rows=[4, 3, 2, 1, 0])[0])
    assert [backwards[3 * (4 - i) + sample] for i in range(5) for sample in range(3)] == together
    for row in (0, 3):
        assert rows_of(talk(engine, policy, rows=[row])[0]) == together[3 * row : 3 * row + 3]


@pytest.mark.parametrize(("group_size", "places"), [(9, 8), (2, 3)])
def test_any_number_of_places_holds_any_group(group_size: int, places: int | None) -> None:
    """Answers come two at a time, so parts of a cache are split and joined in every order."""
    policy, asked = shared("qwen2"), {"rows": list(range(8)), "group_size": group_size}
    oracle = rows_of(talk(HFGenerator(), policy, responder=Scripted(reply, at_once=2), **asked)[0])
    for grouped in (True, False):
        engine = NativeGenerator(batch_size=places, speedups={"grouped_cache": grouped})
        assert rows_of(talk(engine, policy, responder=Scripted(reply, at_once=2), **asked)[0]) == oracle


@pytest.mark.parametrize("grouped", [True, False])
def test_native_reads_every_token_once(grouped: bool) -> None:
    """The cache of a row is kept until it is answered; without it, each turn would read all turns before it again."""
    policy, fed = build("qwen2").eval(), 0

    def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal fed
        fed += next(ids for ids in (kwargs.get("input_ids"), *args) if ids is not None).numel()

    def read(engine: Any, row: int) -> tuple[int, int, int]:
        """Tokens that the model read, those of the text, and turns."""
        nonlocal fed
        responder, fed = Scripted(reply), 0
        out, prompts = talk(engine, policy, responder=responder, rows=[row], group_size=1)
        assert out.attended is not None
        return fed, len(prompts.token_ids[0]) + int(out.attended.sum()), len(responder.told[0])

    native, whole = NativeGenerator(speedups={"grouped_cache": grouped}), HFGenerator()
    for engine in (native, whole):
        talk(engine, policy)  # whatever they find out of a model they have found out then
    with_turns = 0
    with policy.register_forward_pre_hook(count, with_kwargs=True):
        for row in range(5):
            seen, length, turns = read(native, row)
            assert seen == length - 1, "the last token is drawn, and read by nobody"
            with_turns += turns > 1
            assert turns == 1 or read(whole, row)[0] > seen
    assert with_turns >= 2


def test_turns_of_one_token(engine: Any) -> None:
    out, _ = talk(engine, shared("qwen2"), Sampling(max_new_tokens=1))
    assert rows_of(out) == rows_of(talk(HFGenerator(), shared("qwen2"), Sampling(max_new_tokens=1))[0])


WIDE = {"vocab_size": VOCAB, "initializer_range": 0.3}
MODELS: dict[str, Callable[[], nn.Module]] = {
    # These count columns: a hole inside a text would move what stands before it away.
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, max_seq_len=64, **WIDE)
    ),
    "gpt_neo": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            window_size=6,
            max_position_embeddings=64,
            **WIDE,
        )
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=64, n_head=4, n_layer=2, **WIDE)
    ),
    "lora": lambda: with_adapter(build("qwen2")),
}


def with_adapter(model: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("places", [None, 4])
def test_other_kinds_of_models_read_answers_into_their_caches(name: str, places: int | None) -> None:
    torch.manual_seed(3)
    policy = MODELS[name]().eval()
    oracle, _ = talk(HFGenerator(), policy)
    out, _ = talk(NativeGenerator(batch_size=places), policy)
    assert rows_of(out) == rows_of(oracle)
    torch.testing.assert_close(out.sampler_logprobs, oracle.sampler_logprobs, atol=1e-4, rtol=0)


def test_layers_that_hold_nothing_are_passed_over() -> None:
    """The config counts the layers of an encoder that the model has not."""
    settings = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    tokens = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": EOS, "vocab_size": VOCAB}
    config = transformers.BartConfig(**settings, **tokens, init_std=0.3, max_position_embeddings=80)
    out, _ = talk(NativeGenerator(batch_size=4), transformers.BartForCausalLM(config).eval())
    assert out.turn is not None and out.turn.max() > 0


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_near_to_training(autocast: bool) -> None:
    policy = build("qwen2").eval() if autocast else build("qwen2").eval().bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, _ = talk(NativeGenerator(), policy)
        gap = (score(policy, out, SAMPLED).logprobs.detach() - out.sampler_logprobs)[out.response_mask].abs()
    assert gap.mean() < 0.1


@of_both
def test_a_response_that_is_split_by_an_empty_answer_is_the_same_response(engine: Any, policy: nn.Module) -> None:
    go_on = Scripted(lambda said: None if said.ended else [], 12)
    split, prompts = talk(engine, policy, Sampling(max_new_tokens=5), responder=go_on)
    whole = engine.generate(dataclasses.replace(prompts, responder=None), Sampling(max_new_tokens=12))
    assert torch.equal(split.response_ids, whole.response_ids)
    assert torch.equal(split.response_mask, whole.response_mask)
    assert torch.equal(split.ended, whole.ended)
    torch.testing.assert_close(split.sampler_logprobs, whole.sampler_logprobs, atol=1e-4, rtol=0)
    assert split.turn is not None and split.turn.max() == 2


@of_both
def test_conversations_of_one_turn_are_the_usual_completions(engine: Any, policy: nn.Module) -> None:
    out, prompts = talk(engine, policy, responder=Scripted(lambda said: None))
    usual = engine.generate(dataclasses.replace(prompts, responder=None), SAMPLED)
    assert usual.attended is None and usual.turn is None
    assert torch.equal(out.response_ids, usual.response_ids)
    assert torch.equal(out.response_mask, usual.response_mask)
    torch.testing.assert_close(out.sampler_logprobs, usual.sampler_logprobs, atol=1e-5, rtol=0)


def test_a_text_beyond_the_context_is_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"67 tokens, .* context holds 64"):
        talk(engine, shared("qwen2"), responder=Scripted(reply, 60))


class ScriptedInteraction:
    """In the place of an `Interaction`: opens each prompt with a token, and answers by the script."""

    factory = SimpleNamespace(seed="group", converses=True)
    settings = factory
    journal, waited = None, 0.0
    draw = Interaction.draw

    def begin(
        self, batch: PromptBatch, seeds: Sequence[int], *, max_new_tokens: int, journal: Any, seen: Any
    ) -> tuple[list[OpenedPrompt], Any]:
        class Closing(Scripted):
            waited, chat_frames = 0.0, ()

            def episodes(self) -> tuple[str, ...]:
                return ("as it went",)

            def close(self) -> None: ...

        assert len(set(seeds)) == 1 and len(seeds) == 2, "one seed for the group"
        opened = [OpenedPrompt(prompt, [*ids, 5], None) for prompt, ids in zip(batch.prompts, batch.prompt_ids)]
        return opened, Closing(reply)


def test_a_request_takes_its_responder_to_generators_that_hear_it() -> None:
    batch = PromptBatch(["a"], [[3, 4]], {}, [0], [0])
    vocabulary, policy = Vocabulary((EOS,), PAD, spell, unspell), shared("qwen2")

    def asked(generator: Any) -> Callable[[], Completions]:
        settings = {"sampling": SAMPLED, "group_size": 2, "vocabulary": vocabulary, "version": 0, "seed": 0}
        scripted: Any = ScriptedInteraction()
        return RolloutRequest(batch, policy, **settings, interaction=scripted).send_to(generator)

    completions = asked(NativeGenerator())()
    assert completions.turn is not None and completions.episodes == ("as it went",)
    assert completions.prompt_ids[0].tolist() == [3, 4, 5], "as it was opened"
    with pytest.raises(ConfigError, match="OneTurn .* single turn.*generator=native"):
        asked(OneTurn())


class OneTurn(NativeGenerator):
    """Hears nothing."""

    converses = False


def test_an_answer_without_room_is_refused(engine: Any) -> None:
    class Long(Scripted):
        def tell(self, said: PolicyTurn) -> None:
            self._waiting.append(EnvironmentTurn(said.row, [3] * 30, 1))

    with pytest.raises(GenerationError, match=r"answer to row \d+ has 30 tokens"):
        talk(engine, shared("qwen2"), responder=Long(reply))


def test_native_refuses_windows_shorter_than_the_text() -> None:
    with pytest.raises(ConfigError, match="generator=native .* conversations.*generator=hf"):
        talk(NativeGenerator(), shared("mistral"))
    out, _ = talk(HFGenerator(), shared("mistral"))
    assert out.turn is not None and out.turn.max() > 0
