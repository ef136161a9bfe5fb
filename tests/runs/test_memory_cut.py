"""Runs that the memory plan cuts: the same training, resumed with the same cut; and `lit-rl plan`."""

from __future__ import annotations

import re
import subprocess
import warnings

import lightning as L
import pytest
from runs_helpers import EVERY_STEP, SMALL, assert_same_run, interrupted, newest

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.checks import micro_batching
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.native import NativeGenerator
from lit_rl.rewards import exact_match

ROWS = ["data.prompts_per_rollout=8", "algo.group_size=4", "trainer.max_steps=4", "data.task.val_rows=4"]
LITTLE = "plan.memory_gb=0.016"
"""Not enough for a micro-batch of 32 completions of the shipped policy."""
SCARCE = "plan.memory_gb=0.0102"
"""Not enough for a group of 4."""
LEAST = "plan.memory_gb=0.00975"
"""Not enough for one completion whose activations are kept."""


@pytest.mark.parametrize(
    "memory", [LEAST, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (LITTLE, SCARCE))]
)
def test_a_resumed_run_keeps_its_cut_whatever_memory_is_free(train, tmp_path, memory):
    whole, again = tmp_path / "whole", tmp_path / "again"
    overrides = [*SMALL, *EVERY_STEP, *ROWS]
    assert train(*overrides, memory, f"run_dir={whole}") == 0
    kept = newest(whole)["micro_batch_plan"]
    assert (kept["micro_batches"] > 1) and (kept["micro_batches"] > 8) == (memory != LITTLE)
    assert kept["recompute"] == (memory == LEAST)
    interrupted(whole, again, 2)
    assert train(*overrides, f"run_dir={again}", "ckpt_path=last") == 0
    assert newest(again)["micro_batch_plan"] == kept
    assert_same_run(whole, again)


def test_a_plan_is_printed_and_nothing_written(train, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train(*SMALL, *ROWS, LITTLE, "task=plan") == 0
    said = capsys.readouterr().out
    assert "activations" in said and "key-value cache" in said and "may be given out" in said
    assert "expected" not in said  # another machine's step cannot be timed here
    assert train(*SMALL, *ROWS, "task=plan", "plan.probe=true") == 0
    assert "seconds an optimizer step" in capsys.readouterr().out
    assert train(*SMALL, *ROWS, "task=plan", "algo.micro_batch_size=2", "plan.probe=true") == 0
    assert "16: algo.micro_batch_size=2" in capsys.readouterr().out  # half a group: set up twice, for the probe
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "ranks", "divided_over"),
    [
        (["strategy=ddp", "trainer.devices=2"], 2, 1),
        (["strategy=fsdp", "trainer.devices=8", "plan.memory_gb=80", "trainer.precision=bf16-true"], 8, 8),
        (["strategy=fsdp", "trainer.devices=2", "trainer.num_nodes=2", "plan.memory_gb=80"], 4, 4),
    ],
)
def test_several_ranks_are_planned_by_one_process(train, monkeypatch, capsys, words, ranks, divided_over):
    """In float32, which shards are under every precision."""

    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert train(*SMALL, *ROWS, *words, "task=plan", "plan.probe=true") == 0
    said = capsys.readouterr().out
    parts = {name: size for name, size in re.findall(r"│ (\w+) +│ +([\d.]+) MiB", said)}
    whole = sum(4 * weight.numel() for weight in GRPO("tiny", exact_match).model.load().parameters()) / 2**20
    assert float(parts["weights"]) == pytest.approx(whole / divided_over, rel=0.01)
    assert float(parts["optimizer"]) == pytest.approx(2 * whole / divided_over, rel=0.01)
    assert f"Per rank, {ranks} ranks" in said and (f"divided over {ranks} ranks" in said) == (divided_over > 1)
    assert f"micro-batch and rank │ {8 * 4 // ranks}" in said
    assert ("No step was timed" in said) == ("plan.memory_gb=80" not in words) and "expected" not in said


def test_nothing_is_offloaded_to_the_host_from_the_host(train, tmp_path, capsys):
    assert train(*SMALL, "model.gradient_checkpointing=offload", f"run_dir={tmp_path / 'run'}") == 2
    assert "this run has no GPU. Set it to true" in capsys.readouterr().err


def test_what_can_never_fit_is_refused_with_what_each_part_needs(train, tmp_path, capsys):
    assert train(*SMALL, *ROWS, "plan.memory_gb=0.005", f"run_dir={tmp_path / 'run'}") == 2
    said = capsys.readouterr().err
    assert "does not fit" in said and "micro-batches of 1 row" in said and "weights" in said


def made(**settings) -> GRPO:
    return GRPO("tiny", exact_match, group_size=4, sampling=Sampling(max_new_tokens=6), **settings)


def prompts() -> RolloutDataModule:
    return RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=8)


def short_trainer(**settings) -> L.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(off, False) | {"limit_val_batches": 0, "use_distributed_sampler": False}
    return L.Trainer(accelerator="cpu", devices=1, **({"max_steps": 1} | quiet | settings))


def test_a_trainer_trains_one_module_after_another_each_with_its_own_cut():
    trainer, first, second = short_trainer(), made(micro_batch_size=2), made(micro_batch_size=16)
    trainer.fit(first, datamodule=prompts())
    assert first.plan.accumulate == 16 and first.plan.split_groups == 2 and trainer.accumulate_grad_batches == 1
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(first, datamodule=prompts())
    assert trainer.global_step == 2 and first.plan.accumulate == 16
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(second, datamodule=prompts())
    assert trainer.global_step == 3 and second.plan.accumulate == 2 and trainer.accumulate_grad_batches == 1


def test_two_answers_to_one_question_are_refused():
    trainer = short_trainer(accumulate_grad_batches=4)
    with pytest.raises(ConfigError, match="both set how a step is split"):
        trainer.fit(made(micro_batch_size="auto"), datamodule=prompts())
    assert trainer.accumulate_grad_batches == 4


def test_the_settings_of_a_warning_are_enough():
    module = made(micro_batch_size=4, generator=NativeGenerator(batch_size=2))
    module.micro_batches.memory_gb = 0.0125
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not fit")
        short_trainer().fit(module, datamodule=prompts())


def test_plain_constructors_warn_once_and_go_on():
    module = made()
    module.micro_batches.memory_gb = 0.016
    data, trainer = prompts(), short_trainer()
    with pytest.warns(UserWarning, match=r"does not fit.*Set trainer.accumulate_grad_batches=\d") as seen:
        trainer.fit(module, datamodule=data)
    assert sum("does not fit" in str(one.message) for one in seen) == 1
    assert trainer.global_step == 1 and trainer.accumulate_grad_batches == 1


@pytest.mark.parametrize(("free", "warned"), [(1.9, False), (0.9, True)])
def test_on_a_cpu_they_warn_of_what_is_more_than_all_that_is_free(monkeypatch, free, warned):
    """The plan gives out half of it, so that twice what is planned would still fit."""
    module, trainer = made(), short_trainer()
    monkeypatch.setattr(micro_batching, "available_memory", lambda: 2**40)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not fit")
        trainer.fit(module, datamodule=prompts())
    needed = module.memory().plan(32, 32, steps_in_parts=False).total
    monkeypatch.setattr(micro_batching, "available_memory", lambda: int(free * needed))
    module = made()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        short_trainer().fit(module, datamodule=prompts())
    assert module.memory().budget < needed
    assert any("does not fit" in str(one.message) for one in seen) == warned
