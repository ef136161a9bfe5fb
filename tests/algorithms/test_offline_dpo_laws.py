"""DPO beside its kin: what is left where the reference is free or no loss reads it. How a step is cut is in
test_offline_loss_changes_nothing.py, of each loss in tests/ops."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from offline_cuts import PAIRS, data_of, micro_batches

from lit_rl.algorithms import DPO
from lit_rl.models.references import ReferenceFree
from lit_rl.ops import preference_losses
from lit_rl.ops.preference_losses import sft, sigmoid


def test_without_a_reference_it_is_cpo_whose_likelihood_is_beside_it() -> None:
    """2401.08417 is the logistic loss of log-probs beside the likelihood of what was chosen."""
    free = DPO("tiny", reference=ReferenceFree(), preference={"sigmoid": sigmoid, "sft": sft})
    free.configure_model()
    assert free.reference_policy is None
    ((batch,),) = micro_batches(data_of(PAIRS, "pairs"))
    columns = free.columns(batch, free.text_scores(batch.tokens))
    z = 0.1 * (columns["chosen"] - columns["rejected"])
    expected = -torch.nn.functional.logsigmoid(z).mean() + columns["nll"].sum() / batch.totals.tokens
    assert free.loss(batch)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_reference_that_no_loss_reads_is_not_loaded() -> None:
    """`simpo` and its reward are of the policy's log-probs alone. Beside a loss that compares the reference is needed;
    with `sft` too: the rewards that are logged are measured against it, as in TRL."""
    simpo = partial(preference_losses.simpo, gamma=1.0)
    assert not DPO("tiny", preference=simpo).needs_reference
    assert DPO("tiny", preference={"a": simpo, "b": preference_losses.sigmoid}).needs_reference
    assert DPO("tiny", preference=preference_losses.sft).needs_reference
