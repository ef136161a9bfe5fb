"""Uses of other packages' private names are listed, each with a test, and versions that moved are named
(`scripts/upstream.py`)."""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_upstream_names import NAMES


@pytest.fixture(scope="module")
def upstream(root: Path) -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("upstream", root / "scripts" / "upstream.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["upstream"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(upstream: ModuleType) -> list[Any]:
    """Every use in lit_rl."""
    return upstream.uses(upstream.modules())


def test_every_use_has_a_test_and_every_line_of_the_table_a_use(
    upstream: ModuleType, found: list[Any], root: Path
) -> None:
    used = {use.name for use in found}
    bare = [f"{use.file}:{use.line}: {use.name}" for use in found if use.name not in upstream.TESTS]
    assert not bare, "give each of these a test in scripts/upstream.py, or do without it"
    assert not upstream.TESTS.keys() - used, "nothing uses these any more"
    assert [test for test in set(upstream.TESTS.values()) if not (root / test).is_file()] == []
    assert [file for file in upstream.OWN_SIGNATURES if "inspect." not in (root / file).read_text()] == []


def test_every_name_of_that_module_and_every_hook_is_looked_up_in_what_is_installed(
    upstream: ModuleType, found: list[Any]
) -> None:
    known = {name for owners in NAMES.values() for names in owners.values() for name in names}
    known |= {part for owners in NAMES.values() for owner in owners for part in owner.replace(":", ".").split(".")}
    there = [use for use in found if use.file in (upstream.HOME, *upstream.HOOKS) and use.kind != "signature"]
    assert there and [use for use in there if use.name.rpartition(".")[2] not in known] == []


def test_what_the_command_line_and_the_trainer_use_stands_in_one_module(upstream: ModuleType, found: list[Any]) -> None:
    told = f"move it to {upstream.HOME}, or say in scripts/upstream.py why it stands where it is"
    assert not [f"{use.file}:{use.line}: {use.name}" for use in upstream.astray(found)], told
    used = {(use.file, use.name.removeprefix(".")) for use in found}
    hooks = {(file, name) for file, names in upstream.HOOKS.items() for name in names}
    assert not hooks - used, "nothing overrides or calls these any more"


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        ("from torch.nn._reduction import x", "private", "torch.nn._reduction.x"),
        ("import torch as t\nt.cuda._lazy_init()", "private", "torch.cuda._lazy_init"),
        ("def f(model): return model._tied_weights_keys", "private", "._tied_weights_keys"),
        ("def f(model): return getattr(model, '_hf_hook', None)", "private", "._hf_hook"),
        ("import lightning as L\nclass A(L.Trainer):\n  def _run(self): pass", "private", "._run"),
        ("import torch\nclass A(torch.nn.Module): pass\nclass B(A):\n  def _apply(self): pass", "private", "._apply"),
        ("import peft\npeft.PeftModel.forward = None", "patch", "peft.PeftModel.forward"),
        ("import trl\nsetattr(trl.models, 'x', 1)", "patch", "trl.models.x"),
        ("def f(head): head.forward = print", "patch", ".forward"),
        ("def f(it): it.handlers = lambda: None", "patch", ".handlers"),
        ("import inspect\ninspect.signature(print)", "signature", "here.py"),
        ("def f(theirs): return theirs.forward.__code__", "signature", "here.py"),
        ("def _device(): pass\ndef f(part): part._device = None", "private", "._device"),
        (
            "class A:\n  def __init__(self): self._own = 1\n  def f(self, other): return other._theirs",
            "private",
            "._theirs",
        ),
    ],
)
def test_a_new_use_is_found(upstream: ModuleType, code: str, kind: str, name: str) -> None:
    found = upstream.uses([upstream.Module("here.py", ast.parse(code))])
    assert (kind, name) in {(use.kind, use.name) for use in found}


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n  def _own(self): return self._own()",
        "import lit_rl.core.errors\nlit_rl.errors._other",
        "import os\nos._exit(1)",
        "def f(node): return node._target_",
        "import torch\nclass A(torch.nn.Module):\n  def _mine(self): pass\n  def forward(self): return self._mine()",
    ],
)
def test_what_is_lit_rls_own_is_none(upstream: ModuleType, code: str) -> None:
    assert upstream.uses([upstream.Module("here.py", ast.parse(code))]) == []


def test_what_moved_is_named(upstream: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "then.txt").write_text("torch==2.13.0\nHydra_core==1.3.4  # pinned\ngone==1\nnew-line==2\n")
    then = upstream.listed(tmp_path / "then.txt")
    here = {"torch": "2.15.0", "hydra-core": "1.3.4", "new-line": "2", "came": "3"}
    assert upstream.moved(here, then) == ["came absent -> 3", "gone 1 -> absent", "torch 2.13.0 -> 2.15.0"]
    assert upstream.moved(then, then) == []
    assert upstream.installed()["pytest"] == pytest.__version__


def test_the_oldest_are_the_lower_bounds(upstream: ModuleType, root: Path) -> None:
    from packaging.requirements import Requirement

    lines = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    ranges, lowest = [Requirement(line) for line in lines], [Requirement(line) for line in upstream.oldest()]
    assert [each.name for each in lowest] == [each.name for each in ranges]
    for allowed, exact in zip(ranges, lowest, strict=True):
        (pin,) = exact.specifier
        assert pin.operator == "==" and pin.version in allowed.specifier
        assert f">={pin.version}" in {str(bound) for bound in allowed.specifier}
