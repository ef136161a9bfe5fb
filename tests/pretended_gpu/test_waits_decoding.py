"""The budget of waits of decoding: how often the host waits for the device for a token, and beside the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pretend
import pytest
import torch
from generation_cases import ask, build, responses, spell
from turn_cases import Scripted, reply, rows_of

from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.generator import Generator
from lit_rl.generation.hf import HFContinuousGenerator, HFGenerator
from lit_rl.generation.native import NativeGenerator

pytestmark = pytest.mark.all

STOP = Sampling(stop=("never said",))
HISTORY = Sampling(
    min_new_tokens=3,
    repetition_penalty=1.1,
    logit_bias={3: 1.0},
    bad_words=(spell([5]), spell([6, 7]), spell([8, 9, 3])),
    top_p=0.9,
)


@dataclass(frozen=True)
class Budget:
    """What a request of one batch may cost, all its rows together."""

    generator: Callable[[], Generator]
    sampling: Sampling
    a_token: float
    """Waits for each token of the longest response."""
    a_request: float
    """Waits beside these."""
    talks: bool = False


def plain() -> Generator:
    return NativeGenerator(speedups={"grouped_cache": False})


BUDGETS = {
    "native": Budget(NativeGenerator, Sampling(), 0.25, 6),
    "native, modules": Budget(lambda: NativeGenerator(speedups={"lean_steps": False}), Sampling(), 0.25, 6),
    # To capture a step is to wait for all of the device: of the 16 tokens that are looked at, for one.
    "native, cuda_graphs": Budget(
        lambda: NativeGenerator(speedups={"cuda_graphs": True}), Sampling(), 0.25 + 1 / 16, 6
    ),
    "native, stop": Budget(NativeGenerator, STOP, 0.25, 6),
    "native, history": Budget(NativeGenerator, HISTORY, 0.25, 11),
    "native, env": Budget(NativeGenerator, Sampling(), 0.25, 10, talks=True),
    "native, env, stop": Budget(NativeGenerator, STOP, 0.25, 10, talks=True),
    "native, grouped_cache=false": Budget(plain, Sampling(), 0.25, 6),
    # Its loop asks at each token whether a row still runs.
    "hf": Budget(HFGenerator, Sampling(), 1, 7),
    "hf, stop": Budget(HFGenerator, STOP, 1.25, 7),
    "hf, history": Budget(HFGenerator, HISTORY, 1, 14),
    # Of the engine 9, and 7 when it begins.
    "hf_continuous": Budget(HFContinuousGenerator, Sampling(), 9.25, 40),
    "hf_continuous, stop": Budget(HFContinuousGenerator, STOP, 9.25, 40),
}


@pytest.fixture(scope="module")
def policies() -> dict[str, Any]:
    """One policy on both devices."""
    return {device: build("qwen2").to(device) for device in ("cpu", "cuda")}


def asked(**kinds: Any) -> Prompts:
    return ask(group_size=4, **kinds)


def drawn(generator: Generator, policy: Any, prompts: Prompts, sampling: Sampling) -> Completions:
    generator.sync(policy, 1)
    return generator.generate(prompts, sampling)


def waits_of(budget: Budget, generator: Generator, policy: Any, tokens: int) -> Counter[tuple[Any, ...]]:
    """Of a request whose rows all have so many tokens."""
    prompts = asked(eos_ids=())
    if budget.talks:
        prompts = replace(prompts, responder=Scripted(lambda said: None, max_tokens=tokens))
    pretend.ledger.clear()
    out = drawn(generator, policy, prompts, replace(budget.sampling, max_new_tokens=tokens))
    seen = pretend.ledger.events.copy()
    assert out.lengths.tolist() == [tokens] * 20
    return Counter({key: count for key, count in seen.items() if key[0] in pretend.Ledger.WAITING})


def lines(waits: Counter[tuple[Any, ...]]) -> str:
    named = [f"{n:5} {kind} {what} {frames[-1][0]}:{frames[-1][1]}" for (kind, what, *frames), n in waits.most_common()]
    return "\n".join(["", *named])


@pytest.mark.parametrize("name", BUDGETS)
def test_the_host_waits_once_in_a_few_tokens(policies: dict[str, Any], name: str) -> None:
    budget = BUDGETS[name]
    generator, policy = budget.generator(), policies["cuda"]
    waits_of(budget, generator, policy, 4)  # proves the policy
    short, long = (waits_of(budget, generator, policy, tokens) for tokens in (8, 24))
    a_token = (long.total() - short.total()) / 16
    # The engine's thread reads the prompts in one step or two.
    slack = 12 if "continuous" in name else 0
    assert a_token <= budget.a_token + slack / 16, lines(long - short)
    assert short.total() - 8 * budget.a_token <= budget.a_request + slack, lines(short)


RAGGED = {
    "eos": Sampling(max_new_tokens=24),
    "stop": Sampling(max_new_tokens=24, min_new_tokens=2, stop=("f5", "1n", "2")),
}


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (NativeGenerator, "eos"),
        (NativeGenerator, "stop"),
        (lambda: NativeGenerator(6), "stop"),
        (plain, "stop"),
        (HFGenerator, "stop"),
        (HFContinuousGenerator, "stop"),
    ],
)
def test_samples_are_those_of_a_cpu_which_looks_at_each_token(
    policies: dict[str, Any], kind: str, make: Callable[[], Generator]
) -> None:
    prompts, out = asked(eos_ids=(1, 2)), {}
    for device, policy in policies.items():
        out[device] = drawn(make(), policy, prompts, RAGGED[kind])
    assert responses(out["cuda"]) == responses(out["cpu"]) and len(out["cpu"].lengths.unique()) > 5
    assert out["cuda"].ended.tolist() == out["cpu"].ended.tolist()
    torch.testing.assert_close(out["cuda"].sampler_logprobs.cpu(), out["cpu"].sampler_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [NativeGenerator, HFGenerator])
def test_conversations_are_those_of_a_cpu(policies: dict[str, Any], make: Callable[[], Generator]) -> None:
    sampling, rows, told = Sampling(max_new_tokens=6, stop=("f5", "1n", "2")), {}, {}
    for device, policy in policies.items():
        responder = Scripted(reply)
        rows[device] = rows_of(drawn(make(), policy, replace(asked(), responder=responder), sampling))
        told[device] = responder.told
    assert rows["cuda"] == rows["cpu"] and told["cuda"] == told["cpu"]


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("make", [NativeGenerator, plain])
def test_no_step_is_taken_behind_the_last_token(
    policies: dict[str, Any], monkeypatch: pytest.MonkeyPatch, make: Callable[[], Generator], tokens: int
) -> None:
    from lit_rl.generation.decoding import DecodingSteps

    generator, steps, advance = make(), [], DecodingSteps.advance
    drawn(generator, policies["cuda"], asked(eos_ids=()), Sampling(max_new_tokens=1))
    monkeypatch.setattr(DecodingSteps, "advance", lambda self, ids: steps.append(len(ids)) or advance(self, ids))
    drawn(generator, policies["cuda"], asked(eos_ids=()), Sampling(max_new_tokens=tokens))
    assert steps == [20] * (tokens - 1)
