"""Scores of a validation's completions by policy and reference: entropy, and distance to the reference."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.optim.strategies import shards
from lit_rl.algorithms.rollouts.micro_batches import without_gradient
from lit_rl.errors import ConfigError
from lit_rl.models.policy.forward import score
from lit_rl.models.policy.options import ForwardOptions
from lit_rl.rollout import Completions, Sampling

MOST_ROWS = 16
"""Most completions of one forward pass: validation batches are larger than micro-batches."""


def check_policy_scores(name: str, rolls_out: bool, sampling: Sampling, strategy: Any) -> None:
    """Refuse `eval.log_policy` where it has nothing to log, or is not supported.

    Args:
        name: Name of the method.
        rolls_out: Whether it learns from its own completions.
        sampling: Sampling of the training, under whose distribution the completions are scored.
        strategy: The Trainer's strategy; None without one.

    Raises:
        ConfigError: names what to set.
    """
    if not rolls_out:
        raise ConfigError(
            f"eval.log_policy=true: {name} learns from a data set, and logs val/entropy and its distances with the "
            "validation's loss. Leave it out."
        )
    if sampling.greedy:
        raise ConfigError(
            "eval.log_policy=true scores completions under the training's distribution, and with "
            "sampling.temperature=0 there is none. Set it above 0; the validation itself may be greedy "
            "(eval.temperature=0)."
        )
    if shards(strategy):
        raise ConfigError(
            f"eval.log_policy=true is not built for weights in parts ({type(strategy).__name__}): take strategy=auto "
            "or ddp, or leave it out."
        )


def entropies(policy: Any, completions: Completions, sampling: Sampling, options: ForwardOptions) -> Tensor:
    """Return `(b, t)`, in nats: the entropy of the policy's distribution at each sampled token."""

    def of_rows(part: Completions) -> Tensor:
        found = score(policy, part, sampling, entropy=True, options=options).entropy
        assert found is not None
        return found

    return without_gradient(policy, completions, of_rows, rows_at_once=MOST_ROWS)
