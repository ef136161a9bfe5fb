"""What docs/other-environments.md tells people to type works, with the real packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from doc_blocks import blocks
from doc_runs import SMALL

pytest.importorskip("verifiers.v1")
ELSEWHERE = {"env.path=./my_openenv.py:OnServer", "env.path=./my_harness.py:rollout"}
"""Needs a server, which test_openenv.py starts; needs uv and a network, test_verifiers_runs.py has another harness."""
PAGE = Path(__file__).parents[2] / "docs" / "other-environments.md"


def test_the_commands_of_the_page_run(cwd: Path, train: Callable[..., int], root: Path) -> None:
    found, ran = blocks(PAGE), 0
    for block in found:
        if block.file is not None:
            (cwd / block.file).write_text(block.text)
    for number, words in enumerate(words for block in found for words in block.commands):
        if words[:2] != ["python", "train.py"]:
            assert words[0] in ("pip", "make"), words
            continue
        if ELSEWHERE & set(words):
            continue
        assert train(*words[2:], *SMALL, f"run_dir=run_{number}", "logger=none") == 0, words
        ran += 1
    assert ran
