"""Short runs on a device that is not the CPU: the methods of `scripts/same_bits.py`, and what runs differently there.

Each is resumed in its middle, where the table says so. Whatever mixes devices ends with an error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import same_bits
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.seed import isolate_rng
from runs_helpers import interrupted

from lit_rl import cli

pytestmark = pytest.mark.all

ON_DEVICE = ["trainer.accelerator=auto", "trainer.devices=1"]
"""What a user types who types nothing. `cuda` is refused before PyTorch is loaded, whose build is one for the CPU."""


def _grpo(settings: str, resume: int | None = 6) -> tuple[str, int | None]:
    return f"{same_bits.COMMON} {same_bits.ROLLOUTS} {same_bits.GRADED} {settings}", resume


FURTHER = {
    "grpo_plain_decoding": _grpo("generator.grouped_cache=false generator.lean_steps=false", None),
    "grpo_hf": _grpo("generator=hf algo.beta=0.1 sampling.min_new_tokens=1"),
    "grpo_hf_continuous": _grpo("generator=hf_continuous", None),
    "grpo_stop": _grpo(
        "sampling.stop=['3'] sampling.top_p=0.9 sampling.top_k=20 sampling.repetition_penalty=1.1", None
    ),
    "grpo_bf16_true": _grpo("trainer.precision=bf16-true algo.beta=0.1"),
    "grpo_fp16": _grpo("trainer.precision=16-mixed"),
    "grpo_offload": _grpo("model.lora.r=4 model.gradient_checkpointing=offload"),
    "grpo_deterministic": _grpo("trainer.deterministic=true sampling.top_p=0.9"),
    "grpo_win_rate": _grpo(
        "eval.win_rate_against=tiny trainer.val_check_interval=2 trainer.limit_val_batches=1"
        " +model.init_kwargs.attention_dropout=0.1"
    ),
    "grpo_other_device": _grpo("trainer.devices=[1]", None),
}
RUNS = {run.name: run for run in same_bits.runs(quick=True)} | {
    name: same_bits.Run(name, tuple(words.split()), resume) for name, (words, resume) in FURTHER.items()
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs name as `{work}/...`."""
    folder = tmp_path_factory.mktemp("work")
    for name, text in same_bits.FILES.items():
        (folder / name).write_text(text)
    same_bits.teacher(same_bits.HERE, folder / "teacher")
    return folder


def train(run: same_bits.Run, work: Path, folder: Path, *more: str) -> None:
    words = [word.replace("{work}", str(work)) for word in run.overrides if word != "trainer.accelerator=cpu"]
    environment = dict(os.environ)
    GlobalHydra.instance().clear()
    with pytest.MonkeyPatch.context() as patch, isolate_rng():
        patch.setattr(sys, "argv", ["train.py"])
        patch.syspath_prepend(str(work))
        try:
            assert cli.run([*ON_DEVICE, *words, *more, f"run_dir={folder}"]) == 0
        finally:
            os.environ.clear()
            os.environ.update(environment)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device_and_its_resume(name: str, work: Path, tmp_path: Path) -> None:
    run = RUNS[name]
    torch.cuda.reset_peak_memory_stats()
    train(run, work, tmp_path / "whole")
    saved = same_bits.newest(tmp_path / "whole")["state_dict"]
    assert {tensor.device.type for tensor in saved.values()} == {"cuda"}
    assert torch.cuda.max_memory_allocated() > sum(tensor.nbytes for tensor in saved.values())
    if run.resume is not None:
        interrupted(tmp_path / "whole", tmp_path / "again", run.resume)
        train(run, work, tmp_path / "again", "ckpt_path=last")
        whole, again = (same_bits.measured(tmp_path / each) for each in ("whole", "again"))
        assert same_bits.same(whole, again), same_bits.first_difference(whole, again)
