"""From losses of tokens to one number: which denominator, over how many tokens.

The denominator belongs to the algorithm and spans the whole optimizer step, every micro-batch on every rank. Each
reduction returns *this micro-batch's share*: the shares of all micro-batches and ranks sum to the value, so cutting a
batch into 8 x 1, 4 x 2 or 1 x 8 gives the same gradient, :func:`local_token_mean` excepted. Whoever averages shares
(data-parallel gradient averaging, division by the number of accumulated batches) has to multiply that factor back in.

Notation: ``l[i,t]`` the loss of token t of row i, ``m[i,t]`` its mask (0 or 1). A micro-batch without a loss token
gives 0, still attached to the graph, so that backward and gradient reduction run on every rank.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.ops.step import WeightTotals


@dataclass(frozen=True)
class StepTotals:
    """Counts of one optimizer step, over all its micro-batches and all ranks."""

    sequences: Tensor | int
    """Rows, fully masked ones (truncated completions) included, as TRL counts them."""
    tokens: Tensor | int
    """True entries of the loss mask."""
    unmasked_sequences: Tensor | int
    """Rows with a loss token, as verl and OpenRLHF count them."""
    micro_batches: Tensor | int
    """Forward passes, on all ranks."""
    weights: WeightTotals | None = None
    """Sums of the weights of an engine correction. None: they are normalised over the micro-batch at hand."""
    better_tokens: Tensor | int = 0
    """Loss tokens of the rows that a judge found better."""

    @classmethod
    def of(cls, mask: Bool[Tensor, "b t"]) -> "StepTotals":
        """Return the totals of a step that is this one batch on one rank. Elsewhere, sum these over batches and
        ranks."""
        return cls(sequences=mask.shape[0], tokens=mask.sum(), unmasked_sequences=mask.any(1).sum(), micro_batches=1)


def token_mean(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals) -> Float[Tensor, ""]:
    """``sum_it m l / max(1, tokens)``: every token weighs the same. DAPO (2503.14476, section 3.3)."""
    return masked_sum(per_token, mask) / _at_least_one(totals.tokens)


def local_token_mean(
    per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals
) -> Float[Tensor, ""]:
    """``sum_it m l / max(1, tokens of this micro-batch) / max(1, micro_batches)``: TRL's ``bnpo``.

    The only reduction that depends on how a step is cut: a token of a micro-batch with few tokens weighs more. It is
    there to repeat runs of others; elsewhere take :func:`token_mean`, which it equals for a step of one micro-batch.
    """
    return masked_mean(per_token, mask) / _at_least_one(totals.micro_batches)


def token_sum(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals) -> Float[Tensor, ""]:
    """``sum_it m l``: no denominator, so the gradient grows with the tokens of a step."""
    return masked_sum(per_token, mask)


def sequence_mean(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals) -> Float[Tensor, ""]:
    """``sum_i (sum_t m l / max(1, sum_t m)) / max(1, sequences)``: every row weighs the same. GRPO (2402.03300, eq. 3).

    A fully masked row adds 0 and still counts in ``sequences``.
    """
    return masked_mean(per_token, mask, dim=1).sum() / _at_least_one(totals.sequences)


def unmasked_sequence_mean(
    per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals
) -> Float[Tensor, ""]:
    """``sum_i (sum_t m l / max(1, sum_t m)) / max(1, unmasked_sequences)``: :func:`sequence_mean` of the rows in use.

    A fully masked row does not count, as in verl and OpenRLHF: cut completions that are left out of the loss do not
    make the gradient of the others smaller.
    """
    return masked_mean(per_token, mask, dim=1).sum() / _at_least_one(totals.unmasked_sequences)


def sequence_total(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals) -> Float[Tensor, ""]:
    """``sum_i (sum_t m l) / max(1, sequences)``: the mean over rows of their sums. LUSPO (2602.05261).

    With a loss of whole rows, each row weighs in with its length. A fully masked row counts in ``sequences``.
    """
    return masked_sum(per_token, mask) / _at_least_one(totals.sequences)


def constant_mean(
    per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals, *, length: int
) -> Float[Tensor, ""]:
    """``sum_it m l / (max(1, sequences) * length)``: no weight depends on a row's length. Dr. GRPO (2503.20783).

    Args:
        per_token: Losses.
        mask: Loss mask.
        totals: Of the optimizer step. A fully masked row counts in ``sequences``.
        length: The constant in place of a row's length, usually the longest response allowed. Above 0.
    """
    return masked_sum(per_token, mask) / (_at_least_one(totals.sequences) * length)


def unmasked_constant_mean(
    per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals, *, length: int
) -> Float[Tensor, ""]:
    """``sum_it m l / (max(1, unmasked_sequences) * length)``: :func:`constant_mean` of the rows in use.

    Args:
        per_token: Losses.
        mask: Loss mask.
        totals: Of the optimizer step. A fully masked row does not count.
        length: The constant in place of a row's length, usually the longest response allowed. Above 0.
    """
    return masked_sum(per_token, mask) / (_at_least_one(totals.unmasked_sequences) * length)


def _at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
