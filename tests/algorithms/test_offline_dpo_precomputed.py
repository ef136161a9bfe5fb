"""Precomputed log-probs of the reference: the same run without the reference, and files that are taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from precomputed_runs import Look, data, files, fit
from small_rollouts import trainer

from lit_rl.algorithms import DPO, AdamW, Constant
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.rollout import Sampling
from lit_rl.data.tasks import AdditionPairs
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.references import AdapterBase, Auto, FrozenCopy, OtherModel
from lit_rl.ops.preference_losses import aot


def module(lora: bool = False, **settings: Any) -> DPO:
    model = LanguageModel("tiny", lora=Lora(r=2) if lora else None)
    sampling = Sampling(max_new_tokens=6)
    return DPO(model, optimizer=AdamW(lr=1e-3), scheduler=Constant(), sampling=sampling, **settings)


@pytest.mark.parametrize(
    ("lora", "reference"),
    [(False, Auto), (True, FrozenCopy), (True, AdapterBase),
     (False, lambda: Auto(device="cpu")), (False, lambda: OtherModel("tiny"))],
    ids=["full-auto", "lora-frozen", "lora-base", "full-cpu", "other"],
)  # fmt: skip
def test_the_numbers_are_the_same(lora: bool, reference: Any, tmp_path: Path) -> None:
    """Also where the policy keeps the base that its adapter shares with the reference."""
    live = fit(tmp_path / "live", module(lora, reference=reference()))
    kept = fit(tmp_path / "kept", module(lora, reference=reference(), precompute_reference=True))
    assert kept == pytest.approx(live, rel=1e-5)
    if reference is Auto:
        assert fit(tmp_path / "kept", module(lora, reference=reference(), precompute_reference=True)) == kept
    assert live[0] != pytest.approx(live[-2], rel=1e-3), "nothing was learned, so nothing was compared"
    assert len(files(tmp_path / "kept" / "cache")) == 2
    assert not (tmp_path / "live" / "cache").exists()


def test_other_losses_read_them_too(tmp_path: Path) -> None:
    """Those of all micro-batches of a step, and sums in which the tail counts less."""
    settings = {"preference": aot, "tail_weight": 0.5}
    live = fit(tmp_path / "live", module(**settings))
    assert fit(tmp_path / "kept", module(**settings, precompute_reference=True)) == pytest.approx(live, rel=1e-5)


def test_the_reference_is_gone_and_the_policy_whole(tmp_path: Path) -> None:
    dpo = module(reference=FrozenCopy(), precompute_reference=True)
    look = Look()
    fit(tmp_path, dpo, callbacks=[look])
    before, after = look.held
    assert isinstance(before, torch.nn.Module) and after is None
    assert sum(p.numel() for p in before.parameters()) == 0
    assert all(p.numel() for p in dpo.policy.parameters())


def test_files_are_found_by_content(tmp_path: Path) -> None:
    """Other training rows: the validation rows are the same, so their file is. Another reference: none is."""
    cache = str(tmp_path / "cache")
    fit(tmp_path, module(precompute_reference=True, reference_cache=cache))
    first = files(tmp_path / "cache")
    rows = [*AdditionPairs(max_operand=12, val_rows=7).train()[:40]]

    class Fewer:
        def train(self) -> list[dict[str, Any]]:
            return rows

        def val(self) -> list[dict[str, Any]]:
            return AdditionPairs(max_operand=12, val_rows=7).val()

    fit(tmp_path, module(precompute_reference=True, reference_cache=cache), data(task=Fewer()))
    assert len(files(tmp_path / "cache")) == len(first) + 1
    fit(tmp_path, module(True, precompute_reference=True, reference_cache=cache), data(task=Fewer()))
    assert len(files(tmp_path / "cache")) in (len(first) + 2, len(first) + 3)


def test_a_second_fit_goes_on_and_other_rows_are_refused(tmp_path: Path) -> None:
    dpo, source = module(precompute_reference=True), data()
    fit(tmp_path, dpo, source)
    fit(tmp_path, dpo, source, max_steps=2)
    with pytest.raises(ConfigError, match="released the reference"):
        fit(tmp_path, dpo, data(task=AdditionPairs(max_operand=13, val_rows=7)))
    with pytest.raises(ConfigError, match="released the reference"):
        trainer(tmp_path, limit_val_batches=1.0).validate(dpo, datamodule=data(task=AdditionPairs(13, 9)))


def test_before_the_training_the_reference_itself_is_asked(tmp_path: Path) -> None:
    dpo, source = module(precompute_reference=True), data()
    runner = trainer(tmp_path, limit_val_batches=1.0)
    runner.validate(dpo, datamodule=source, verbose=False)
    assert float(runner.callback_metrics["val/rewards/margins"]) == pytest.approx(0, abs=1e-6)
    assert not (tmp_path / "cache").exists()


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, module(precompute_reference=True))
    for path in files(tmp_path / "cache"):
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(StorageError, match="Remove it"):
        fit(tmp_path, module(precompute_reference=True))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    trainer(tmp_path, fast_dev_run=True).fit(module(precompute_reference=True), datamodule=data())
    assert not (tmp_path / "cache").exists()
