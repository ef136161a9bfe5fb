"""`kill -9` in the middle of an episode: the run that goes on equals the one that nothing interrupted."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs_helpers import SMALL, assert_same_run

pytestmark = [pytest.mark.faults, pytest.mark.all]

FILE = Path(__file__).parent / "dying_worlds.py"
TOOLS = ",".join(f"{FILE}:tool_{digit}" for digit in range(10))

RUN = [
    *SMALL,
    "trainer.max_steps=5",
    "trainer.val_check_interval=null",
    "trainer.check_val_every_n_epoch=null",
    "callbacks.checkpoint.every_n_train_steps=2",
    "sampling.max_new_tokens=4",
]
LIMITS = ["env.max_turns=3", "env.max_tokens=40", "env.max_observation_tokens=8"]
GAME = [*LIMITS, "env=environment", f"env.path={FILE}:Sums", "reward=environment"]
WORLD = [
    *LIMITS,
    "env=tools",
    f"env.functions=[{TOOLS}]",
    "env.parser=regex",
    "env.call_pattern='^(?P<name>[0-9])(?P<arguments>)'",  # one call a turn: what is in flight is asked again
    "env.journal=true",
    "reward=function",
    f"reward.fn={FILE}:told",
]

AGENT = [
    *("env=rollout_func", f"env.path={FILE}:forks", "env.max_branches=4", "env.max_prompt_tokens=60"),
    *("env.max_tokens=120", "reward=function", f"reward.fn={FILE}:letters"),
]


@pytest.mark.parametrize("words", [GAME, WORLD, AGENT], ids=["deterministic", "journal", "forks"])
def test_the_run_goes_on_as_if_nothing_had_been(
    words: list[str], train: Callable[..., int], process: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world is asked as often as in the whole run where a journal answers in its place."""
    worlds, runs = [tmp_path / "world_a", tmp_path / "world_b"], [tmp_path / "a", tmp_path / "b"]
    for world in worlds:
        world.mkdir()
    monkeypatch.setenv("WORLD", str(worlds[0]))
    assert train(*RUN, *words, f"run_dir={runs[0]}") == 0
    calls = (worlds[0] / "calls").stat().st_size
    (worlds[1] / "dies_at").write_text(str(calls // 2 + 1))
    monkeypatch.setenv("WORLD", str(worlds[1]))
    child = process(*RUN, *words, f"run_dir={runs[1]}")
    output, _ = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, output
    assert train(*RUN, *words, f"run_dir={runs[1]}", "ckpt_path=last") == 0
    assert_same_run(*runs)
    if words is WORLD:
        assert (worlds[1] / "calls").stat().st_size == calls
        assert len(list((runs[1] / "env_journal").iterdir())) <= 3
