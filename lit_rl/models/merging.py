"""Adapters merged into the weights of their base: the kinds that can be, layer by layer, and a check before training.

Every export and every weight that is sent to an engine is merged, so an adapter that cannot be merged, or that splits
two tied weights, is refused before anything is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.core.errors import ConfigError
from lit_rl.models.trunk import base_of

if TYPE_CHECKING:
    from peft import PeftConfig


MERGED = (
    "LORA",
    "BOFT",
    "C3A",
    "FOURIERFT",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "MISS",
    "OFT",
    "RANDLORA",
    "VBLORA",
    "VERA",
)
"""Kinds of adapters whose export is the policy: a test trains, exports and reloads each of them."""


_SETTINGS = {
    "alora_invocation_tokens": "lets the adapter wake up at certain tokens",
    "arrow_config": "lets every token choose among several adapters",
    "layer_replication": "lets several layers stand on the weights of one, each with an adapter of its own",
    "monteclora_config": "lets the adapter be drawn anew in every step",
}
"""Settings of LoRA of which no plain model is the same, or none was ever seen to be."""

_FROM_DATA = ("corda", "eva", "lora_ga")
"""Ways to initialise an adapter by what the model does on data."""


def check_kind(key: str, config: PeftConfig) -> None:
    """Refuse an adapter that could not be merged, before anything is trained.

    Args:
        key: Name of the adapter in messages.
        config: Config of the adapter.

    Raises:
        ConfigError: it puts something before the prompt, allots its ranks while it trains, or is not known to merge.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind in MERGED:
        for name, does in _SETTINGS.items():
            if getattr(config, name, None):
                raise ConfigError(
                    f"{key} has {name}={getattr(config, name)!r}, which {does}: no merged export is that policy. Leave "
                    f"{name} out."
                )
        return
    why = "is not among those whose merged export is known to be the policy"
    if config.is_prompt_learning:
        why = "puts learned vectors before the prompt, which cannot be merged into the weights"
    elif kind == "ADALORA":
        why = "allots its ranks by calls during the training, which no loop here makes"
    raise ConfigError(f"{key} is of PEFT's kind {kind}, which {why}. Allowed are {', '.join(MERGED)}.")


def check_start(key: str, config: PeftConfig, *, trained: bool) -> None:
    """Refuse an adapter whose base, or whose first values, nobody could make again from the config.

    Some ways to initialise an adapter change the base under it, and PEFT changes it again, by the config, wherever the
    adapter is loaded: in a resumed run, and over the base by itself.

    Args:
        key: Name of the adapter in messages.
        config: Config of an adapter that is to be made, or loaded.
        trained: It is loaded, with weights of its own.

    Raises:
        ConfigError: it draws random numbers for the base, or needs data.
    """
    method = getattr(config, "init_lora_weights", None)
    if not isinstance(method, str):
        return
    if method.startswith("pissa_niter"):
        raise ConfigError(
            f"{key} has init_lora_weights={method!r}, which changes the base by random numbers: neither a resumed run "
            "nor the exported adapter would stand on the same base. Use 'pissa', which is exact, or 'olora'."
        )
    if method == "corda" or (method in _FROM_DATA and not trained):
        raise ConfigError(
            f"{key} has init_lora_weights={method!r}, which is made from data, and none are at hand here. Make the "
            "adapter with PEFT's own functions and give the PeftModel as model (with tokenizer=), or use true, "
            "'orthogonal' or 'pissa'."
        )


class LayerWeights(NamedTuple):
    """Weights of one layer, which are made at once."""

    path: str
    """Path of the module that holds them, in the plain model; empty, or with a dot at its end."""
    stored: dict[str, Tensor]
    """The weights as the base holds them, by their names in the plain model."""
    layer: nn.Module | None
    """The layer that adapters have put around them, which they are merged with."""


def layer_weights(policy: nn.Module, made: str = "The adapter") -> list[LayerWeights]:
    """Return the weights of the plain model that the policy is, in the order of its state dict, each tensor once.

    Args:
        policy: A Hugging Face model, or a `PeftModel` around one.
        made: Name of the adapter in messages.

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
            # The trained rows of a layer may be those of the embedding that its weight is tied to.
            follows = getattr(getattr(piece.layer, "token_adapter", None), "tied_adapter", None) is not None
            if layer is not piece.layer and not follows:
                _refuse_split(made, first, name)
        if fresh:
            kept.append(piece._replace(stored=fresh))
    tied = getattr(base, "all_tied_weights_keys", None) or {}
    for name in (name for piece in kept for name in piece.stored if name in tied):
        _refuse_split(made, tied[name], name)
    return kept


def merge_layer(layer: Any) -> nn.Module:
    """Return the plain layer of an adapted one, with its adapter merged. The adapted one is used up."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
    layer.merge(safe_merge=True)
    return layer.get_base_layer()


def refuse_hidden_adapters(base: nn.Module, made: str) -> None:
    """Raise where a model that is no `PeftModel` has layers of an adapter.

    Transformers puts one on wherever a folder holds ``adapter_config.json``, and by `add_adapter`. An export has no
    config of it.

    Args:
        base: The model.
        made: Name of the model in messages.

    Raises:
        ConfigError: it has.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if found := next((name for name, part in base.named_modules() if isinstance(part, BaseTunerLayer)), ""):
        raise ConfigError(
            f"{made} has an adapter inside ({found}) and is no PeftModel. transformers loads one from a folder that "
            "holds adapter_config.json: name the plain model, and the folder in model.adapter. In Python give "
            "PeftModel.from_pretrained(base, folder, is_trainable=True), or merge_and_unload() of it."
        )


def check_merge(policy: nn.Module, made: str) -> None:
    """Raise where the merged export of a policy could differ from the policy, before anything is trained.

    A copy of one layer of each kind gets adapter weights of some size, is run, is merged and run again.

    Args:
        policy: A `PeftModel`.
        made: Name of the adapter in messages.

    Raises:
        ConfigError: the adapter cannot be merged, merges to another layer, or splits a tied weight.
    """
    kinds: dict[Any, tuple[str, nn.Module]] = {}
    for path, _, layer in layer_weights(policy, made):
        held: Any = layer.get_base_layer() if hasattr(layer, "get_base_layer") else None  # pyright: ignore
        # Of a quantised base another one is exported, and without storage there is nothing to run.
        if layer is None or held is None or not all(p.is_floating_point() for p in held.parameters()):
            continue
        if any(p.is_meta for p in layer.parameters()):
            continue
        variants = tuple(type(each) for each in getattr(layer, "lora_variant", {}).values())
        kind = (type(layer), type(held), getattr(held, "bias", None) is None, variants)
        if kind not in kinds or _size(layer) < _size(kinds[kind][1]):
            kinds[kind] = (path.rstrip("."), layer)  # pyright: ignore
    for path, layer in kinds.values():
        why = None
        try:
            if (difference := _merge_error(layer)) > _MERGE_LIMIT:
                why = f"merged it is another layer, off by {difference:.2g} of its output."
        except (ValueError, NotImplementedError, RuntimeError, AttributeError) as error:
            why = " ".join(str(error).split())
        if why is not None:
            raise ConfigError(
                f"{made} cannot be merged into {path}: {why} Leave this layer, or the setting, out: every export is "
                "merged."
            )


_MERGE_LIMIT = 1e-3
"""Share of a layer's output by which a merge in float32 may round."""


def _size(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


@torch.no_grad()
def _merge_error(layer: nn.Module) -> float:
    """Return the largest difference that a merge makes to a layer's output, as a share of the largest number there.

    A copy on the CPU in float32 is tried, whatever device and type the layer has: its numbers are drawn there, and no
    narrow product rounds.
    """
    twin: Any = copy.deepcopy(layer).to("cpu", torch.float32).eval()
    draw = torch.Generator("cpu").manual_seed(0)
    for parameter in twin.parameters():
        if parameter.requires_grad:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw, device="cpu"))
    inputs = _example_input(twin.get_base_layer(), draw)
    before = None if inputs is None else twin(inputs)
    plain = merge_layer(twin)
    if before is None or inputs is None:
        return 0.0
    return float((plain(inputs) - before).abs().max() / before.abs().max().clamp(min=1e-6))


def _example_input(layer: Any, draw: torch.Generator) -> Tensor | None:
    """Return an input on the CPU; None where the layer is of a kind that takes more than one tensor, or another."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, nn.Embedding):
        return torch.arange(min(8, layer.num_embeddings), device="cpu")[None]
    width = layer.in_features if isinstance(layer, nn.Linear) else layer.nx if isinstance(layer, Conv1D) else None
    return None if width is None else torch.randn(1, 4, width, generator=draw, device="cpu")


def _pieces(module: nn.Module, prefix: str = "") -> Iterator[LayerWeights]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper
    from peft.utils.other import TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        trained = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
        module = trained[0] if trained else module.original_module
    if isinstance(module, (BaseTunerLayer, TrainableTokensWrapper)):
        held = module.original_module if isinstance(module, TrainableTokensWrapper) else module.get_base_layer()
        stored = {prefix + name: tensor for name, tensor in held.state_dict(keep_vars=True).items()}
        yield LayerWeights(prefix, stored, module)
        return
    passing = module._non_persistent_buffers_set
    for tensors in (module._parameters, {k: t for k, t in module._buffers.items() if k not in passing}):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield LayerWeights(prefix, {prefix + name: tensor}, None)
    for name, child in module.named_children():
        yield from _pieces(child, f"{prefix}{name}.")


def _refuse_split(made: str, first: str, name: str) -> None:
    raise ConfigError(
        f"{made} changes {first} or {name} alone, and in this model they are one tied weight: neither an export nor an "
        "engine can hold the two apart. Leave both layers out of its targets, modules_to_save and target_parameters. "
        "What moves both together is, in peft.LoraConfig, trainable_token_indices (single rows), or modules_to_save "
        "with ensure_weight_tying=True."
    )
