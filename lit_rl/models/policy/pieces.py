"""The weights of a policy, layer by layer as adapters have wrapped them, and which of them are one tied weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.models.policy.trunk import base_of


class Piece(NamedTuple):
    """Weights that are made at once."""

    path: str
    """Of the module that holds them, in the plain model; empty, or with a dot at its end."""
    stored: dict[str, Tensor]
    """As the base holds them, by their names in the plain model."""
    layer: nn.Module | None
    """What they are merged with: the layer that adapters have put around them."""


def pieces_of(policy: nn.Module, made: str = "The adapter") -> list[Piece]:
    """The weights of the plain model that the policy is, in the order of its state dict, each tensor once.

    Args:
        policy: A Hugging Face model, or a `PeftModel` around one.
        made: What messages call the adapter.

    Raises:
        ConfigError: an adapter changes one of two weights that the model ties, and not the other.
    """
    base = base_of(policy)
    every = list(_pieces(base))
    owners: dict[int, tuple[str, nn.Module | None]] = {}
    kept = []
    for piece in every:
        fresh = {name: tensor for name, tensor in piece.stored.items() if id(tensor) not in owners}
        for name, tensor in piece.stored.items():
            first, layer = owners.setdefault(id(tensor), (name, piece.layer))
            if layer is not piece.layer and not _follows(piece.layer):
                _refuse_split(made, first, name)
        if fresh:
            kept.append(piece._replace(stored=fresh))
    tied = getattr(base, "all_tied_weights_keys", None) or {}
    for name in (name for piece in kept for name in piece.stored if name in tied):
        _refuse_split(made, tied[name], name)
    return kept


def _pieces(module: nn.Module, prefix: str = "") -> Iterator[Piece]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper
    from peft.utils.other import TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        trained = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
        module = trained[0] if trained else module.original_module
    if isinstance(module, (BaseTunerLayer, TrainableTokensWrapper)):
        held = module.original_module if isinstance(module, TrainableTokensWrapper) else module.get_base_layer()
        stored = {prefix + name: tensor for name, tensor in held.state_dict(keep_vars=True).items()}
        yield Piece(prefix, stored, module)
        return
    passing = module._non_persistent_buffers_set
    for tensors in (module._parameters, {k: t for k, t in module._buffers.items() if k not in passing}):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield Piece(prefix, {prefix + name: tensor}, None)
    for name, child in module.named_children():
        yield from _pieces(child, f"{prefix}{name}.")


def _follows(layer: nn.Module | None) -> bool:
    """Its trained rows are those of the embedding that its weight is tied to."""
    return getattr(getattr(layer, "token_adapter", None), "tied_adapter", None) is not None


def _refuse_split(made: str, first: str, name: str) -> None:
    raise ConfigError(
        f"{made} changes {first} or {name} alone, and in this model they are one tied weight: neither an export nor an "
        "engine can hold the two apart. Leave both layers out of its targets, modules_to_save and target_parameters. "
        "What moves both together is, in peft.LoraConfig, trainable_token_indices (single rows), or modules_to_save "
        "with ensure_weight_tying=True."
    )
