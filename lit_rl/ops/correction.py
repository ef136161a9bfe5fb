"""The correction that is chosen by the engine: :mod:`lit_rl.ops.mismatch` where the engine is not quite the policy."""

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.mismatch import token_truncate


def auto_correction(
    old_logprobs: Float[Tensor, "b t"], sampler_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Apply :func:`~lit_rl.ops.mismatch.token_truncate` with its own bounds: truncated importance sampling.

    An algorithm that is given it takes no correction at all where the generator draws by the policy's own forward pass
    (`lit_rl.algorithms.terms.engine_correction`): all weights are 1 there, but for roundings.

    By tokens, where TRL masks whole responses: the ratio of a response is a product, so it leaves any bounds as
    responses grow, and with it the longest ones would leave the loss. A token's does not depend on the length.

    Args:
        old_logprobs: Of the training side.
        sampler_logprobs: Of the engine.
        mask: Loss mask.
    """
    return token_truncate(old_logprobs, sampler_logprobs, mask)
