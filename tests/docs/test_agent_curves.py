"""The curves of docs/agents.md: every task has them, they reach what was set, and the table says what the file says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiers import all_but_exhaustive

REACHED = {"calculator": 0.85, "guess": 0.9, "frozen_lake": 0.95, "chain_sum": 0.5}
"""What the last rollouts of each seed are worth at least, on average."""
PRETRAINED = {"smollm2_tool"}
"""Trained by hand, where the model is there: of these there need be no curve."""


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import run_curves  # pyright: ignore

    return run_curves


def test_every_task_is_learned_from_three_seeds_and_the_table_is_of_them(curves: Any) -> None:
    known = curves.load(curves.DOCS / "images" / "agents.csv")
    assert set(known) - PRETRAINED == set(curves.SHIPPED) == set(REACHED)
    for name, reached in REACHED.items():
        before, after = curves.means(known[name])
        assert len(known[name]) == 3 and max(before) < 0.55 and min(after) > reached, name
    for curve in known["frozen_lake"].values():
        rewards = [reward for _, reward in curve]
        assert rewards[0] < 0.02 and min(rewards[19:]) > 0.9, "within 20 rollouts, and never lost again"
    assert f"{curves.BEGIN}\n{curves.table(known)}\n{curves.END}" in (curves.DOCS / "agents.md").read_text()


@pytest.mark.parametrize("name", all_but_exhaustive(REACHED, ()))
def test_a_task_is_learned_by_the_commands_of_its_page(curves: Any, name: str, tmp_path: Path) -> None:
    """At full length: two minutes a task. The learning tests of test_agents.py are shorter runs of the same."""
    curve = curves.run(name, 0, tmp_path)
    _, (after,) = curves.means({0: curve})
    assert after > REACHED[name], curve


def test_picture_and_table_are_made_from_the_file_again(curves: Any, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("agents.md", "images/agents.csv"):
        shutil.copy(curves.DOCS / name, tmp_path / name)
    curves.main(["agents", "--draw-only", "--docs", str(tmp_path)])
    assert (tmp_path / "images" / "agents.png").stat().st_size > 10_000
    assert (tmp_path / "agents.md").read_text() == (curves.DOCS / "agents.md").read_text()
    known = curves.load(tmp_path / "images" / "agents.csv")
    curves.save(tmp_path / "again.csv", known)
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "images" / "agents.csv").read_text()


def test_a_task_that_is_none_is_named(curves: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        curves.main(["agents", "calculater", "--draw-only"])
    assert "calculater: none of the tasks calculator, guess" in capsys.readouterr().err


def test_a_pretrained_model_is_trained_only_where_it_is_named(curves: Any) -> None:
    assert set(curves.TASKS) - set(curves.SHIPPED) == PRETRAINED
