"""The entropy bonus: a coefficient, fixed or steered, times the mean entropy of the tokens that the loss acts on."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.terms.controllers import EntropyControl
from lit_rl.ops.masking import masked_sum


class EntropyBonus:
    """What an objective gains from the entropy of the policy.

    The loss asks for the bonus and changes nothing. Between micro-batches the training loop calls `observe`, and after
    the optimizer step `update`, so that the controller is given the mean over the whole step.

    Args:
        control: Sets the coefficient from step to step.
    """

    def __init__(self, control: EntropyControl) -> None:
        self.control = control
        self._observed: list[Tensor] = []
        """Of each micro-batch of the step so far: the summed entropy and the number of tokens."""

    def __call__(self, entropy: Tensor, selected: Tensor, tokens: Tensor) -> Tensor:
        """0-dim: this micro-batch's share of the bonus.

        Args:
            entropy: `(b, t)` in nats, with gradient.
            selected: Bool `(b, t)`: the tokens that the policy loss acts on.
            tokens: 0-dim: how many these are in the whole optimizer step.
        """
        return self.control.coefficient * masked_sum(entropy, selected) / tokens.clamp(min=1)

    def observe(self, entropy: Tensor, selected: Tensor) -> None:
        """A micro-batch of the step was learned from; the arguments are those of its bonus."""
        self._observed.append(torch.stack([masked_sum(entropy.detach(), selected), selected.sum().float()]))

    def update(self, ranks: Ranks, *, skipped: bool) -> None:
        """The optimizer step is over: give the controller the step's mean entropy. A collective.

        Args:
            ranks: The step is of all of them.
            skipped: Whether the step was left out, so that the controller does not count it.
        """
        observed, self._observed = self._observed, []
        if observed and not skipped:
            total, count = ranks.total(torch.stack(observed).sum(0)).tolist()
            self.control.update(total / max(1.0, count))
