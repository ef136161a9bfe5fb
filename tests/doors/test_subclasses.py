"""A researcher may derive from what is shipped; what is shipped derives from families alone."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lit_rl
import lit_rl.algorithms
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.data.tasks import Addition

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


def test_a_class_may_be_derived_from() -> None:
    """`@final` would be a complaint of every type checker; it leaves a mark."""
    for kind in (*ALGORITHMS, *DATA):
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


class Derived(lit_rl.GRPO):
    """Of a user, who may change its name."""


class Defective(lit_rl.GRPO):
    """Asks for a key that is missing, of something else than the checkpoint."""

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        super().load_rank_state(saved)
        raise KeyError("tokens")


def test_a_checkpoint_goes_into_a_derived_class_and_into_no_other_algorithm(tmp_path: Path) -> None:
    def fit(kind: type, steps: int, resume: Path | None = None) -> Path:
        module = kind("tiny", lit_rl.exact_match, sampling=lit_rl.Sampling(max_new_tokens=2), group_size=2)
        data = lit_rl.RolloutDataModule(task=Addition(val_rows=0, max_operand=5), prompts_per_rollout=2)
        trainer = L.Trainer(
            max_steps=steps, accelerator="cpu", use_distributed_sampler=False, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return tmp_path / f"{steps}.ckpt"

    first = fit(lit_rl.GRPO, 1)
    fit(lit_rl.GRPO, 3, fit(Derived, 2, first))
    with pytest.raises(StorageError, match="GRPO wrote it, and this run trains with RLOO"):
        fit(lit_rl.RLOO, 2, first)
    with pytest.raises(KeyError, match="tokens"):  # a defect keeps its traceback
        fit(Defective, 2, first)
