"""The parts of a vision-language model: encoder, projector and text model, and the ones that are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lit_rl.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig


PARTS = ("vision", "projector")
"""The values of `model.freeze`."""

_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Fields of configs: tokens that stand for features."""

_PROJECTORS = ("multi_modal_projector", "connector", "mm_projector", "merger", "deepstack_merger_list")
"""Names of the modules that bring features to the width of the text."""


def sees(config: PreTrainedConfig | None) -> bool:
    """Tell whether a model of this config takes images."""
    return getattr(config, "vision_config", None) is not None


def placeholder_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the tokens that stand for features of images and videos: no policy may sample them."""
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return tuple(sorted({number for number in found if isinstance(number, int) and number >= 0}))


def part_of(model: Any) -> Callable[[str], str]:
    """Return the function that maps a name of a parameter or module to its part: "text", "vision" or "projector".

    To be made once for many names: it goes through the whole model.
    """
    trunk = f"{model.base_model_prefix}." if model.base_model is not model else ""
    kept = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    text = {name for name, module in model.named_modules() if any(module is each for each in kept)}

    def part(name: str) -> str:
        if not name.startswith(trunk):  # a head
            return "text"
        words = name.split(".")
        if any(".".join(words[:count]) in text for count in range(1, len(words) + 1)):
            return "text"
        return "projector" if any(word in _PROJECTORS for word in words) else "vision"

    return part


def freeze(model: Any, parts: Sequence[str]) -> None:
    """Freeze parts of a model.

    Raises:
        ConfigError: a part is none.
    """
    for named in parts:
        if named not in PARTS:
            raise ConfigError(f"model.freeze={list(parts)} names {named!r}: allowed are {', '.join(PARTS)}.")
    part = part_of(model)
    for name, parameter in model.named_parameters():
        if part(name) in parts:
            parameter.requires_grad_(False)


def find_vision_model(module: nn.Module) -> Any:
    """Return the model over images in a module: under adapters, or under another head. None: there is none."""
    from transformers import PreTrainedModel

    models = (part for part in module.modules() if isinstance(part, PreTrainedModel))  # adapters show its config too
    return next((model for model in models if sees(model.config)), None)


def trained_by_images(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that only rows with images train: unfrozen ones of the vision encoder and the projector."""
    model = find_vision_model(module)
    if model is None:
        return []
    part = part_of(model)
    return [each for name, each in model.named_parameters() if each.requires_grad and part(name) != "text"]


def with_image_gradients(loss: Tensor, modules: Iterable[nn.Module]) -> Tensor:
    """Add a gradient of 0 for weights that only rows with images train.

    If the rows of one rank have no images, the others would wait for its gradient; and without a gradient an
    optimizer would skip these weights in a step without images, on one rank and not on several.
    """
    return loss + sum(0 * parameter.sum() for module in modules for parameter in trained_by_images(module))


def excluded_layers(model: Any, targets: str | Sequence[str], frozen: Sequence[str] = ("vision",)) -> list[str]:
    """Return the modules of a model over images that get no adapter, by name.

    Args:
        model: Any model; one over text has none such.
        targets: Names of layers, or a regular expression, which mean none of a frozen part; or "all-linear", which
            means those of the text.
        frozen: Parts that are not trained.
    """
    if not sees(model.config):
        return []
    if targets == "all-linear":
        return modules_outside_text(model)
    part = part_of(model)
    return [name for name, _ in model.named_modules() if name and part(name) in frozen]


def modules_outside_text(model: nn.Module) -> list[str]:
    """Return names of the linear layers that are no part of the text model."""
    from torch import nn  # here, as describing a model imports no library

    part = part_of(model)
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if part(name) != "text"]
