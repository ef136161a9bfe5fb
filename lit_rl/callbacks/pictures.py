"""Images of rows for people: names for text outputs, thumbnails elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_rl.images import THUMBNAIL, WHITE, pillow
from lit_rl.videos import Visual, shown_in

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Pictures:
    """The images of a row, then its videos as their first frames. Files are opened at first use."""

    refs: tuple[Visual, ...]

    @classmethod
    def of(cls, table: Mapping[str, Sequence[Any]], row: int) -> Pictures:
        """Return the pictures in a row of a table of samples."""
        return cls(shown_in(table, row))

    def __str__(self) -> str:
        """Return a line for each: the file, or the origin of the bytes and the start of their digest."""
        return "\n".join(ref.name if ref.path is not None else f"{ref.name} {ref.digest[:8]}" for ref in self.refs)

    def strip(self) -> Image | None:
        """Return thumbnails side by side on white, mode RGB; None where there are none.

        Raises:
            DataError: an image cannot be read.
        """
        small = [ref.thumbnail() for ref in self.refs]
        if len(small) < 2:
            return small[0] if small else None
        width, height = sum(image.width for image in small), max(image.height for image in small)
        strip, left = pillow().new("RGB", (width + _GAP * (len(small) - 1), height), WHITE), 0
        for image in small:
            strip.paste(image, (left, 0))
            left += image.width + _GAP
        return strip


_GAP = THUMBNAIL // 24
