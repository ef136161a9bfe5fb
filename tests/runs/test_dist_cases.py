"""Two real processes, replicated or sharded, learn what one does: a table of short runs, `dist_cases.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist_cases import CASES, OFFLINE, ROWS, run
from dist_equal import Ones, assert_equal_runs, left

from lit_rl.algorithms.gkd import writer_of

pytestmark = [pytest.mark.dist, pytest.mark.all]
__all__ = ["run"]  # for `one`


@pytest.mark.parametrize("row", ROWS)
def test_two_processes_equal_one(row: str, two: Path, one: Ones) -> None:
    way, name = row.split("/")
    case = CASES[name]
    alone, both = one(name, case.alone), left(two / way, name)
    start = case.start(one.folder)
    limits = {"share": case.share, "beyond": case.beyond, "moved": case.moved}
    assert_equal_runs(alone, both, start=start.name, **limits)
    assert alone.get("drawn") == both.get("drawn"), "episodes, less by whom they were drawn"
    assert not case.shown or case.shown(both)
    if case.caches:
        folders = one.folder / str(case.alone), two / way
        here, there = ([each.name for each in (folder / name / "cache").iterdir()] for folder in folders)
        assert sorted(here) == sorted(there) and len(here) == case.caches
    if name.startswith("vision-"):
        begun, adapters = start.load().state_dict(), name in ("vision-lora", "vision-eyes")
        found = {key.removeprefix("policy."): weight for key, weight in both["weights"].items()}
        eyes = [key for key in found if ("vision" in key or "visual" in key) and (".lora_B." in key or not adapters)]
        assert any(not found[key].equal(begun[key]) for key in eyes), "what sees was trained"


@pytest.mark.parametrize("name", OFFLINE)
def test_micro_batches_equal_a_whole_batch(name: str, one: Ones) -> None:
    assert_equal_runs(one(name), one(name, 4), share=2e-4, beyond=2e-6, moved=1e-4)


@pytest.mark.parametrize("rows", [("ddp/iterative-dpo", "ddp/online-dpo")])
def test_a_reference_had_moved(rows: tuple[str, str], two: Path) -> None:
    moved, still = (left(two, row)["metrics"]["train/objective/kl"] for row in rows)
    assert abs(moved) < abs(still)


def test_the_steps_of_gkd_had_every_writer() -> None:
    steps = range(CASES["gkd-mixed"].steps)
    writers = {writer_of(step, seed=0, on_policy_fraction=0.5, teacher_completions=True) for step in steps}
    assert writers == {"student", "teacher"}
