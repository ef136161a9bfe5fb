"""docs/papers.md: every paper that the code names is there, and every command composes and builds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from composed_configs import tree_of
from doc_blocks import table_rows
from doc_runs import left_as_found

import lit_rl
from lit_rl.cli.build import build

ROOT = Path(lit_rl.__file__).parents[1]
ROWS = table_rows(ROOT / "docs" / "papers.md")


@pytest.mark.all
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_command_of_a_paper_composes_and_builds(row: list[str]) -> None:
    """A command of one preset is built by tests/cli/test_configs.py: here its file has to be there."""
    words = row[1].strip("`").split()
    assert words[:2] == ["python", "train.py"]
    match words[2:]:
        case [preset] if preset.startswith("algo="):
            assert (ROOT / "conf" / "algo" / f"{preset.removeprefix('algo=')}.yaml").is_file()
        case overrides:
            with left_as_found():
                assert build(tree_of(*overrides)["algo"]) is not None


def test_every_paper_that_the_code_names_is_told() -> None:
    files = [*(ROOT / "lit_rl").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    named = {number for path in files for number in re.findall(r"\b\d{4}\.\d{5}\b", path.read_text())}
    told = set(re.findall(r"arXiv:(\d{4}\.\d{5})", (ROOT / "docs" / "papers.md").read_text()))
    assert len(named) > 40
    assert not named - told


def test_every_setting_says_what_it_is_and_every_page_is_there() -> None:
    for paper, _, setting, page in ROWS:
        assert setting and page, paper
        for target in re.findall(r"\]\(([^)#]+)\)", page):
            assert (ROOT / "docs" / target).is_file(), f"{paper}: {target}"
