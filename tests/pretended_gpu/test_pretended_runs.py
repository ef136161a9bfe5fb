"""Short runs on a device that is not the CPU: the methods of `scripts/same_bits.py`, and what takes another path there.

Whatever mixes devices ends with an error. Where a run has a step to resume at, it must end from there with the bits of
the whole one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import same_bits
import torch
from pretend_graphs import Graph
from runs_helpers import interrupted
from test_peft_configs import CONFIGS

from lit_rl import GRPO, AdamW, LanguageModel, RolloutDataModule, Sampling
from lit_rl.data.tasks import Addition
from lit_rl.rewards import exact_match

pytestmark = pytest.mark.all

ON_DEVICE = ("trainer.accelerator=auto", "trainer.devices=1")
"""The defaults of a user. `trainer.accelerator=cuda` is refused early, where it is read how PyTorch was built."""
SHORT = "trainer.max_steps=8"
"""In place of the table's 12: two rollouts, so that the step that is gone on from is still in the second."""


def _grpo(settings: str) -> str:
    return f"{same_bits.COMMON} {same_bits.ROLLOUTS} {same_bits.GRADED} {settings}"


FURTHER = {
    "grpo_plain_decoding_stop": _grpo(
        "generator.speedups.grouped_cache=false generator.speedups.lean_steps=false sampling.stop=['3']"
        " sampling.top_p=0.9 sampling.top_k=20 sampling.repetition_penalty=1.1"
    ),
    "grpo_hf_stop": _grpo(
        "generator=hf algo.beta=0.1 sampling.stop=['3'] sampling.top_p=0.9 sampling.min_new_tokens=1"
    ),
    "grpo_hf_continuous": _grpo("generator=hf_continuous"),
    "grpo_bf16_true": _grpo("trainer.precision=bf16-true algo.beta=0.1"),
    "grpo_fp16": _grpo("trainer.precision=16-mixed"),
    "grpo_offload": _grpo("model.lora.r=4 model.gradient_checkpointing=offload"),
    "grpo_deterministic": _grpo(
        "trainer.deterministic=true sampling.top_p=0.9 generator.speedups.cuda_graphs=true sampling.min_new_tokens=16"
        " sampling.max_new_tokens=20"
    ),
    "grpo_win_rate": _grpo(
        "eval.win_rate_against=tiny trainer.val_check_interval=2 trainer.limit_val_batches=1"
        " +model.init_kwargs.attention_dropout=0.1"
    ),
    "grpo_other_device": _grpo("trainer.devices=[1]"),
    "grpo_averaged": _grpo("callbacks=ema reference=bema algo.beta=0.1 trainer.log_every_n_steps=2"),
    "grpo_split": _grpo("trainer.precision=bf16-true optimizer=adamw_split"),
    "grpo_mixed_checkpointing": _grpo(
        "trainer.precision=bf16-mixed model.gradient_checkpointing=true model.lora.r=4"
        " generator.speedups.cuda_graphs=true sampling.min_new_tokens=16 sampling.max_new_tokens=20"
    ),
    "gigpo_guess": f"{same_bits.GAME} algo=gigpo reward=environment_turns",
    "turn_ppo_guess": f"{same_bits.GAME} algo=turn_ppo reward=environment_turns"
    " algo.ptx.path={work}/texts.jsonl algo.ptx.batch_size=1 algo.ptx_coef=0.2",
    "clip_cov": _grpo("algo=clip_cov"),
    "grpo_reward_model": f"{same_bits.COMMON} {same_bits.ROLLOUTS} reward=reward_model algo.beta=0.1"
    " reward.functions.reward_model.name={work}/scorer",
    "online_dpo_reward_judge": f"{same_bits.COMMON} {same_bits.PAIRED} algo=nash_md judge=reward judge.soft=true"
    " reward=reward_model reward.functions.reward_model.name={work}/scorer",
    "process_reward_model": f"{same_bits.COMMON} {same_bits.ROWS} algo=process_reward_model",
    "ppo_images": f"{same_bits.IMAGES['grpo_images']} algo=ppo algo.group_size=4 algo.reward_beta=0.05",
    "raft": _grpo("algo=raft"),
    "grpo_lora_averaged": _grpo("callbacks=ema model.lora.r=4"),
    "grpo_turns_guess": f"{same_bits.GAME} algo/advantage=centered_turns reward=environment_turns algo.beta=0.1"
    " reference=ema reference.device=cpu",
    "grpo_process_guess": f"{same_bits.GAME} algo/advantage=process_supervised reward=environment_turns",
    "orpo": f"{same_bits.COMMON} {same_bits.ROWS} algo=orpo",
    "bco_reference_on_the_host": f"{same_bits.COMMON} {same_bits.ROWS} algo=bco algo/prompt_weights=density_ratio"
    " reference=frozen_copy reference.device=cpu",
    "kto_precomputed": f"{same_bits.COMMON} {same_bits.ROWS} algo=kto algo.precompute_reference=true",
}
RESUMED = {
    "grpo_stateful", "ppo_shared_trunk", "grpo_tools", "grpo_images", "online_dpo", "dpo_moving", "sft", "bco",
    "grpo_bf16_true", "grpo_fp16", "grpo_win_rate", "grpo_averaged", "grpo_split",
}  # fmt: skip
"""What differs in what it keeps on the device. The others are run for two steps, and once."""
ELSEWHERE = {"grpo_guess", "ppo_guess", "nash_md", "dpo", "kto"}
"""Each of them is here with more that is switched on."""
LISTED = [run for run in same_bits.runs(quick=True) if run.name not in ELSEWHERE]
LISTED += [same_bits.Run(name, tuple(words.split()), 6) for name, words in FURTHER.items()]
RUNS = {run.name: run if run.name in RESUMED else replace(run, resume=None) for run in LISTED}


def words_of(run: same_bits.Run) -> list[str]:
    """Return the run's words, shortened, with the device that a user has who says nothing of it.

    A checkpoint falls on the last step: one that is written behind the training holds what Lightning moved to the host.
    """
    typed = [SHORT if word == "trainer.max_steps=12" else word for word in run.overrides]
    every = [] if run.resume == 3 else ["callbacks.checkpoint.every_n_train_steps=2"]
    once = [] if run.resume else ["trainer.max_steps=2"]
    if once and any(word.startswith("data.prompts_per_rollout") for word in typed):
        once.append("trainer.limit_val_batches=0")
    return [*ON_DEVICE, *(word for word in typed if word != "trainer.accelerator=cpu"), *every, *once]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device_and_its_resume(name: str, command, tmp_path: Path) -> None:
    run = RUNS[name]
    torch.cuda.reset_peak_memory_stats()
    replayed = Graph.replayed
    assert command(*words_of(run), f"run_dir={tmp_path / 'whole'}") == 0
    saved = same_bits.newest(tmp_path / "whole")["state_dict"]
    assert {tensor.device.type for tensor in saved.values()} == {"cuda"}
    assert torch.cuda.max_memory_allocated() > sum(tensor.nbytes for tensor in saved.values())
    assert (Graph.replayed > replayed + 10) == ("generator.speedups.cuda_graphs=true" in words_of(run))
    if run.resume is not None:
        interrupted(tmp_path / "whole", tmp_path / "again", run.resume)
        assert command(*words_of(run), "ckpt_path=last", f"run_dir={tmp_path / 'again'}") == 0
        whole, again = (same_bits.measured(tmp_path / each) for each in ("whole", "again"))
        assert same_bits.same(whole, again), same_bits.first_difference(whole, again)


@pytest.mark.parametrize(("begins", "goes_on"), [("cpu", "auto"), ("auto", "cpu")])
def test_a_checkpoint_of_one_device_is_gone_on_with_on_another(
    begins: str, goes_on: str, command, tmp_path: Path
) -> None:
    words = words_of(replace(RUNS["grpo"], resume=6))
    assert command(*words, f"trainer.accelerator={begins}", f"run_dir={tmp_path / 'whole'}") == 0
    interrupted(tmp_path / "whole", tmp_path / "again", 6)
    assert command(*words, f"trainer.accelerator={goes_on}", "ckpt_path=last", f"run_dir={tmp_path / 'again'}") == 0
    first, second = (same_bits.newest(tmp_path / each)["state_dict"] for each in ("whole", "again"))
    assert {tensor.device.type for tensor in second.values()} == {"cpu" if goes_on == "cpu" else "cuda"}
    for name, weight in first.items():
        torch.testing.assert_close(second[name].cpu(), weight.cpu(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["VERA", "RANDLORA", "FOURIERFT", "OFT"])
def test_an_adapter_of_peft_is_trained(kind: str, tmp_path: Path) -> None:
    """All but the last draw frozen numbers with a generator of the host while Lightning's default device is the GPU."""
    module = GRPO(
        LanguageModel("tiny", lora=CONFIGS[kind]), exact_match, optimizer=AdamW(lr=1e-2),
        sampling=Sampling(max_new_tokens=3),
    )  # fmt: skip
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=4)
    trainer = L.Trainer(
        accelerator="gpu", devices=1, max_steps=2, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    trained = [each for each in module.policy.parameters() if each.requires_grad]
    assert trainer.global_step == 2 and trained
    assert {each.device.type for each in module.policy.parameters()} == {"cpu"}, "Lightning moves them back at the end"
