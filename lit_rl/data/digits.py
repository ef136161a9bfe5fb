"""Handwritten digits to be read, which come with the package: the first task with images.

The 1797 images of ``digits.csv.gz``, 8 x 8 pixels of 17 greys each, are the test set of "Optical Recognition of
Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998, doi:10.24432/C50P49), licensed
under CC BY 4.0. The file is the one that scikit-learn distributes, byte for byte.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rl.data.tasks import HoldsOut
from lit_rl.errors import in_range
from lit_rl.images import as_png, pillow

QUESTION = "Which digit?"
IMAGES = 1797
_SIDE, _GREYS, _SCALE = 8, 16, 4
_FILE = Path(__file__).with_name("digits.csv.gz")


@dataclass(eq=False)
class Digits(HoldsOut):
    """The digit that an image shows, as one message of a chat:

    `{"prompt": [{"role": "user", "content": "Which digit?"}], "image": b"...", "answer": "7"}`

    Images are PNG files of 32 x 32 pixels in RGB: each pixel of the data is a square of 4 x 4. Rows depend on the
    arguments alone. Needs Pillow.

    Args:
        val_rows: Number of the 1797 images that are held out for validation; 0 holds out none.
        seed: Seed of the order of the rows, and so of which of them are held out.

    Raises:
        ConfigError: `val_rows` leaves nothing to learn from.
    """

    val_rows: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        in_range("data.task.val_rows", self.val_rows, low=0, high=IMAGES - 1)

    def _rows(self) -> list[dict[str, Any]]:
        lines = gzip.decompress(_FILE.read_bytes()).decode("ascii").split()
        random.Random(self.seed).shuffle(lines)
        return [self._row([int(float(number)) for number in line.split(",")]) for line in lines]

    @staticmethod
    def _row(numbers: list[int]) -> dict[str, Any]:
        *greys, digit = numbers
        prompt = [{"role": "user", "content": QUESTION}]
        return {"prompt": prompt, "image": _png(greys), "answer": str(digit)}


class DigitTexts(Digits):
    """The same images with the reply that is wanted, as a message of the assistant, in the column `completion`."""

    def _rows(self) -> list[dict[str, Any]]:
        return [{**row, "completion": [{"role": "assistant", "content": row["answer"]}]} for row in super()._rows()]


def _png(greys: list[int]) -> bytes:
    """Return a PNG of grey values from 0, which is black, to 16."""
    module = pillow()
    image = module.frombytes("L", (_SIDE, _SIDE), bytes(grey * 255 // _GREYS for grey in greys))
    side = _SIDE * _SCALE
    return as_png(image.resize((side, side), module.Resampling.NEAREST).convert("RGB"))
