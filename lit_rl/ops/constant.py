"""An advantage that does not depend on the reward: what is learned from was chosen before."""

from jaxtyping import Float, Int
from torch import Tensor


def constant(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return 1 for every scored row, 0 for the others: with the loss ``-lp A`` the cross-entropy of the samples.

    The expected gradient over *all* samples of a policy is then 0; it teaches something only where a selection by
    reward came first (`algo/groups=best`: RAFT, 2304.06767).

    Args:
        rewards: NaN: not scored.
        group_id: Of each row; not read.
    """
    return (~rewards.isnan()).to(rewards.dtype)
