from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from generation_cases import SHARED, VOCAB, ask, build, responses
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.core.transfers import left_pad, right_pad
from lit_rl.generation import Generator
from lit_rl.generation.generator import as_generator, context_length, decode_batches, rollout_mode
from lit_rl.generation.hf import HFGenerator, blank_generation_config
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.noise import row_keys
from lit_rl.models.modes import set_checkpointing

CPU = torch.device("cpu")


def synced(engine: Any, policy: nn.Module) -> Any:
    engine.sync(policy, 0)
    return engine


class TwoVerbs(Generator):
    """The least that a generator is."""

    def sync(self, policy: nn.Module, version: int) -> None:
        pass

    def generate(self, prompts: Prompts, sampling: Sampling) -> Any:
        raise NotImplementedError


def test_a_generator_of_two_verbs_has_every_member_of_those_that_are_shipped() -> None:
    """Whoever asks a generator finds the member, whatever generator it is; what is optional does nothing."""
    from lit_rl.generation.hf import HFContinuousGenerator
    from lit_rl.generation.vllm.engine_generator import EngineGenerator
    from lit_rl.generation.vllm.in_process import VLLMGenerator
    from lit_rl.generation.vllm.server import VLLMServerGenerator

    shipped = NativeGenerator, HFGenerator, HFContinuousGenerator, EngineGenerator, VLLMGenerator, VLLMServerGenerator
    assert all(issubclass(one, Generator) for one in shipped)
    least: Any = TwoVerbs()
    members = (least.exact, least.lag, least.reports_kept_mass, least.context, least.gap, dict(least.seconds))
    assert members == (True, 0, False, 0, None, {})
    for optional in (lambda: least.prepare(None), lambda: least.check(Sampling(), 5), least.rest, least.close):
        assert optional() is None
    least.seconds = {"sync": 1.0}  # an instance may have its own, and no other sees it
    assert not TwoVerbs().seconds


class Duck:
    """Has both verbs and is no generator."""

    sync, generate = TwoVerbs.sync, TwoVerbs.generate


def test_a_class_that_is_no_generator_is_refused_with_what_to_do() -> None:
    for generator in (Duck(), Duck):
        with pytest.raises(ConfigError, match=r"Duck is no generator: subclass lit_rl\.generation\.Generator"):
            as_generator(generator)


def test_a_subclass_without_both_verbs_cannot_be_made() -> None:
    class Half(Generator):
        def sync(self, policy: nn.Module, version: int) -> None:
            pass

    with pytest.raises(TypeError, match="generate"):
        Half()  # pyright: ignore[reportAbstractUsage]


def test_rows_are_padded_before_or_behind_them_and_the_mask_says_what_is_theirs() -> None:
    rows = [[5], [6, 7, 8], [9, 9]]
    ids, mask = left_pad(rows, 9)
    assert ids.tolist() == [[9, 9, 5], [6, 7, 8], [9, 9, 9]]
    assert mask.tolist() == [[False, False, True], [True] * 3, [False, True, True]]
    ids, mask = right_pad(rows, 9)
    assert ids.tolist() == [[5, 9, 9], [6, 7, 8], [9, 9, 9]]
    assert mask.tolist() == [[True, False, False], [True] * 3, [True, True, False]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    group=st.integers(1, 7),
    size=st.one_of(st.none(), st.integers(1, 30)),
)
def test_decode_batches_hold_every_row_once_and_fit(lengths: list[int], group: int, size: int | None) -> None:
    token_ids = [[100 * i + j for j in range(length)] for i, length in enumerate(lengths)]
    prompts = Prompts(token_ids, list(range(len(lengths))), group, (1,), 0)
    keys = row_keys(prompts.keys, group)
    seen = []
    for batch in decode_batches(prompts, size, CPU):
        assert len(batch.rows) == len(batch.keys) == len(batch.prompt_ids) * batch.repeats
        assert size is None or len(batch.rows) <= size
        assert torch.equal(batch.keys, keys[batch.rows])
        assert batch.repeats == group or len(batch.prompt_ids) == 1, "only a group larger than a batch is cut"
        for ids, mask, row in zip(*batch.repeated(), batch.rows.tolist()):
            assert ids[mask].tolist() == token_ids[row // group]
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(len(lengths) * group))


def test_decode_batches_put_similar_lengths_together() -> None:
    prompts = Prompts([[1], [1] * 50, [1] * 2, [1] * 49], [0, 1, 2, 3], 2, (1,), 0)
    assert [batch.prompt_ids.shape[1] for batch in decode_batches(prompts, 4, CPU)] == [50, 2]


def flags(model: nn.Module) -> list[tuple[bool, Any]]:
    return [(module.training, getattr(module, "gradient_checkpointing", None)) for module in model.modules()]


@pytest.mark.parametrize("fails", [False, True])
def test_rollout_mode_restores_every_flag(fails: bool) -> None:
    model: Any = build("qwen2")
    set_checkpointing(model, True)
    model.config.use_cache = False
    model.train()
    model.model.layers[0].mlp.eval()  # a part that the user froze in evaluation mode
    before = flags(model)
    try:
        with rollout_mode(model):
            assert not any(training or checkpointing for training, checkpointing in flags(model))
            assert model.config.use_cache is True
            assert not torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert flags(model) == before
    assert model.config.use_cache is False
    assert torch.is_grad_enabled()


def test_generation_config_is_blank_inside_and_back_after_an_exception() -> None:
    model: Any = build("qwen2")
    held = model.generation_config
    held.top_k = 3
    with pytest.raises(KeyError), blank_generation_config(model):
        assert model.generation_config.top_k is None
        raise KeyError
    assert model.generation_config is held


def test_context_length_is_the_number_of_positions() -> None:
    assert context_length(build("gpt2")) == context_length(build("llama")) == 64
    assert context_length(nn.Linear(1, 1)) is None


def test_a_model_without_position_ids_decodes_like_transformers() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(3)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=2, initializer_range=0.3)
    model = BloomForCausalLM(config)
    prompts, sampling = ask(), Sampling(max_new_tokens=8)
    native, peer = (synced(engine, model).generate(prompts, sampling) for engine in (NativeGenerator(), HFGenerator()))
    assert responses(native) == responses(peer)
    torch.testing.assert_close(native.sampler_logprobs, peer.sampler_logprobs, atol=1e-4, rtol=0)


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4))


def hybrid() -> nn.Module:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    settings = {name: value for name, value in SHARED.items() if name != "head_dim"}
    return Lfm2ForCausalLM(Lfm2Config(**settings, layer_types=["conv", "full_attention"]))


@pytest.mark.parametrize("make", [mamba, hybrid])
def test_a_cache_that_cannot_be_repeated_is_refused_with_the_way_out(make: Any) -> None:
    model = make()
    with pytest.raises(ConfigError, match=rf"{type(model).__name__}.*generator=hf"):
        synced(NativeGenerator(), model).generate(ask(), Sampling(max_new_tokens=4))
    assert len(synced(HFGenerator(), model).generate(ask(), Sampling(max_new_tokens=4))) == 15


def test_prompt_learning_adapters_are_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    policy = get_peft_model(build("qwen2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="virtual tokens"):
        synced(NativeGenerator(), policy).generate(ask(), Sampling(max_new_tokens=4))


def test_a_prompt_runs_once_a_group_and_finished_rows_leave_the_batch() -> None:
    model = build("qwen2")
    engine = synced(NativeGenerator(), model)
    engine.generate(ask(rows=[0]), Sampling(max_new_tokens=1))  # so that the model is proven
    shapes: list[tuple[int, int]] = []
    model.register_forward_pre_hook(lambda *args: shapes.append(tuple(args[2]["input_ids"].shape)), with_kwargs=True)
    prompts = ask(group_size=8, eos_ids=tuple(range(1, 10)))
    out = engine.generate(prompts, Sampling(max_new_tokens=20))
    assert shapes[0] == (5, 7), "five prompts of up to seven tokens"
    rows = [rows for rows, _ in shapes[1:]]
    running = [int((out.lengths > step).sum()) for step in range(1, len(shapes))]
    assert rows[0] <= 40 and rows == sorted(rows, reverse=True) and rows[-1] < 20
    assert all(alive <= there <= max(alive / 0.75, alive + 1) for alive, there in zip(running, rows))
    assert len(shapes) == int(out.lengths.max()), "no step after the last token"


def test_stop_needs_no_decoder_when_there_are_no_stop_strings() -> None:
    engine = synced(NativeGenerator(), build("qwen2"))
    assert len(engine.generate(dataclasses.replace(ask(), decode=None), Sampling(max_new_tokens=2))) == 15
