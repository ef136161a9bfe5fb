"""One optimizer step of rows, cut into micro-batches and ranks in any way, as `training_step` takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.loaders import ExampleLoader
from lit_rl.models import LanguageModel

MODEL = LanguageModel("tiny")

VERDICTS = [
    {"prompt": "1+2=", "completion": "3", "label": True},
    {"prompt": "11+22=", "completion": "34", "label": False},
    {"prompt": "5+5=", "completion": "10", "label": True},
    {"prompt": "40+2=", "completion": "402", "label": False},
    {"prompt": "7+1=", "completion": "8", "label": True},
    {"prompt": "60+60=", "completion": "120", "label": True},
    {"prompt": "9+9=", "completion": "1", "label": False},
    {"prompt": "3+4=", "completion": "7", "label": True},
]

PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "333"},
    {"prompt": "17+25=", "chosen": "42", "rejected": "32"},
    {"prompt": "5+5=", "chosen": "10", "rejected": "9"},
    {"prompt": "99+1=", "chosen": "100", "rejected": "0"},
    {"prompt": "2+7=", "chosen": "9 is right", "rejected": "8"},
    {"prompt": "30+3=", "chosen": "33", "rejected": "34 perhaps"},
    {"prompt": "4+4=", "chosen": "8", "rejected": "7"},
    {"prompt": "60+6=", "chosen": "66", "rejected": "67"},
]
GOLD = ["2", "42, as asked", "10", "100", "9", "33 or so", "8", "66"]
TRIPLES = [{**row, "reference": gold} for row, gold in zip(PAIRS, GOLD)]


class Step(NamedTuple):
    """What an optimizer step is made of."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def loaded(module: Any, *, moved: float = 0.02) -> Any:
    """The module with its weights, of which those that are trained are away from its reference."""
    module.configure_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (each for each in module.policy.parameters() if each.requires_grad):
            parameter += moved * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return module


def data_of(rows: Sequence[dict[str, Any]], kind: Any) -> PreferenceDataModule:
    data = PreferenceDataModule(rows=list(rows), batch_size=len(rows), shuffle=False, val_fraction=0.0)
    data.prepare(MODEL.tokenizer, kind)
    return data


def micro_batches(
    data: PreferenceDataModule, accumulate: int = 1, ranks: int = 1, *, rows: Sequence[int] | None = None
) -> list[list[Any]]:
    """The micro-batches of the one step, for each rank: of all rows, or of these in this order."""
    order, taken = data.order(False), list(range(data.batch_size) if rows is None else rows)
    cut: dict[str, Any] = {"accumulate": accumulate, "world_size": ranks, "group_by_length": True}
    return [ExampleLoader(data.corpus.train, order, rank=rank, **cut).batches(taken, 0) for rank in range(ranks)]


def step_of(module: OfflineModule, data: PreferenceDataModule, accumulate: int = 1, ranks: int = 1) -> Step:
    """Loss, gradient by every trained parameter, and metrics, all summed over micro-batches and ranks."""
    return step_by_parts(module, micro_batches(data, accumulate, ranks))


def step_by_parts(module: OfflineModule, parts: Sequence[Sequence[Any]]) -> Step:
    """The same of the micro-batches of each rank."""
    averages, losses = Averages(), []
    for mine, whole in zip(parts, whole_of(module, parts), strict=True):
        for batch in mine:
            loss, metrics = module.loss(batch, whole)
            losses.append(loss)
            averages.add(metrics)
    total = torch.stack(losses).sum()
    trained = [parameter for parameter in module.policy.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(total, trained)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return Step(float(total.detach()), flat, averages.reduce())


def whole_of(module: OfflineModule, parts: Sequence[Sequence[Any]]) -> list[Any]:
    """What each rank knows of the whole step before it learns: None of a loss that couples no rows, or of one batch."""
    if not module.couples_rows or sum(map(len, parts)) == 1:
        return [None] * len(parts)
    alone = [WholeStep.of(module.step_columns, mine[0], Ranks()) for mine in parts]
    joined = {name: torch.cat([one.columns[name] for one in alone]) for name in alone[0].columns}
    rows = sum(len(batch) for batch in parts[0])
    return [WholeStep(joined, rank * rows) for rank in range(len(parts))]


def assert_same_step(found: Step, expected: Step) -> None:
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert expected.gradient.norm() > 1e-3, "nothing to compare"
    assert (found.gradient - expected.gradient).norm() <= 2e-5 * expected.gradient.norm()
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=5e-6, atol=5e-6, equal_nan=True, msg=name)
