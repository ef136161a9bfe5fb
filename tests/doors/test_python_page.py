"""The Python of docs/python.md runs as it stands, from top to bottom, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

QUIET = ", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, "


def test_the_page_runs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "docs" / "python.md").read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("max_steps=2, ", f'max_steps=2{QUIET}accelerator="cpu", '), names)
    assert names["module"].global_step == 2
