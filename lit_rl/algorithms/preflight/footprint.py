"""Sizes for a memory plan, from the description of a run's parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lit_rl.algorithms.optim.master_weights import BUCKET, moves_each_alone, moves_numbers_alone
from lit_rl.algorithms.optim.optimizers import AdamW8bit, AdamWSplit, ByPath
from lit_rl.algorithms.preflight.images import seeing_shape
from lit_rl.algorithms.preflight.memory import Buckets, Gathered, Head, Network, Numbers
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.lora import Lora
from lit_rl.models.policy.shape import Linear, ModelShape
from lit_rl.models.policy.vision_parts import PARTS
from lit_rl.models.reference.base import AdapterBase, Auto, Reference
from lit_rl.models.reference.moving import Moving
from lit_rl.models.reference.other_model import OtherModel
from lit_rl.models.scoring.critic import AdapterCritic, Critic, SeparateCritic, SharedTrunk

_STORED = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "auto": 4.0, "nf4": 0.56, "int8": 1.06}
"""Bytes of a frozen weight by type; a quantised one with its scales (2305.14314, section 3)."""


def shape_of(model: LanguageModel) -> ModelShape | None:
    """Return the shape of a described model; None where it cannot be built from its config alone, or is no decoder."""
    config = model.config
    try:
        return ModelShape.of(config)
    except Exception:  # the code of any architecture runs here
        return None


def numbers_of(model: LanguageModel, precision: str, optimizer: Any, *, shards: bool = False) -> Numbers:
    """Return the number sizes of a run; `shards` under FSDP2. A user's optimizer is assumed to keep two moments."""
    moments = 2 if isinstance(optimizer, AdamW8bit | AdamWSplit) else 8
    if isinstance(optimizer, ByPath) and optimizer.path.endswith(".SGD"):
        moments = 4 if optimizer.kwargs.get("momentum") else 0
    trained_narrow = model.dtype == "bfloat16" and model.lora is None and model.adapter is None
    return Numbers.of("bf16-true" if trained_narrow else precision, moments, shards=shards)


def masters_at_once(networks: Iterable[Network], numbers: Numbers, optimizer: Any) -> int:
    """Return the bytes of float32 masters of narrow weights that exist at once in an optimizer step.

    They are those of a bucket of `optim.master_weights`, which its last weight may overfill, or of all weights.
    """
    narrow = [network for network in networks if network.trained and not network.adapters]
    if not numbers.remainder or not narrow or isinstance(optimizer, AdamWSplit):
        return 0
    every = sum(network.trained for network in narrow)
    path = getattr(optimizer, "path", "")  # the optimizer of a user's function is not known yet
    if not moves_each_alone(path):
        return 4 * every
    largest = max(max(network.shape.head, network.shape.hidden * network.shape.inner) for network in narrow)
    last = min(largest, BUCKET) if moves_numbers_alone(path) else largest
    return 4 * min(every, BUCKET + last)


def shares_prompts(model: LanguageModel) -> bool:
    """Tell whether the model allows that the prompt of a group runs once: by its cache, and without dropout."""
    shape = shape_of(model)
    if shape is None:
        return False
    drops = shape.drops_out and not model.disable_dropout
    if model.lora is not None:
        drops = drops or model.lora.dropout > 0
    elif model.adapter is not None:
        drops = drops or _saved_adapter(model).get("lora_dropout", 0) > 0
    return shape.shares and not drops


def frozen_bytes(model: LanguageModel) -> int:
    """Return the bytes of a frozen model's weights; 0 where its shape is not known."""
    shape = shape_of(model)
    return 0 if shape is None else int(_STORED[model.quantization or model.dtype] * shape.parameters)


def policy_network(model: LanguageModel, shape: ModelShape, numbers: Numbers, head: Head) -> Network:
    """Return the network of the policy as it is trained."""
    how: dict[str, Any] = {"checkpointing": bool(model.checkpointing), "offloaded": model.checkpointing == "offload"}
    how["eager"] = model.attn_implementation == "eager"
    halves = numbers.product < 4 or model.dtype in ("bfloat16", "float16")
    how["frozen"] = PARTS if model.lora is not None or model.adapter is not None else model.frozen_parts
    how["logit"] = 2 if halves and not model.lm_head_fp32 else 4
    if model.lora is None and model.adapter is None:
        held = numbers.weight * shape.parameters
        return Network(shape, shape.parameters - _frozen(model, model.frozen_parts), held, head=head, **how)
    rank, targets = _adapter(model)
    adapted = _adapted(model, shape, targets)
    trained = sum(rank * (linear.inputs + linear.outputs) * linear.count for linear in adapted)
    base = int(stored_bytes(model, numbers) * shape.parameters)
    return Network(
        shape,
        trained,
        base + 4 * trained,
        adapters=rank * sum(linear.count for linear in adapted),
        widened=_widened(adapted, numbers),
        head=head,
        narrow=model.quantization is not None or model.dtype in ("bfloat16", "float16"),
        **how,
    )


def _frozen(model: LanguageModel, parts: Sequence[str]) -> int:
    """Return the parameters of these parts of a model over images."""
    seeing = seeing_shape(model)
    return 0 if seeing is None else seeing.frozen(parts)


def _adapted(model: LanguageModel, shape: ModelShape, targets: Any) -> tuple[Linear, ...]:
    """Return the linear layers with adapters; "all-linear" means those of the language model."""
    seeing = seeing_shape(model) if targets == "all-linear" else None
    outside = seeing.outside if seeing else frozenset()
    kept = (linear.only(lambda path: path not in outside) for linear in shape.adapted(targets))
    return tuple(linear for linear in kept if linear.paths)


def _widened(adapted: Iterable[Linear], numbers: Numbers) -> int:
    """Return the numbers a token that float32 adapters read beside narrow layers, without autocast."""
    narrow = numbers.product < 4 and not numbers.cast and numbers.weight < 4  # FSDP2 gathers narrow adapters
    return sum(linear.inputs * linear.count for linear in adapted) if narrow else 0


def _adapter(model: LanguageModel) -> tuple[int, Any]:
    """Return rank and targets of the adapter, fresh or continued (16 on all layers where its config is missing)."""
    if model.lora is not None:
        return model.lora.r, model.lora.targets
    saved = _saved_adapter(model)
    return saved.get("r", 16) or 16, saved.get("target_modules") or "all-linear"


def _saved_adapter(model: LanguageModel) -> dict[str, Any]:
    """Return the config of the continued adapter; empty where it is missing."""
    file = Path(str(model.adapter)).expanduser() / "adapter_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def reference_bytes(reference: Reference, model: LanguageModel, policy: Network, numbers: Numbers) -> int:
    """Return the bytes of a reference's own weights, and their averages, on the policy's device."""
    fresh = isinstance(reference, Auto) and isinstance(model.lora, Lora)
    if fresh or isinstance(reference, AdapterBase) or getattr(reference, "device", None) == "cpu":
        return 0
    if isinstance(reference, OtherModel):
        other = getattr(reference, "model", None)
        return frozen_bytes(other) if isinstance(other, LanguageModel) else 0
    narrow = numbers.weight < 4 and not policy.adapters
    averages = reference.kept_copies(narrow=narrow) if isinstance(reference, Moving) else 0
    return copy_bytes(policy, numbers) + 4 * averages * policy.trained


def copy_bytes(policy: Network, numbers: Numbers) -> int:
    """Return the bytes of a copy of the policy, which shares frozen weights under adapters."""
    return 4 * policy.trained if policy.adapters else numbers.weight * policy.shape.parameters


def buckets(networks: Sequence[Network], numbers: Numbers, *, viewed: bool) -> Buckets:
    """Return the buckets of DDP's reducer, which sends numbers of the weights' type.

    Args:
        networks: The trained networks.
        numbers: The number sizes of the run.
        viewed: Whether the strategy sets `gradient_as_bucket_view`. Float32 gradients of narrow weights do not fit in:
            they are sent without the reducer, which keeps its buckets all the same.
    """
    narrow = [network for network in networks if network.trained and not network.adapters and numbers.weight < 4]
    size = sum(network.trained * (4 if network.adapters else numbers.weight) for network in networks)
    return Buckets(size, viewed=viewed and not narrow)


def gathered(policy: Network, numbers: Numbers, critic: Network | None, *, reference: bool, stored: float) -> Gathered:
    """Return the weights that FSDP2 holds whole: a unit is a layer, or embedding, last norm and head together.

    Args:
        policy: The trained policy.
        numbers: The number sizes of the run.
        critic: A separate critic.
        reference: Whether there is a reference with weights of its own.
        stored: Bytes of a stored weight of the policy, also of a gathered one except under `bf16-true`.
    """
    shape = policy.shape
    wide = int(2 if numbers.product < 4 and not numbers.cast else stored)
    root, embedding = shape.head * (1 if shape.tied else 2), shape.head
    layer = (shape.parameters - root) // shape.layers
    beside = root * reference + (embedding if critic is not None else 0)
    trained = (policy.trained // shape.layers) if policy.adapters else max(root, layer)
    return Gathered(wide * root, wide * layer, wide * shape.parameters, wide * beside, (wide + 4) * trained)


def stored_bytes(model: LanguageModel, numbers: Numbers) -> float:
    """Return the bytes of a weight as the policy stores it."""
    adapts = model.lora is not None or model.adapter is not None
    return _STORED[model.quantization or model.dtype] if adapts else numbers.weight


def critic_network(critic: Critic, policy: Network, numbers: Numbers, model: LanguageModel) -> Network | None:
    """Return the network of a critic's own layers; None where it shares the policy's trunk."""
    if isinstance(critic, SharedTrunk):
        return None
    same = {name: getattr(policy, name) for name in ("checkpointing", "offloaded", "eager")}
    like_policy: Any = {"head": "none", **same}
    if isinstance(critic, AdapterCritic):
        adapted = _adapted(model, policy.shape, critic.targets)
        like_policy["frozen"] = PARTS
        trained = sum(critic.r * (linear.inputs + linear.outputs) * linear.count for linear in adapted)
        ranks = critic.r * sum(linear.count for linear in adapted)
        wide = _widened(adapted, numbers)
        return Network(policy.shape, trained, 4 * trained, adapters=ranks, widened=wide, **like_policy)
    other = critic.model if isinstance(critic, SeparateCritic) and isinstance(critic.model, LanguageModel) else None
    shape = (shape_of(other) if other else None) or policy.shape
    adapts = model.lora is not None or model.adapter is not None
    like_policy["frozen"] = other.frozen_parts if other else ("vision",) if adapts else model.frozen_parts
    trained = shape.trunk - _frozen(other or model, like_policy["frozen"])
    return Network(shape, trained, numbers.weight * shape.trunk, **like_policy)
