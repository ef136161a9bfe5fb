"""Write a scoring model as a Hugging Face folder that `RewardModel` and `ProcessRewardModel` load, and prove it."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rl.errors import StorageError
from lit_rl.models.export import ExportReport, check_target, fill, publish
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.scoring_model import Scoring, load_scoring_base
from lit_rl.models.trunk import base_of
from lit_rl.models.verify import compare_folder, verify_adapter, verify_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        scorer: The model: it gives configs only.
        folder: A new folder, or an earlier export, which is replaced.
        card: Text of README.md, see `model_card`.
        reads: How a text must be prepared to be read as in training; these go into config.json.

    Raises:
        StorageError: as `export_policy`.
    """
    target = Path(folder).expanduser().resolve()
    check_target(target, description)
    rebuilt, plain = _rebuild(description, scoring, scorer, scorer_state)
    plain.config.update(dict(reads))
    staged = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        staged.mkdir(parents=True)
        model = _write(staged, rebuilt, description)
        (staged / "README.md").write_text(card, encoding="utf-8")
        state = model.state_dict()
        difference = compare_folder(staged, state, scoring.auto, trust_remote_code=description.trust_remote_code)
        verify_tokenizer(staged, description.tokenizer, trust_remote_code=description.trust_remote_code)
        publish(staged, target)
    except OSError as error:
        raise StorageError(f"The export to {target} failed: {error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return ExportReport(
        folder=target,
        adapter=target / "adapter" if rebuilt is not model else None,
        tensors=len(state),
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        max_abs_diff=difference,
    )


def _rebuild(
    description: LanguageModel, scoring: Scoring, scorer: nn.Module, state: Mapping[str, Tensor]
) -> tuple[Any, PreTrainedModel]:
    """A model on the CPU like ``scorer`` with the tensors of ``state``, and the same without adapters."""
    import transformers
    from peft import PeftModel, get_peft_model

    if description.quantization is not None:
        # As for a policy: the adapter joins the base as it was published, since 4-bit weights would round it away.
        unquantized = copy.copy(description)
        unquantized.quantization = None
        plain: Any = load_scoring_base(unquantized, scoring)
    else:
        remote = {"trust_remote_code": True, "code_revision": description.revision}
        with torch.device("meta"):
            plain = getattr(transformers, scoring.auto).from_config(
                copy.deepcopy(base_of(scorer).config), **(remote if description.trust_remote_code else {})
            )
    rebuilt: Any = plain
    if isinstance(scorer, PeftModel):
        with torch.device(plain.device):
            rebuilt = get_peft_model(plain, copy.deepcopy(scorer.peft_config[str(scorer.active_adapter)]))
    if description.quantization is not None:
        trained = {name for name, parameter in rebuilt.named_parameters() if parameter.requires_grad}
        state = {name: tensor for name, tensor in state.items() if name in trained}
    fill(rebuilt, plain, state)
    return rebuilt, plain


def _write(staged: Path, rebuilt: Any, description: LanguageModel) -> PreTrainedModel:
    from peft import PeftModel

    model = rebuilt
    if isinstance(rebuilt, PeftModel):
        rebuilt.peft_config[str(rebuilt.active_adapter)].base_model_name_or_path = description.name
        rebuilt.save_pretrained(str(staged / "adapter"), save_embedding_layers=False)
        verify_adapter(staged / "adapter", rebuilt)
        try:
            model = rebuilt.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise StorageError(f"The adapter cannot be merged: {error}") from error
    model.save_pretrained(staged)
    description.tokenizer.save_pretrained(staged)
    return model
