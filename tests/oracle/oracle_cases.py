"""What both sides of a comparison are given, and what comes out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Settings = Mapping[str, Any]
"""Fields of TRL's config by name; what is not named has the value of `BASE`."""

TEMPERATURE, LIMIT, ROWS, GROUP = 0.7, 7, 8, 4
PROMPTS = ["ab"] * GROUP + ["cde"] * GROUP
WEIGHTS = {"first": 1.0, "second": 0.5}

BASE: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "num_iterations": 2,  # so that ratios differ from 1
    "mask_truncated_completions": False,
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "router_aux_loss_coef": 0.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "normalize_advantages": False,
    "reward_clip_range": None,
}
"""TRL's defaults, but for `num_iterations`."""

Rows = tuple[float | None, ...]

GIVEN: dict[str, Any] = {"first": [], "second": [], "ids": [], "logprobs": None}
"""What the reward functions say next, and what is sampled next."""


def first(completions: Sequence[str], **columns: object) -> list[float | None]:
    return list(GIVEN["first"])


def second(completions: Sequence[str], **columns: object) -> list[float | None]:
    return list(GIVEN["second"])


@dataclass(frozen=True)
class Case:
    """One rollout: two prompts, the longer completions first, as a step's micro-batches are dealt out."""

    first: Rows = (0.0, 1.0, 0.35, 0.2, 3.0, 4.0, 0.0, 2.0)
    second: Rows = (None,) * ROWS
    lengths: tuple[int, ...] = (7, 5, 6, 4, 3, 7, 1, 4)
    cut: tuple[int, ...] = (0, 3, 5)
    """Rows that do not end by EOS."""
    micro_batches: int = 2
    now: str = "update"
    """Whose weights the loss is taken with."""


@dataclass
class Outcome:
    """What an optimizer step is made of."""

    loss: float
    gradient: Tensor
    advantages: Tensor = field(default_factory=lambda: torch.zeros(0))
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """One value a micro-batch; one, if it is of the rollout."""


def response_ids(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, 200, (length,), generator=generator).tolist() for length in case.lengths]
    return [[*row[:-1], row[-1] if i in case.cut else 1] for i, row in enumerate(rows)]


def backward(model: nn.Module, shares: Sequence[Tensor]) -> Outcome:
    """The sum of the shares, and its gradient by every parameter, 0 where it has none."""
    total = torch.stack(list(shares)).sum()
    gradients = torch.autograd.grad(total, list(model.parameters()), materialize_grads=True)
    return Outcome(total.item(), torch.cat([gradient.flatten() for gradient in gradients]))


def assert_same_step(mine: Outcome, other: Outcome, *, size: float = 0.1) -> None:
    """Agreement to 1e-5: of the loss, relative to itself or to the `size` of its terms, which may cancel."""
    torch.testing.assert_close(mine.advantages, other.advantages, atol=1e-5, rtol=1e-5)
    assert other.gradient.norm() > 1e-3, "nothing to compare"
    assert mine.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-5 * size)
    assert (mine.gradient - other.gradient).norm() <= 1e-5 * other.gradient.norm()
