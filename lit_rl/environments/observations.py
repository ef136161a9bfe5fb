"""Results of tools and environments as the content of a message: a text, or parts of texts and images.

Images are read as those of the data are, with the same limits, and are held as references with their encoded bytes.
A string is never one: what a tool says must not open files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from lit_rl.core.errors import ConfigError, DataError, excerpt
from lit_rl.core.visuals import ImageRef, VideoRef, is_pillow
from lit_rl.data.row_visuals import image_of
from lit_rl.environments.runner import NoReply
from lit_rl.rewards.jobs import number_of

Content = str | list[dict[str, Any]]
"""The content of a message: a text, or parts: ``{"type": "text", "text": ...}``, or ``{"type": "image", "image": ...}``
with an `ImageRef`."""

IMAGE_LIMIT: ContextVar[int | None] = ContextVar("image_limit", default=None)
"""Width times height that an image of the environment at hand may have; None: the policy reads text."""


class UnusableImage(NoReply):
    """The error for a result that is no usable image, or too large: the episode fails."""


def content_of(result: Any, who: str) -> Content:
    """Return the result of a tool or an environment as the policy reads it.

    An image is a PIL image, the encoded bytes of one, or an `ImageRef`, by itself or as the ``image`` of a part
    ``{"type": "image", "image": ...}``. A list that has one is content: images and parts, those of text as
    ``{"type": "text", "text": ...}``, in the order in which they are seen. All else is text, see `as_text`.

    Raises:
        ImageReturned: it is an image and the policy reads text, an image that has no form of these, or a video and
            the policy sees.
        UnusableImage: an image is damaged, animated, too large or too narrow.
        ConfigError: it can be nothing of this.
    """
    if (most := IMAGE_LIMIT.get()) is None:
        return as_text(result, who)
    parts = result if isinstance(result, list | tuple) else [result]
    for part in parts:
        names = isinstance(part, Mapping) and part.get("type") in ("video", "video_url") and part.keys() <= _VIDEO_KEYS
        if names or isinstance(part, VideoRef):
            raise ImageReturned(
                f"{who} returned a video ({_short_repr(part)}), but only images can be returned. Return some of its "
                'frames, each as {"type": "image", "image": ...}.'
            )
    if not shows_image(result):
        return as_text(result, who)
    return [_part(part, who, most) for part in parts]


def shows_image(value: Any) -> bool:
    """Tell whether a value is an image, or a list with one. For a policy over images, bytes count too."""
    parts = value if isinstance(value, list | tuple) else [value]
    return any(_is_image(part) or (isinstance(part, bytes) and IMAGE_LIMIT.get() is not None) for part in parts)


def images_of_content(content: Any) -> list[ImageRef]:
    """Return the images in a message's content, in their order."""
    return [part["image"] for part in content if "image" in part] if isinstance(content, list) else []


def texts_of_content(content: Content) -> list[str]:
    """Return the texts in a message's content, in their order."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def with_texts(content: Content, texts: Sequence[str]) -> Content:
    """Return the content with other texts in the places of its own."""
    if isinstance(content, str):
        (text,) = texts
        return text
    new = iter(texts)
    return [{**part, "text": next(new)} if "text" in part else part for part in content]


def without_payload(content: Content) -> Content:
    """Return the content for chat templates: image parts without payload."""
    return content if isinstance(content, str) else [{"type": "image"} if "image" in part else part for part in content]


def _part(part: Any, who: str, most: int) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": replace_surrogates(part["text"])}
    image = part.get("image") if isinstance(part, Mapping) and part.get("type") == "image" else part
    if not (isinstance(image, bytes | ImageRef) or is_pillow(image)):
        raise ImageReturned(
            f"{who} returned {_short_repr(part)} as an image or beside one. An image is a PIL image or its encoded "
            'bytes, by itself or in {"type": "image", "image": ...}; a text beside it is '
            '{"type": "text", "text": ...}. Turn an array of pixels into an image by PIL.Image.fromarray. Paths and '
            "addresses are not opened."
        )
    try:
        return {"type": "image", "image": image_of(image, who, max_pixels=most)}
    except DataError as error:
        raise UnusableImage(str(error)) from error


def as_text(result: Any, who: str) -> str:
    """Return what a tool or an environment gave as the policy reads it: text as it stands, all else as JSON.

    Raises:
        ImageReturned: it is an image, or has one as a part of a message.
        ConfigError: it is neither.
    """
    if isinstance(result, str):
        return replace_surrogates(result)
    parts = result if isinstance(result, list | tuple) else [result]
    if (image := next((part for part in parts if _is_image(part)), None)) is not None:
        raise ImageReturned(  # as JSON the policy would read the words of a part, and see nothing
            f"{who} returned an image ({_short_repr(image)}), but the policy is a language model over text. Set model= "
            "to one that sees, such as smolvlm_256m, or return words or numbers about the image."
        )
    try:
        return replace_surrogates(json.dumps(result, ensure_ascii=False, allow_nan=True, default=_as_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{who} returned {_short_repr(result)}, which is neither text nor JSON ({error}). Return a str, a "
            "number, or lists and dicts of these."
        ) from error


def _as_plain(value: Any) -> Any:
    """Return numbers of NumPy and PyTorch, arrays of them, and decimals as JSON has them.

    Raises:
        TypeError: it is none of these.
    """
    if hasattr(value, "tolist") and hasattr(value, "ndim"):
        return value.tolist()
    if (number := number_of(value)) is not None:
        return number
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class ImageReturned(ConfigError):
    """A tool or an environment gave an image that the policy cannot be shown."""


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):  # a part of a message, not any mapping with a type
        return value.get("type") in ("image", "image_url") and value.keys() <= _IMAGE_KEYS
    bytes_ = str(getattr(value, "dtype", "")).endswith("uint8")
    return (bytes_ and value.ndim == _DIMENSIONS) or isinstance(value, ImageRef) or is_pillow(value)


_IMAGE_KEYS = {"type", "image", "image_url", "url", "path", "bytes", "base64", "detail"}
_VIDEO_KEYS = {"type", "video", "video_url", "frames", "fps", "path", "url", "bytes"}
_DIMENSIONS = 3
"""Height, width and colour, of the arrays of pixels that gymnasium's environments give."""


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which no file can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _short_repr(value: Any) -> str:
    try:
        return excerpt(repr(value), 80)
    except Exception:  # repr of an integer with thousands of digits fails
        return f"a {type(value).__name__}"
