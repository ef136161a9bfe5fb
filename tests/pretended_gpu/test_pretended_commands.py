"""Every command that loads a model, on the device: over a run that was trained there."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import same_bits
import torch

pytestmark = pytest.mark.all

ON_DEVICE = ["trainer.accelerator=auto", "trainer.devices=1"]
SMALL = [*ON_DEVICE, "data.task.max_operand=5", "data.task.val_rows=4", "logger=none", "callbacks.samples.print=0"]
COMMANDS = {
    "eval": ["eval", "run_dir={run}", "ckpt_path=last", *ON_DEVICE[1:]],
    "eval_on_the_cpu": ["eval", "run_dir={run}", "ckpt_path=last", "trainer.accelerator=cpu", "trainer.devices=1"],
    "eval_of_the_cpu": ["eval", "run_dir={cpu}", "ckpt_path=last", *ON_DEVICE],
    "chat": ["chat", "run_dir={run}"],
    "doctor": ["doctor"],
    "doctor_hf_continuous": ["doctor", "generator=hf_continuous"],
    "replay": ["replay", "run_dir={run}", "replay.losses=[run,dapo]"],
    "best_of_n": ["best-of-n", "eval.group_size=2", "run_dir={folder}/best", *SMALL],
    "plan": ["plan", *SMALL],
    "reward_test": [
        *("reward-test", "reward=reward_model", "reward.functions.reward_model.name={work}/scorer"),
        *("reward_test.completions={folder}/completions.jsonl", *ON_DEVICE),
    ],
    "export": ["export", "run_dir={run}", "export.folder={folder}/hf"],
    "report": ["report", "run_dir={run}"],
    "transcripts": ["transcripts", "run_dir={game}"],
    "env": ["env"],
}
ON_THE_HOST = ("eval_on_the_cpu", "report", "transcripts", "env", "export")
"""No tensor of the policy need be on the device."""


@pytest.fixture(scope="module")
def runs(command, work: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders that `COMMANDS` name: a run of the device, one of the CPU, and one of episodes."""
    folder = tmp_path_factory.mktemp("commands")
    grpo = [*SMALL, "data.prompts_per_rollout=4", "algo.group_size=4", "trainer.max_steps=2"]
    made = {
        "run": [*grpo, "callbacks.checkpoint.every_n_train_steps=1"],
        "cpu": [*grpo, "trainer.accelerator=cpu", "trainer.max_steps=1"],
        "game": [
            *same_bits.GAME.replace("trainer.accelerator=cpu", "").split(),
            *ON_DEVICE,
            "reward=environment",
            "trainer.max_steps=1",
        ],
    }
    for name, words in made.items():
        assert command("train", *words, f"run_dir={folder / name}") == 0
    line = json.dumps({"prompt": "17+25=", "completion": "42", "answer": "42"})
    (folder / "completions.jsonl").write_text(line + "\n")
    return {"folder": folder, "work": work, **{name: folder / name for name in made}}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_on_the_device(
    name: str, runs: dict[str, Path], command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("17+25=\n"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    code = command(*(word.format_map(runs) for word in COMMANDS[name]))
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    on_device = torch.cuda.max_memory_allocated() - before
    weights = sum(each.nbytes for each in same_bits.newest(runs["run"])["state_dict"].values())
    assert (on_device == 0) if name == "eval_on_the_cpu" else (name in ON_THE_HOST or on_device > weights // 2)
    if name == "env":
        assert "cuda:1  Pretended GPU" in said.out


@pytest.mark.parametrize("subcommand", ["fit", "predict"])
def test_lightnings_command_line_runs_on_the_device(
    subcommand: str, root: Path, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    words = [f"--config={root / 'conf' / 'lightning' / 'addition.yaml'}", "--trainer.accelerator=gpu"]
    words += ["--trainer.devices=1", "--trainer.max_steps=2", "--data.prompts_per_rollout=4", "--data.task.val_rows=4"]
    assert command(subcommand, *words) == 0
    assert torch.cuda.max_memory_allocated() - before > 1 << 20
