"""Decode steps replayed as graphs: the numbers of steps that are launched one by one, and what no graph may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pretend_graphs
import pytest
import torch
from generation_cases import ask, build, responses, spell
from pretend_graphs import CaptureError, Graph
from test_lean_steps import with_lora
from torch import Tensor, nn
from turn_cases import Scripted, reply

from lit_rl.core.rollout import Completions, Sampling
from lit_rl.generation import fast_decoding
from lit_rl.generation.grouped_cache import GroupedCache
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.responses import Responses

pytestmark = pytest.mark.all

SAMPLINGS = {
    "plain": Sampling(max_new_tokens=40),
    "history": Sampling(
        max_new_tokens=40,
        min_new_tokens=3,
        repetition_penalty=1.1,
        logit_bias={3: 1.0},
        bad_words=(spell([5]), spell([6, 7]), spell([8, 9, 3])),
        top_p=0.9,
        top_k=20,
        min_p=0.01,
    ),
    "stop": Sampling(max_new_tokens=40, min_new_tokens=2, stop=("f5", "1n")),
}


@pytest.fixture(scope="module")
def policy() -> nn.Module:
    policy = build("qwen2").to("cuda").eval()
    with torch.no_grad():
        assert fast_decoding.step_graphs_proven(policy, lean=True)
    return policy


@contextmanager
def one_by_one() -> Iterator[None]:
    """Take all steps so, by the shapes of those that are captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_decoding, "step_graphs_proven", lambda policy, lean: lean)
        patch.setattr(fast_decoding.StepGraphs, "__call__", lambda self, step, *others: step(others[-1]))
        yield


def drawn(policy: nn.Module, sampling: Sampling, *, talks: bool = False, cuda_graphs: bool = True, **kinds: Any) -> Any:
    """The completions, and what the host was told: by the responder, and of tokens for each look."""
    counted: list[int] = []
    added = Responses.count_token

    def noted(self: Responses) -> None:
        added(self)
        counted.append(self._since)

    generator = NativeGenerator(speedups={"cuda_graphs": cuda_graphs}, **kinds)
    prompts, responder = ask(group_size=4, eos_ids=(1,)), Scripted(reply, max_tokens=50)
    generator.sync(policy, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Responses, "count_token", noted)
        out = generator.generate(replace(prompts, responder=responder) if talks else prompts, sampling)
    assert generator.steps == ("cuda_graphs" if cuda_graphs else "lean_steps")
    return out, (responder.told, counted)


def same_bits(one: Completions, other: Completions) -> bool:
    fields = ("response_ids", "response_mask", "sampler_logprobs", "ended", "kept_logmass", "turn", "attended")
    pairs = [(getattr(one, name), getattr(other, name)) for name in fields]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("kind", "talks", "batch_size"),
    [
        ("plain", False, None),
        ("history", False, None),
        ("stop", False, 6),
        ("stop", True, None),
    ],
)
def test_replayed_steps_are_those_launched_one_by_one(
    policy: nn.Module, kind: str, talks: bool, batch_size: int | None
) -> None:
    """To the bit, while rows end, leave, join and hear, and room grows; and what is drawn is what is drawn without."""
    sampling = SAMPLINGS[kind]
    before = Graph.captures, Graph.replayed
    replayed, told = drawn(policy, sampling, talks=talks, batch_size=batch_size)
    captures, replays = Graph.captures - before[0], Graph.replayed - before[1]
    assert captures >= 1 and replays > 3 + captures
    with one_by_one():
        launched, heard = drawn(policy, sampling, talks=talks, batch_size=batch_size)
    assert same_bits(replayed, launched) and told == heard
    off, _ = drawn(policy, sampling, talks=talks, batch_size=batch_size, cuda_graphs=False)
    assert responses(replayed) == responses(off)
    torch.testing.assert_close(replayed.sampler_logprobs, off.sampler_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["autocast", "lora", "bfloat16"])
def test_other_weights(policy: nn.Module, kind: str) -> None:
    if kind == "lora":
        policy = with_lora(build("llama")).to("cuda")
    if kind == "bfloat16":
        policy = build("llama").to("cuda", torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16) if kind == "autocast" else nullcontext():
        replayed, _ = drawn(policy, SAMPLINGS["plain"])
        with one_by_one():
            launched, _ = drawn(policy, SAMPLINGS["plain"])
    assert same_bits(replayed, launched) and len(replayed.lengths.unique()) > 5


def test_a_number_of_the_host_shows(policy: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above can fail: here the host counts the tokens of a turn, which is right where steps are launched."""
    calls, spoken = [0], Responses.turn_lengths

    def counted(self: Responses, rows: Tensor) -> Tensor:
        calls[0] += 1
        return torch.full_like(spoken(self, rows), calls[0] - 1)

    sampling, outs = Sampling(max_new_tokens=20), []
    for way in (nullcontext, one_by_one):
        with way(), monkeypatch.context() as patch:
            expected, _ = drawn(policy, sampling)
            patch.setattr(Responses, "turn_lengths", counted)
            calls[0] = 0
            outs.append(drawn(policy, sampling)[0])
    assert same_bits(outs[1], expected) and not same_bits(outs[0], expected)


def test_a_step_that_is_captured_wrong_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All replays write to one column."""
    policy = build("qwen2").to("cuda")

    @contextmanager
    def fixed(self: GroupedCache, column: Tensor) -> Iterator[None]:
        self._write_at(column)
        yield
        self._write_at(None)

    monkeypatch.setattr(GroupedCache, "writing_at", fixed)
    generator = NativeGenerator(speedups={"cuda_graphs": True})
    generator.sync(policy, 1)
    with caplog.at_level("INFO"):
        for _ in range(2):
            generator.generate(ask(), SAMPLINGS["plain"])
    assert generator.steps == "lean_steps"
    said = [each.message for each in caplog.records if "cuda_graphs" in each.message]
    assert len(said) == 1 and "does not fit Qwen2ForCausalLM on cuda: its numbers differ" in said[0]


class Waiting(nn.Module):
    """An activation that asks how large its numbers are."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(max=10.0) if bool(x.abs().max() > 10) else nn.functional.silu(x)


def test_a_model_that_waits_is_decoded_without(caplog: pytest.LogCaptureFixture) -> None:
    policy: Any = build("qwen2")
    for layer in policy.model.layers:
        layer.mlp.act_fn = Waiting()
    policy.to("cuda")
    generator = NativeGenerator(speedups={"cuda_graphs": True})
    generator.sync(policy, 1)
    with pytest.warns(UserWarning, match="cuda_graphs=true could not be tried on Qwen2ForCausalLM, for CaptureError"):
        out = generator.generate(ask(), SAMPLINGS["plain"])
    assert generator.steps == "lean_steps" and pretend_graphs.capturing is None
    generator = NativeGenerator()
    generator.sync(policy, 1)
    assert same_bits(out, generator.generate(ask(), SAMPLINGS["plain"]))


NOT_CAPTURED: dict[str, Callable[[Tensor], Any]] = {
    "a number is read": lambda x: x.sum().item(),
    "a size depends on numbers": lambda x: x.nonzero(),
    "a copy from the host": lambda x: x + torch.tensor([1.0, 2.0]).to("cuda", non_blocking=True),
    "a number of the host at an index": lambda x: x.index_put_((x.long() * 0,), torch.tensor(1.0)),
    "an index of the host": lambda x: x[torch.tensor([0])],
    "a draw": lambda x: torch.rand_like(x),
    "all of the device": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", NOT_CAPTURED)
def test_what_breaks_a_capture(what: str) -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        NOT_CAPTURED[what](x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
    assert x.tolist() == [1, 1]


def test_a_replay_computes_in_the_memory_of_the_capture() -> None:
    x, column, out = (torch.arange(n, device="cuda") for n in (3, 1, 4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice = x * 2
        out.index_copy_(0, column, twice[1:2])
        column.add_(1)
    assert (column.tolist(), out.tolist()) == ([0], [0, 1, 2, 3]) and twice.tolist() != [0, 2, 4]
    graph.replay()
    x.add_(10)
    graph.replay()
    assert (twice.tolist(), column.tolist(), out.tolist()) == ([20, 22, 24], [2], [2, 22, 2, 3])
    view = x[:2]
    del x
    graph.replay()
    del view
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()
