"""Laws of shape that fail a build, and the meter that finds what stands out (`scripts/shape.py`)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def shape(root: Path) -> ModuleType:
    sys.path.insert(0, str(root / "scripts"))  # it imports upstream.py beside it
    spec = importlib.util.spec_from_file_location("shape", root / "scripts" / "shape.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shape"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(root / "scripts"))
    return module


def test_no_file_and_no_public_class_has_the_name_of_another(shape: ModuleType, root: Path) -> None:
    found = shape.modules(root / "lit_rl")
    assert not shape.file_names_twice(found)
    assert not shape.class_names_twice(found)


def test_docstrings_open_with_a_verb_or_a_noun(shape: ModuleType, root: Path) -> None:
    found = shape.modules(root / "lit_rl")
    assert [f"{module.name}:{line} {text}" for module in found for line, text in shape.riddles(module)] == []


def test_the_meter_by_hand(shape: ModuleType, tmp_path: Path) -> None:
    """Two packages of a few lines, each with something to flag."""
    files = {
        "a/one.py": '"""A."""\nimport os\n\ndef used():\n    """Return it."""\n    return os.sep\n# why\nX = used()\n',
        "a/two.py": "from p.a.one import X\n\n\nclass Twice:\n    def get(self):\n        return getattr(self, 'x', "
        "X)\n",
        "b/two.py": '"""Whether it is so."""\n\n\nclass Twice:\n    """A class."""\n\n    x = open._theirs\n',
    }
    for name, text in files.items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(text)
    found = shape.modules(tmp_path / "p")
    assert [len(each.code_lines) for each in found] == [4, 4, 2]
    assert [(one.name, by.name) for one, by in shape.with_one_importer(found)] == [("a/one", "a/two")]
    assert [(module.name, function.name, own) for module, function, own in shape.used_once(found)] == [
        ("a/one", "used", True)
    ]
    flags = [flag.split(":")[0] for flag in shape.flags(found)]
    assert sorted({*flags}) == [
        *("class name twice", "docstring", "file name twice", "one importer"),
        *("own attribute guessed", "small", "upstream private name", "used once"),
    ]
    row = shape.figures(found, shape.used_once(found), shape.with_one_importer(found))
    assert (row["files"], row["code lines"], row["imports"]) == ("3", "10", "20%")


@pytest.mark.all
def test_a_step_opens_no_more_files_than_the_table_says(root: Path) -> None:
    run = [sys.executable, str(root / "scripts" / "trace_step.py"), "--check"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
