"""One optimizer step of rows, cut into micro-batches and ranks in any way, as `training_step` takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.offline import OfflineModule
from lit_rl.algorithms.statistics import Averages
from lit_rl.algorithms.whole_step import WholeStep
from lit_rl.data.offline.datamodule import PreferenceDataModule
from lit_rl.data.offline.loader import ExampleLoader
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
    {"prompt": "1+2=", "chosen": "3", "rejected": "12"},
    {"prompt": "11+22=", "chosen": "33", "rejected": "3"},
    {"prompt": "5+5=", "chosen": "10", "rejected": "55"},
    {"prompt": "40+2=", "chosen": "42", "rejected": "402"},
    {"prompt": "7+1=", "chosen": "8", "rejected": "7"},
    {"prompt": "60+60=", "chosen": "120", "rejected": "12"},
    {"prompt": "9+9=", "chosen": "18", "rejected": "1"},
    {"prompt": "3+4=", "chosen": "7", "rejected": "34"},
]

CUTS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2)]
"""Micro-batches on each rank, and ranks."""


@dataclass
class Step:
    """What an optimizer step is made of."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def loaded(module: Any, *, moved: float = 0.02) -> Any:
    """The module with its weights, away from its reference."""
    module.configure_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter += moved * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return module


def data_of(rows: list[dict[str, Any]], kind: Any) -> PreferenceDataModule:
    data = PreferenceDataModule(rows=rows, batch_size=len(rows), shuffle=False, val_fraction=0.0)
    data.prepare(MODEL.tokenizer, kind)
    return data


def micro_batches(data: PreferenceDataModule, accumulate: int = 1, ranks: int = 1) -> list[list[Any]]:
    """The micro-batches of the one step, for each rank."""
    order, rows = data._order(False), list(range(data.batch_size))
    return [
        ExampleLoader(data.corpus.train, order, accumulate=accumulate, rank=rank, world_size=ranks).batches(rows, 0)
        for rank in range(ranks)
    ]


def step_of(module: OfflineModule, data: PreferenceDataModule, accumulate: int = 1, ranks: int = 1) -> Step:
    """Loss, gradient by every trained parameter, and metrics, all summed over micro-batches and ranks."""
    parts, averages = micro_batches(data, accumulate, ranks), Averages()
    wholes: list[Any] = [None] * ranks
    if module.couples_rows and accumulate * ranks > 1:
        module.everyones = lambda column: column  # pyright: ignore
        alone = [WholeStep.of(module, mine[0]) for mine in parts]
        joined = {name: torch.cat([one.columns[name] for one in alone]) for name in alone[0].columns}
        wholes = [WholeStep(joined, rank * len(data.corpus.train) // ranks) for rank in range(ranks)]
    losses = []
    for mine, whole in zip(parts, wholes):
        for batch in mine:
            loss, metrics = module.loss(batch, whole)
            losses.append(loss)
            averages.add(metrics)
    total = torch.stack(losses).sum()
    trained = [parameter for parameter in module.policy.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(total, trained)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return Step(float(total.detach()), flat, averages.reduce(torch.device("cpu")))


def assert_same_step(found: Step, expected: Step) -> None:
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert expected.gradient.norm() > 1e-3, "nothing to compare"
    assert (found.gradient - expected.gradient).norm() <= 2e-5 * expected.gradient.norm()
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
