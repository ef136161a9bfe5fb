"""Images in a memory plan: the pixels of a micro-batch, and activations and working memory of the vision parts.

With P patches of a prompt's images, L layers of width d and MLP m with h heads in the vision tower, f tokens for
images, numbers of x and y bytes as in `lit_rl.algorithms.preflight.memory`; a prompt:

    pixels       as the processor makes them, of images and of frames; a pass joins them
    kept         of the vision tower, where it is trained: its pixels, and a layer
                 P (2 x d + c y d + 4 y d + 2 y m + 4 h): inputs and outputs of two norms, queries, keys, values and
                 attention's output, the MLP's two numbers
                 of the projector, where it is trained: what its layers read, for each of the f tokens
    working      a layer of the tower without gradient: P (2 x d + y max(5 d, d + 2 m)), and the pixels once more, as
                 models narrow or sort them. It runs before the text, whose activations do not exist yet

A prompt that runs once a group is seen once; otherwise each of its rows sees it. Tokens of videos count as those of
images do. Where a model pools features behind its projector (LLaVA-OneVision, of videos), f is less than that reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from lit_rl.algorithms.preflight.memory import Memory, Network, Numbers, Sight
from lit_rl.data.image_prompts import Processor, count_of_placeholders
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.vision_parts import part_of
from lit_rl.vision import PromptVision


class SeeingShape(NamedTuple):
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
    def of(cls, config: Any) -> SeeingShape:
        """Return the shape for the config of a model over images. No weight is read."""
        return _counted(type(config), config.to_json_string(use_diff=False))

    def frozen(self, parts: Sequence[str]) -> int:
        """Return the parameters of the parts of these names."""
        return sum(getattr(self, part) for part in parts)


@cache
def _counted(kind: type, text: str) -> SeeingShape:
    import json
    from collections import Counter

    import torch
    from torch import nn

    from lit_rl.models.policy.loading import auto_class

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
    return SeeingShape(
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


def seeing_shape(model: LanguageModel) -> SeeingShape | None:
    """Return the vision shape of a described model; None of one over text, and where its config does not tell."""
    if not model.sees:
        return None
    try:
        return SeeingShape.of(model.config)
    except Exception:  # the code of any architecture runs here
        return None


# ---------------------------------------------------------------------- the largest prompt of the data


@dataclass(frozen=True)
class LargestPrompt:
    """The images of the prompt with most image tokens."""

    vision: PromptVision
    tokens: int
    """Tokens that stand for images."""


def most_shown(data: Any, processor: Processor) -> LargestPrompt | None:
    """Return the training prompt with most image tokens, of a loaded data module; None without images."""

    images = partial(count_of_placeholders, processor.placeholders)
    if hasattr(data, "peek"):
        counts = list(map(images, data.peek(data.report["train"]["kept"]).prompt_ids))
        vision_of = data.vision
    else:
        examples = data.corpus.train.examples
        counts = [images(example.texts[0].ids) for example in examples]

        def vision_of(row: int) -> PromptVision | None:
            shown = examples[row].shown
            return shown.vision(processor, row) if shown else None

    most = max(range(len(counts)), key=counts.__getitem__, default=None)
    vision = vision_of(most) if most is not None and counts[most] else None
    return LargestPrompt(vision, counts[most]) if vision is not None and most is not None else None


# ---------------------------------------------------------------------- in a plan


def with_images(memory: Memory, model: LanguageModel, shown: LargestPrompt | None) -> Memory:
    """Return the memory of a run with images, no more of them than in the largest prompt."""
    shape = seeing_shape(model)
    if shape is None or shown is None:
        return memory

    def seeing(network: Network) -> Network:
        return replace(network, sight=sight_of(shape, shown, memory.numbers, network.frozen, network.checkpointing))

    critic = None if memory.critic is None else seeing(memory.critic)
    return replace(memory, policy=seeing(memory.policy), critic=critic)


def sight_of(
    shape: SeeingShape, shown: LargestPrompt, numbers: Numbers, frozen: Sequence[str], checkpointing: bool = False
) -> Sight:
    """Return the bytes of a prompt's images.

    Args:
        shape: The vision shape.
        shown: The prompt's images.
        numbers: The number sizes of the run.
        frozen: Parts that are not trained.
        checkpointing: Whether a trained layer keeps its input only.
    """
    x, y, d, m = numbers.residual, numbers.product, shape.hidden, shape.inner
    pixels = shown.vision.inputs
    seen = (value.numel() for name, value in pixels.items() if name.startswith("pixel_values"))
    patches = sum(seen) // shape.patch
    size = sum(value.nbytes for value in pixels.values())
    layer = patches * (2 * x * d + (numbers.copies + 4) * y * d + 2 * y * m + 4 * shape.heads)
    kept = 0
    if "vision" not in frozen:
        kept += size + (shape.layers * patches * x * d + layer if checkpointing else shape.layers * layer)
    if "projector" not in frozen:
        between = sum(outputs for _, outputs in shape.projections[:-1])
        kept += y * shown.tokens * (sum(inputs for inputs, _ in shape.projections) + between)
    return Sight(size, kept, size + patches * (2 * x * d + y * max(5 * d, d + 2 * m)))
