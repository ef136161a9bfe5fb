"""The processor of a vision-language model, asked one prompt at a time.

Pixels and placeholders of a prompt depend on that prompt alone, so what is made once can be joined to any batch
(`lit_rl.vision`). Images are given as pixels: a processor opens every path and URL that it is given as a string.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rl.errors import BackendError, DataError
from lit_rl.images import ImageRef
from lit_rl.models.policy import hub
from lit_rl.models.policy.vision_parts import placeholder_ids
from lit_rl.vision import PromptVision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

_NAMES = ("image_token", "video_token", "boi_token", "eoi_token", "full_image_sequence", "fake_image_token")
"""Attributes of processors and tokenizers: text that becomes, or surrounds, placeholders."""

_TOKENS = ("input_ids", "attention_mask", "labels")
_PREFIX_FAMILIES = {"paligemma": 1}
"""Value of `token_type_ids` at tokens of a response, by model type: PaliGemma attends both ways where it is 0."""

_TEXT_AS_PARTS = (
    "{%- set with_parts = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- if message['content'] is string -%}"
    "{%- set message = dict(message, content=[{'type': 'text', 'text': message['content']}]) -%}"
    "{%- endif -%}{%- set with_parts.messages = with_parts.messages + [message] -%}{%- endfor -%}"
    "{%- set messages = with_parts.messages -%}"
)
"""Before a chat template that reads nothing but parts: a message that is a text becomes a part of text."""

_PACKAGES = ("torchvision", "num2words", "PIL")


class VisionProcessor:
    """Makes tokens and model inputs of messages with images.

    Args:
        processor: Of transformers. Its tokenizer and chat template are replaced by those of `tokenizer`.
        tokenizer: Of the policy, as `LanguageModel.tokenizer` has it.
        config: Of the model.
    """

    def __init__(self, processor: ProcessorMixin, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        self.processor: Any = processor
        self.processor.tokenizer = tokenizer
        if tokenizer.chat_template:
            self.processor.chat_template = tokenizer.chat_template
        else:
            tokenizer.chat_template = self.processor.chat_template
        if _drops_plain_text(tokenizer):
            tokenizer.chat_template = self.processor.chat_template = f"{_TEXT_AS_PARTS}{tokenizer.chat_template}"
        self._placeholders = placeholder_ids(config)
        self._needs_images = config.model_type in _PREFIX_FAMILIES
        self._in_response = {"token_type_ids": _PREFIX_FAMILIES.get(config.model_type, 0)}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.processor.tokenizer

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Tokens that stand for features of images."""
        return self._placeholders

    @property
    def name(self) -> str:
        """The classes that make pixels, two backends of which differ in their last digits, and their settings' hash."""
        makers = (self.processor, self.processor.image_processor)
        settings = json.dumps(self.processor.image_processor.to_dict(), sort_keys=True, default=str)
        digest = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
        return f"{'/'.join(type(each).__name__ for each in makers)} {digest}"

    @property
    def reserved(self) -> list[str]:
        """Texts that the processor would turn into placeholders."""
        holders = (self.processor, self.tokenizer)
        found = {getattr(holder, name, None) for holder in holders for name in _NAMES}
        return sorted(str(text) for text in found if text)

    def process(self, text: str, images: Sequence[ImageRef], where: str) -> tuple[list[int], PromptVision | None]:
        """Tokens of a rendered prompt, and what the model sees beside them: None without images.

        Raises:
            DataError: an image cannot be opened or used, or the text does not show as many images as there are.
        """
        if not images and self._needs_images:
            raise DataError(f"{where}: the prompt shows no image, and this model takes none without one.")
        if not images:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]), None
        places = max(text.count(marker) for marker in self.reserved)
        if places != len(images):
            raise DataError(
                f"{where}: the chat template shows {places} of the prompt's {len(images)} images. Give a template that "
                "writes a placeholder for each with model.chat_template."
            )
        pixels = [image.open() for image in images]
        try:
            made = self.processor(text=[text], images=[pixels], add_special_tokens=False, return_tensors="pt")
        except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError) as error:
            sizes = ", ".join(f"{image.name} {image.width} x {image.height}" for image in images)
            raise DataError(f"{where}: the processor refuses the images ({sizes}): {error}") from error
        ids = made["input_ids"]
        vision = self._vision({name: torch.as_tensor(value) for name, value in made.items()}, ids)
        return ids[0].tolist(), vision

    def _vision(self, made: Mapping[str, Tensor], ids: Tensor) -> PromptVision:
        others = {name: value for name, value in made.items() if name not in _TOKENS}
        per_token = {name: value[0].long() for name, value in others.items() if value.shape == ids.shape}
        inputs = {name: value for name, value in others.items() if name not in per_token}
        return PromptVision(inputs, per_token, {name: self._in_response.get(name, 0) for name in per_token})


def _drops_plain_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template goes over the parts of a message and finds none in a text, which is then lost."""
    if not isinstance(tokenizer.chat_template, str):
        return False
    word = "plain"
    shown = []
    for content in (word, [{"type": "text", "text": word}]):
        try:
            messages: Any = [{"role": "user", "content": content}]
            shown.append(word in str(tokenizer.apply_chat_template(messages, tokenize=False)))
        except Exception:  # a template is a program: whatever it raises, it reads no such message
            shown.append(False)
    return shown == [False, True]


def load_processor(
    name: str,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    key: str = "model.name",
    **how: Any,
) -> VisionProcessor:
    """The processor that was saved with a model, which a user named by the key.

    Raises:
        BackendError: its files or a package that it needs are missing, or the model cannot be reached.
    """
    from transformers import AutoProcessor

    with hub.reading(key, name, path):
        try:
            processor: Any = AutoProcessor.from_pretrained(path, **how)
        except ImportError as error:
            raise BackendError(f"The processor of {name!r} lacks a package: {_missing(error)}") from error
    if not hasattr(processor, "image_processor"):
        raise BackendError(
            f"{key}={name!r} is a model over images and comes without its processor (preprocessor_config.json or "
            "processor_config.json). Copy these files of its base model into the folder."
        )
    return VisionProcessor(processor, tokenizer, config)


def _missing(error: ImportError) -> str:
    said = str(error).strip().splitlines()[0] if str(error).strip() else "an import failed"
    for package in _PACKAGES:
        if package.lower() in str(error).lower() and importlib.util.find_spec(package) is None:
            return f"pip install {'pillow' if package == 'PIL' else package}. ({said})"
    return said
