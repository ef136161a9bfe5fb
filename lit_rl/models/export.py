"""Write a policy as a Hugging Face folder, and prove that what was written is what was trained."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rl.errors import StorageError
from lit_rl.models.card import model_card
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.loading import load_base
from lit_rl.models.verify import verify, verify_adapter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

__all__ = ["ExportReport", "export_policy", "model_card", "verify"]


@dataclass(frozen=True)
class ExportReport:
    """What was written, and the proof."""

    folder: Path
    adapter: Path | None
    """The LoRA adapter by itself; None where the policy has none."""
    tensors: int
    """Tensors of the state dict, all of them compared after a reload."""
    parameters: int
    """Numbers in them, tied weights counted once."""
    dtype: str
    max_abs_diff: float
    """Largest difference between a weight and its reload: 0, or the export fails."""


def export_policy(
    description: LanguageModel,
    policy_state: Mapping[str, Tensor],
    policy: nn.Module,
    folder: str | Path,
    *,
    card: str,
) -> ExportReport:
    """Write model, tokenizer, generation config and card to ``folder``, which appears whole and checked, or not at all.

    A LoRA policy is merged into its base, and its adapter stands by itself in ``folder/adapter``. One process calls
    this. The weights are ``policy_state``'s: ``policy`` gives configs only, so it may be sharded and on any device.

    Args:
        description: What the policy was loaded from.
        policy_state: Every tensor of the policy, whole, under the policy's own names (see `full_state_dict`).
        policy: The policy.
        folder: A new folder, or an earlier export, which is replaced.
        card: Text of README.md, see `model_card`.

    Raises:
        StorageError: the state is partial or of other shapes, the folder cannot be written or holds something else,
            or what was written does not reload as it was.
    """
    target = Path(folder).expanduser().resolve()
    check_target(target, description)
    rebuilt = _rebuild(description, policy, policy_state)
    staged = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        staged.mkdir(parents=True)
        model = _write(staged, rebuilt, description)
        (staged / "README.md").write_text(card, encoding="utf-8")
        state = model.state_dict()
        difference = verify(staged, state, description.tokenizer, trust_remote_code=description.trust_remote_code)
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


def check_target(target: Path, description: LanguageModel) -> None:
    if description.is_local and target == Path(description.path).resolve():
        raise StorageError(f"The export would overwrite the model that training started from, {target}.")
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").is_file()):
        raise StorageError(f"{target} exists and is not an earlier export. Choose a new folder.")


def _rebuild(description: LanguageModel, policy: nn.Module, state: Mapping[str, Tensor]) -> PreTrainedModel | PeftModel:
    """A model on the CPU like ``policy``, whose parameters are the tensors of ``state``: nothing is copied."""
    from peft import PeftModel, get_peft_model

    base = policy.get_base_model() if isinstance(policy, PeftModel) else policy
    config, generation_config = _configs(base, description)
    if description.quantization is not None:
        # Merging into 4-bit weights would round the adapter away, so the adapter joins the base as it was published.
        rebuilt: Any = _full_precision_base(description)
        rebuilt.config.update({"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id})
    else:
        rebuilt = _empty(config, description)
    rebuilt.generation_config = generation_config
    plain = rebuilt
    if isinstance(policy, PeftModel):
        with torch.device(plain.device):
            rebuilt = get_peft_model(plain, copy.deepcopy(policy.peft_config[str(policy.active_adapter)]))
    if description.quantization is not None:
        trained = {name for name, parameter in rebuilt.named_parameters() if parameter.requires_grad}
        state = {name: tensor for name, tensor in state.items() if name in trained}
    fill(rebuilt, plain, state)
    return rebuilt


def _empty(config: PreTrainedConfig, description: LanguageModel) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    remote = {"trust_remote_code": True, "code_revision": description.revision} if description.trust_remote_code else {}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **remote)


def _full_precision_base(description: LanguageModel) -> PreTrainedModel:
    unquantized = copy.copy(description)
    unquantized.quantization = None
    return load_base(unquantized)


def fill(model: nn.Module, plain: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Put ``state`` into ``model``, whose base is ``plain``; refuse a state that leaves a parameter without a value."""
    tensors = {name: tensor.detach().cpu() for name, tensor in state.items()}
    try:
        unexpected = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise StorageError(f"The policy's weights do not fit its own config: {error}") from error
    _tie(plain)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    for problem, names in (("lacks", missing), ("also holds", unexpected)):
        if names:
            raise StorageError(
                f"The state to export {problem} {len(names)} weights of the policy: {', '.join(sorted(names)[:5])}. "
                "Was it gathered from every rank, under the policy's own names?"
            )


def _tie(plain: Any) -> None:
    """Make tied weights one tensor again. Where PEFT trains single rows of the embedding, it has moved both weights to
    names under which transformers does not find them.
    """
    from peft.utils.other import TrainableTokensWrapper

    embedding, head = plain.get_input_embeddings(), plain.get_output_embeddings()
    if not isinstance(embedding, TrainableTokensWrapper):
        plain.tie_weights()
    elif plain.config.get_text_config().tie_word_embeddings:
        head.token_adapter.get_base_layer().weight = embedding.token_adapter.get_base_layer().weight


def _configs(base: Any, description: LanguageModel) -> tuple[PreTrainedConfig, GenerationConfig]:
    """Config and generation config that agree with the tokenizer about the ids of EOS and padding."""
    from lightning.pytorch.utilities import rank_zero_warn
    from transformers import GenerationConfig

    first, *others = description.eos_ids
    eos = [first, *others] if others else first
    ids = {"eos_token_id": eos, "pad_token_id": description.pad_id, "bos_token_id": description.tokenizer.bos_token_id}
    config, generation_config = copy.deepcopy(base.config), copy.deepcopy(base.generation_config)
    config.get_text_config().update(ids)
    config.update(ids)
    generation_config.update(**ids)
    try:
        generation_config.validate(strict=True)
    except ValueError as error:
        rank_zero_warn(
            f"The model's generation_config.json contradicts itself, so only its token ids are kept: {error}"
        )
        generation_config = GenerationConfig(**ids)
    return config, generation_config


def _write(staged: Path, rebuilt: Any, description: LanguageModel) -> PreTrainedModel:
    """Write everything but the card. Returns the plain model that was written, adapters merged."""
    from peft import PeftModel

    model = rebuilt
    if isinstance(rebuilt, PeftModel):
        adapter = rebuilt.peft_config[str(rebuilt.active_adapter)]
        adapter.base_model_name_or_path = description.name
        # "auto", the default, would ask the hub whether the vocabulary was resized.
        rebuilt.save_pretrained(str(staged / "adapter"), save_embedding_layers=False)
        verify_adapter(staged / "adapter", rebuilt)
        try:
            # Safe: it checks for NaN, and replaces the base's tensors, which the caller's state still points to.
            model = rebuilt.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise StorageError(f"The adapter cannot be merged: {error}") from error
    model.save_pretrained(staged)
    description.tokenizer.save_pretrained(staged)
    return model


def publish(staged: Path, target: Path) -> None:
    """Make the staged folder durable, and put it in place of an earlier export."""
    for item in [*staged.rglob("*"), staged]:
        descriptor = os.open(item, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    earlier = staged.with_name(staged.name.replace(".tmp-", ".old-"))
    replaces = target.exists()
    if replaces:
        os.rename(target, earlier)
    try:
        os.rename(staged, target)
    except OSError:
        if replaces:
            os.rename(earlier, target)
        raise
    shutil.rmtree(earlier, ignore_errors=True)
