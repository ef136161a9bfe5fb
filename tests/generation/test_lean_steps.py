"""Decode steps over a model's weights: the model's own logits, or not taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from generation_cases import SHARED, VOCAB, ask, responses
from tiers import quick
from torch import Tensor, nn

from lit_rl.core.rollout import Sampling
from lit_rl.generation.decoding import DecodingSteps
from lit_rl.generation.fast_decoding import LeanModel, LeanSteps, lean_steps_proven
from lit_rl.generation.generator import decode_batches
from lit_rl.generation.grouped_cache import GroupedSteps, decode_probe, probe_batch
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.forward import score

WIDE = SHARED | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def model_of(kind: str, **settings: Any) -> nn.Module:
    """With weights that are far from what they begin as: norms that do something, and biases."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**WIDE | settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def with_lora(model: nn.Module, **settings: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **settings)
    return get_peft_model(model, config).eval()  # type: ignore[arg-type]


LEAN: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: model_of("Qwen2"),
    "qwen3": lambda: model_of("Qwen3"),
    "llama-tied": lambda: model_of("Llama", tie_word_embeddings=True),
    "llama with biases": lambda: model_of("Llama", attention_bias=True, mlp_bias=True),
    "llama3 angles": lambda: model_of(
        "Llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral": lambda: model_of("Mistral", sliding_window=64),
    "lora": lambda: with_lora(model_of("Qwen2")),
    "dora": lambda: with_lora(model_of("Llama"), use_dora=True),
}


@pytest.fixture(params=quick(LEAN, {"qwen2", "qwen3", "lora"}))
def policy(request: pytest.FixtureRequest) -> nn.Module:
    return LEAN[request.param]()


def lean(policy: nn.Module, batch: Any, new_tokens: int) -> LeanSteps:
    return LeanSteps(LeanModel(policy, batch.prompt_ids.shape[1] + new_tokens), policy, batch, new_tokens)


def kind_of(policy: nn.Module) -> Any:
    """What `native` would decode this policy with."""
    kind: Any = NativeGenerator()._choose_steps(policy, 20)
    return getattr(kind, "func", kind)


@torch.no_grad()
def test_the_logits_are_the_models_own(policy: nn.Module) -> None:
    """Prompts of one to seven tokens; rows leave so that groups of unequal size remain, others join, some read."""
    assert lean_steps_proven(policy)
    (batch,), (later,) = (
        list(decode_batches(ask(rows, group_size=2), None, torch.device("cpu"))) for rows in ((0, 1, 2), (3, 4))
    )
    later = dataclasses.replace(later, numbers=[3, 4])
    ways = []
    for make in (DecodingSteps, lean):
        generator, seen = torch.Generator().manual_seed(0), []
        steps: Any = make(policy, batch, 16)
        rows = len(batch.rows)
        for step in range(12):
            if step == 3:
                steps.keep(torch.tensor([0, 2, 3, 5]))
            if step == 6:
                steps.join(make(policy, later, 16))
            rows = {3: 4, 6: 4 + len(later.rows)}.get(step, rows)
            steps.advance(torch.randint(VOCAB, (rows,), generator=generator))
            seen.append(steps.logits)
        ways.append(torch.cat(seen))
    torch.testing.assert_close(ways[1], ways[0], rtol=1e-5, atol=5e-5)
    chunks = [decode_probe(make(policy, probe_batch(policy), 5)) for make in (DecodingSteps, lean)]
    torch.testing.assert_close(chunks[1], chunks[0], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_weights_of_now_are_read_at_every_rollout(lora: bool) -> None:
    policy = LEAN["lora" if lora else "qwen3"]()
    engine, sampling = NativeGenerator(), Sampling(max_new_tokens=12)
    for version in range(2):
        engine.sync(policy, version)
        assert kind_of(policy) is LeanSteps
        out = engine.generate(ask(group_size=3, eos_ids=tuple(range(1, 6))), sampling)
        expected = score(policy, out, sampling).logprobs[out.response_mask]
        torch.testing.assert_close(out.sampler_logprobs[out.response_mask], expected, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5)


@pytest.mark.parametrize("kind", ["qwen2", "lora"])
def test_in_bfloat16_it_is_as_far_from_the_exact_model_as_the_models_own_steps(kind: str) -> None:
    policy, exact = LEAN[kind]().bfloat16(), LEAN[kind]()
    exact.load_state_dict({name: value.float() for name, value in policy.state_dict().items()})
    sampling, off = Sampling(max_new_tokens=12), {}
    assert kind_of(policy) is LeanSteps
    for lean_steps in (True, False):
        engine = NativeGenerator(speedups={"lean_steps": lean_steps})
        engine.sync(policy, 0)
        out = engine.generate(ask(group_size=8), sampling)
        expected = score(exact, out, sampling).logprobs[out.response_mask]
        off[lean_steps] = (out.sampler_logprobs[out.response_mask] - expected).abs().mean()
    assert off[True] < 1.2 * off[False]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "lora"])
def test_autocast_is_kept(kind: str) -> None:
    """Tokens are drawn with the arithmetic that scores them, and what is frozen is narrowed once a rollout."""
    policy, sampling = LEAN[kind](), Sampling(max_new_tokens=12)
    engine, off = NativeGenerator(), {}
    engine.sync(policy, 0)
    with torch.autocast("cpu", torch.bfloat16):
        out = engine.generate(ask(group_size=8), sampling)
        off["autocast"] = score(policy, out, sampling).logprobs
        steps: Any = engine._choose_steps(policy, 20)(policy, probe_batch(policy), 5)
    off["float32"] = score(policy, out, sampling).logprobs
    off = {name: (out.sampler_logprobs - values)[out.response_mask].abs().mean() for name, values in off.items()}
    assert off["float32"] > 1e-4 and off["autocast"] < 1.5 * off["float32"]
    assert {part.dtype for part in steps._cache.layers[0].no_tokens(1)} == {torch.bfloat16}


def test_the_switch_changes_no_sample(policy: nn.Module) -> None:
    out = []
    for lean_steps in (True, False):
        engine = NativeGenerator(batch_size=6, speedups={"lean_steps": lean_steps})
        engine.sync(policy, 0)
        out.append(engine.generate(ask(group_size=2, eos_ids=tuple(range(1, 6))), Sampling(max_new_tokens=12)))
    assert responses(out[0]) == responses(out[1])
    torch.testing.assert_close(out[0].sampler_logprobs, out[1].sampler_logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("switches", "steps", "why"),
    [
        ({}, "lean_steps", "CUDA graphs are of CUDA devices, and it is on cpu"),
        ({"lean_steps": False}, "grouped_cache", "it takes no lean steps"),
        ({"grouped_cache": False}, "own", "it takes no lean steps"),
    ],
)
def test_where_no_step_is_captured_it_is_said_once(
    switches: dict[str, bool], steps: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is captured on a device: tests/pretended_gpu/test_decode_graphs.py."""
    policy, out = LEAN["qwen2"](), []
    with caplog.at_level("INFO"):
        for graphs in (True, False):
            engine = NativeGenerator(speedups={**switches, "cuda_graphs": graphs})
            engine.sync(policy, 0)
            out += [engine.generate(ask(), Sampling(max_new_tokens=6)) for _ in range(2)]
            assert engine.steps == steps
    assert torch.equal(out[1].sampler_logprobs, out[3].sampler_logprobs)
    assert [each.message for each in caplog.records if "cuda_graphs" in each.message] == [
        f"generator.speedups.cuda_graphs=true does not fit Qwen2ForCausalLM: {why}. The host launches each operation "
        "of its decode steps."
    ]


# ------------------------------------------------------------------------------------------- what takes no lean steps


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = model_of("Qwen2")
        change(model)
        return model

    return make


def _double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def _own_forward(module: Any) -> None:
    usual = module.forward
    module.forward = lambda *args, **kwargs: 2 * usual(*args, **kwargs)


class _SquaredGate(nn.Module):
    """An MLP with the parts of Llama's, put together in another way."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) ** 2 * self.up_proj(x))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "scaled residuals": lambda: model_of("Granite", residual_multiplier=0.5),
    "norms of weight plus one": lambda: model_of("Gemma"),
    "norms behind the parts": lambda: model_of("Olmo2"),
    "a layer that does not rotate": lambda: model_of("SmolLM3", no_rope_layers=[1, 0], pad_token_id=0),
    "angles that depend on the text": lambda: model_of(
        "Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    ),
    "queries by their position": lambda: model_of("Ministral3"),  # from a text's 16384th token on
    "experts": lambda: model_of("Mixtral", num_local_experts=4),
    "hook of a layer": changed(lambda model: model.model.layers[1].mlp.register_forward_hook(_double)),
    "hook of a norm": changed(lambda model: model.model.norm.register_forward_hook(_double)),
    "hook of the model": changed(lambda model: model.register_forward_pre_hook(lambda *inputs: None)),
    "a forward of its own": changed(lambda model: _own_forward(model.model.layers[0].input_layernorm)),
    "another order of operations": changed(
        lambda model: setattr(model.model.layers[1], "mlp", _SquaredGate(model.model.layers[1].mlp))
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@torch.no_grad()
def test_other_models_take_their_own_steps(kind: str) -> None:
    policy = OTHERS[kind]().eval()
    assert not lean_steps_proven(policy)
    assert kind_of(policy) is GroupedSteps


@torch.no_grad()
@pytest.mark.parametrize("part", ["q_proj", "gate_proj"])
def test_a_product_that_is_watched_is_left_to_its_module(part: str) -> None:
    policy: Any = model_of("Qwen2")
    layer = policy.model.layers[1]
    module = getattr(layer.self_attn if part == "q_proj" else layer.mlp, part)
    module.register_forward_hook(_double)
    assert kind_of(policy) is LeanSteps
    plain, ours = (decode_probe(make(policy, probe_batch(policy), 5)) for make in (DecodingSteps, lean))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=5e-5)


@torch.no_grad()
def test_an_operation_that_differs_from_its_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in bfloat16, where the logits alone would not tell."""
    from lit_rl.generation import fast_decoding

    policy = model_of("Qwen2").bfloat16()
    assert lean_steps_proven(policy)
    usual = fast_decoding.F.rms_norm
    monkeypatch.setattr(fast_decoding.F, "rms_norm", lambda x, shape, weight, eps: usual(x, shape, weight, eps + 0.1))
    assert not lean_steps_proven(model_of("Qwen2").bfloat16())
