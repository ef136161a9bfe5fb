"""Precomputed references of KTO and BCO: the same runs, also where other completions and prompts are read too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from precomputed_runs import Look, data, files, fit
from small_rollouts import trainer
from tiers import in_turn

from lit_rl.algorithms import BCO, KTO, AdamW, Constant
from lit_rl.algorithms.terms.verdict_terms import DensityRatio, RunLength
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.rollout import Sampling
from lit_rl.data.tasks import AdditionPairs
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.references import FrozenCopy
from lit_rl.ops.preference_losses import apo_zero_unpaired

METHODS: dict[str, Any] = {
    "kto": KTO,
    "apo": lambda *args, **settings: KTO(*args, verdict=apo_zero_unpaired, **settings),
    "bco": BCO,
    "bco-weighted": lambda *args, **settings: BCO(*args, prompt_weights=DensityRatio(sample_rows=40), **settings),
}


def module(name: str, lora: bool = False, **settings: Any) -> Any:
    model = LanguageModel("tiny", lora=Lora(r=2) if lora else None)
    sampling = Sampling(max_new_tokens=6)
    return METHODS[name](model, optimizer=AdamW(lr=1e-3), scheduler=Constant(), sampling=sampling, **settings)


def small(**settings: Any) -> Any:
    """24 training rows of 12 sums, so that a run of several epochs is short."""
    rows = AdditionPairs(max_operand=12, val_rows=7)

    class Task:
        def train(self) -> list[dict[str, Any]]:
            return [*rows.train()[:12]]

        def val(self) -> list[dict[str, Any]]:
            return [*rows.val()]

    return data(task=Task(), **settings)


@in_turn(name=["kto", "bco", "bco-weighted"], lora=[False, True])
def test_the_numbers_are_the_same(name: str, lora: bool, tmp_path: Path) -> None:
    """Over two epochs, whose steps pair other rows, and in validation before, while and after."""
    settings = {"max_steps": 5, "val_check_interval": 4}
    live = fit(tmp_path / "live", module(name, lora), small(), **settings)
    kept = fit(tmp_path / "kept", module(name, lora, precompute_reference=True), small(), **settings)
    assert kept == pytest.approx(live, rel=1e-5)
    if name == "kto":
        assert fit(tmp_path / "kept", module(name, lora, precompute_reference=True), small(), **settings) == kept
    assert len(live) == 11 and abs(live[0] - live[-2]) > 1e-4, "nothing was learned, so nothing was compared"
    # Training rows and validation rows; for the baseline two epochs of pairs, and those of validation.
    assert len(files(tmp_path / "kept" / "cache")) == (5 if name == "kto" else 2)
    assert not (tmp_path / "live" / "cache").exists()


def test_the_reference_is_gone_and_nobody_asks_for_it(tmp_path: Path) -> None:
    made, look = module("bco-weighted", reference=FrozenCopy(), precompute_reference=True), Look()
    fit(tmp_path, made, small(), callbacks=[look])
    before, after = look.held
    assert isinstance(before, torch.nn.Module) and after is None
    assert sum(p.numel() for p in before.parameters()) == 0
    assert all(p.numel() for p in made.policy.parameters())


def test_a_run_that_goes_on_longer_finds_the_epochs_it_had(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    settings = {"precompute_reference": True, "reference_cache": cache}
    fit(tmp_path / "one", module("kto", **settings), small(), max_steps=6)  # two epochs of three steps
    first = set(files(tmp_path / "cache"))
    fit(tmp_path / "two", module("kto", **settings), small(), max_steps=9)
    assert first < set(files(tmp_path / "cache")) and len(files(tmp_path / "cache")) == len(first) + 1
    fit(tmp_path / "three", module("bco", **settings), small(), max_steps=6)
    assert len(files(tmp_path / "cache")) == len(first) + 1, "the rows are the same for every method"


def test_the_same_pairs_are_in_memory_once_where_nothing_is_shuffled(tmp_path: Path) -> None:
    settings = {"precompute_reference": True, "reference_cache": str(tmp_path / "cache")}
    fit(tmp_path, module("kto", **settings), small(shuffle=False), max_steps=9)
    assert len(files(tmp_path / "cache")) == 4


def test_weights_of_prompts_are_those_of_the_reference(tmp_path: Path) -> None:
    """The regression is fitted to the same rows, and each prompt weighs what it would have weighed alone."""
    live, kept = module("bco-weighted"), module("bco-weighted", precompute_reference=True)
    fit(tmp_path / "live", live, small(), max_steps=2)
    fit(tmp_path / "kept", kept, small(), max_steps=2)
    for name, part in live.prompt_weights.ratio.state().items():
        torch.testing.assert_close(kept.prompt_weights.ratio.state()[name], part, rtol=1e-4, atol=1e-6)
    assert len(kept.prompt_weights.known) == 12 + 7 and not live.prompt_weights.known


def test_rows_that_come_later_are_refused(tmp_path: Path) -> None:
    made, source = module("kto", precompute_reference=True), small()
    fit(tmp_path, made, source, max_steps=3)
    fit(tmp_path, made, source, max_steps=3)
    with pytest.raises(ConfigError, match="released the reference.*epoch 1"):
        fit(tmp_path, made, source, max_steps=6)
    with pytest.raises(ConfigError, match="released the reference"):
        trainer(tmp_path, limit_val_batches=1.0).validate(made, datamodule=data(task=AdditionPairs(13, 9)))


# ---------------------------------------------------------------------- how many steps there are


class Loader:
    """Six steps of four rows, in two micro-batches each."""

    slots = 2

    class order:
        prompts_per_rollout = 4

        @staticmethod
        def epoch(number: int) -> list[int]:
            return [100 * number + row for row in range(24)]

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize(
    ("limits", "steps"),
    [((8, -1), [6, 2]), ((8, 1), [6]), ((-1, 2), [6, 6]), ((6, 5), [6]), ((7, 5, 0.5), [3, 3, 1]), ((-1, 1, 3), [2]),
     ((1, 1, 1), [1]), ((-1, 1, 99), [6]), ((0, 1), []), ((5, 3, 0), [])],
)  # fmt: skip
def test_the_steps_of_a_run(limits: Any, steps: list[int]) -> None:
    epochs = list(RunLength(*limits).epochs(Loader()))
    assert [(number, len(found)) for number, found in epochs] == list(enumerate(steps))
    for number, found in epochs:
        assert [row for rows in found for row in rows] == [100 * number + row for row in range(4 * len(found))]


# ---------------------------------------------------------------------- what is refused


def test_a_run_without_an_end_is_refused(tmp_path: Path) -> None:
    endless = {"max_steps": -1, "max_epochs": -1}
    made = module("kto", precompute_reference=True)
    with pytest.raises(ConfigError, match=r"algo\.precompute_reference=true.*trainer\.max_steps"):
        fit(tmp_path, made, small(), **endless)
    assert made.policy is None, "before any weight is loaded"
    made = module("apo", precompute_reference=True)
    made.trainer = trainer(tmp_path, **endless)
    made.trainer.datamodule = source = small()  # pyright: ignore
    made.trainer.strategy.connect(made)
    source.trainer = made.trainer
    source.prepare(made.tokenizer, "verdicts")
    made.setup("fit")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_scored(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "lit_rl.algorithms.terms.precomputed_reference.ReferenceSource.compute",
        lambda *_: pytest.fail("the reference was asked"),
    )
    (tmp_path / "file").write_text("")
    kept = module("kto", precompute_reference=True, reference_cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match=r"cannot be written .*algo\.reference_cache"):
        fit(tmp_path / "run", kept, small(), max_steps=1)
