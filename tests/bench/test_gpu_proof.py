"""The proof on one GPU keeps what each stage found, however it ended, and its checks can fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import page
from gpu import kernels, prove, step_trace, table
from gpu.result import Result

SCRIPTS = Path(prove.__file__).parents[1]
FIRST = "from gpu.result import Result; from pathlib import Path; Result(Path({file!r})).check('first', 1, most=2); "


def stage(out: Path, then: str, box: float = 60) -> dict[str, Any]:
    """Run a stage named "sound" that finds one row and goes on so; returns its file."""
    code = FIRST.format(file=str(out / "sound.json")) + then
    prove.run_stage("sound", [sys.executable, "-c", code], out, box, {"PYTHONPATH": str(SCRIPTS)})
    return table.read(out)["sound"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_stage_that_breaks_keeps_its_rows_and_its_last_lines(tmp_path: Path) -> None:
    found = stage(tmp_path, "raise ValueError('no such card')")
    assert found["status"] == "broke with 1" and found["rows"][0]["passed"] is True
    assert found["last_lines"][-1] == "ValueError: no such card"
    assert not table.passed({"sound": found})
    assert "ValueError: no such card" in table.markdown({"sound": found})


def test_a_stage_out_of_time_is_killed_with_its_children_though_it_ignores_signals(tmp_path: Path) -> None:
    child = "import subprocess, sys, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child += (
        f"c = subprocess.Popen(['sleep', '60']); Path({str(tmp_path / 'child')!r}).write_text(str(c.pid)); c.wait()"
    )
    began = time.perf_counter()
    found = stage(tmp_path, child, box=6)
    assert time.perf_counter() - began < 30
    assert found["status"] == "ran out of time" and len(found["rows"]) == 1
    until = time.monotonic() + 20  # a signal takes a moment where cores are busy
    while alive(int((tmp_path / "child").read_text())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(int((tmp_path / "child").read_text()))


def test_a_stage_that_ended_passes_unless_a_check_failed(tmp_path: Path) -> None:
    assert table.passed({"sound": stage(tmp_path, "pass")})
    result = Result(tmp_path / "sound.json")
    result.check("within", 0.5, least=0.5, most=0.5)
    assert result.rows[-1].passed
    for value in (0.6, 0.4, math.nan):
        result.check("without", value, least=0.5, most=0.5)
        assert result.rows[-1].passed is False
    with result.part("a part"):
        raise RuntimeError("broken\nin two lines")
    assert result.rows[-1].passed is False and result.rows[-1].note == "broke: RuntimeError: broken"
    told = json.loads((tmp_path / "sound.json").read_text())
    assert len(told["rows"]) == 5 and not table.passed({"sound": told | {"status": table.ENDED}})


def test_the_page_shows_every_row_with_its_bound_and_without_files_that_no_card_was_there(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    page.write(tmp_path, tmp_path / "page.md", tmp_path)
    assert "No card was there yet" in (tmp_path / "page.md").read_text()
    result = Result(tmp_path / "gpu" / "machine.json")
    result.figure("card", "A card of 2031")
    told = json.loads((tmp_path / "gpu" / "machine.json").read_text())
    machine = told | {"status": table.ENDED, "seconds": 3.0, "box": 20}
    rows = Result(tmp_path / "gpu" / "kernels.json")
    rows.check("a | kernel", 3e-5, most=1e-4, unit="nats")
    rows.check("another", 2.0, most=1e-4)
    rows.not_run("a third", "there is no NCCL")
    found = json.loads((tmp_path / "gpu" / "kernels.json").read_text())
    found |= {"status": table.ENDED, "seconds": 61.0, "box": 80}
    for name, one in (("machine", machine), ("kernels", found)):
        (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(one))
    page.write(tmp_path, tmp_path / "page.md", tmp_path)
    text = (tmp_path / "page.md").read_text()
    assert "No card was there yet" not in text and "card A card of 2031." in text
    assert "| kernels | ended | 61 | 80 | 1 of 2 | 1 |" in text
    assert "| a / kernel | 3e-05 nats | <= 0.0001 | passed |  |" in text
    assert "| another | 2 | <= 0.0001 | **failed** |  |" in text


@pytest.mark.all
def test_kernels_are_compared_with_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result(tmp_path / "kernels.json")
    kernels.kernels(result)
    checks = [row for row in result.rows if row.passed is not None]
    assert len(checks) > 20 and all(row.passed for row in checks)
    calls = []

    def wrong(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(hidden)
        return (hidden @ weight.T)[:, 0] * (1 + 1e-3 * (len(calls) % 2))

    kernels.compared(result, "wrong", wrong, torch.float32, (4, 8), (16, 8))
    assert not any(row.passed for row in result.rows[-3:])


def test_spans_that_overlap_count_once() -> None:
    assert step_trace.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4


@pytest.mark.all
def test_a_whole_stage_in_small_shapes(tmp_path: Path) -> None:
    """The main command, as `prove.sh` runs it."""
    command = ["bash", str(SCRIPTS / "gpu" / "prove.sh"), str(tmp_path), "--only", "machine", "main_command"]
    environment = os.environ | {"PROOF_SMALL": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    what = {row["what"]: row["value"] for row in table.read(tmp_path)["main_command"]["rows"]}
    assert what["lit_rl: a step"] > what["lit_rl: generate"] > 0
    assert 0 < what["lit_rl: MFU of learning"] < 1 and 0 < what["lit_rl: share of the limit, step"] < 1
    assert "A rehearsal in small shapes" in (tmp_path / "table.md").read_text()
