"""APO (2408.06266): losses that say for each completion alone whether its probability rises or falls."""

from jaxtyping import Float
from torch import Tensor

from lit_rl.ops.preference.pairs import RatioPairs


def apo_zero(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """``sigma(-beta rho_c) + sigma(beta rho_r)`` (eq. 7): the chosen one rises, the rejected one falls.

    For chosen completions that are better than what the policy writes.
    """
    return (-beta * pairs.chosen_ratio).sigmoid() + (beta * pairs.rejected_ratio).sigmoid()


def apo_down(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """``sigma(beta rho_c) + sigma(-beta (rho_c - rho_r))`` (eq. 8): both fall, the rejected one further.

    For chosen completions that are worse than what the policy writes.
    """
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return chosen.sigmoid() + (rejected - chosen).sigmoid()
