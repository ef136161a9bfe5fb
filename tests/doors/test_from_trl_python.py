"""What docs/from-trl.md says of Python: the quickstart runs, and no argument or reward function of TRL is left out."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import trl
import trl.rewards
from datasets import Dataset

import lit_rl
import lit_rl.rewards
from lit_rl import GRPO, RolloutDataModule, Sampling


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "from-trl.md").read_text()


def rows(page: str, heading: str) -> dict[str, str]:
    section = page.split(f"### {heading}\n")[1].split("\n#")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M))


def test_the_quickstart_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules_here: None) -> None:
    """As it is printed; of the model alone another one is named, which needs no hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(
        "def score(completions, **columns):\n    return [-float(len(text)) for text in completions]\n"
    )
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"prompt": "{n}+{n}="}}\n' for n in range(3)))
    lines = re.findall(r"^\| `(.+)` \| `(.+)` \|$", page.split("## In Python")[1].split("\n\nRows")[0], re.M)
    theirs, ours = ("\n".join(column) for column in zip(*lines, strict=True))
    assert len(lines) == 5
    compile(theirs, "theirs", "exec")
    names: dict[str, Any] = {}
    exec(ours.replace("Qwen/Qwen2.5-0.5B-Instruct", "tiny"), names)
    assert names["rows"].trainer.global_step == 3


def test_no_argument_is_left_out(page: str) -> None:
    table = rows(page, "Arguments of GRPOTrainer")
    assert set(table) == set(inspect.signature(trl.GRPOTrainer.__init__).parameters) - {"self"}
    named = {word for cell in table.values() for word in re.findall(r"`([A-Z]\w+)\(", cell)}
    assert named and all(hasattr(lit_rl, name) for name in named)


def test_no_reward_function_is_left_out(page: str) -> None:
    table = rows(page, "Functions of trl.rewards")
    structure = trl.rewards._import_structure
    assert set(table) == {name for names in structure.values() for name in names}
    for path in (cell.strip("`") for cell in table.values() if cell.startswith("`lit_rl")):
        assert hasattr(lit_rl.rewards, path.rpartition(".")[2])


@pytest.mark.parametrize("accuracy", [trl.rewards.accuracy_reward, trl.rewards.reasoning_accuracy_reward])
def test_a_function_of_trl_is_a_reward_as_it_is(accuracy: Any, tmp_path: Path) -> None:
    """Each is called with what it reads, in a run over messages."""
    found: list[Any] = [
        accuracy,
        trl.rewards.think_format_reward,
        trl.rewards.get_soft_overlong_punishment(4, 2),
        trl.rewards.get_cosine_scaled_reward(8),
        trl.rewards.get_repetition_penalty_reward(),
    ]
    data = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}], "solution": f"${2 * n}$"} for n in range(2)]
    named = {f"f{number}": function for number, function in enumerate(found)}
    module = GRPO("tiny", lit_rl.Rewards(named), group_size=2, sampling=Sampling(max_new_tokens=4))
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_steps=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(module, datamodule=RolloutDataModule(Dataset.from_list(data), prompts_per_rollout=2, val_fraction=0))
    assert trainer.global_step == 1
