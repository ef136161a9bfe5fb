"""From hidden states to values."""

from __future__ import annotations

from torch import Tensor, float32, nn, no_grad

from lit_rl.models.policy.loading import Float32Head


class ValueHead(nn.Module):
    """A head of one number a position: ``w h + b``, computed in float32, with ``w = 0`` and ``b = 0`` at the start.

    Zeros, where it does not begin as the head of a reward model: so ``V = 0`` before the first update, the first
    advantages hold no noise of a head that has learned nothing, and no random number is drawn. The head learns from the
    first step (its gradient is ``(V - R) h``), and the trunk under it from the second.

    Args:
        hidden_size: Width of the hidden states.
    """

    _no_split_modules = ("Float32Head",)
    """The weights are float32 beside a trunk that may not be, and FSDP2 wants one type a unit: so they are a unit."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = Float32Head(hidden_size, 1, dtype=float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @classmethod
    def of_scores(cls, score: nn.Linear) -> ValueHead:
        """Make a head that begins as that of a reward model: ``V`` of a state is the score of the text up to it."""
        head = cls(score.in_features)
        with no_grad():
            head.linear.weight.copy_(score.weight)
            if score.bias is not None:
                head.linear.bias.copy_(score.bias)
        return head

    def forward(self, hidden: Tensor) -> Tensor:
        """``(..., h)`` of any type to float32 ``(...)``."""
        values = self.linear(hidden.reshape(-1, hidden.shape[-1]))
        return values.view(hidden.shape[:-1]).clone()  # FSDP2 warns of views: changed in place they lose its hooks


class ValueModel(nn.Module):
    """A trunk and a value head."""

    def __init__(self, trunk: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, *, t: int, **inputs: Tensor) -> Tensor:
        """Return float32 ``(b, t)``: values of the states from which each of the last t tokens was chosen."""
        hidden = self.trunk(**inputs, use_cache=False).last_hidden_state
        return self.head(hidden[:, -(t + 1) : -1])
