"""Prompts with images and videos: what a processor has to offer, and what is shown, for pixels whenever it is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lit_rl.errors import DataError
from lit_rl.videos import VideoRef, Visual
from lit_rl.vision import PromptVision


class Processor(Protocol):
    """Makes tokens and model inputs of a rendered prompt: `lit_rl.models.policy.processor.VisionProcessor`."""

    @property
    def name(self) -> str:
        """Which classes make pixels: part of a data set's fingerprint."""
        ...

    @property
    def name_for_videos(self) -> str:
        """Likewise, of frames."""
        ...

    @property
    def equal_videos(self) -> bool:
        """Whether videos that are shown in one pass need equally many frames."""
        ...

    @property
    def reserved(self) -> Sequence[str]:
        """Texts that would become placeholders, which no message may hold."""
        ...

    @property
    def placeholders(self) -> Sequence[int]:
        """Tokens that stand for features of images and videos."""
        ...

    def process(self, text: str, visuals: Sequence[Visual], where: str) -> tuple[list[int], PromptVision | None]:
        """Tokens of a rendered prompt, and what the model sees beside them."""
        ...


def count_of_placeholders(processor: Processor, ids: Sequence[int]) -> int:
    """How many tokens of a text stand for images and videos."""
    return sum(map(processor.placeholders.__contains__, ids))


def refuse_reserved(processor: Processor, text: str, where: str) -> None:
    """A placeholder that is written in a plain text would be taken for an image that is not there.

    Raises:
        DataError: the text holds one.
    """
    for token in processor.reserved:
        if token in text:
            raise DataError(f"{where} holds the text {token!r}, which stands for an image or a video. Take it out.")


@dataclass(frozen=True)
class Shown:
    """What a prompt shows, from which pixels are made again whenever its row is drawn: they are never held."""

    text: str
    """The rendered prompt, placeholders not expanded."""
    images: tuple[Visual, ...]
    """Images and videos; those of a kind in the order in which they are shown."""
    where: str

    def vision(self, processor: Processor, row: int) -> PromptVision | None:
        """What the model sees: equal to the bit each time.

        Args:
            processor: The one that made the prompt's tokens.
            row: Number of the prompt in its data set.

        Raises:
            DataError: an image is gone, or has changed since the data were read.
        """
        _, vision = processor.process(self.text, self.images, self.where)
        return None if vision is None else replace(vision, row=row, source=self)

    def maker_of_videos(self, processor: Processor) -> list[str]:
        """What makes pixels of its videos, for a data set's fingerprint; empty where it shows none."""
        return [processor.name_for_videos] if any(isinstance(each, VideoRef) for each in self.images) else []


def refuse_unequal_videos(processor: Processor | None, prompts: Iterable[Shown | None]) -> None:
    """Prompts of a set are read together, which some models can where all videos have equally many frames.

    Raises:
        DataError: the processor's model is one of these, and two videos differ.
    """
    first: tuple[int, Shown] | None = None
    for shown in prompts:
        counts = [len(each.frames) for each in shown.images if isinstance(each, VideoRef)] if shown else []
        for count in counts if processor is not None and processor.equal_videos else []:
            assert shown is not None
            first = first or (count, shown)
            if count != first[0]:
                raise DataError(
                    f"{shown.where}: the video has {count} frames, one of {first[1].where} has {first[0]}, and this "
                    "model reads prompts together where all videos have equally many. Take as many frames of each."
                )
