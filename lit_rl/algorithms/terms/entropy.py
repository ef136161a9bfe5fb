"""The entropy bonus: a coefficient, fixed or steered, times the mean entropy of the tokens that the loss acts on."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.terms.controllers import EntropyControl
from lit_rl.ops.masking import masked_sum


class EntropyBonus:
    """The entropy bonus of an objective.

    The loss calls it, which changes no state. Between micro-batches the training loop calls `observe`, and after the
    optimizer step `update`, so that the controller gets the mean over the whole step.

    Args:
        control: Controller of the coefficient.
    """

    def __init__(self, control: EntropyControl) -> None:
        self.control = control
        self._observed: list[Tensor] = []
        """Summed entropy and number of tokens of each micro-batch of the step so far."""

    def __call__(self, entropy: Tensor, selected: Tensor, tokens: Tensor) -> Tensor:
        """Return this micro-batch's share of the bonus, 0-dim.

        Args:
            entropy: `(b, t)` in nats, with gradient.
            selected: Bool `(b, t)`: the tokens that the policy loss acts on.
            tokens: 0-dim: the number of such tokens in the whole optimizer step.
        """
        return self.control.coefficient * masked_sum(entropy, selected) / tokens.clamp(min=1)

    def observe(self, entropy: Tensor, selected: Tensor) -> None:
        """Add the entropy of a micro-batch; the arguments are those of its bonus."""
        self._observed.append(torch.stack([masked_sum(entropy.detach(), selected), selected.sum().float()]))

    def update(self, ranks: Ranks, *, skipped: bool) -> None:
        """Update the controller with the optimizer step's mean entropy. A collective.

        Args:
            ranks: The ranks that share the step.
            skipped: Whether the step was skipped, so that the controller does not count it.
        """
        observed, self._observed = self._observed, []
        if observed and not skipped:
            total, count = ranks.total(torch.stack(observed).sum(0)).tolist()
            self.control.update(total / max(1.0, count))
