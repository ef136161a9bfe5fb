"""Losses of preferences: pairs of a chosen and a rejected completion, and single completions with a verdict.

Losses of pairs share the signature ``loss(pairs, beta, *, settings) -> (b,)``: one value a pair, to be minimised, whose
mean over the pairs of an optimizer step is the loss of the step. ``beta`` is above 0; the caller checks that. A verdict
is ``verdict(ratio, desirable, baseline, beta, *, settings) -> (b,)``, with the same meaning. Settings that are out of
range raise a ValueError that names them.

Notation: ``rho_c`` and ``rho_r`` log ratios ``log(pi / ref)`` of the chosen and the rejected completion, summed over
their tokens; ``s_c`` and ``s_r`` their scores, which are the log ratios unless a divergence of
:mod:`lit_rl.ops.preference.divergences` changes them; ``n_c`` and ``n_r`` their numbers of tokens; ``z`` the scaled
margin ``beta (s_c - s_r)``; ``ls`` the logarithm of the logistic function ``sigma``; ``e`` the label smoothing: the
share of pairs whose label is taken to be the wrong way round. ``sg`` is "without gradient".

What a loss reads stands in its signature, as the type of its first argument, one of :mod:`lit_rl.ops.preference.pairs`.
Without one it is given all of `Pairs`:

    PolicyPairs  log-probs of the policy: no reference has to be scored
    RatioPairs   log-probs or log ratios as they are: no divergence but the reverse KL fits it
    StepPairs    the same, of all pairs of a step, which it couples: `Annotated[..., OfStep()]`

A verdict that reads no baseline takes three arguments by position, not four.
"""

from lit_rl.ops.preference.anchored import apo_down, apo_zero
from lit_rl.ops.preference.divergences import alpha_divergence, forward_kl, js_divergence, reverse_kl
from lit_rl.ops.preference.losses import (
    bco_pair,
    discopop,
    exo_pair,
    hinge,
    ipo,
    nca_pair,
    robust,
    sft,
    sigmoid,
    sigmoid_norm,
    sppo_hard,
)
from lit_rl.ops.preference.pairs import Pairs
from lit_rl.ops.preference.ranked import aot, aot_unpaired
from lit_rl.ops.preference.reference_free import alphapo, simpo
from lit_rl.ops.preference.verdicts import apo_zero_unpaired, bco, kto

__all__ = [
    "Pairs",
    "alpha_divergence",
    "alphapo",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "apo_zero_unpaired",
    "bco",
    "bco_pair",
    "discopop",
    "exo_pair",
    "forward_kl",
    "hinge",
    "ipo",
    "js_divergence",
    "kto",
    "nca_pair",
    "reverse_kl",
    "robust",
    "sft",
    "sigmoid",
    "sigmoid_norm",
    "simpo",
    "sppo_hard",
]
