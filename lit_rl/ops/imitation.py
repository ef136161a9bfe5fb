"""What a token of a text to imitate costs: losses of supervised fine-tuning, before they are averaged."""

from jaxtyping import Float
from torch import Tensor


def cross_entropy(logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """``-log pi(token)``, in nats.

    Args:
        logprobs: Of the texts' own tokens.
    """
    return -logprobs


def dft(logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """``-sg(pi(token)) log pi(token)`` (dynamic fine-tuning, 2508.05629); sg passes no gradient on.

    Its gradient is that of ``-pi(token)``: as a policy gradient with a reward of 1 for the text, without the weight
    1 / pi that cross-entropy gives to what the policy would hardly write.

    Args:
        logprobs: Of the texts' own tokens.
    """
    return -logprobs.detach().exp() * logprobs
