"""`import lit_rl` is light, and has the names that a notebook needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lit_rl
import lit_rl.callbacks


def test_the_package_alone_loads_no_torch() -> None:
    code = (
        "import sys, lit_rl; assert 'GRPO' in dir(lit_rl); "
        "print([name for name in ('torch', 'lightning', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_is_there_and_is_the_one_of_its_module() -> None:
    for name in lit_rl.__all__:
        found = getattr(lit_rl, name)
        assert found is getattr(sys.modules[lit_rl._NAMES.module_of[name]], name)
        assert name in vars(lit_rl) and name in dir(lit_rl)


def test_dir_lists_the_public_names_alone() -> None:
    assert {name for name in dir(lit_rl) if not name.startswith("__")} == set(lit_rl.__all__)


@pytest.mark.parametrize("package", [lit_rl, lit_rl.callbacks], ids=lambda package: package.__name__)
def test_type_checkers_are_told_the_same_names(package: Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.name == alias.asname  # a re-export
        told[alias.name] = node.module
    assert told == package._NAMES.module_of
    assert all(getattr(package, name) is getattr(sys.modules[place], name) for name, place in told.items())


def test_all_algorithms_are_among_them() -> None:
    import lit_rl.algorithms

    assert {name for name in vars(lit_rl.algorithms) if name[0].isupper()} <= set(lit_rl.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"lit_rl has no 'GRP0' of its own\. Did you mean 'GRPO'\?"):
        lit_rl.GRP0  # noqa: B018  # pyright: ignore
    with pytest.raises(ImportError):
        from lit_rl import Nothing  # noqa: F401  # pyright: ignore
    assert not hasattr(lit_rl, "__wrapped__")
