"""The processor of a vision-language model, called for one prompt at a time, with images or videos.

Pixels and placeholders of a prompt depend on that prompt alone, so what is made once can be joined to any batch
(`lit_rl.core.vision_inputs`). Images and frames are given as pixels: a processor opens every path and URL that it is
given as a string.

Processors of transformers take a video for a file to sample from. Here its frames were chosen by the author of the
data, so none is left out, and the time of each is what the row says: Qwen2.5-VL rotates positions by it, Qwen3-VL and
SmolVLM write it out. Left to themselves, processors assume 24 frames a second.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rl.core.chat_template import apply_chat_template
from lit_rl.core.errors import BackendError, ConfigError, DataError
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.core.visuals import ImageRef, VideoRef, Visual
from lit_rl.models import hub_files
from lit_rl.models.vision_parts import placeholder_ids

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin


@dataclass(frozen=True)
class _Family:
    """The way in which the processor and the model of a family take videos."""

    timed: bool = False
    """The model gets the time of each frame."""
    stacked: bool = False
    """The processor stacks the videos of a prompt; SmolVLM's writes the longest one's number of frames for all."""
    unpadded: bool = False
    """The model has no mark for frames that only pad a shorter video of a batch."""
    apart: bool = False
    """The processor makes one input of frames and images, of which the frames stay."""


VIDEO_FAMILIES = {
    "internvl": _Family(stacked=True),
    "llava_onevision": _Family(stacked=True, unpadded=True),
    "qwen2_5_vl": _Family(timed=True),
    "qwen2_vl": _Family(),
    "qwen3_vl": _Family(timed=True),
    "smolvlm": _Family(timed=True, stacked=True, apart=True),
}
"""The families, by model type, whose videos were compared with what transformers makes of them."""


def check_visuals(model_type: str, visuals: Sequence[Visual], where: str) -> None:
    """Refuse what a model cannot be shown exactly.

    Args:
        model_type: Model type of the config.
        visuals: Images and videos of a prompt.
        where: The row, for messages.

    Raises:
        ConfigError: there is a video, and the family shows none.
        DataError: the family cannot show these videos.
    """
    videos = [each for each in visuals if isinstance(each, VideoRef)]
    if not videos:
        return
    family = VIDEO_FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"{where}: the row shows a video, and models of the type {model_type!r} are shown images alone. Set model= "
            f"to one of {', '.join(VIDEO_FAMILIES)}, or list the frames as images."
        )
    if family.timed and (untimed := next((video for video in videos if video.fps is None), None)):
        raise DataError(
            f"{where}: the video {untimed.name} has no frame rate, and this model ({model_type}) reads the time of "
            'each frame. Set it: {"frames": [...], "fps": 2.0}.'
        )
    if family.stacked and len(counts := sorted({len(video.frames) for video in videos})) > 1:
        raise DataError(
            f"{where}: the row's videos have {' and '.join(map(str, counts))} frames, and the processor of this model "
            f"({model_type}) takes videos of one prompt where all have equally many. Take as many frames of each."
        )
    if family.apart and len(videos) < len(visuals):
        raise DataError(
            f"{where}: the row shows images and videos, and the processor of this model ({model_type}) takes one kind "
            "in a prompt. List the images as videos of one frame."
        )


def video_arguments(videos: Sequence[VideoRef], frames: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the arguments of a processor for the videos of one prompt; none where it shows no video.

    Args:
        videos: In the order in which they are shown.
        frames: Their pixels.
    """
    if not videos:
        return {}
    metadata = [
        {
            "total_num_frames": len(video.frames),
            "frames_indices": list(range(len(video.frames))),  # a list of its own: Qwen3-VL's processor adds to it
            "fps": video.fps,
        }
        for video in videos
    ]
    return {"videos": [list(frames)], "videos_kwargs": {"do_sample_frames": False, "video_metadata": metadata}}


_NAMES = ("image_token", "boi_token", "eoi_token", "full_image_sequence", "fake_image_token")
"""Attributes of processors and tokenizers: text that becomes, or surrounds, placeholders of images."""

_VIDEO_NAMES = ("video_token",)
"""Attributes for placeholders of videos."""

_UNCOUNTED = ("idefics3", "smolvlm")
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
    """A maker of tokens and model inputs from messages with images or videos.

    Args:
        processor: Processor of transformers. Its tokenizer and chat template are replaced by those of `tokenizer`.
        tokenizer: Tokenizer of the policy, as `LanguageModel.tokenizer` has it.
        config: Config of the model.
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
        self._model_type = config.model_type
        self._needs_images = config.model_type in _PREFIX_FAMILIES
        self._in_response = {"token_type_ids": _PREFIX_FAMILIES.get(config.model_type, 0)}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.processor.tokenizer

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Tokens that stand for features of images and videos."""
        return self._placeholders

    @property
    def equal_videos(self) -> bool:
        """True where videos that are shown in one pass need equally many frames."""
        return self._model_type in VIDEO_FAMILIES and VIDEO_FAMILIES[self._model_type].unpadded

    @property
    def name(self) -> str:
        """The class that makes pixels of images (two backends differ in their last digits) and the hash of its
        settings."""
        return self._made_by(self.processor.image_processor)

    @property
    def name_for_videos(self) -> str:
        """The class that makes pixels of frames, and the hash of its settings."""
        return self._made_by(self.processor.video_processor)

    def _made_by(self, part: Any) -> str:
        settings = json.dumps(part.to_dict(), sort_keys=True, default=str)
        digest = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
        return f"{type(self.processor).__name__}/{type(part).__name__} {digest}"

    @property
    def reserved(self) -> list[str]:
        """Texts that the processor would turn into placeholders."""
        return sorted({*self._markers(_NAMES), *self._markers(_VIDEO_NAMES)})

    def _markers(self, names: Sequence[str]) -> set[str]:
        holders = (self.processor, self.tokenizer)
        found = {getattr(holder, name, None) for holder in holders for name in names}
        return {str(text) for text in found if text}

    def process(self, text: str, visuals: Sequence[Visual], where: str) -> tuple[list[int], PromptVision | None]:
        """Return the tokens of a rendered prompt, and the model inputs beside them: None where it shows nothing.

        Args:
            text: The prompt, with a placeholder for each image and video.
            visuals: Those of a kind in the order in which they are shown.
            where: The row, for messages.

        Raises:
            ConfigError: a video, and the model is shown none.
            DataError: an image cannot be opened or used, the text does not show as many images as there are, or the
                model cannot be shown these videos.
        """
        if not visuals:
            self.refuse_without_images(where)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]), None
        check_visuals(self._model_type, visuals, where)
        images = [each for each in visuals if isinstance(each, ImageRef)]
        moving = [each for each in visuals if isinstance(each, VideoRef)]
        self._check_places("images", self._places(text, _NAMES), len(images), where)
        self._check_places("videos", self._places(text, _VIDEO_NAMES), len(moving), where)
        try:
            pixels = {"images": [[image.open() for image in images]]} if images else {}
            pixels |= video_arguments(moving, [video.open() for video in moving])
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        try:
            made = self.processor(text=[text], **pixels, add_special_tokens=False, return_tensors="pt")
        except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError) as error:
            sizes = ", ".join(f"{each.name} {each.width} x {each.height}" for each in visuals)
            kinds = " and ".join(["images"] * bool(images) + ["videos"] * bool(moving))
            raise DataError(f"{where}: the processor refuses the {kinds} ({sizes}): {error}") from error
        ids = made["input_ids"]
        vision = self._vision({name: torch.as_tensor(value) for name, value in made.items()}, ids)
        return ids[0].tolist(), vision

    def refuse_without_images(self, where: str) -> None:
        """Raise DataError, with the row, where the model takes no prompt that shows nothing."""
        if self._needs_images:
            raise DataError(
                f"{where}: the prompt shows no image, and this model takes none without one. Leave such rows out with "
                "data.on_bad_row=skip, or take another model."
            )

    def places(self, text: str) -> int:
        """Count the images and videos that a rendered text has a placeholder for."""
        return self._places(text, _NAMES) + self._places(text, _VIDEO_NAMES)

    def _places(self, text: str, names: Sequence[str]) -> int:
        return max(map(text.count, self._markers(names)), default=0)

    def _check_places(self, kind: str, places: int, count: int, where: str) -> None:
        if places != count:
            raise DataError(
                f"{where}: the chat template shows {places} of the prompt's {count} {kind}. Give a template that "
                "writes a placeholder for each with model.chat_template."
            )

    def _vision(self, made: Mapping[str, Tensor], ids: Tensor) -> PromptVision:
        others = {name: value for name, value in made.items() if name not in _TOKENS}
        per_token = {name: value[0].long() for name, value in others.items() if value.shape == ids.shape}
        inputs = {name: value for name, value in others.items() if name not in per_token}
        return PromptVision(inputs, per_token, {name: self._in_response.get(name, 0) for name in per_token})


def _drops_plain_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether the chat template goes over the parts of a message and finds none in a text, which is then lost."""
    if not isinstance(tokenizer.chat_template, str):
        return False
    word = "plain"
    shown = []
    for content in (word, [{"type": "text", "text": word}]):
        try:
            messages: Any = [{"role": "user", "content": content}]
            shown.append(word in str(apply_chat_template(tokenizer, messages, tokenize=False)))
        except ConfigError:
            raise
        except Exception:  # a template is a program: whatever it raises, it reads no such message
            shown.append(False)
    return shown == [False, True]


def copies_of(given: Any) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None]:
    """Return a copy of a tokenizer, and of the processor that it came in, if any. Its chat template is the processor's,
    by which `ProcessorMixin.apply_chat_template` renders."""
    from transformers import ProcessorMixin

    copied = copy.deepcopy(given)
    if not isinstance(copied, ProcessorMixin):
        return copied, None
    tokenizer: Any = copied.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.chat_template = copied.chat_template or tokenizer.chat_template
    return tokenizer, copied


def load_processor(
    name: str,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    key: str = "model.name",
    **how: Any,
) -> VisionProcessor:
    """Load the processor that was saved with a model, which a user named by the key.

    Raises:
        BackendError: its files or a package that it needs are missing, or the model cannot be reached.
    """
    from transformers import AutoProcessor

    with hub_files.reading(key, name, path):
        try:
            processor: Any = AutoProcessor.from_pretrained(path, **how)
        except ImportError as error:
            raise BackendError(f"The processor of {name!r} lacks a package: {_missing(error)}") from error
    return checked_processor(key, name, processor, tokenizer, config)


def checked_processor(
    key: str, name: str, processor: Any, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> VisionProcessor:
    """Return the maker of tokens and model inputs of a processor, whose tokenizer and template are replaced.

    Raises:
        BackendError: it makes no pixels, or another number of placeholders than the model has features.
    """
    if not hasattr(processor, "image_processor"):
        raise BackendError(
            f"{key}={name!r} is a model over images and comes without its processor (preprocessor_config.json or "
            "processor_config.json). Copy these files of its base model into the folder."
        )
    if config.model_type in _UNCOUNTED:  # these do not compare placeholders with features
        encoder: Any = config.vision_config  # type: ignore[attr-defined]
        features = (encoder.image_size // encoder.patch_size) ** 2 // config.scale_factor**2  # type: ignore[attr-defined]
        if processor.image_seq_len != features:
            raise BackendError(
                f"{key}={name!r}: the processor writes {processor.image_seq_len} placeholders for a tile "
                f"(image_seq_len), and the model has {features} features of one: they are of two models. Copy the "
                "processor's files of this one."
            )
    return VisionProcessor(processor, tokenizer, config)


def _missing(error: ImportError) -> str:
    message = str(error).strip().splitlines()[0] if str(error).strip() else "an import failed"
    for package in _PACKAGES:
        if package.lower() in str(error).lower() and importlib.util.find_spec(package) is None:
            return f"pip install {'pillow' if package == 'PIL' else package}. ({message})"
    return message
