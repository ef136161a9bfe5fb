"""The repository itself: what is written is tracked, and knows nothing of the machine it was written on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def tracked(root):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [root / name for name in listed.stdout.split("\0") if name]


def test_every_test_and_module_is_tracked(root, tracked):
    """An ignore pattern that is not anchored once hid a whole folder of tests."""
    ignored = subprocess.run(
        ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "-z", "tests", "lit_rl", "conf", "scripts"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lost = [name for name in ignored.stdout.split("\0") if name.endswith((".py", ".yaml"))]
    assert lost == []


def test_no_file_names_a_path_of_a_machine(tracked):
    pattern = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")
    texts = [p for p in tracked if p.suffix in {".py", ".md", ".yaml", ".toml", ".ipynb", ".txt"} and p.is_file()]
    assert [str(p) for p in texts if p.name != "test_repository.py" and pattern.search(p.read_text())] == []


def test_below_families_and_loop_nothing_takes_a_lightning_module(root):
    """Helpers that take the module back are how a layout grows circles: they are given values."""
    algorithms = root / "lit_rl" / "algorithms"
    below = [p for f in ("checks", "terms", "evaluation", "rollouts", "optim") for p in (algorithms / f).glob("*.py")]
    below += [algorithms / f"{name}.py" for name in ("records", "data_parallel", "chosen_functions")]
    found = []
    for path in below:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                kind = "" if node.annotation is None else ast.unparse(node.annotation)
                if node.arg in ("module", "pl_module") or "LightningModule" in kind:
                    found.append(f"{path.name}:{node.lineno} {node.arg}: {kind}")
    assert len(below) > 30 and found == []


def test_the_breaks_of_the_mutation_script_still_fit_the_code(root):
    script = [sys.executable, "scripts/mutations.py", "--check"]
    told = subprocess.run(script, cwd=root, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout


def test_what_is_left_to_make_test_all_is_there(root):
    names = [line for line in (root / "tests/later.txt").read_text().splitlines() if not line.startswith("#")]
    gone = []
    for name in names:
        file, *places = name.partition("[")[0].split("::")
        tree = {node.name for node in ast.walk(ast.parse((root / "tests" / file).read_text())) if hasattr(node, "name")}
        gone += [name] if not tree.issuperset(places) else []
    assert gone == [] and len(names) == len(set(names))


@pytest.mark.xdist_group("shared")
def test_workers_see_the_groups_of_tests(request):
    """A pytest that hides them from pytest-xdist makes every worker start what one was to share, without a word."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process")
    assert request.node.nodeid.endswith("@shared")
