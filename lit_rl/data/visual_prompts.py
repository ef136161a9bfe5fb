"""Prompts with images and videos: the interface of a processor, and what is kept of a prompt to make its pixels
again."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lit_rl.core.errors import DataError, GenerationError
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.core.visuals import VideoRef, Visual


class Processor(Protocol):
    """The interface of a processor, which makes tokens and model inputs of a rendered prompt:
    `lit_rl.models.vision_processor.VisionProcessor`."""

    @property
    def name(self) -> str:
        """The classes that make pixels: part of a data set's fingerprint."""
        ...

    @property
    def name_for_videos(self) -> str:
        """The classes that make pixels of frames: part of a data set's fingerprint."""
        ...

    @property
    def equal_videos(self) -> bool:
        """Tell whether videos that are shown in one pass need equally many frames."""
        ...

    @property
    def reserved(self) -> Sequence[str]:
        """Texts that would become placeholders, which no message may hold."""
        ...

    @property
    def placeholders(self) -> Sequence[int]:
        """Tokens that stand for features of images and videos."""
        ...

    def refuse_without_images(self, where: str) -> None:
        """Raise DataError, with the row, where the model takes no prompt without images."""
        ...

    def places(self, text: str) -> int:
        """Return the number of image and video placeholders in a rendered text."""
        ...

    def process(self, text: str, visuals: Sequence[Visual], where: str) -> tuple[list[int], PromptVision | None]:
        """Return the tokens of a rendered prompt, and the model's vision inputs."""
        ...


def count_placeholders(placeholders: Container[int], ids: Sequence[int]) -> int:
    """Return the number of tokens that stand for images and videos.

    Args:
        placeholders: Tokens that stand for images and videos: `Processor.placeholders`.
        ids: Tokens of the text.
    """
    return sum(token in placeholders for token in ids)


def refuse_reserved(processor: Processor, text: str, where: str) -> None:
    """Refuse a plain text that holds a placeholder: it would be taken for an image that is not there.

    Raises:
        DataError: the text holds one.
    """
    for token in processor.reserved:
        if token in text:
            raise DataError(f"{where} holds the text {token!r}, which stands for an image or a video. Take it out.")


@dataclass(frozen=True)
class PromptVisuals:
    """The images and videos of a prompt. Pixels are made again from it whenever the row is drawn, and never held."""

    text: str
    """The rendered prompt, placeholders not expanded."""
    visuals: tuple[Visual, ...]
    """References, in the order in which those of a kind are shown."""
    where: str

    def vision(self, processor: Processor, row: int) -> PromptVision | None:
        """Return the model's vision inputs, equal to the bit each time.

        Args:
            processor: The one that made the prompt's tokens.
            row: Number of the prompt in its data set.

        Raises:
            DataError: an image is gone, or has changed since the data were read.
        """
        _, vision = processor.process(self.text, self.visuals, self.where)
        return None if vision is None else replace(vision, row=row, source=self)

    def maker_of_videos(self, processor: Processor) -> list[str]:
        """Return the name of the video processor, for a data set's fingerprint; an empty list where the prompt shows no
        video."""
        return [processor.name_for_videos] if any(isinstance(each, VideoRef) for each in self.visuals) else []


def shown_again(
    processor: Processor | None,
    text: str,
    seen: PromptVision | None,
    where: str,
    returned: Sequence[Visual] = (),
) -> tuple[list[int], PromptVision | None]:
    """Return the tokens and vision inputs of a prompt in other words, with the images that it shows.

    Args:
        processor: The policy's.
        text: The new rendering.
        seen: Vision inputs of the prompt as it was. None: it shows no image.
        where: The prompt, for messages.
        returned: Images of an environment, which stand behind those.

    Raises:
        DataError: the processor refuses it.
        GenerationError: the images are not known, only their pixels.
    """
    source = PromptVisuals("", (), where) if seen is None else seen.source
    if processor is None or not isinstance(source, PromptVisuals):
        raise GenerationError(
            f"{where} has pixels, and is rendered anew: that takes the policy's processor and the images "
            "(PromptVision.source), which data modules give."
        )
    shown = PromptVisuals(text, (*source.visuals, *returned), where)
    ids, found = processor.process(text, shown.visuals, where)
    if found is not None:
        found = replace(found, row=-1 if seen is None else seen.row, source=shown, from_environment=bool(returned))
    return ids, found


class EqualVideos:
    """Prompts of a set are read together, which some models can where all their videos have equally many frames.

    Args:
        processor: Processor of the model. None, or of another model: videos may have any number of frames.
    """

    def __init__(self, processor: Processor | None) -> None:
        self._needed = processor is not None and processor.equal_videos
        self._first: tuple[int, str] | None = None

    def check(self, visuals: Sequence[Visual], where: str) -> None:
        """Check the videos of the next prompt against those that were added.

        Args:
            visuals: Visuals of the next prompt.
            where: Row of the prompt, for messages.

        Raises:
            DataError: one of its videos has another number of frames than those of the prompts that were added.
        """
        for count in self._lengths(visuals):
            if self._first is not None and count != self._first[0]:
                raise DataError(
                    f"{where}: the video has {count} frames, one of {self._first[1]} has {self._first[0]}, and this "
                    "model reads prompts together where all videos have equally many. Take as many frames of each."
                )

    def add(self, visuals: Sequence[Visual], where: str) -> None:
        """Check the next prompt, and compare later prompts with it.

        Raises:
            DataError: as `check`.
        """
        self.check(visuals, where)
        for count in self._lengths(visuals):
            self._first = self._first or (count, where)

    def _lengths(self, visuals: Sequence[Visual]) -> list[int]:
        return [len(each.frames) for each in visuals if isinstance(each, VideoRef)] if self._needed else []


def refuse_unequal_videos(processor: Processor | None, prompts: Iterable[PromptVisuals | None]) -> None:
    """Refuse unequal videos in a whole set, whose sources were read one by one.

    Raises:
        DataError: two videos have unequally many frames, and the model reads prompts together where none have.
    """
    videos = EqualVideos(processor)
    for shown in prompts:
        if shown is not None:
            videos.add(shown.visuals, shown.where)
