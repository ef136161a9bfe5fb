"""What continuous batching has beside the contract: pages, forks, a thread, and settings of the model it touches."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generation_cases import EOS, PAD, SHARED, VOCAB, ask, build, responses, spell, unspell
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.generator import InProcessGenerator
from lit_rl.generation.hf import HFContinuousGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.noise import prompt_key


def run(engine: InProcessGenerator, policy: nn.Module, prompts: Prompts, sampling: Sampling) -> Completions:
    engine.sync(policy, 0)
    return engine.generate(prompts, sampling)


def long_prompts(lengths: list[int], group_size: int) -> Prompts:
    """Prompts of several pages that begin alike, so that pages are shared between them."""
    head = [2 + (11 * j) % (VOCAB - 2) for j in range(max(lengths))]
    ids = [[*head[: length - 1], 2 + i] for i, length in enumerate(lengths)]
    keys = [prompt_key(0, 0, row, 0) for row in range(len(lengths))]
    return Prompts(ids, keys, group_size, (EOS,), PAD, spell, unspell)


def wide(**other: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    return Qwen3ForCausalLM(Qwen3Config(**SHARED | {"max_position_embeddings": 512} | other))


@pytest.fixture(scope="module")
def policy() -> Qwen3ForCausalLM:
    return wide()


def same(ours: Completions, theirs: Completions, tolerance: float = 1e-4) -> None:
    assert responses(ours) == responses(theirs)
    assert torch.equal(ours.ended, theirs.ended)
    torch.testing.assert_close(ours.sampler_logprobs, theirs.sampler_logprobs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("batch_size", [None, 1, 5])
def test_sequences_of_many_pages_equal_the_native_loops(policy: nn.Module, batch_size: int | None) -> None:
    prompts = long_prompts([100, 33, 97, 2, 70], group_size=3)  # short ones wait for long ones, and take their places
    sampling = Sampling(max_new_tokens=80, temperature=0.8, bad_words=("c2d3",), repetition_penalty=1.05)
    same(
        run(HFContinuousGenerator(batch_size), policy, prompts, sampling),
        run(NativeGenerator(), policy, prompts, sampling),
    )


def test_pages_of_older_weights_are_never_read(policy: nn.Module) -> None:
    model, engine = copy.deepcopy(policy), HFContinuousGenerator()
    prompts, sampling = long_prompts([100, 100], group_size=2), Sampling(max_new_tokens=6)
    before = run(engine, model, prompts, sampling)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.neg_()  # type: ignore[union-attr]
    after = engine.generate(prompts, sampling)
    assert responses(after) != responses(before)
    same(after, run(NativeGenerator(), model, prompts, sampling))


def test_prompts_of_one_token_are_not_forked(policy: nn.Module) -> None:
    prompts = ask(rows=[0, 0, 1])
    assert [len(ids) for ids in prompts.token_ids] == [1, 1, 4]
    sampling = Sampling(max_new_tokens=5)
    same(run(HFContinuousGenerator(), policy, prompts, sampling), run(NativeGenerator(), policy, prompts, sampling))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_of_training_is_used_and_put_back(attention: str) -> None:
    model = wide(attn_implementation=attention)
    sampling = Sampling(max_new_tokens=6)
    ours = run(HFContinuousGenerator(), model, long_prompts([40, 9], 2), sampling)
    assert model.config._attn_implementation == attention
    same(ours, run(NativeGenerator(), model, long_prompts([40, 9], 2), sampling))


def test_under_autocast_as_the_native_loop(policy: nn.Module) -> None:
    # Its keys are normalised in float32 and its values are bfloat16: the cache has to hold both.
    prompts, sampling = long_prompts([40, 9], 4), Sampling(max_new_tokens=1)
    plain = run(HFContinuousGenerator(), policy, prompts, sampling)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (
            run(engine, policy, prompts, sampling) for engine in (HFContinuousGenerator(), NativeGenerator())
        )
    alike = (ours.response_ids == theirs.response_ids) & (ours.response_ids == plain.response_ids)
    assert alike.sum() >= 4  # a rounding of bfloat16 may flip a token
    error, moved = ((ours.sampler_logprobs - other.sampler_logprobs)[alike].abs() for other in (theirs, plain))
    assert error.max() < 0.15 and moved.max() > 1e-3, "autocast is on, in the engine's thread too"


def test_an_error_in_the_engines_thread_is_raised_here_and_leaves_nothing(policy: nn.Module) -> None:
    model, threads = copy.deepcopy(policy).train(), threading.active_count()
    log, state = logging.getLogger("ContinuousBatchingLogger"), torch.get_rng_state()
    level, frozen = log.level, gc.get_freeze_count()
    engine = HFContinuousGenerator()
    with pytest.raises(ConfigError, match=r"sampling\.logit_bias"):
        run(engine, model, ask(), Sampling(max_new_tokens=3, logit_bias={999: 1.0}))

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a layer broke")

    hook = model.model.layers[1].register_forward_pre_hook(breaks)
    with pytest.raises(GenerationError, match="a layer broke"):
        run(engine, model, ask(), Sampling(max_new_tokens=3))
    hook.remove()
    assert threading.active_count() == threads
    assert log.level == level
    assert 0.9 * frozen < gc.get_freeze_count() <= frozen, "what was frozen stays so, less what is freed meanwhile"
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not hasattr(model, "_cached_continuous_batching_manager")
    assert len(run(engine, model, ask(), Sampling(max_new_tokens=3))) == 15


def test_an_interrupt_while_waiting_stops_the_engines_thread(
    policy: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    join, threads = ContinuousBatchingManager.join, threading.active_count()

    def interrupted(self: Any, *args: Any) -> None:
        monkeypatch.setattr(ContinuousBatchingManager, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(ContinuousBatchingManager, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(HFContinuousGenerator(), policy, long_prompts([20], 2), Sampling(max_new_tokens=400))
    assert threading.active_count() == threads


def test_what_has_no_continuous_batching_is_refused() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    with pytest.raises(ConfigError, match=r"generator=hf_continuous.*Other.*generator=native"):
        run(HFContinuousGenerator(), Other(), ask(), Sampling(max_new_tokens=2))


def test_a_cache_it_has_no_pages_for_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(ConfigError, match=r"hf_continuous .* MambaForCausalLM.*generator=hf "):
        run(HFContinuousGenerator(), model, ask(), Sampling(max_new_tokens=2))


def test_virtual_tokens_are_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    policy: Any = get_peft_model(build("qwen2"), config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"generator=hf_continuous.*virtual tokens"):
        run(HFContinuousGenerator(), policy, ask(), Sampling(max_new_tokens=2))


def test_the_cache_has_room_for_batch_size_sequences_and_no_more(
    policy: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching import continuous_api

    made = SimpleNamespace(sizes=[])
    whole = continuous_api.PagedAttentionCache.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        whole(self, *args, **kwargs)
        made.sizes.append(self.cache_tensor.numel())

    monkeypatch.setattr(continuous_api.PagedAttentionCache, "__init__", noted)
    prompts, sampling = long_prompts([60, 20], 8), Sampling(max_new_tokens=30)
    for batch_size in (None, 8, 2):
        run(HFContinuousGenerator(batch_size), policy, prompts, sampling)
    per_token = 2 * 2 * 32 * 4  # layers, keys and values, head size, bytes
    everything, half, two = made.sizes
    assert 16 * 90 * per_token < everything < 16 * 90 * per_token * 2
    assert half < 0.6 * everything and two < 0.3 * everything
