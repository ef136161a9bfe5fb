"""What a run leaves on the console and on disk: few tables, the last step last, and nothing of a start that failed."""

from __future__ import annotations

import io
import re

from cli_helpers import QUICK, Command, contents, refused, write_jsonl
from tqdm import tqdm

from lit_rl.callbacks.progress import _show_values, _values_that_fit

RUN = [word for word in QUICK if not word.startswith("trainer.max_steps")]


def test_samples_at_the_start_the_middle_and_the_end_and_the_last_step_last(command: Command, cwd):
    outcome = command(*RUN, "trainer.max_steps=6", "run_dir=run", "callbacks.progress.seconds_between_lines=1e-9")
    assert outcome.code == 0, outcome.err
    assert [int(step) for step in re.findall(r"rollout at step (\d+)", outcome.out)] == [0, 3, 5]
    lines = [line for line in outcome.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{n}/6" for n in range(1, 7)]
    assert " left  reward=" in lines[2] and " left" not in lines[-1]
    assert "cut=" in lines[2] and "dead_groups=" in lines[2] and "clipped=" not in lines[2]
    spent = dict(re.findall(r"^│ (\w[\w, ]*?)\s+│\s+([\d.]+) │", outcome.out, re.M))
    rest = float(spent.pop("validation, checkpoints, the rest"))
    assert abs(rest + sum(map(float, spent.values())) - 2 * float(spent["whole run"])) < 0.5  # the parts are the whole
    assert len(list((cwd / "run" / "samples").glob("step_*.parquet"))) == 6
    slow = command(*RUN, "trainer.max_steps=3", "run_dir=slow", "callbacks.progress.seconds_between_lines=1e9")
    assert [line.split()[1] for line in slow.out.splitlines() if line.startswith("step ")] == ["3/3"]


def test_a_narrow_terminal_keeps_reward_and_loss():
    values = {name: f"{name}=1.000" for name in ("reward", "std", "zero_std", "kl", "loss")}
    assert _values_that_fit(values, 200) == ", ".join(values.values())
    assert _values_that_fit(values, 40) == "reward=1.000, std=1.000, loss=1.000"
    for columns in (40, 50, 60, 80):
        bar = tqdm(total=700, initial=4, ncols=columns, file=io.StringIO())
        _show_values(bar, values)
        line = str(bar)
        assert "reward=1.000" in line and "loss=1.000" in line and "4/700" in line and len(line) <= columns


def test_a_start_that_fails_leaves_no_folder(command: Command, cwd, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n}+1=", "answer": "2"} for n in range(4)])
    (cwd / "wrong.py").write_text("def score(completions, **_):\n    return [1.0]\n")
    before = contents(cwd)
    refused(command(f"data.path={rows}", "data.prompts_per_rollout=32"), 3, "to 3 or less")
    wrong = [f"data.path={rows}", "data.prompts_per_rollout=2", "reward=./wrong.py:score", "logger=tensorboard"]
    for more in ([], ["run_dir=a/b/c"], ["data.val_fraction=0", "run_dir=d"]):
        refused(command(*wrong, "trainer.accelerator=cpu", *more), 4, "wrong")
        assert [name for name in contents(cwd) if "__pycache__" not in name] == before
    (cwd / "mine").mkdir()
    (cwd / "mine" / "notes.txt").write_text("of the user")
    late = command(*wrong[:2], "data.max_prompt_tokens=1", "trainer.accelerator=cpu", "run_dir=mine")
    assert late.code == 3 and "overlong 4" in late.err
    assert (cwd / "mine" / "notes.txt").exists()
