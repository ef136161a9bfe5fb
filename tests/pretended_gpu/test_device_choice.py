"""What has to be the same on every device, and what has to follow the device of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lit_rl
from lit_rl import GRPO, RolloutDataModule
from lit_rl.algorithms.rollouts.checkpoints import rng_state, set_rng_state
from lit_rl.core.examples import TokenBatch
from lit_rl.core.process_state import preserve_generators, seed_generators
from lit_rl.core.rollout import Sampling
from lit_rl.generation import grouped_cache
from lit_rl.generation.collect import Vocabulary
from lit_rl.generation.fast_decoding import LeanModel
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.adapters import Lora
from lit_rl.models.critics import AdapterCritic
from lit_rl.models.forward_inputs import noisy_embeddings
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.scoring import SEQUENCES, TOKENS, load_scoring
from lit_rl.rewards import RewardModel
from lit_rl.rewards.classifiers import OnRunDevice
from lit_rl.runs.step_memory import peak_memory

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
    "score and lora of a table": lambda: load_scoring(
        LanguageModel(TINY, lora=Lora(r=4, targets=["embed_tokens", "q_proj"])), SEQUENCES
    ),
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
        whole = grouped_cache.probe_batch
        monkeypatch.setattr(
            grouped_cache,
            "probe_batch",
            lambda policy: dataclasses.replace(whole(policy), prompt_mask=whole(policy).prompt_mask.cpu()),
        )
        key, instead = "generator.speedups.grouped_cache", "own"
    else:
        turned = LeanModel._turned
        monkeypatch.setattr(LeanModel, "_turned", lambda self, x, cos, sin: turned(self, x, cos.cpu(), sin))
        key, instead = "generator.speedups.lean_steps", "grouped_cache"
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


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model's folder."""
    folder = tmp_path_factory.mktemp("scorer")
    model: Any = load_scoring(LanguageModel(TINY), SEQUENCES)
    model.save_pretrained(folder)
    LanguageModel(TINY).tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("accelerator", "devices", "device", "where"),
    [("cpu", 1, None, "cpu"), ("auto", [1], None, "cuda:1"), ("auto", 1, "cpu", "cpu"), ("cpu", 1, "cuda:1", "cuda:1")],
)
def test_a_reward_model_is_on_the_device_of_the_run(
    scorer: str, accelerator: str, devices: Any, device: str | None, where: str
) -> None:
    """And not on a GPU that is there."""
    reward = RewardModel(scorer, device=device)
    module = GRPO(TINY, reward=reward, group_size=2, sampling=Sampling(max_new_tokens=2))
    trainer = L.Trainer(
        accelerator=accelerator, devices=devices, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, RolloutDataModule([{"prompt": "1+1="}] * 2, prompts_per_rollout=2, val_fraction=0))
    assert trainer.global_step == 1
    assert {weight.device for weight in reward.load()[0].parameters()} == {torch.device(where)}


def test_outside_of_a_run_a_scorer_takes_the_gpu() -> None:
    torch.cuda.set_device(1)
    assert OnRunDevice().load_device == torch.device("cuda", 1)


def test_noise_on_embeddings_is_the_same_on_every_device() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    segment = torch.tensor([[0, 0, 1, 1, 0, 0], [0] * 6])
    noise = []
    for device in ("cpu", "cuda"):
        tokens = TokenBatch(torch.zeros(2, 6, dtype=torch.long), mask, mask, segment=segment)
        embedding = Embedder().to(device).train()
        with noisy_embeddings(embedding, tokens.to(device), 5.0, [3, 4]):
            noise.append(embedding.table(tokens.input_ids.to(device)).detach())
        assert noise[-1].device.type == device
    assert torch.equal(noise[0], noise[1].cpu()) and noise[0][mask].all() and not noise[0][~mask].any()


class Embedder(nn.Module):
    """A model of an embedding of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, 8, _weight=torch.zeros(1, 8))

    def get_input_embeddings(self) -> nn.Module:
        return self.table


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_checkpoint_holds_the_generators_that_a_run_draws_from(kind: str) -> None:
    def drawn() -> list[float]:
        return [torch.rand(1).item(), torch.rand(1, device=kind).item()]

    saved = rng_state(kind)
    assert saved.keys() == {"cpu", kind}, "a run on the CPU does not wake a GPU that is there"
    first = drawn()
    set_rng_state(saved, kind)
    assert drawn() == first
    with preserve_generators():
        torch.manual_seed(0)
        seed_generators(1)
        seeded = drawn()
        seed_generators(1)
        assert drawn() == seeded
    second = drawn()
    set_rng_state(saved, kind)
    assert [drawn(), drawn()] == [first, second]


def test_a_checkpoint_of_a_gpu_is_resumed_on_the_cpu_and_the_other_way_round() -> None:
    """Checkpoints of earlier versions name both where a GPU was there."""
    of_gpu, of_cpu = rng_state("cuda"), rng_state("cpu")
    torch.rand(1), torch.rand(1, device="cuda")
    set_rng_state(of_gpu, "cpu")
    assert torch.equal(torch.get_rng_state(), of_cpu["cpu"])
    assert not torch.equal(torch.cuda.get_rng_state(), of_gpu["cuda"])
    set_rng_state({kind: state.to("cuda") for kind, state in of_gpu.items()}, "cuda")  # as a Trainer loads them
    assert torch.equal(torch.cuda.get_rng_state(), of_gpu["cuda"])
    set_rng_state(of_cpu, "cuda")


def test_a_run_on_the_cpu_beside_a_gpu_reports_the_memory_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning wakes the GPU for it too."""
    kept = torch.ones(1000, device="cuda")
    assert peak_memory()["tensors"] >= kept.nbytes
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 0)
    assert peak_memory().keys() == {"process"}
