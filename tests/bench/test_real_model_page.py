"""docs/real-model.md has the numbers of its run, and the run sets TRL's process as it says."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest
import real_model
from bench.suites import KEEP


def test_the_tables_are_what_the_numbers_make() -> None:
    text = real_model.PAGE.read_text()
    found = json.loads(real_model.NUMBERS.read_text())
    assert text == real_model.with_tables(text, found), "run: python scripts/real_model.py --page"
    found["steps"]["TRL"] += 1
    assert text != real_model.with_tables(text, found)


def test_a_run_gets_its_variables_and_its_peak_is_written_down(tmp_path: Path) -> None:
    code = "import os; print(os.environ['MALLOC_MMAP_MAX_'], os.environ['HF_HUB_OFFLINE'])"
    real_model.run("one", [sys.executable, "-c", code], tmp_path, KEEP)
    assert (tmp_path / "one.log").read_text() == "0 1\n"
    # A new process begins with the peak of the one that starts it, and a worker of these tests may be large.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert 0 < json.loads((tmp_path / "one.json").read_text())["peak_gib"] < max(1, 1.01 * own)
    with pytest.raises(SystemExit, match="no such thing"):
        real_model.run("two", [sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path)
