"""vLLM loads the adapter folders that are written: its log-probs are PEFT's, version after version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lit_rl.models.engine_weights import adapter_only, write_adapter

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "every-layer": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "rslora": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
    "part-of-a-packed-layer": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "up_proj"]},
    "patterns": {"r": 2, "target_modules": ALL, "rank_pattern": {"v_proj": 8}, "alpha_pattern": {"up_proj": 5}},
}
PROMPTS = [[5 + (7 * i + start) % 200 for i in range(150)] for start in (0, 3)]
"""Longer than a block of the prefix cache, which is 128 tokens on a CPU."""


@pytest.fixture(scope="module")
def engine(tiny_dir: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        yield LLM(
            str(tiny_dir), dtype="float32", max_model_len=256, enforce_eager=True, enable_lora=True, max_lora_rank=8,
            enable_prefix_caching=True, disable_log_stats=True,
        )  # fmt: skip


def policy_of(folder: Path, settings: dict[str, Any]) -> Any:
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()


def learn(policy: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def sampled(engine: Any, request: Any) -> list[tuple[list[int], Tensor]]:
    """Prompt and response of each prompt, and the log-probs of the response."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    settings = SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    answers = engine.generate(prompts, settings, use_tqdm=False, lora_request=request)
    parts = [(answer.prompt_token_ids, answer.outputs[0]) for answer in answers]
    return [
        ([*ids, *out.token_ids], torch.tensor([lp[t].logprob for t, lp in zip(out.token_ids, out.logprobs)]))
        for ids, out in parts
    ]


def gap(policy: nn.Module, samples: list[tuple[list[int], Tensor]]) -> float:
    """The largest difference from the log-probs of PEFT's own forward pass."""
    worst = 0.0
    for ids, found in samples:
        with torch.no_grad():
            rows = torch.log_softmax(policy(torch.tensor([ids])).logits[0, -len(found) - 1 : -1].float(), -1)
        wanted = rows.gather(-1, torch.tensor(ids[-len(found) :])[:, None])[:, 0]
        worst = max(worst, (found - wanted).abs().max().item())
    return worst


@pytest.mark.parametrize("kind", ADAPTERS)
def test_vllm_takes_every_version_of_the_adapter(engine, tiny_dir, tmp_path, kind):
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    policy, number = policy_of(tiny_dir, ADAPTERS[kind]), list(ADAPTERS).index(kind) + 1
    assert adapter_only(policy) is None
    before: list[tuple[list[int], Tensor]] = []
    for version in range(3):
        learn(policy, seed=10 * number + version)
        write_adapter(policy, tmp_path / "adapter")
        first = version == 0
        if not first:
            engine.llm_engine.add_lora(LoRARequest(kind, number, str(tmp_path / "adapter"), load_inplace=True))
        # Cached keys and values are of the version before, and vLLM does not know that.
        assert engine.reset_prefix_cache()
        samples = sampled(engine, LoRARequest(kind, number, str(tmp_path / "adapter")))
        assert gap(policy, samples) < 1e-4
        assert first or gap(policy, before) > 0.02, "the versions differ too little to be told apart"
        before = samples
    with policy.disable_adapter():
        assert gap(policy, sampled(engine, None)) < 1e-4, "the base has changed"


def test_what_is_refused_is_what_vllm_cannot_take(engine, tiny_dir, tmp_path):
    """Each of these it refuses when it loads the folder, or, worse, takes for something else."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    for number, settings in enumerate(
        (
            {"r": 2, "target_modules": ["q_proj"], "use_dora": True},
            {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["down_proj"]},
            {"r": 2, "target_modules": ["q_proj"], "bias": "lora_only"},
            {"r": 2, "target_modules": ["q_proj"], "lora_bias": True},
            {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "pissa"},
        ),
        start=50,
    ):
        policy = policy_of(tiny_dir, settings)
        assert adapter_only(policy) is not None, settings
        policy.save_pretrained(str(tmp_path / str(number)), save_embedding_layers=False)
        with pytest.raises(Exception, match=r"vLLM|not supported|expected target modules"):
            engine.llm_engine.add_lora(LoRARequest(str(number), number, str(tmp_path / str(number))))
