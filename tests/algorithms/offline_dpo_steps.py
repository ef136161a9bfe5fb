"""Optimizer steps of DPO by hand: one step of pairs, cut into micro-batches, and the gradient of all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms import DPO
from lit_rl.algorithms.whole_step import WholeStep
from lit_rl.data.offline.datamodule import PreferenceDataModule
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.examples import PairBatch
from lit_rl.models import LanguageModel
from lit_rl.ops import preference

ROWS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "333"},
    {"prompt": "17+25=", "chosen": "42", "rejected": "32"},
    {"prompt": "5+5=", "chosen": "10", "rejected": "9"},
    {"prompt": "99+1=", "chosen": "100", "rejected": "0"},
    {"prompt": "2+7=", "chosen": "9 is right", "rejected": "8"},
    {"prompt": "30+3=", "chosen": "33", "rejected": "34 perhaps"},
    {"prompt": "4+4=", "chosen": "8", "rejected": "7"},
    {"prompt": "60+6=", "chosen": "66", "rejected": "67"},
]
LOSSES: dict[str, Any] = {
    name: getattr(preference, name)
    for name in (
        "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
        "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
    )
} | {"cdpo": partial(preference.sigmoid, label_smoothing=0.2)}  # fmt: skip


@cache
def example_set(swapped: bool = False) -> ExampleSet:
    rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS] if swapped else ROWS
    data = PreferenceDataModule(rows=rows, batch_size=len(ROWS), val_fraction=0.0)
    data.prepare(LanguageModel("tiny").tokenizer, "pairs")
    return data.corpus.train


def loaded(moved: bool = True, **settings: Any) -> DPO:
    """A module with its weights, away from its reference if `moved`."""
    module = DPO(LanguageModel("tiny"), **settings)
    module.configure_model()
    module.everyones = lambda column: column  # one rank  # pyright: ignore
    if moved:
        generator = torch.Generator().manual_seed(3)
        for parameter in module.policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.05 * parameter.detach().std() * noise
    module.policy.eval()
    return module


def micro_batches(count: int, rows: Sequence[int] = range(len(ROWS)), swapped: bool = False) -> list[PairBatch]:
    """The step of these rows as the loader cuts it."""
    data, size = example_set(swapped), len(rows) // count
    totals = data.totals(rows, count)
    parts: list[Any] = [
        data.batch(list(rows[i * size : (i + 1) * size]), [0] * size, totals, step=0, slot=i) for i in range(count)
    ]
    return [dataclasses.replace(parts[0], whole=tuple(parts) if count > 1 else ()), *parts[1:]]


def step(module: DPO, parts: Sequence[PairBatch]) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of a step, as `training_step` takes them."""
    whole = WholeStep.of(module, parts[0]) if module.couples_rows and len(parts) > 1 else None
    found = [module.loss(batch, whole) for batch in parts]
    total = torch.stack([loss for loss, _ in found]).sum()
    gradients = torch.autograd.grad(total, list(module.policy.parameters()), materialize_grads=True)
    metrics = {
        name: (sum(m[name][0] for _, m in found) / sum(m[name][1] for _, m in found)).item()  # pyright: ignore
        for name in found[0][1]
    }
    return total.item(), torch.cat([gradient.flatten() for gradient in gradients]), metrics


def assert_same(one: tuple[float, Tensor, dict[str, float]], other: tuple[float, Tensor, dict[str, float]]) -> None:
    assert abs(one[0] - other[0]) <= 2e-6 * max(1.0, abs(other[0]))
    assert (one[1] - other[1]).norm() <= 2e-5 * other[1].norm()
    assert other[1].norm() > 1e-6, "nothing to compare"
    for name, value in other[2].items():
        assert abs(one[2][name] - value) <= 1e-5 * max(1.0, abs(value)), name
