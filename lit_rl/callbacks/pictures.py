"""Images of rows for people: their names where there is text alone, small pictures where there is more."""

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
    """What a row shows: images, then videos, as their first frames. Nothing is opened before it is asked for."""

    refs: tuple[Visual, ...]

    @classmethod
    def of(cls, table: Mapping[str, Sequence[Any]], row: int) -> Pictures:
        """Those in a row of a table of samples."""
        return cls(shown_in(table, row))

    def __str__(self) -> str:
        """A line each: the file, or where the bytes came from and how their digest begins."""
        return "\n".join(ref.name if ref.path is not None else f"{ref.name} {ref.digest[:8]}" for ref in self.refs)

    def strip(self) -> Image | None:
        """Thumbnails side by side on white, mode RGB; None where there are none.

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
