"""A policy's LoRA adapter by itself, for an engine that holds the base: whether one can take it, and its folder."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from lit_rl.errors import ConfigError, StorageError
from lit_rl.models.export.gathering import refuse_flat, whole
from lit_rl.models.policy.trunk import base_of

if TYPE_CHECKING:
    from peft import PeftModel

_HARMLESS = ("gaussian", "eva", "orthogonal")
"""Ways to initialise an adapter that leave the base's weights alone, among those that have a name."""

_FEATURES = {
    "use_dora": "DoRA (use_dora)",
    "lora_bias": "a bias of the adapter (lora_bias)",
    "modules_to_save": "modules trained in full (modules_to_save)",
    "trainable_token_indices": "trained rows of the embedding (trainable_token_indices)",
    "target_parameters": "adapters on bare parameters (target_parameters)",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "an adapter that wakes up at certain tokens (alora_invocation_tokens)",
    "use_qalora": "QALoRA (use_qalora)",
}


def adapter_only(policy: nn.Module) -> str | None:
    """Return None if an engine that holds the policy's base can take the policy as a LoRA adapter, else the reason, in
    words.

    It can take one plain LoRA, rsLoRA included, on linear layers other than the head, of ranks and alphas that may
    differ by layer; this is what vLLM 0.32 takes for every model that it takes adapters for.
    """
    from peft import PeftModel, PeftType

    if not isinstance(policy, PeftModel):
        return "it is not a LoRA policy"
    active = policy.active_adapters
    if len(active) != 1:
        return f"{len(active)} adapters are active at once"
    config: Any = policy.peft_config[active[0]]
    if config.peft_type != PeftType.LORA:
        return f"its adapter is {config.peft_type}, not LoRA"
    for field, words in _FEATURES.items():
        if getattr(config, field, None):
            return f"it has {words}"
    if config.bias != "none":
        return f"it trains biases of the base (bias={config.bias})"
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights not in _HARMLESS:
        return f"its base was changed when the adapter was made (init_lora_weights={config.init_lora_weights})"
    return _unfit_layer(policy)


def _unfit_layer(policy: PeftModel) -> str | None:
    from peft.tuners.lora import LoraLayer

    head, name = base_of(policy).get_output_embeddings(), policy.active_adapters[0]
    for path, layer in policy.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        plain = path.removeprefix("base_model.model.")
        if layer is head or not isinstance(layer.get_base_layer(), nn.Linear):
            return f"it adapts {plain}, and only linear layers other than the head may be adapted"
        if layer.merged:
            return f"its adapter is merged into {plain}"
        if name in layer.lora_variant:
            return f"{plain} has a variant of LoRA, {type(layer.lora_variant[name]).__name__}"
    return None


def write_adapter(policy: nn.Module, folder: str | Path) -> None:
    """Write the active adapter as a PEFT folder, adapter_config.json and adapter_model.safetensors, of whole tensors.

    A collective in a run of several processes: every rank calls it, rank 0 writes, and none returns before the folder
    is complete. Files of an earlier version are replaced, not written over, so an engine that still reads them reads
    what it began with.

    Args:
        policy: A policy that `adapter_only` finds nothing against.
        folder: Made if it is not there.

    Raises:
        ConfigError: the policy is no such adapter.
        StorageError: the folder cannot be written; on every rank.
    """
    refuse_flat(policy)
    reason = adapter_only(policy)
    if reason is not None:
        raise ConfigError(f"This policy cannot be shipped as an adapter: {reason}. Ship its merged weights.")
    tensors = _adapter_tensors(policy)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        problem = _write(policy, tensors, Path(folder))
    else:
        problems = [_write(policy, tensors, Path(folder)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(problems, src=0)
        problem = problems[0]
    if problem is not None:
        raise StorageError(f"The adapter cannot be written to {folder}: {problem}")


def _adapter_tensors(policy: Any) -> dict[str, Tensor]:
    """Return whole tensors on the CPU, under the names of a PEFT folder."""
    from peft import get_peft_model_state_dict

    # Parameters themselves: a state dict has lost what DeepSpeed knows of them.
    held = get_peft_model_state_dict(
        policy,
        state_dict=dict(policy.named_parameters()),
        adapter_name=policy.active_adapters[0],
        save_embedding_layers=False,  # "auto" would ask the hub whether the vocabulary was resized
    )
    return {name: whole(parameter).cpu().contiguous() for name, parameter in held.items()}


def sort_names(config: Any) -> None:
    """Sort the names of modules in a config of PEFT, which writes a set as it happens to be iterated: the same adapter
    would have another file in every process."""
    for name, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, name, sorted(value))


def _write(policy: Any, tensors: dict[str, Tensor], folder: Path) -> str | None:
    """Write the folder and return the reason of a failure, in words; None where it is written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config = copy.deepcopy(policy.peft_config[policy.active_adapters[0]])
    config.inference_mode = True
    sort_names(config)
    staged = folder / f".tmp-{os.getpid()}"
    try:
        staged.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(staged))
        save_file(tensors, staged / "adapter_model.safetensors", metadata={"format": "pt"})
        for item in sorted(staged.iterdir()):
            os.replace(item, folder / item.name)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        return str(error)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return None
