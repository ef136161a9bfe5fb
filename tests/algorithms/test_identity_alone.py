"""What a run notes of itself, and what it resumes, without a Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.loop import run_identity
from lit_rl.algorithms.loop.run_identity import RunIdentity, run_settings
from lit_rl.algorithms.rollouts.checkpoints import GlobalGenerators, check_precision, load_reference, rng_state
from lit_rl.core.errors import StorageError
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.references import EMA

CPU = torch.device("cpu")


def optimizer(kind: Any = torch.optim.AdamW, lr: float = 0.1) -> tuple[Any, LambdaLR]:
    made = kind([{"params": [torch.nn.Parameter(torch.ones(2))], "name": "policy"}], lr=lr)
    return made, LambdaLR(made, lambda step: 1.0)


def began(**changed: Any) -> RunIdentity:
    identity = RunIdentity()
    identity.model = {"model.name": "tiny", "frozen weights": "1", "reference weights": "2"}
    identity.settings = run_settings(GRPO, {"beta": 0.1, "seed": 0, **changed}, LanguageModel("tiny"))
    return identity


def test_a_run_goes_on_with_its_own_settings_and_says_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(run_identity, "rank_zero_info", said.append)
    first, second = began(), began(beta=0.2)
    first.note_optimizer(*optimizer())
    second.note_optimizer(*optimizer(lr=0.3))
    assert not second.is_resumed
    second.compare({"run": first.record(first.settings)}, "GRPO", resumes=True, allow_changed=False)
    assert second.is_resumed
    restored, schedule = optimizer()
    kept = second.apply_settings(restored, schedule, lambda made: LambdaLR(made, lambda step: 1.0), step=3)
    assert kept is schedule and restored.param_groups[0]["lr"] == 0.3 and not second.is_resumed
    (line,) = said
    assert "from step 3" in line and "algo.beta 0.1 -> 0.2" in line and "optimizer.lr 0.1 -> 0.3" in line


def test_an_optimizer_that_cannot_read_the_state_is_refused_in_either_order() -> None:
    first = began()
    first.note_optimizer(*optimizer())
    saved = {"run": first.record(first.settings)}
    before, after = began(), began()
    before.note_optimizer(*optimizer(torch.optim.SGD))
    with pytest.raises(StorageError, match="optimizer=torch.optim.*AdamW.*SGD"):
        before.compare(saved, "GRPO", resumes=True, allow_changed=False)
    after.compare(saved, "GRPO", resumes=True, allow_changed=False)
    with pytest.raises(StorageError, match="optimizer=torch.optim.*AdamW.*SGD"):
        after.note_optimizer(*optimizer(torch.optim.SGD))


def test_who_reads_weights_alone_compares_no_reference() -> None:
    first, other = began(), began(beta=0.2)
    other.model = {**other.model, "reference weights": "3"}
    saved = {"run": first.record(first.settings)}
    other.compare(saved, "GRPO", resumes=False, allow_changed=False)
    other.compare({}, "GRPO", resumes=False, allow_changed=False)
    assert not other.is_resumed
    with pytest.raises(StorageError, match="reference weights changed"):
        other.compare(saved, "GRPO", resumes=True, allow_changed=False)
    with pytest.raises(StorageError, match="holds no run"):
        other.compare({}, "GRPO", resumes=True, allow_changed=False)


def test_random_draws_go_on_once_and_are_others_on_every_rank_of_a_new_world() -> None:
    def draw(generators: GlobalGenerators, rank: int = 0, step: int = 0) -> float:
        generators.start(1, rank, step, CPU)
        return float(torch.rand(()))

    generators = GlobalGenerators()
    torch.manual_seed(5)
    saved, expected = rng_state(CPU), float(torch.rand(()))
    fresh = draw(generators)
    generators.load(saved)
    assert draw(generators) == expected
    assert draw(generators) == fresh == draw(generators, step=3) != draw(generators, rank=1)
    generators.seed_by_step = True
    assert len({fresh, draw(generators, step=3), draw(generators, step=4), draw(generators, 1, 3)}) == 4


def test_what_a_resume_lacks_is_refused() -> None:
    check_precision("32-true", "32-true")
    with pytest.raises(StorageError, match="trainer.precision=32-true.*auto is bf16-mixed"):
        check_precision("32-true", "bf16-mixed")
    load_reference(EMA(0.9), None, {}, required=False)
    with pytest.raises(StorageError, match="reference=EMA changes"):
        load_reference(EMA(0.9), None, {}, required=True)
