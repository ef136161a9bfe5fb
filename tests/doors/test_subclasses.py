"""A researcher may derive from what is shipped; what is shipped derives from families alone."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import lit_rl
import lit_rl.algorithms
from lit_rl.errors import ConfigError

ALGORITHMS = [kind for kind in vars(lit_rl.algorithms).values() if inspect.isclass(kind) and hasattr(kind, "export")]
DATA = [lit_rl.SupervisedDataModule, lit_rl.PreferenceDataModule, lit_rl.StepwiseDataModule, lit_rl.RolloutDataModule]


def test_no_class_of_ours_derives_from_an_algorithm(root: Path) -> None:
    names = {kind.__name__ for kind in (*ALGORITHMS, *DATA)}
    assert len(names) > 15
    for path in (root / "lit_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & names, (
                    f"{path}: {node.name} derives from {bases & names}; put what they share in families/"
                )


@pytest.mark.parametrize("kind", [*ALGORITHMS, *DATA], ids=lambda kind: kind.__name__)
def test_a_class_may_be_derived_from(kind: type) -> None:
    """`@final` would be a complaint of every type checker; it leaves a mark."""
    assert not getattr(kind, "__final__", False)
    assert isinstance(type("Mine", (kind,), {}), type)


def test_a_derived_class_keeps_its_keywords() -> None:
    class Mine(lit_rl.GRPO):
        def __init__(self, model: Any, reward: Any, *, temper: float = 1.0, **terms: Any) -> None:
            super().__init__(model, reward, **terms)
            self.temper = temper

    module = Mine("tiny", lit_rl.exact_match, temper=2.0, group_size=4)
    assert module.temper == 2.0 and module.group_size == 4
    with pytest.raises(ConfigError, match=r"Mine takes no tempr=\. Did you mean 'temper'\?"):
        Mine("tiny", lit_rl.exact_match, tempr=2.0)
