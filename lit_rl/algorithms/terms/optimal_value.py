"""A*-PO's baseline (2505.20686): the optimal value of each prompt, estimated from completions of the initial policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_rl.core.declared_settings import checked
from lit_rl.ops.ranges import AtLeastOne, Positive
from lit_rl.ops.traits import AdvantageTraits


@checked("algo.advantage")
@AdvantageTraits(compares_group=False)
class OptimalValue:
    """``r - V*``: the reward beyond what the best policy earns that stays near the initial one.

    The policy that is best under ``E[r] - beta KL(policy || initial)`` has for a prompt the value

        V* = beta log E[exp(r / beta)]        over completions of the initial policy,

    here the mean over `samples` of them, drawn for every training row before the first optimizer step. With
    ``algo.reward_beta`` (k1) this is A*-PO's advantage: on policy, the gradient of its regression
    ``(reward_beta log(policy / initial) - (r - V*))^2`` is that of REINFORCE, ``2 reward_beta`` times as large.

    Args:
        samples: Completions of each training row that its value is estimated from.
        beta: Temperature of the value: V* is their mean reward where it is large, and the highest reward near 0.
    """

    def __init__(self, samples: AtLeastOne = 8, beta: Positive = 0.5) -> None:
        self.samples, self.beta = samples, beta
        self._values: dict[int, float] = {}

    def __call__(self, rewards: Tensor, group_id: Tensor, data_row: Tensor) -> Tensor:
        """Return advantages `(b,)`, 0 for rows without a reward or a value.

        Args:
            rewards: `(b,)`, of all ranks; NaN: not scored.
            group_id: Not used.
            data_row: Long `(b,)`: the training row of each.
        """
        values = [self._values.get(row, math.nan) for row in data_row.tolist()]
        return (rewards - torch.tensor(values, dtype=rewards.dtype, device=rewards.device)).nan_to_num(0.0)

    @property
    def is_estimated(self) -> bool:
        """True once `learn` was called, here or in the run that a checkpoint is of."""
        return bool(self._values)

    def learn(self, rewards: Mapping[int, Sequence[float]]) -> str:
        """Estimate the value of each training row from rewards of the initial policy, NaN where it was not scored.

        Returns a line for the log.
        """
        self._values = {row: self._value_of(torch.tensor(drawn)) for row, drawn in sorted(rewards.items())}
        values = torch.tensor(list(self._values.values()))
        known = values[~values.isnan()]
        mean = f"{known.double().mean():.3f}" if len(known) else "nan"
        return f"A*-PO: V* of {len(known)} training rows from {self.samples} completions each, {mean} on average."

    def _value_of(self, rewards: Tensor) -> float:
        scored = rewards[~rewards.isnan()].double()
        if not len(scored):
            return math.nan
        return float(self.beta * (torch.logsumexp(scored / self.beta, 0) - math.log(len(scored))))

    def state(self) -> dict[str, Any]:
        return {"values": dict(self._values)}

    def load_state(self, saved: dict[str, Any]) -> None:
        self._values = dict(saved["values"])
