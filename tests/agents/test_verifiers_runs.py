"""Whole runs on a task set of the real verifiers: by its scorers, and by a harness of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

pytest.importorskip("verifiers.v1")

PLAIN = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
SMALL = [
    "data=verifiers",
    "data.task.id=sums",
    "data.task.val_rows=20",
    "data.prompts_per_rollout=8",
    "algo.group_size=4",
    "sampling.max_new_tokens=6",
    "logger=none",
    "callbacks.samples.print=0",
    "callbacks.samples.every=1",
    "reward=verifiers",
    "run_dir=run",
    f'model.chat_template="{PLAIN}"',
]


@pytest.fixture
def here(cwd: Path) -> Path:
    shutil.copy(Path(__file__).with_name("sums.py"), cwd)
    return cwd


def logged(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


SEVENS = """
import verifiers.v1 as vf


class Mine(vf.Task[vf.TaskData]):
    @vf.reward
    async def sevens(self, trace: vf.Trace) -> float:
        return trace.last_reply.count("7") / max(1, len(trace.last_reply))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 2)


class Sevens(vf.Taskset[Mine]):
    def load(self):
        for n in range(100):
            yield Mine(vf.TaskData(prompt=f"{n}+{n + 1}="), self.config.task)


__all__ = ["Sevens"]
"""


def test_a_policy_learns_by_the_scorers_of_a_task_set(here: Path, train: Callable[..., int]) -> None:
    (here / "sevens.py").write_text(SEVENS)
    words = [
        "data.task.id=sevens",
        "data.task.settings={}",
        "trainer.max_steps=24",
        "optimizer.lr=1e-3",
        "eval.limit=8",
    ]
    assert train(*SMALL, *words) == 0
    rewards, sevens = logged(here / "run", "train/reward"), logged(here / "run", "train/verifiers/sevens")
    brief = logged(here / "run", "train/verifiers/brief")
    assert len(rewards) == len(sevens) == 24
    for reward, one, other in zip(rewards, sevens, brief):
        assert reward == pytest.approx(one + 0.5 * other, abs=1e-5)
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 1.0
    assert logged(here / "run", "val/reward")


HARNESS = """
from lit_rl.generation import VerifiersHarness

rollout = VerifiersHarness({"agent": {"runtime": {"type": "subprocess"}, **%r}}, **%r)
"""


def played(here: Path, train: Callable[..., int], agent: dict[str, Any], *words: str, **settings: Any) -> int:
    (here / "my_harness.py").write_text(HARNESS % (agent, settings))
    env = ["env=rollout_func", "env.path=./my_harness.py:rollout", "env.max_tokens=60"]
    return train(*SMALL, *env, "trainer.max_steps=2", "trainer.limit_val_batches=0", *words)


def test_a_harness_plays_the_tasks_with_the_policy(here: Path, train: Callable[..., int]) -> None:
    assert played(here, train, {}) == 0
    (path, *_) = sorted((here / "run" / "samples").glob("step_*.parquet"))
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len(rows) == 32
    for row in rows:
        assert row["turns"] == 2
        by_policy, turn, text = row["tokens/by_policy"], row["tokens/turn"], row["tokens/text"]
        between = "".join(t for t, ours in zip(text, by_policy) if not ours)
        assert "=" in row["prompt"]
        again = between.replace("<|im_end|>", "")
        assert again and again in row["prompt"]
        assert set(turn) == {0, 1}
        scores = json.loads(row["verifiers"])
        last = "".join(t for t, ours, n in zip(text, by_policy, turn) if ours and n == 1).replace("<|im_end|>", "")
        assert scores["metrics"]["characters"] == len(last.strip())
        assert row["reward"] == pytest.approx(scores["reward"])


def test_a_turn_limit_of_the_agent_ends_its_episode(here: Path, train: Callable[..., int]) -> None:
    assert played(here, train, {"max_turns": 1}) == 0
    (path, *_) = sorted((here / "run" / "samples").glob("step_*.parquet"))
    assert {row["turns"] for row in pyarrow.parquet.read_table(path).to_pylist()} == {1}


def test_episodes_that_fail_end_the_run_or_are_unscored(
    here: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (here / "sums.py").read_text().replace("for _ in range(2)", "for _ in range(1)")
    text = text.replace("return vf.ProgramResult(exit_code=0", "return vf.ProgramResult(exit_code=int(data.idx % 2)")
    (here / "breaks.py").write_text(text)
    assert played(here, train, {}, "data.task.id=breaks") == 5
    said = " ".join(capsys.readouterr().err.split())
    assert "episodes failed or took too long, more than env.max_failed=0.1" in said and "EpisodeFailed" in said
    assert played(here, train, {}, "data.task.id=breaks", "run_dir=kept", "env.max_failed=1.0") == 0
    unscored, failed = (logged(here / "kept", f"train/{name}") for name in ("completions/unscored", "env/failed"))
    assert unscored[0] > 0 and failed[0] == unscored[0] / 32


def test_an_episode_that_takes_too_long_is_unscored_and_the_others_are_learned_from(
    here: Path, train: Callable[..., int]
) -> None:
    text = (here / "sums.py").read_text().replace("import httpx", "import asyncio\n\nimport httpx")
    text = text.replace("            for _ in range(2):", "            await asyncio.sleep(60 * (data.idx % 2))\n            for _ in range(2):")  # fmt: skip  # noqa: E501
    (here / "sleeps.py").write_text(text)
    words = ["data.task.id=sleeps", "env.max_failed=1.0", "trainer.max_steps=1"]
    assert played(here, train, {}, *words, agent_timeout=10.0, patience=0.2) == 0
    (share,) = logged(here / "run", "train/env/timeouts")
    assert 0 < share < 1 and logged(here / "run", "train/completions/unscored") == [32 * share]
    (path, *_) = sorted((here / "run" / "samples").glob("step_*.parquet"))
    late = [row for row in pyarrow.parquet.read_table(path).to_pylist() if row["end"] == "timeout"]
    assert len(late) == 32 * share and all("agent_timeout=10 s" in row["episode_error"] for row in late)


def test_a_wrong_environment_is_refused(
    here: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert played(here, train, {"max_truns": 1}) == 2
    assert "max_truns" in capsys.readouterr().err


def test_a_set_that_wants_its_runtime_is_refused_without_a_harness_and_played_with_one(
    here: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (here / "sums.py").read_text()
    text = text.replace("async def right(self, trace: vf.Trace)", "async def right(self, trace, runtime: vf.Runtime)")
    text = text.replace(
        "return float(trace.last_reply", 'await runtime.write("a", b"b")\n        return float(trace.last_reply'
    )
    (here / "writes.py").write_text(text)
    words = ["data.task.id=writes", "trainer.max_steps=1"]
    assert train(*SMALL, *words) == 2
    said = capsys.readouterr().err
    assert "@reward right reads the runtime" in said and "VerifiersHarness" in said
    assert not (here / "run" / "hf").exists()
    assert played(here, train, {}, *words, "run_dir=played") == 0
    assert logged(here / "played", "train/verifiers/right")
