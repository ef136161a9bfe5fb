"""Write a scoring model as a Hugging Face folder that `RewardModel` and `ProcessRewardModel` load, and prove it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.models.export.checked_folder import ExportReport, write_checked
from lit_rl.models.export.policy import base_in_files, made_by, refilled, unquantized
from lit_rl.models.export.probe import Probe
from lit_rl.models.export.verify import compare_folder, verify_processor, verify_tokenizer
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.trunk import base_of
from lit_rl.models.scoring.model import Scoring, load_scoring_base


def export_scoring(
    description: LanguageModel,
    scoring: Scoring,
    scorer_state: Mapping[str, Tensor],
    scorer: nn.Module,
    folder: str | Path,
    *,
    card: str,
    reads: Mapping[str, Any],
) -> ExportReport:
    """Write classifier, tokenizer and card to ``folder``, which appears whole and checked, or not at all.

    A LoRA model is merged into its base, and its adapter, with the head, stands by itself in ``folder/adapter``.

    Args:
        description: What the model was loaded from.
        scoring: What kind it is.
        scorer_state: Every tensor, whole, under the model's own names (see `full_state_dict`).
        scorer: The model: it gives configs, and the scores that the reloaded model has to give.
        folder: A new folder, or an earlier export, which is replaced.
        card: Text of README.md, see `model_card`.
        reads: How a text must be prepared to be read as in training; these go into config.json.

    Raises:
        StorageError: as `export_policy`.
    """

    def check(staged: Path, state: Mapping[str, Tensor], description: LanguageModel, probe: Probe) -> float:
        remote = description.trust_remote_code
        difference = compare_folder(staged, state, scoring.auto, trust_remote_code=remote, probe=probe)
        verify_tokenizer(staged, description.tokenizer, trust_remote_code=description.trust_remote_code)
        if description.processor is not None:
            verify_processor(staged, description.processor, trust_remote_code=description.trust_remote_code)
        return difference

    load_base = base_in_files(description, partial(load_scoring_base, unquantized(description), scoring))
    probe = Probe(description, scorer, scorer_state, load_base)
    rebuild = partial(_rebuild_scorer, description, scoring, scorer, scorer_state, reads)
    return write_checked(folder, description, rebuild, check, card, probe)


def _rebuild_scorer(
    description: LanguageModel,
    scoring: Scoring,
    scorer: nn.Module,
    state: Mapping[str, Tensor],
    reads: Mapping[str, Any],
) -> Any:
    """Return a model on the CPU like ``scorer`` with the tensors of ``state``."""
    import transformers

    if description.quantization is not None:
        # As for a policy: the adapter joins the base as it was published, since 4-bit weights would round it away.
        plain: Any = load_scoring_base(unquantized(description), scoring)
    else:
        with torch.device("meta"):
            plain = made_by(getattr(transformers, scoring.auto), copy.deepcopy(base_of(scorer).config), description)
    plain.config.update(dict(reads))
    return refilled(plain, scorer, state, description)
