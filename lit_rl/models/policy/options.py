"""How a forward pass of a policy is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ForwardOptions:
    """Choices for computing a forward pass. Every choice gives the same numbers, but for rounding.

    Args:
        fused_head: Compute log-probs without the logits in memory (`lit_rl.ops.linear_logprobs`).
        shared_prompts: Compute the prompt of a group once (`lit_rl.models.policy.shared_prefix`).
        rows_by_length: Run rows of like length together (`lit_rl.models.policy.rows_by_length`).
        folded_attention: Where a prompt is shared, attend to its keys where they lie
            (`lit_rl.models.policy.shared_attention`).
        fused_accumulation: Sum what the calls of a pass give the embedding and the head in one place
            (`lit_rl.models.policy.fused_accumulation`).
        most_rows: Texts of a call without gradient, at most; None: all.
    """

    fused_head: bool = True
    shared_prompts: bool = True
    rows_by_length: bool = True
    folded_attention: bool = True
    fused_accumulation: bool = True
    most_rows: int | None = None

    @property
    def in_one_call(self) -> ForwardOptions:
        """The options with rows that are learned from in one call of the model, whole and beside each other."""
        return replace(self, shared_prompts=False, rows_by_length=False)


DEFAULT = ForwardOptions()
