"""The weights of a policy for another process: merged, one whole tensor at a time, or its LoRA adapter as a folder.

Tensors are named as a Hugging Face folder names them. An adapter by itself is for an engine that holds the base.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rl.core.errors import ConfigError, NumericError, StorageError
from lit_rl.core.ranks import broadcast_object, rank
from lit_rl.models.merging import LayerWeights, layer_weights, merge_layer
from lit_rl.models.sharding import own_part, refuse_flat_parameters, reshard, whole_shape, whole_tensor
from lit_rl.models.trunk import base_of

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
    from peft import get_peft_model_state_dict

    refuse_flat_parameters(policy)
    reason = adapter_only(policy)
    if reason is not None:
        raise ConfigError(f"This policy cannot be shipped as an adapter: {reason}. Ship its merged weights.")
    adapted: Any = policy
    held = get_peft_model_state_dict(
        adapted,
        state_dict=dict(adapted.named_parameters()),  # a state dict has lost what DeepSpeed knows of parameters
        adapter_name=adapted.active_adapters[0],
        save_embedding_layers=False,  # "auto" would ask the hub whether the vocabulary was resized
    )
    tensors = {name: whole_tensor(parameter).cpu().contiguous() for name, parameter in held.items()}
    problem = broadcast_object(_write(policy, tensors, Path(folder)) if rank() == 0 else None)
    if problem is not None:
        raise StorageError(f"The adapter cannot be written to {folder}: {problem}")


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


_COLUMNS = 4096


def whole_weights(policy: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every weight of the plain model that the policy is, under the names of its safetensors
    files.

    Those are the names of its state dict, but for models that transformers holds in another form than it stores, such
    as experts in one tensor. Adapters are merged, the modules and token rows trained beside them are in place, and tied
    weights come once. A collective where the policy is sharded (FSDP2, ZeRO stage 3): every rank asks for every weight,
    and gets it whole. Works within `unsharded` too.

    One layer at a time: nothing is kept once the next one is asked for, so there is never a second whole copy. The
    policy is not changed, not even for a moment: adapters are merged into a copy of one layer.

    Args:
        policy: A Hugging Face model, or a `PeftModel` around one.
        dtype: Type to cast floating weights to, such as the engine's; None leaves them as they are.

    Returns:
        Pairs of a name and a detached tensor on the parameter's device, which may be the policy's own memory: read it,
        or copy it.

    Raises:
        ConfigError: classic FSDP, a quantised base, or adapters that cannot be merged or that split a tied weight.
        NumericError: a merged weight is not finite.
    """
    base, pieces = _plan(policy)
    return _ship(base, pieces, dtype)


def base_weights(policy: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield what `whole_weights` does without the adapters: the base for an engine that takes the adapter by itself.

    Modules trained in full beside the adapters come as they were trained; `adapter_only` refuses those policies.
    """
    base, pieces = _plan(policy)
    return _ship(base, [piece._replace(layer=None) for piece in pieces], dtype)


def weight_shapes(policy: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and whole shapes of what `whole_weights` gives, in its order. Nothing is gathered or merged.

    Raises:
        ConfigError: as `whole_weights`.
    """
    base, pieces = _plan(policy)
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        for name, tensor in piece.stored.items():
            empty = torch.empty(whole_shape(tensor), device="meta")
            shapes |= {key: tuple(part.shape) for key, part in _as_stored(base, name, empty).items()}
    return shapes


def fingerprint(policy: nn.Module) -> tuple[tuple[str, int, int], ...]:
    """Return checksums of the parts that this process holds of every trained parameter and every stored buffer.

    They are equal where nothing has changed, and differ once anything has, however it was written (``.data`` included).
    One pass and no collective.

    The sums are of bits and of integers: no change is too small to be seen, values that change places are seen, and
    a change goes unseen by a chance of about 2**-64. Not seen are changes of parameters that need no gradient, and of
    other ranks' shards: ask every rank. 0.0 and -0.0 count as different.

    Under FSDP2 gathered parameters are taken apart first: ask outside of `unsharded`.
    """
    reshard(policy)
    held = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    held |= {
        name: tensor
        for name, tensor in policy.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
    }
    if not held:
        return ()
    sums = [_bit_sums(own_part(tensor)) for tensor in held.values()]
    device = sums[0].device
    rows = torch.stack([pair.to(device) for pair in sums]).tolist()
    return tuple((name, first, second) for name, (first, second) in zip(held, rows, strict=True))


def _plan(policy: nn.Module) -> tuple[Any, list[LayerWeights]]:
    """Return the plain model and its layers' weights, in the order of its state dict, each tensor once."""
    refuse_flat_parameters(policy)
    base = base_of(policy)
    if getattr(base, "is_quantized", False) or not all(p.is_floating_point() for p in base.parameters()):
        raise ConfigError(
            "The policy's base is quantised (model.quantization): merging its adapter into rounded weights would round "
            "the adapter away. Ship the adapter by itself, or unset model.quantization."
        )
    for conversion in getattr(base, "_weight_conversions", None) or ():
        if len(conversion.target_patterns) > 1:
            raise ConfigError(
                f"{type(base).__name__} saves several parameters as one tensor "
                f"({', '.join(conversion.target_patterns)}), which sending weights one by one does not support."
            )
    return base, layer_weights(policy)


def _ship(base: Any, pieces: list[LayerWeights], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for piece in pieces:
        yield from _ship_piece(base, piece, dtype)


def _ship_piece(base: Any, piece: LayerWeights, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of one layer, in a frame of its own: what it holds is gone before the next layer's are made."""
    if piece.layer is None:
        made = {name: whole_tensor(tensor, dtype) for name, tensor in piece.stored.items()}
    else:
        made = {name: whole_tensor(tensor, dtype) for name, tensor in _merged(piece).items()}
    for name in list(made):
        stored = _as_stored(base, name, made.pop(name))
        for key in list(stored):
            yield key, stored.pop(key)


def _merged(piece: LayerWeights) -> dict[str, Tensor]:
    """Return the weights of one adapted layer, merged in a copy of it."""
    layer: Any = piece.layer
    # What is in the memo is taken for the copy. Merging safely replaces tensors, and writes to none.
    memo: dict[int, Any] = {id(p): nn.Parameter(whole_tensor(p), requires_grad=False) for p in layer.parameters()}
    twin = copy.deepcopy(layer, memo)
    try:
        plain = merge_layer(twin)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        if "NaN" in str(error) or not all(p.isfinite().all() for p in twin.parameters()):
            raise NumericError(
                f"The adapter of {piece.path[:-1]}, merged into its layer, gives NaN or infinite weights: the policy "
                "diverged. Lower optimizer.lr or set trainer.gradient_clip_val."
            ) from error
        raise ConfigError(f"The adapter of {piece.path[:-1]} cannot be merged into its layer: {error}") from error
    found = plain.state_dict()
    return {name: found[name.removeprefix(piece.path)] for name in piece.stored}


def _as_stored(base: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensor as a safetensors file has it: most often itself."""
    from transformers.core_model_loading import revert_weight_conversion

    if getattr(base, "_weight_conversions", None) == []:
        return {name: tensor}
    return revert_weight_conversion(base, {name: tensor})


def _bit_sums(tensor: Tensor) -> Tensor:
    """Return two sums of the bits, read as integers of 64 and laid out in rows. Shape (2,), int64.

    One has a weight for each column and one for each row, so that values that change places are seen too.
    """
    flat = tensor.reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    even = len(octets) // (8 * _COLUMNS) * (8 * _COLUMNS)
    table, rest = octets[:even].view(torch.int64).view(-1, _COLUMNS), octets[even:].to(torch.int64)
    beyond = (rest * _odd_numbers(rest)).sum()
    return torch.stack([beyond + (part * _odd_numbers(part)).sum() for part in (table.sum(0), table.sum(1))])


def _odd_numbers(like: Tensor) -> Tensor:
    """Return as many well-mixed odd numbers, the same each time: a change times an odd number is never 0 modulo
    2**64."""
    mixed = torch.arange(1, len(like) + 1, device=like.device) * -7046029254386353131
    return ((mixed ^ (mixed >> 29)) * -4658895280553007687) | 1
