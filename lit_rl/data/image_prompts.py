"""Prompts with images: what a processor has to offer, and what a prompt shows, for pixels whenever it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lit_rl.errors import DataError
from lit_rl.images import ImageRef
from lit_rl.vision import PromptVision


class Processor(Protocol):
    """Makes tokens and model inputs of a rendered prompt: `lit_rl.models.policy.processor.VisionProcessor`."""

    @property
    def name(self) -> str:
        """Which classes make pixels: part of a data set's fingerprint."""
        ...

    @property
    def reserved(self) -> Sequence[str]:
        """Texts that would become placeholders, which no message may hold."""
        ...

    @property
    def placeholders(self) -> Sequence[int]:
        """Tokens that stand for features of images."""
        ...

    def process(self, text: str, images: Sequence[ImageRef], where: str) -> tuple[list[int], PromptVision | None]:
        """Tokens of a rendered prompt, and what the model sees beside them."""
        ...


def count_of_placeholders(processor: Processor, ids: Sequence[int]) -> int:
    """How many tokens of a text stand for images."""
    return sum(map(processor.placeholders.__contains__, ids))


def refuse_reserved(processor: Processor, text: str, where: str) -> None:
    """A placeholder that is written in a plain text would be taken for an image that is not there.

    Raises:
        DataError: the text holds one.
    """
    for token in processor.reserved:
        if token in text:
            raise DataError(f"{where} holds the text {token!r}, which stands for an image. Take it out.")


@dataclass(frozen=True)
class Shown:
    """What a prompt shows, from which pixels are made again whenever its row is drawn: they are never held."""

    text: str
    """The rendered prompt, placeholders not expanded."""
    images: tuple[ImageRef, ...]
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
