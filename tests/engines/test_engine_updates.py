"""Updates of an engine that go wrong, each in a way that says nothing by itself; and adapters, memory and ranks."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from engine_cases import ask, described, largest_gap, perturb, untied_folder, with_lora
from engine_fixtures import Case
from server_processes import Served, end, start
from turn_cases import Scripted

from lit_rl.core import interrupts
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.generation.generator import EngineLost
from lit_rl.generation.vllm import worker
from lit_rl.generation.vllm.client import Client
from lit_rl.generation.vllm.engine import complete, push_weights, requests_of
from lit_rl.generation.vllm.in_process import InProcessEngine, VLLMGenerator
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.generation.vllm.server_engine import ServerEngine
from lit_rl.models import LanguageModel

SAMPLED = Sampling(max_new_tokens=12)


@pytest.fixture
def here(started: Callable[[str], Case]) -> Case:
    return started("vllm-tied")


def refused(case: Case, policy: Any, match: str) -> None:
    with pytest.raises(GenerationError, match=match):
        case.sync(policy)
    with pytest.raises(GenerationError, match="before sync"):
        case.generator.generate(ask(case.model), SAMPLED)


@pytest.mark.parametrize(
    ("where", "what"),
    [(worker, "repack_heads"), (InProcessEngine, "reset_caches")],
    ids=["tied head not packed anew", "prefix cache not reset"],
)
def test_a_silent_fault_of_an_update_is_found_out(
    here: Case, monkeypatch: pytest.MonkeyPatch, where: Any, what: str
) -> None:
    """Both leave vLLM without an error: its own reload forgets the tied head of a CPU, and resets no cache."""
    policy = here.fresh()
    with monkeypatch.context() as patch:
        patch.setattr(where, what, lambda *arguments: None)
        perturb(policy, 1, size=0.05)
        refused(here, policy, "does not hold policy version")
    case_is_well_again(here, policy)


def test_an_update_that_goes_nowhere_is_found_out_however_small(here: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps too small for the limit add up until the engine's stillness is a proof."""
    policy = here.fresh()
    with monkeypatch.context() as patch:
        for verb in ("begin", "load", "finish"):
            patch.setattr(InProcessEngine, verb, lambda self, *arguments: None)
        with pytest.raises(GenerationError, match="did not change, and the trainer's have"):
            for seed in range(20):
                perturb(policy, seed, size=2e-6)
                here.sync(policy)
    case_is_well_again(here, policy)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda named: {name: t for name, t in named.items() if "k_proj.weight" not in name}, "missing .*k_proj"),
        (lambda named: named | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(128)}, "unknown .*o_proj.bias"),
        (lambda named: named | {"model.norm.weight": torch.zeros(7)}, r"another shape.*model\.norm\.weight"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_names_are_strict(tied: Case, change: Callable[..., Any], match: str) -> None:
    """A tensor that is missing, unknown (vLLM itself would drop this bias without a word) or of another shape."""
    policy = tied.fresh()
    named = change({name: tensor.detach() for name, tensor in policy.named_parameters()})

    @dataclasses.dataclass
    class Tensors:
        dtype = torch.float32

        @property
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {name: tuple(tensor.shape) for name, tensor in named.items()}

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(named.items())

    assert tied.generator.engine is not None
    with pytest.raises(GenerationError, match=match):
        push_weights(tied.generator.engine, Tensors(), 99)  # pyright: ignore[reportArgumentType]
    case_is_well_again(tied, policy)


def test_an_update_that_was_left_half_done_is_refused_and_the_next_one_heals(here: Case) -> None:
    policy = here.fresh()
    engine = here.generator.engine
    assert isinstance(engine, InProcessEngine)
    named = [(name, tensor.detach()) for name, tensor in policy.named_parameters()]
    engine.begin({name: tuple(tensor.shape) for name, tensor in named})
    engine.load(iter(named[:4]), torch.float32)
    with pytest.raises(ValueError, match="weights never came"):
        engine.finish(99)
    case_is_well_again(here, policy)


def test_an_interrupted_rollout_leaves_nothing_behind(here: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a notebook's stop button does: the next rollout must not get the answers of the one before."""
    policy, prompts = here.fresh(), ask(here.model)
    expected = here.generator.generate(prompts, SAMPLED).response_ids.tolist()

    def stopped(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lit_rl.generation.vllm.engine_generator.ProgressLine.__call__", stopped)
        here.generator.generate(ask(here.model, seed=5), SAMPLED)
    out = here.generator.generate(prompts, SAMPLED)
    assert out.response_ids.tolist() == expected
    assert largest_gap(policy, out, prompts) < 1e-4


def test_a_signal_in_the_middle_of_a_step_leaves_the_engine_well(here: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process. vLLM takes no step after one that was left between its forward pass and its sampling."""
    policy, prompts = here.fresh(), ask(here.model)
    expected = here.generator.generate(prompts, SAMPLED).response_ids.tolist()
    assert isinstance(here.generator.engine, InProcessEngine)
    executor = here.generator.engine._llm.llm_engine.model_executor
    sample, calls = executor.sample_tokens, list[int]()

    class Ended(Exception):
        pass

    def end() -> NoReturn:
        raise Ended

    def signalled(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        return sample(*arguments, **named)

    before = signal.signal(signal.SIGUSR2, lambda number, frame: interrupts.request_stop())
    interrupts.enable_interrupts(end, several=False)
    try:
        with monkeypatch.context() as patch, pytest.raises(Ended):
            patch.setattr(executor, "sample_tokens", signalled)
            with interrupts.run_ending_hook():
                here.generator.generate(ask(here.model, seed=5), Sampling(max_new_tokens=100, min_new_tokens=100))
    finally:
        interrupts.disable_interrupts()
        signal.signal(signal.SIGUSR2, before)
    assert len(calls) == 3, "noticed at once"
    out = here.generator.generate(prompts, SAMPLED)
    assert out.response_ids.tolist() == expected
    assert largest_gap(policy, out, prompts) < 1e-4


def test_the_completions_of_a_rollout_have_a_deadline(
    started: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that lives and is too slow counts as lost when `generator.deadline` comes."""
    case = started("server-tied")
    policy, engine = case.fresh(), case.generator.engine
    assert engine is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine, "deadline", 0.02)
        many = requests_of(ask(case.model, group_size=32, eos_ids=()), Sampling(max_new_tokens=200))
        with pytest.raises(EngineLost, match=r"no answer within|no time was left"):
            complete(engine, many)
    case_is_well_again(case, policy)


def test_several_servers_share_the_work_and_an_adapter_travels_alone(
    started: Callable[[str], Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = started("server-tied")
    first.fresh()
    served = start(tmp_path, "model.lora.r=4").wait_ready()
    addresses = [first.generator.engine.clients[0].url, served.url]  # pyright: ignore
    try:
        both = VLLMServerGenerator(urls=addresses, heartbeat=None, answer_deadline=5, start_deadline=1)
        both.prepare(first.model)
        policy, prompts = first.model.load(), ask(first.model)
        for version in range(2):
            both.sync(policy, version)
            assert largest_gap(policy, both.generate(prompts, SAMPLED), prompts) < 1e-4
            perturb(policy, version)
        conversations_keep_to_their_server(both, first.model, addresses)
        model = with_lora(Path(first.model.name))
        lora, alone = model.load(), VLLMServerGenerator(urls=addresses[1:], push="adapter", heartbeat=None)
        alone.prepare(model)
        for version in range(3):
            alone.sync(lora, version)
            assert largest_gap(lora, alone.generate(prompts, SAMPLED), prompts) < 1e-4
            perturb(lora, version)
        one_of_them_is_lost_and_no_rollout_with_it(both, policy, first.model, served, capsys)
    finally:
        end(served)


def one_of_them_is_lost_and_no_rollout_with_it(
    both: VLLMServerGenerator, policy: Any, model: LanguageModel, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """It hangs, is left out of an update, is there again and takes part; it is killed with requests in flight."""

    def same_rows(prompts: Prompts) -> None:
        out = both.generate(prompts, SAMPLED)
        assert out.response_ids.tolist() == expected.response_ids.tolist(), "who is asked changes no sample"
        assert largest_gap(policy, out, prompts) < 1e-4

    def holders() -> int:
        assert isinstance(both.engine, ServerEngine)
        return len(both.engine.clients) - len(both.engine.lost)

    prompts = ask(model)
    both.sync(policy, 2)
    expected = both.generate(prompts, SAMPLED)

    os.killpg(served.group, signal.SIGSTOP)
    same_rows(prompts)
    assert "2 requests that it has not answered are asked of the others" in capsys.readouterr().out and holders() == 1
    perturb(policy, 3)
    both.sync(policy, 3)
    assert f"1 of 2; {served.url} will be tried again" in capsys.readouterr().out and holders() == 1
    expected = both.generate(prompts, SAMPLED)

    os.killpg(served.group, signal.SIGCONT)
    both.sync(policy, 3)  # nothing has changed but who is there
    assert "2 of 2." in capsys.readouterr().out and holders() == 2
    same_rows(prompts)

    killed: list[int] = []

    def kill(row: int, ids: list[int]) -> None:
        """When the other server has answered first; this one stands still until then."""
        if not killed:
            killed.append(row)
            os.killpg(served.group, signal.SIGKILL)

    os.killpg(served.group, signal.SIGSTOP)
    same_rows(dataclasses.replace(prompts, on_finished=kill))
    assert "2 requests that it has not answered are asked of the others" in capsys.readouterr().out and holders() == 1
    perturb(policy, 4)
    both.sync(policy, 4)
    assert holders() == 1 and largest_gap(policy, both.generate(prompts, SAMPLED), prompts) < 1e-4


def conversations_keep_to_their_server(
    both: VLLMServerGenerator, model: LanguageModel, addresses: Sequence[str]
) -> None:
    """There its text is in the cache; and both have some."""
    asked: dict[tuple[int, ...], list[str]] = {}
    usual = Client.complete

    def noted(self: Client, payload: Any, deadline: float) -> Any:
        asked.setdefault(next(ids for ids in firsts if payload["prompt"][: len(ids)] == [*ids]), []).append(self.url)
        return usual(self, payload, deadline)

    prompts = ask(model, group_size=1, responder=Scripted(lambda said: None if said.turn == 2 else [7, 8]))
    firsts = [tuple(ids) for ids in prompts.token_ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "complete", noted)
        both.generate(prompts, Sampling(max_new_tokens=4))
    assert [len(urls) for urls in asked.values()] == [3] * 4
    assert [len(set(urls)) for urls in asked.values()] == [1] * 4, "each at one server"
    assert {url for urls in asked.values() for url in urls} == set(addresses)


def case_is_well_again(case: Case, policy: Any) -> None:
    perturb(policy, 11)
    case.sync(policy)
    prompts = ask(case.model)
    assert largest_gap(policy, case.generator.generate(prompts, SAMPLED), prompts) < 1e-4


def test_another_model_than_the_policys_is_refused(here: Case, tiny_dir: Path, tmp_path: Path) -> None:
    here.fresh()
    policy = described(untied_folder(tiny_dir, tmp_path / "untied")).load()
    assert here.generator.engine is not None
    with pytest.raises(GenerationError, match=r"another model.*tied: True, the policy's: False"):
        here.generator._check_model(here.generator.engine, policy)


@pytest.mark.parametrize("push", ["auto", "merged"])
def test_adapters(tiny_dir: Path, push: Any) -> None:
    """Sent by themselves, or merged: the engine's log-probs are PEFT's after each of three updates."""
    model = with_lora(tiny_dir)
    policy: Any = model.load()
    generator = VLLMGenerator(push=push, heartbeat=None)
    generator.prepare(model)
    prompts = ask(model)
    try:
        for version in range(4):
            generator.sync(policy, version)
            out = generator.generate(prompts, SAMPLED)
            assert largest_gap(policy, out, prompts) < 1e-4
            assert (generator.facts is not None and generator.facts.max_lora_rank is not None) == (push == "auto")
            perturb(policy, version)
    finally:
        generator.close()


def test_an_adapter_that_cannot_travel_alone(tiny_dir: Path, here: Case) -> None:
    here.fresh()
    generator = VLLMGenerator(push="adapter", heartbeat=None)
    generator.prepare(here.model)
    generator.engine, generator.facts = here.generator.engine, here.generator.facts
    with pytest.raises(ConfigError, match=r"generator\.push=adapter.*not a LoRA policy.*merged"):
        generator.sync(here.model.load(), 1)


def test_memory_is_given_back_between_rollouts_in_this_order(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order only: on a CPU vLLM ignores both calls. Weights wake before the update, the cache after it."""
    verbs: list[str] = []
    for name in ("sleep", "wake", "begin", "finish", "reset_caches", "run"):
        verb = getattr(InProcessEngine, name)

        def noted(self: Any, *arguments: Any, _verb: Any = verb, _name: str = name, **named: Any) -> Any:
            verbs.append(" ".join([_name, *(a for a in arguments if _name == "wake")]))
            return _verb(self, *arguments, **named)

        monkeypatch.setattr(InProcessEngine, name, noted)
    model = described(tiny_dir)
    policy = model.load()
    generator = VLLMGenerator(sleep="always", probe="off", heartbeat=None)
    generator.prepare(model)
    try:
        generator.sync(policy, 0)
        generator.generate(ask(model), SAMPLED)
        generator.rest()
        generator.rest()
        generator.sync(policy, 0)  # nothing has changed, and yet the engine holds nothing
        out = generator.generate(ask(model), SAMPLED)
    finally:
        generator.close()
    update = ["begin", "finish", "reset_caches"]
    assert verbs == [
        *update,
        "run",
        "sleep",
        "wake weights",
        *update[:2],
        "reset_caches",
        "wake kv_cache",
        "run",
    ]
    assert largest_gap(policy, out, ask(model)) < 1e-4
