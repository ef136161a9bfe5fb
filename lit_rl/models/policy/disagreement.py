"""What two models think of the same tokens, without the logits of either in memory.

Distillation needs whole distributions of student and teacher. Each model runs up to the input of its head; then both
heads work on a block of tokens at a time, `LOGITS` numbers of each model, and what is kept of a block is one number a
token. The backward pass computes the student's and the teacher's logits of a block anew, and sums the gradient of the
student's head in float32 (`lit_rl.ops.linear_rows`). Where all logits are one block they are kept, as there is nothing
to save.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_rl.examples import TokenBatch
from lit_rl.models.policy.head import can_stand_apart, factors, linear_head, without_head
from lit_rl.models.policy.text_forward import text_logits
from lit_rl.ops.linear_rows import of_whole_rows
from lit_rl.ops.logprobs import logprobs_and_entropy
from lit_rl.ops.token_stats import token_stats

LOGITS = 1 << 24

Divergence = Callable[[Tensor, Tensor], Tensor]
"""`(1, n, v), (1, n, v) -> (1, n)`: the divergence of the student's logits from the teacher's."""


@dataclass(frozen=True)
class Disagreement:
    """Divergence and statistics, float32 `(n,)` each: one number for each learned token, row by row."""

    divergence: Tensor
    """The divergence, with gradient."""
    correct: Tensor
    """True where the token is the student's likeliest."""
    entropy: Tensor | None = None
    """Entropy of the student's next-token distribution, in nats. None unless requested."""
    teacher_entropy: Tensor | None = None
    """Entropy of the teacher's."""
    aux_loss: Tensor | None = None
    """The student's router loss; None unless requested."""


def disagreement(
    student: nn.Module,
    teacher: nn.Module,
    tokens: TokenBatch,
    divergence: Divergence,
    *,
    shared_tokens: int | None,
    entropies: bool = False,
    router_aux: bool = False,
    fused: bool = True,
) -> Disagreement:
    """Compare student and teacher on the `n` learned tokens of texts; `n` may be 0.

    Args:
        student: Gets the gradient.
        teacher: Gets none.
        tokens: `b` rows.
        divergence: Of the one from the other.
        shared_tokens: Number of tokens, the first of both vocabularies, that are compared. None: all.
        entropies: Whether to compute those of both.
        router_aux: Whether to compute the student's load-balancing loss.
        fused: Whether to work in blocks, where both models allow it.

    Raises:
        ConfigError: the student has no router whose load could be balanced.
    """
    columns = _learned_columns(tokens)
    at = tokens.learned[:, columns].flatten().nonzero().flatten()
    ids = tokens.input_ids[:, 1:][:, columns].flatten()[at]
    in_blocks = fused and can_stand_apart(student) and can_stand_apart(teacher)
    with torch.no_grad():
        theirs, _ = _last(teacher, tokens, columns, router_aux=False, headless=in_blocks)
    ours, aux_loss = _last(student, tokens, columns, router_aux=router_aux, headless=in_blocks)
    mine, others = (each.flatten(0, 1).index_select(0, at) for each in (ours, theirs))
    head_of_teacher = linear_head(teacher) if in_blocks else nn.Identity()

    def compared(rows: slice, logits: Tensor) -> tuple[Tensor, ...]:
        logits = logits[None, :, :shared_tokens]
        with torch.no_grad():
            of_teacher, plain = head_of_teacher(others[rows])[None, :, :shared_tokens], logits.detach()
            spread = (plain, of_teacher) if entropies else ()
            spreads = [logprobs_and_entropy(each, ids[rows][None])[1][0] for each in spread]
            correct = token_stats(plain, ids[rows][None]).correct[0].float()
        return divergence(logits, of_teacher)[0], correct, *spreads

    if not in_blocks:
        return Disagreement(*compared(slice(None), mine), aux_loss=aux_loss)
    head = linear_head(student)
    size = max(1, LOGITS // max(each.weight.shape[0] for each in (head, head_of_teacher)))  # pyright: ignore
    if len(at) <= size:
        return Disagreement(*compared(slice(None), head(mine)), aux_loss=aux_loss)
    return Disagreement(*of_whole_rows(*factors(mine, head), compared, size=size), aux_loss=aux_loss)  # pyright: ignore


def _last(
    model: nn.Module, tokens: TokenBatch, columns: Tensor, *, router_aux: bool, headless: bool
) -> tuple[Tensor, Tensor | None]:
    """Return `(b, c, ...)` of the given columns: logits, or the inputs of the head; and the router's loss."""
    with without_head(model) if headless else nullcontext():
        return text_logits(model, tokens, columns, router_aux)


def _learned_columns(tokens: TokenBatch) -> Tensor:
    """Return the columns that predict a learned token in some row; one where there are none, so that a loss has a
    graph."""
    columns = tokens.learned.any(0).nonzero().flatten()
    return columns if len(columns) else columns.new_zeros(1)
