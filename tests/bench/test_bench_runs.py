"""The benchmark runs: real trainers in their own processes, through gate, turns, table and page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench.bounds import GateError
from bench.protocol import ContenderFailed
from bench.run import Place, header, of_machine, results_of, save
from bench.suites import OURS, REFERENCE, ours, peers
from bench.workload import Workload
from bench_results import small

WORK = Workload("small", shape="tiny", prompts=2, group=4, prompt_tokens=6, completion_tokens=8, lengths="variable")


def place(folder: Path) -> Place:
    return Place(folder, sys.executable, "cpu", threads=1)


@pytest.mark.all
def test_a_step_of_ours_is_timed_beside_one_of_trl(tmp_path: Path) -> None:
    benchmark = small(WORK, [*peers(WORK, []), ours(OURS)])
    where = place(tmp_path)
    run = header("smoke", where, size=64, floats=2**16, times=2)
    run["benchmarks"] = [of_machine(run, result) for result in results_of([benchmark], where)]
    save(run, tmp_path / "docs" / "benchmarks" / "cpu.json", tmp_path / "docs")
    (found,) = json.loads((tmp_path / "docs" / "benchmarks" / "cpu.json").read_text())["benchmarks"]
    assert list(found["contenders"]) == [REFERENCE, OURS]
    for one in found["contenders"].values():
        (turn,) = one["turns"]
        assert len(turn["seconds"]) == 1 and 0 < turn["phases"][0]["generate"] < turn["seconds"][0]
        assert one["flops"] > 0 and turn["peak"] > 1e8
    assert found["contenders"][OURS]["gate"]["tokens"] == sum(WORK.lengths_of(0))
    assert run["machine"]["flops"]["float32"] > 0
    assert "### small" in (tmp_path / "docs" / "benchmarks.md").read_text()


@pytest.mark.exhaustive
def test_a_contender_with_another_temperature_gets_no_figure(tmp_path: Path) -> None:
    benchmark = small(WORK, [ours(OURS), ours("hot", "sampling.temperature=2")])
    with pytest.raises(GateError, match=r"small: hot computes something else .* log-probs differ"):
        list(results_of([benchmark], place(tmp_path)))


@pytest.mark.exhaustive
def test_a_contender_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match=r"algo\.group_sise"):
        list(results_of([small(WORK, [ours("typo", "algo.group_sise=3")])], place(tmp_path)))
