"""The entropy bonus: a coefficient, fixed or steered, times the mean entropy of the tokens that the loss acts on."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.terms.controllers import EntropyControl
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.step import ForController, Metrics

SEEN = "algo/entropy"
"""The name under which the loss says what the controller is to be told."""


class EntropyBonus:
    """What an objective gains from the entropy of the policy.

    Args:
        control: Sets the coefficient from step to step.
    """

    def __init__(self, control: EntropyControl) -> None:
        self.control = control

    def __call__(self, entropy: Tensor, acting: Tensor, tokens: Tensor) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the bonus, and what its controller is to be told after the step.

        Args:
            entropy: `(b, t)` in nats, with gradient.
            acting: Bool `(b, t)`: the tokens that the loss acts on.
            tokens: 0-dim: how many these are in the whole optimizer step.
        """
        total = masked_sum(entropy, acting)
        seen: Metrics = {SEEN: ForController(total.detach(), acting.sum())}
        return self.control.coefficient * total / tokens.clamp(min=1), seen
