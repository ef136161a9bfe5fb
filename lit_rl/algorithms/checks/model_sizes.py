"""The memory of a run's step (`memory_of_step`), from its parts: policy, reference, critic, strategy, and images.

Images. With P patches of a prompt's images, L layers of width d and MLP m with h heads in the vision tower, f tokens
that stand for images, numbers of x and y bytes as in `lit_rl.algorithms.checks.memory`; a prompt:

    pixels       as the processor makes them, of images and of frames; a pass joins them
    kept         of the vision tower, where it is trained: its pixels, and a layer
                 P (2 x d + c y d + 4 y d + 2 y m + 4 h): inputs and outputs of two norms, queries, keys, values and
                 attention's output, the MLP's two numbers
                 of the projector, where it is trained: what its layers read, for each of the f tokens
    working      a layer of the vision tower without gradient: P (2 x d + y max(5 d, d + 2 m)), and the pixels once
                 more, as models narrow or sort them. It runs before the text, whose activations do not exist yet

A prompt that runs once a group is seen once; otherwise each of its rows sees it. Tokens of videos count as those of
images do. Where a model pools features behind its projector (LLaVA-OneVision, of videos), f is less than that reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch.distributed.fsdp import CPUOffloadPolicy

from lit_rl.algorithms.checks.memory import (
    AuxiliaryTexts,
    DDPBuckets,
    GatheredWeights,
    Head,
    Memory,
    Network,
    NumberSizes,
    RowLengths,
    VisionMemory,
)
from lit_rl.algorithms.data_parallel import data_world_size
from lit_rl.algorithms.optim.master_weights import BUCKET, moves_each_alone, moves_numbers_alone
from lit_rl.algorithms.optim.optimizers import AdamW8bit, AdamWSplit, ByPath
from lit_rl.algorithms.optim.strategies import offload_policy, shards_weights
from lit_rl.core import upstream
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.example_set import Example
from lit_rl.data.visual_prompts import Processor, count_placeholders
from lit_rl.models.adapters import Lora
from lit_rl.models.critics import AdapterCritic, Critic, SeparateCritic, SharedTrunk
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.model_costs import LinearLayers, ModelShape
from lit_rl.models.references import AdapterBase, Auto, Moving, OtherModel, Reference
from lit_rl.models.vision_parts import PARTS, part_of
from lit_rl.ops.fused_head import part_numbers
from lit_rl.ops.logprobs import block_numbers
from lit_rl.ops.sampling_distribution import NO_TRUNCATION

# ---------------------------------------------------------------------- vision parts


class VisionShape(NamedTuple):
    """The sizes of the vision parts of a model, and the layers outside of its language model."""

    vision: int
    """Parameters of the vision tower."""
    projector: int
    """Parameters of the projector to the width of the language model."""
    layers: int
    hidden: int
    inner: int
    heads: int
    patch: int
    """Numbers of a patch: channels times pixels times frames."""
    projections: tuple[tuple[int, int], ...]
    """Inputs and outputs of the projector's linear layers, in order."""
    outside: frozenset[str]
    """Paths of the linear layers outside of the language model."""

    @classmethod
    def of(cls, config: Any) -> VisionShape:
        """Return the shape for the config of a model over images. No weight is read."""
        return _count_parts(type(config), config.to_json_string(use_diff=False))

    def frozen(self, parts: Sequence[str]) -> int:
        """Return the parameters of the parts of these names."""
        return sum(getattr(self, part) for part in parts)


@cache
def _count_parts(kind: type, text: str) -> VisionShape:
    from collections import Counter

    import torch
    from torch import nn

    from lit_rl.models.loading import auto_class

    config: Any = kind.from_dict(json.loads(text))  # type: ignore[attr-defined]
    with torch.device("meta"):
        model: Any = auto_class(config).from_config(config)
    sizes, outside, projections = Counter(), set[str](), []
    part_of_name = part_of(model)
    for name, parameter in model.named_parameters():
        sizes[part_of_name(name)] += parameter.numel()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (part := part_of_name(name)) != "text":
            outside.add(name)
            projections += [(module.in_features, module.out_features)] if part == "projector" else []
    seen: Any = config.vision_config
    hidden = getattr(seen, "embed_dim", None) or seen.hidden_size
    heads = getattr(seen, "num_attention_heads", None) or seen.num_heads
    channels = getattr(seen, "num_channels", None) or getattr(seen, "in_channels", 3)
    return VisionShape(
        vision=sizes["vision"],
        projector=sizes["projector"],
        layers=getattr(seen, "num_hidden_layers", None) or seen.depth,
        hidden=hidden,
        inner=getattr(seen, "intermediate_size", None) or int(hidden * seen.mlp_ratio),
        heads=heads,
        patch=channels * seen.patch_size**2 * getattr(seen, "temporal_patch_size", 1),
        projections=tuple(projections),
        outside=frozenset(outside),
    )


def vision_shape(model: LanguageModel) -> VisionShape | None:
    """Return the vision shape of a described model; None of one over text, and where its config does not tell."""
    if not model.sees:
        return None
    try:
        return VisionShape.of(model.config)
    except Exception:  # the code of any architecture runs here
        return None


# ---------------------------------------------------------------------- the largest prompt of the data


@dataclass(frozen=True)
class LargestPrompt:
    """The images of the prompt with most image tokens."""

    vision: PromptVision
    tokens: int
    """Tokens that stand for images."""


def find_largest_prompt(data: Any, processor: Processor) -> LargestPrompt | None:
    """Return the training prompt with most image tokens, of a loaded data module; None without images."""
    if not hasattr(data, "peek"):
        return largest_example(data.corpus.train.examples, processor)
    return _largest(data.peek(data.report["train"]["kept"]).prompt_ids, data.vision, processor)


def largest_example(examples: Sequence[Example], processor: Processor) -> LargestPrompt | None:
    """Return the images of the example with most image tokens; None without images."""

    def vision_of(row: int) -> PromptVision | None:
        shown = examples[row].shown
        return shown.vision(processor, row) if shown else None

    return _largest([example.texts[0].ids for example in examples], vision_of, processor)


def _largest(
    prompts: Iterable[Sequence[int]], vision_of: Callable[[int], PromptVision | None], processor: Processor
) -> LargestPrompt | None:
    counts = list(map(partial(count_placeholders, processor.placeholders), prompts))
    most = max(range(len(counts)), key=counts.__getitem__, default=None)
    vision = vision_of(most) if most is not None and counts[most] else None
    return LargestPrompt(vision, counts[most]) if vision is not None and most is not None else None


# ---------------------------------------------------------------------- in a plan


def with_images(
    memory: Memory, model: LanguageModel, largest: LargestPrompt | None, of_texts: LargestPrompt | None = None
) -> Memory:
    """Return the memory of a run with images, no more of them than in the largest prompt, and in the largest of the
    auxiliary texts."""
    shape = vision_shape(model)
    if shape is None:
        return memory

    def sight(network: Network, most: LargestPrompt | None) -> VisionMemory | None:
        how = network.frozen, network.checkpointing
        return None if most is None else vision_memory(shape, most, memory.numbers, *how)

    policy, critic, auxiliary = memory.policy, memory.critic, memory.auxiliary
    return replace(
        memory,
        policy=replace(policy, sight=sight(policy, largest)),
        critic=None if critic is None else replace(critic, sight=sight(critic, largest)),
        auxiliary=None if auxiliary is None else replace(auxiliary, sight=sight(policy, of_texts)),
    )


def vision_memory(
    shape: VisionShape, largest: LargestPrompt, numbers: NumberSizes, frozen: Sequence[str], checkpointing: bool = False
) -> VisionMemory:
    """Return the bytes of a prompt's images.

    Args:
        shape: The vision shape.
        largest: The prompt's images.
        numbers: The number sizes of the run.
        frozen: Parts that are not trained.
        checkpointing: Whether a trained layer keeps its input only.
    """
    x, y, d, m = numbers.residual, numbers.product, shape.hidden, shape.inner
    pixels = largest.vision.inputs
    counts = (value.numel() for name, value in pixels.items() if name.startswith("pixel_values"))
    patches = sum(counts) // shape.patch
    size = sum(value.nbytes for value in pixels.values())
    per_layer = patches * (2 * x * d + (numbers.copies + 4) * y * d + 2 * y * m + 4 * shape.heads)
    kept = 0
    if "vision" not in frozen:
        kept += size + (shape.layers * patches * x * d + per_layer if checkpointing else shape.layers * per_layer)
    if "projector" not in frozen:
        between = sum(outputs for _, outputs in shape.projections[:-1])
        kept += y * largest.tokens * (sum(inputs for inputs, _ in shape.projections) + between)
    return VisionMemory(size, kept, size + patches * (2 * x * d + y * max(5 * d, d + 2 * m)))


# ---------------------------------------------------------------------- networks


_STORED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "auto": 4.0, "nf4": 0.56, "int8": 1.06}
"""Bytes of a frozen weight by type; a quantised one with its scales (2305.14314, section 3)."""


def model_shape(model: LanguageModel) -> ModelShape | None:
    """Return the shape of a described model; None where it cannot be built from its config alone, or is no decoder."""
    config = model.config
    try:
        return ModelShape.of(config)
    except Exception:  # the code of any architecture runs here
        return None


def number_sizes(model: LanguageModel, precision: str, optimizer: Any, *, shards: bool = False) -> NumberSizes:
    """Return the number sizes of a run; `shards` under FSDP2. A user's optimizer is assumed to keep two moments."""
    moments = 2 if isinstance(optimizer, AdamW8bit | AdamWSplit) else 8
    if isinstance(optimizer, ByPath) and optimizer.path.endswith(".SGD"):
        moments = 4 if optimizer.kwargs.get("momentum") else 0
    trained_narrow = model.dtype == "bfloat16" and model.lora is None and model.adapter is None
    return NumberSizes.of("bf16-true" if trained_narrow else precision, moments, shards=shards)


def masters_at_once(networks: Iterable[Network], numbers: NumberSizes, optimizer: Any) -> int:
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
    shape = model_shape(model)
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
    shape = model_shape(model)
    return 0 if shape is None else int(_STORED_BYTES[model.quantization or model.dtype] * shape.parameters)


def policy_network(model: LanguageModel, shape: ModelShape, numbers: NumberSizes, head: Head) -> Network:
    """Return the network of the policy as it is trained."""
    settings: dict[str, Any] = {
        "checkpointing": bool(model.checkpointing),
        "offloaded": model.checkpointing == "offload",
    }
    settings["eager"] = model.attn_implementation == "eager"
    half_precision = numbers.product < 4 or model.dtype in ("bfloat16", "float16")
    settings["frozen"] = PARTS if model.lora is not None or model.adapter is not None else model.frozen_parts
    settings["logit"] = 2 if half_precision and not model.lm_head_fp32 else 4
    if model.lora is None and model.adapter is None:
        size = numbers.weight * shape.parameters
        return Network(
            shape, shape.parameters - _frozen_parameters(model, model.frozen_parts), size, head=head, **settings
        )
    if model.lora is not None:
        rank, targets = model.lora.r, model.lora.targets
    else:  # PEFT's usual ones where the config of the continued adapter is missing
        saved = _saved_adapter(model)
        rank, targets = saved.get("r", 16) or 16, saved.get("target_modules") or "all-linear"
    adapted = _adapted_layers(model, shape, targets)
    trained = sum(rank * (linear.inputs + linear.outputs) * linear.count for linear in adapted)
    base = int(stored_bytes(model, numbers) * shape.parameters)
    return Network(
        shape,
        trained,
        base + 4 * trained,
        adapters=rank * sum(linear.count for linear in adapted),
        widened=_widened_numbers(adapted, numbers),
        head=head,
        narrow=model.quantization is not None or model.dtype in ("bfloat16", "float16"),
        **settings,
    )


def _frozen_parameters(model: LanguageModel, parts: Sequence[str]) -> int:
    """Return the parameters of these parts of a model over images."""
    vision = vision_shape(model)
    return 0 if vision is None else vision.frozen(parts)


def _adapted_layers(model: LanguageModel, shape: ModelShape, targets: Any) -> tuple[LinearLayers, ...]:
    """Return the linear layers with adapters; "all-linear" means those of the language model."""
    vision = vision_shape(model) if targets == "all-linear" else None
    outside = vision.outside if vision else frozenset()
    inside = (linear.only(lambda path: path not in outside) for linear in shape.adapted(targets))
    return tuple(linear for linear in inside if linear.paths)


def _widened_numbers(adapted: Iterable[LinearLayers], numbers: NumberSizes) -> int:
    """Return the numbers a token that float32 adapters read beside narrow layers, without autocast."""
    narrow = numbers.product < 4 and not numbers.cast and numbers.weight < 4  # FSDP2 gathers narrow adapters
    return sum(linear.inputs * linear.count for linear in adapted) if narrow else 0


def _saved_adapter(model: LanguageModel) -> dict[str, Any]:
    """Return the config of the continued adapter; empty where it is missing."""
    file = Path(str(model.adapter)).expanduser() / "adapter_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def reference_bytes(reference: Reference, model: LanguageModel, policy: Network, numbers: NumberSizes) -> int:
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


def copy_bytes(policy: Network, numbers: NumberSizes) -> int:
    """Return the bytes of a copy of the policy, which shares frozen weights under adapters."""
    return 4 * policy.trained if policy.adapters else numbers.weight * policy.shape.parameters


def ddp_buckets(networks: Sequence[Network], numbers: NumberSizes, *, viewed: bool) -> DDPBuckets:
    """Return the buckets of DDP's reducer, which sends numbers of the weights' type.

    Args:
        networks: The trained networks.
        numbers: The number sizes of the run.
        viewed: Whether the strategy sets `gradient_as_bucket_view`. Float32 gradients of narrow weights do not fit in:
            they are sent without the reducer, which keeps its buckets all the same.
    """
    narrow = [network for network in networks if network.trained and not network.adapters and numbers.weight < 4]
    size = sum(network.trained * (4 if network.adapters else numbers.weight) for network in networks)
    return DDPBuckets(size, viewed=viewed and not narrow)


def gathered_weights(
    policy: Network, numbers: NumberSizes, critic: Network | None, *, reference: bool, stored: float
) -> GatheredWeights:
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
    other_models = root * reference + (embedding if critic is not None else 0)
    trained = (policy.trained // shape.layers) if policy.adapters else max(root, layer)
    return GatheredWeights(
        wide * root, wide * layer, wide * shape.parameters, wide * other_models, (wide + 4) * trained
    )


def stored_bytes(model: LanguageModel, numbers: NumberSizes) -> float:
    """Return the bytes of a weight as the policy stores it."""
    adapts = model.lora is not None or model.adapter is not None
    return _STORED_BYTES[model.quantization or model.dtype] if adapts else numbers.weight


def critic_network(critic: Critic, policy: Network, numbers: NumberSizes, model: LanguageModel) -> Network | None:
    """Return the network of a critic's own layers; None where it shares the policy's trunk."""
    if isinstance(critic, SharedTrunk):
        return None
    same = {name: getattr(policy, name) for name in ("checkpointing", "offloaded", "eager")}
    like_policy: Any = {"head": "none", **same}
    if isinstance(critic, AdapterCritic):
        adapted = _adapted_layers(model, policy.shape, critic.targets)
        like_policy["frozen"] = PARTS
        trained = sum(critic.r * (linear.inputs + linear.outputs) * linear.count for linear in adapted)
        ranks = critic.r * sum(linear.count for linear in adapted)
        wide = _widened_numbers(adapted, numbers)
        return Network(policy.shape, trained, 4 * trained, adapters=ranks, widened=wide, **like_policy)
    other = critic.model if isinstance(critic, SeparateCritic) and isinstance(critic.model, LanguageModel) else None
    shape = (model_shape(other) if other else None) or policy.shape
    adapts = model.lora is not None or model.adapter is not None
    like_policy["frozen"] = other.frozen_parts if other else ("vision",) if adapts else model.frozen_parts
    trained = shape.trunk - _frozen_parameters(other or model, like_policy["frozen"])
    return Network(shape, trained, numbers.weight * shape.trunk, **like_policy)


# ---------------------------------------------------------------------- the memory of a run


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The facts of a method's step that its memory depends on, beside model, optimizer, strategy and precision.

    Args:
        lengths: The most tokens of a row that is learned from; None if unknown.
        head: The kind of head; a fused one only if the model's options allow it.
        critic: The critic that is trained with the policy.
        auxiliary: Further texts that the policy learns from in a step.
        auxiliary_images: The images of the text with most image tokens among these; None if they show nothing.
        reference: The reference; None if no term reads one.
        frozen: Bytes of the weights of other frozen models, by name.
        copies_ahead: Copies of the policy that are kept for rollouts drawn ahead.
        engine: Bytes of an engine that stays in memory while the policy learns.
        decoding: The most tokens of a decoded sequence; None if the policy itself does not decode.
        grouped_cache: Whether the decoding's cache holds a prompt once a group.
    """

    lengths: RowLengths | None = None
    head: Head = "fused"
    critic: Critic | None = None
    auxiliary: AuxiliaryTexts | None = None
    auxiliary_images: LargestPrompt | None = None
    reference: Reference | None = None
    frozen: Mapping[str, int] = field(default_factory=dict)
    copies_ahead: int = 0
    engine: int = 0
    decoding: RowLengths | None = None
    grouped_cache: bool = True


def memory_of_step(
    facts: StepFacts,
    model: LanguageModel,
    optimizer: Any,
    trainer: Any,
    *,
    budget: int | None = None,
    host: int | None = None,
) -> Memory | None:
    """Return the memory of a rank, as a function of the micro-batch; None if model or rows are unknown, and under
    DeepSpeed.

    Args:
        facts: The facts of the method's step.
        model: The description of the policy.
        optimizer: The factory of the optimizer.
        trainer: The Trainer: its strategy, its precision, its ranks and, for images, its data.
        budget: Bytes of the device that a plan may use.
        host: Bytes of main memory that it may offload to.
    """
    strategy, shape = trainer.strategy, model_shape(model)
    if shape is None or facts.lengths is None or isinstance(strategy, DeepSpeedStrategy):
        return None
    fsdp2 = isinstance(strategy, ModelParallelStrategy)
    numbers = number_sizes(model, str(trainer.precision), optimizer, shards=fsdp2)
    head = facts.head if facts.head == "none" or model.forward_options.fused_head else "logits"
    policy = policy_network(model, shape, numbers, head)
    critic = None if facts.critic is None else critic_network(facts.critic, policy, numbers, model)
    networks, stored, buckets = list(filter(None, (policy, critic))), stored_bytes(model, numbers), None
    if isinstance(strategy, DDPStrategy):
        buckets = ddp_buckets(networks, numbers, viewed=upstream.views_gradients(strategy))
    reference = 0 if facts.reference is None else reference_bytes(facts.reference, model, policy, numbers)
    others = {"reference": reference, **facts.frozen}
    if facts.copies_ahead:
        others["copies for rollouts ahead"] = facts.copies_ahead * copy_bytes(policy, numbers)
    device = strategy.root_device
    may_recompute = model.gradient_checkpointing == "auto" and shape.recomputes
    sizes = Memory(
        policy,
        numbers,
        facts.lengths,
        critic=critic,
        auxiliary=facts.auxiliary,
        buckets=buckets,
        others=others,
        engine=facts.engine,
        decoding=facts.decoding,
        grouped_cache=facts.grouped_cache,
        spread_over=data_world_size(trainer) if shards_weights(strategy) else 1,
        ranks=trainer.world_size,
        gathered=gathered_weights(policy, numbers, critic, reference=reference > 0, stored=stored) if fsdp2 else None,
        shards_on_host=device.type == "cuda" and isinstance(offload_policy(strategy), CPUOffloadPolicy),
        masters=masters_at_once(networks, numbers, optimizer),
        block=block_numbers(device, NO_TRUNCATION),
        part=part_numbers(device),
        may_recompute=may_recompute,
        may_offload=may_recompute and device.type == "cuda",
        host=host,
        budget=budget,
    )
    if model.processor is None:
        return sizes
    largest = find_largest_prompt(trainer.datamodule, model.processor)
    return with_images(sizes, model, largest, facts.auxiliary_images)
