"""What a teacher says of a student's tokens, and the formulas of distillation on policy: tensors in, tensors out.

A teacher gives its log-prob of each token that the student has sampled, and perhaps its k likeliest tokens there
(`TeacherScores`). Where it has no opinion its numbers may be anything, -inf and NaN too.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's log-probs of a rollout's tokens, in nats, at the temperature of the rollout."""

    log_probs: Float[Tensor, "b t"]
    """Of the sampled tokens, in float32."""
    mask: Bool[Tensor, "b t"]
    """True where the teacher has an opinion; elsewhere the numbers may be anything."""
    top_ids: Int[Tensor, "b t k"] | None = None
    """The teacher's likeliest tokens; None where it gives none."""
    top_log_probs: Float[Tensor, "b t k"] | None = None
    """Of `top_ids`, in float32: logs of a mass that is at most 1 together."""
