"""The parts of a vision-language model: what sees, what joins it to the text, and what is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lit_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

PARTS = ("vision", "projector")
"""What `model.freeze` may name."""

_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Fields of configs: tokens that stand for features."""

_PROJECTORS = ("multi_modal_projector", "connector", "mm_projector", "merger", "deepstack_merger_list")
"""Names of the modules that bring features to the width of the text."""


def sees(config: PreTrainedConfig | None) -> bool:
    """Whether a model of this config takes images."""
    return getattr(config, "vision_config", None) is not None


def placeholder_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Tokens that stand for features of images and videos: no policy may say them."""
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return tuple(sorted({number for number in found if isinstance(number, int) and number >= 0}))


def part_of(name: str, model: nn.Module) -> str:
    """Which part a parameter or module belongs to, by its name in the model: "text", "vision" or "projector"."""
    text = _text_names(model)
    whole: Any = model
    if whole.base_model is not whole and not name.startswith(f"{whole.base_model_prefix}."):  # a head on the trunk
        return "text"
    if any(name == each or name.startswith(f"{each}.") for each in text):
        return "text"
    return "projector" if any(part in name.split(".") for part in _PROJECTORS) else "vision"


def freeze(model: Any, parts: Sequence[str]) -> None:
    """Stop the training of parts.

    Raises:
        ConfigError: a part is none.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"model.freeze={list(parts)} names {part!r}: allowed are {', '.join(PARTS)}.")
    for name, parameter in model.named_parameters():
        if part_of(name, model) in parts:
            parameter.requires_grad_(False)


def seeing_model(module: nn.Module) -> Any:
    """The model over images in a module: under adapters, or under another head. None: there is none."""
    return next((part for part in module.modules() if sees(getattr(part, "config", None))), None)


def trained_by_images(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that only rows with images train: those of what sees and of the projector that are not frozen."""
    model = seeing_model(module)
    if model is None:
        return []
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and part_of(name, model) != "text"
    ]


def layers_unasked(model: Any, targets: str | Sequence[str]) -> list[str]:
    """Layers that get no adapter of "all-linear": those of a model over images that are no part of its text."""
    return modules_outside_text(model) if isinstance(targets, str) and sees(model.config) else []


def modules_outside_text(model: nn.Module) -> list[str]:
    """Names of the linear layers that are no part of the text model."""
    from torch import nn  # here, as describing a model imports no library

    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if part_of(name, model) != "text"]


def _text_names(model: Any) -> list[str]:
    """The modules of the text: the decoder, the embedding and the head."""
    kept = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    return [name for name, module in model.named_modules() if any(module is each for each in kept)]
