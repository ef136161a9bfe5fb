"""docs/reliability.md names for every kind of bad input, and for what ends a run, a test that is there, and exit codes
that are ours."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from doc_blocks import table_rows

from lit_rl.core import errors

PLACES = re.compile(r"`([\w/]+\.py)::(\w+)`")
CODES = {0, 130, 137, 143} | {kind.exit_code for kind in errors.LitRLError.__subclasses__()}


@cache
def names(file: Path) -> set[str]:
    """Of the test functions and classes of a file that run in CI: not the exhaustive ones."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds))
    return {node.name for node in found if "pytest.mark.exhaustive" not in map(ast.unparse, node.decorator_list)}


def test_every_kind_of_bad_input_has_its_test(root: Path) -> None:
    rows = table_rows(root / "docs" / "reliability.md", "Bad input: what happens")
    assert len(rows) > 40
    for what, _, codes, tests in rows:
        places = PLACES.findall(tests)
        assert places and not PLACES.sub("", tests).strip(", "), f"{what}: {tests}"
        for file, name in places:
            assert name in names(root / "tests" / file), f"{what}: {file} has no {name}"
        assert {int(code) for code in codes.replace("its own", "1").split(", ")} <= CODES | {1}, f"{what}: {codes}"


def test_whatever_ends_a_run_has_its_test(root: Path) -> None:
    """What is saved, with which exit code, within how many seconds."""
    rows = [row for row in table_rows(root / "docs" / "reliability.md", "What ends a run") if len(row) == 6]
    assert len(rows) > 18
    for what, *_, test in rows:
        ((file, name),) = PLACES.findall(test)
        assert name in names(root / "tests" / "runs" / file), f"{what}: {file} has no {name}"
