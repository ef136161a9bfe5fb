"""The weights of a policy for another process: whole, named as a Hugging Face folder names them, one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.errors import ConfigError, NumericError
from lit_rl.models.export.adapter_folder import adapter_only, write_adapter
from lit_rl.models.export.gathering import own_part, refuse_flat, take_apart, whole, whole_shape
from lit_rl.models.policy.pieces import Piece, merged, pieces_of
from lit_rl.models.policy.trunk import base_of

__all__ = ["adapter_only", "base_weights", "fingerprint", "weight_shapes", "whole_weights", "write_adapter"]

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
    take_apart(policy)
    held = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    held |= {name: tensor for name, tensor in policy.state_dict(keep_vars=True).items() if _is_buffer(tensor)}
    if not held:
        return ()
    sums = [_bit_sums(own_part(tensor)) for tensor in held.values()]
    device = sums[0].device
    rows = torch.stack([pair.to(device) for pair in sums]).tolist()
    return tuple((name, first, second) for name, (first, second) in zip(held, rows, strict=True))


def _plan(policy: nn.Module) -> tuple[Any, list[Piece]]:
    """Return the plain model and its layers' weights, in the order of its state dict, each tensor once."""
    refuse_flat(policy)
    base = base_of(policy)
    if getattr(base, "is_quantized", False) or not all(p.is_floating_point() for p in base.parameters()):
        raise ConfigError(
            "The policy's base is quantised (model.quantization): merging its adapter into rounded weights would round "
            "the adapter away. Ship the adapter by itself, or unset model.quantization."
        )
    for conversion in getattr(base, "_weight_conversions", None) or ():
        if len(conversion.target_patterns) > 1:
            raise ConfigError(
                f"{type(base).__name__} stores in one tensor what it holds in several "
                f"({', '.join(conversion.target_patterns)}), so its weights cannot be shipped one at a time."
            )
    return base, pieces_of(policy)


def _ship(base: Any, pieces: list[Piece], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for piece in pieces:
        yield from _ship_piece(base, piece, dtype)


def _ship_piece(base: Any, piece: Piece, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of one layer, in a frame of its own: what it holds is gone before the next layer's are made."""
    if piece.layer is None:
        made = {name: whole(tensor, dtype) for name, tensor in piece.stored.items()}
    else:
        made = {name: whole(tensor, dtype) for name, tensor in _merged(piece).items()}
    for name in list(made):
        stored = _as_stored(base, name, made.pop(name))
        for key in list(stored):
            yield key, stored.pop(key)


def _merged(piece: Piece) -> dict[str, Tensor]:
    """Return the weights of one adapted layer, merged in a copy of it."""
    layer: Any = piece.layer
    # What is in the memo is taken for the copy. Merging safely replaces tensors, and writes to none.
    memo: dict[int, Any] = {id(p): nn.Parameter(whole(p), requires_grad=False) for p in layer.parameters()}
    twin = copy.deepcopy(layer, memo)
    try:
        plain = merged(twin)
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


def _is_buffer(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)


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
