"""Selection of the tokens and rows that the policy loss acts on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_rl.algorithms.signatures import arguments_for, copies_for, reads
from lit_rl.errors import in_range
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.reductions import StepTotals
from lit_rl.ops.selection import off_policy_sequence_mask
from lit_rl.ops.step import Metrics, StepTokens


class TokenSelection:
    """A selection of the loss tokens that the policy loss acts on; the KL and the denominator have all of them.

    Args:
        choose: `(entropy, mask, ...) -> bool (b, t)`; it may also name `step`. It may be called several times for a
            micro-batch with the same result, so it has no state and is not random. None: all loss tokens.
    """

    def __init__(self, choose: Callable[..., Tensor] | None) -> None:
        self.choose = choose

    @property
    def needs_step(self) -> bool:
        """True if the selection depends on all tokens of an optimizer step."""
        return self.choose is not None and reads(self.choose, "step")

    def __call__(self, entropy: Tensor | None, mask: Tensor, step: StepTokens | None) -> Tensor:
        """Return the selected tokens, bool `(b, t)`, a subset of `mask`.

        Args:
            entropy: `(b, t)` in nats. May be None if all loss tokens are chosen.
            mask: Loss mask.
            step: The loss tokens of the whole step. None: this micro-batch is the whole step.
        """
        if self.choose is None:
            return mask
        assert entropy is not None
        return mask & self.choose(
            *copies_for(self.choose, entropy.detach(), mask), **arguments_for(self.choose, {"step": step})
        )

    def count(self, selected: Tensor, totals: StepTotals, step: StepTokens | None) -> Tensor:
        """Return the number of tokens of the whole step that the loss acts on."""
        if self.choose is None:
            return torch.as_tensor(totals.tokens)
        return selected.sum() if step is None or step.selected is None else step.selected


class OffPolicyMask:
    """A mask that drops rows with a negative advantage whose policy moved too far from the one that sampled them.

    Args:
        threshold: Distance in nats a token, above 0 (2512.02556, eq. 9). None masks nothing.
    """

    def __init__(self, threshold: float | None) -> None:
        if threshold is not None:
            in_range("algo.off_policy_threshold", threshold, low=0, open_low=True)
        self.threshold = threshold

    def __call__(
        self, per_token: Tensor, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Return the losses `(b, t)` with 0 in masked rows, and the share of tokens that stay.

        Args:
            per_token: Losses.
            logprobs: `(b, t)` of the policy now.
            sampler_logprobs: `(b, t)` of the policy that sampled them.
            advantages: `(b,)` or `(b, t)`.
            mask: Loss mask.
        """
        if self.threshold is None:
            return per_token, {}
        near = off_policy_sequence_mask(logprobs, sampler_logprobs, advantages, mask, threshold=self.threshold)
        return per_token * near, {"off_policy_kept": (masked_sum(near.float(), mask), mask.sum())}
