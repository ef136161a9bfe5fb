"""One of each command of `lit-rl`, over the first thirty steps of the demo and over a game of turns."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from cli_helpers import Command

from lit_rl.cli.help import COMMANDS

pytestmark = [pytest.mark.all, pytest.mark.xdist_group("every command")]

CPU = ["trainer.accelerator=cpu", "trainer.devices=1"]
WORDS = {
    "train": ["trainer.max_steps=1", "run_dir={folder}/one", "logger=none", *CPU],
    "eval": ["run_dir={run}", "ckpt_path=last"],
    "plan": ["plan.memory_gb=1"],
    "chat": ["run_dir={run}"],
    "data-check": [],
    "reward-test": ["reward_test.completions={folder}/completions.jsonl"],
    "best-of-n": ["eval.group_size=2", "data.task.val_rows=8", "run_dir={folder}/best", *CPU],
    "replay": ["run_dir={run}", "replay.losses=[run,dapo]"],
    "transcripts": ["run_dir={game}"],
    "report": ["run_dir={run}"],
    "export": ["run_dir={run}", "export.folder={folder}/hf"],
    "compare": ["{run}", "{other}"],
    "env-check": ["experiment=guess"],
    "serve": [],
    "doctor": CPU[:1],
    "list": ["algo"],
    "env": [],
    "completion": ["bash"],
}
"""What is typed behind each command: ``{run}`` is the demo's first steps, ``{other}`` one, ``{game}`` has episodes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("every_command")
    return {"folder": folder, **{name: folder / name for name in ("run", "other", "game")}}


@pytest.fixture
def runs(command: Command, folders: dict[str, Path]) -> dict[str, Path]:
    """The runs that commands are asked about, made once."""
    made = {
        "run": ["trainer.max_steps=30"],
        "other": ["trainer.max_steps=1", "seed=2"],
        "game": [
            "experiment=guess",
            "trainer.max_steps=1",
            "data.prompts_per_rollout=4",
            "trainer.limit_val_batches=0",
        ],
    }
    for name, words in made.items():
        if not folders[name].exists():
            told = command(*words, f"run_dir={folders[name]}", *CPU)
            assert told.code == 0, told.out + told.err
    line = json.dumps({"prompt": "17+25=", "completion": "42", "answer": "42"})
    (folders["folder"] / "completions.jsonl").write_text(line + "\n")
    return folders


def test_the_demo_learns_in_its_first_steps(runs: dict[str, Path]) -> None:
    rows = [json.loads(line) for line in (runs["run"] / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    assert len(rewards) == 30 and sum(rewards[-10:]) > sum(rewards[:10])
    assert json.loads((runs["run"] / "summary.json").read_text())["status"] == "finished"
    assert (runs["run"] / "hf" / "model.safetensors").is_file(), "exported, and verified"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_well(
    name: str, runs: dict[str, Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("17+25=\n"))
    told = command(name, *(word.format_map(runs) for word in WORDS[name]))
    wanted = 8 if name == "serve" else 0  # vLLM has an environment of its own
    assert told.code == wanted and told.out + told.err, told.out + told.err
