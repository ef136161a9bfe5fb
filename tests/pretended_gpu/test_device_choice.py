"""What has to be the same on every device, and what has to follow the device of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lit_rl
from lit_rl.generation import grouped_steps
from lit_rl.generation.collect import Vocabulary
from lit_rl.generation.lean_steps import LeanModel
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.lora import Lora
from lit_rl.models.scoring.critic import AdapterCritic
from lit_rl.models.scoring.model import SEQUENCES, TOKENS, load_scoring
from lit_rl.rollout import Sampling

TINY = str(Path(lit_rl.__file__).parent / "models" / "tiny")


def peft_config() -> object:
    from peft import VeraConfig

    return VeraConfig(r=4, target_modules=["q_proj", "v_proj"])


FRESH: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: LanguageModel(TINY, lora=Lora(r=4)).load(),
    "dora": lambda: LanguageModel(TINY, lora=Lora(r=4, dora=True, modules_to_save=["norm"])).load(),
    "peft": lambda: LanguageModel(TINY, lora=peft_config()).load(),  # pyright: ignore[reportArgumentType]
    "score": lambda: load_scoring(LanguageModel(TINY), SEQUENCES),
    "scores of steps": lambda: load_scoring(LanguageModel(TINY), TOKENS),
    "score and lora": lambda: load_scoring(LanguageModel(TINY, lora=Lora(r=4)), SEQUENCES),
    "critic": lambda: AdapterCritic(r=4).module(LanguageModel(TINY, lora=Lora(r=4)).load()),
}


@pytest.mark.parametrize("kind", FRESH)
def test_one_seed_draws_the_same_fresh_weights_on_every_device(kind: str) -> None:
    """Lightning loads a model with the run's device as the default one."""
    weights: dict[str, dict[str, Tensor]] = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        with torch.device(device):
            model = FRESH[kind]()
        weights[device] = model.state_dict()
        assert {tensor.device.type for tensor in weights[device].values()} == {device}
    for name, weight in weights["cpu"].items():
        assert torch.equal(weights["cuda"][name].cpu(), weight), name


@pytest.fixture
def policy() -> Any:
    """The shipped policy on the device."""
    return LanguageModel(TINY).load().to("cuda").eval()


@pytest.mark.parametrize("fault", ["a prompt on the host", "a table on the host"])
def test_a_mixture_of_devices_in_a_trial_fails_a_test_and_warns_a_run(
    policy: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the warning the run ends well, and decodes the slow way."""
    if fault == "a prompt on the host":
        whole = grouped_steps.probe
        monkeypatch.setattr(
            grouped_steps,
            "probe",
            lambda policy: dataclasses.replace(whole(policy), prompt_mask=whole(policy).prompt_mask.cpu()),
        )
        key, instead = "generator.grouped_cache", "own"
    else:
        turned = LeanModel._turned
        monkeypatch.setattr(LeanModel, "_turned", lambda self, x, cos, sin: turned(self, x, cos.cpu(), sin))
        key, instead = "generator.lean_steps", "grouped_cache"
    said = rf"{key}=true could not be tried on Qwen2ForCausalLM, for RuntimeError: .*device"
    with pytest.raises(UserWarning, match=said):
        decode(policy)
    with pytest.warns(UserWarning, match=said) as warned:
        assert decode(policy).steps == instead
    assert len(warned) == 1


def test_the_device_takes_the_quickest_steps(policy: Any) -> None:
    assert decode(policy).steps == "lean_steps"


def decode(policy: Any) -> NativeGenerator:
    """What drew two batches."""
    generator = NativeGenerator()
    prompts = Vocabulary.of(LanguageModel(TINY)).prompts([[5, 6, 7], [8, 9]], [1, 2], 2)
    for version in range(2):
        generator.sync(policy, version)
        generator.generate(prompts, Sampling(max_new_tokens=2))
    return generator
