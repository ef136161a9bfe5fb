"""What hardly a run reaches, called on the device: its numbers are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import same_bits
import test_pair_ranker
import test_reward_adapter
import torch
from torch import Tensor

from lit_rl import LanguageModel, RewardModel
from lit_rl.core.vision_inputs import Vision
from lit_rl.generation.token_sampler import draw
from lit_rl.models.engine_weights import fingerprint
from lit_rl.models.scoring import SEQUENCES, load_scoring
from lit_rl.ops.fused_head import Distribution, linear_logprobs
from lit_rl.rewards import PairRMJudge

pytestmark = pytest.mark.all
SHORT = ["trainer.max_steps=2", "trainer.limit_val_batches=0", "callbacks.samples.print=0"]
ADDITION = ["data.task.max_operand=5", "data.task.val_rows=4", "data.prompts_per_rollout=4", "algo.group_size=4"]
ADDITION += ["logger=none", "trainer.devices=1"]
folder, reward_model = test_pair_ranker.folder, test_reward_adapter.reward_model


def drawn(device: str) -> Any:
    noise = torch.Generator().manual_seed(0)
    logits, uniforms = torch.randn(3, 5000, generator=noise), torch.rand(3, generator=noise)
    return draw(logits.to(device), uniforms.to(device))


def slopes(device: str) -> Any:
    noise = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=noise).to(device).requires_grad_() for n in (3, 7))
    ids = torch.tensor([0, 6, 2], device=device)
    scores = linear_logprobs(hidden, weight, ids, Distribution(), compiler=lambda function: function)
    scores.logprobs.sum().backward()
    return hidden.grad, weight.grad


def checksums(device: str) -> Any:
    return torch.tensor([sums[1:] for sums in fingerprint(LanguageModel("tiny").load().to(device))]).to(device)


@pytest.mark.parametrize("called", [drawn, slopes, checksums])
def test_a_call_returns_the_cpus_numbers(called: Callable[[str], Any]) -> None:
    here, there = called("cpu"), called("cuda")
    torch.testing.assert_close(there, here, check_device=False)
    assert all(isinstance(each, Tensor) and each.is_cuda for each in (there if isinstance(there, tuple) else [there]))


def test_images_follow_rows_of_either_device() -> None:
    images = Vision((None, None), torch.tensor([0, 0, 1]))
    for device in ("cpu", "cuda"):
        assert images.select(torch.tensor([2, 0], device=device)).index.tolist() == [1, 0]


PROMPTS, COMPLETIONS = ["1+1=", "10+20="], ["2", "30 and more"]
"""Of different lengths: rows are padded."""


def test_a_reward_model_scores_padded_rows(work: Path) -> None:
    scored = [RewardModel(str(work / "scorer"), device=device) for device in ("cpu", "cuda")]
    here, there = (each(prompts=PROMPTS, completions=COMPLETIONS) for each in scored)
    assert there == pytest.approx(here, abs=1e-5)


def test_a_reward_model_that_is_an_object_is_moved() -> None:
    tiny = LanguageModel("tiny")
    model: Any = load_scoring(tiny, SEQUENCES)
    reward = RewardModel(model, tokenizer=tiny.tokenizer, device="cuda")
    assert {weight.device.type for weight in reward.load()[0].parameters()} == {"cuda"}


def test_pairrm_gives_the_cpus_verdicts(folder: str) -> None:
    texts = test_pair_ranker.PROMPTS, test_pair_ranker.ONE, test_pair_ranker.TWO
    here, there = (PairRMJudge(folder, device=device)(*texts) for device in ("cpu", "cuda"))
    assert there == pytest.approx(here, abs=1e-5)


def test_ppo_scores_episodes_by_a_reward_adapter(reward_model: str, command, tmp_path: Path) -> None:
    words = same_bits.GAME.replace("trainer.accelerator=cpu", "").split()
    words += ["trainer.devices=1", "algo=ppo", "model.lora.r=2", "algo/critic=adapter", "reference=adapter_base"]
    words += [f"algo.reward_adapter={reward_model}", "reward=environment", "algo.reward_beta=0.05"]
    assert command("train", *words, *SHORT, f"run_dir={tmp_path / 'run'}") == 0


def test_replay_takes_what_was_kept_of_greedy_completions_and_of_the_reference(command, tmp_path: Path) -> None:
    assert command("train", *ADDITION, "algo=remax", "algo.beta=0.1", *SHORT, f"run_dir={tmp_path / 'run'}") == 0
    assert command("replay", "replay.losses=[run]", f"run_dir={tmp_path / 'run'}") == 0


def test_completions_of_a_rollout_function_come_to_the_device(command, tmp_path: Path) -> None:
    """It returns lists."""
    lines = (
        "def single(prompts, trainer):",
        "    return trainer.generate([trainer.encode(prompt) for prompt in prompts])",
    )
    (tmp_path / "function.py").write_text("\n".join(lines))
    words = [*ADDITION, "env=rollout_func", f"env.path={tmp_path / 'function.py'}:single"]
    assert command("train", *words, *SHORT, f"run_dir={tmp_path / 'run'}") == 0
