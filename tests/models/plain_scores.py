"""Logits of response tokens, with nothing of ours but the inputs: what scores are held against."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lit_rl.core.rollout import Completions
from lit_rl.models.forward_inputs import trunk_inputs


def token_logits(model: nn.Module, completions: Completions) -> Tensor:
    """`(b, t, v)`, in the model's own type: those that predict each response token."""
    inputs: dict[str, Any] = {**trunk_inputs(model, completions)}
    kept = completions.response_ids.shape[1] + 1
    return model(**inputs, logits_to_keep=kept, use_cache=False).logits[:, -kept:-1]
