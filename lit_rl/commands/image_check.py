"""What `lit-rl data-check` says of images: how many rows show some, their sizes, their tokens, and which are no use."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from rich.console import Console
from rich.text import Text

from lit_rl.callbacks.pictures import Pictures
from lit_rl.callbacks.text import printable
from lit_rl.data.corpus import set_key
from lit_rl.data.datamodule import RolloutDataModule
from lit_rl.data.formats import as_read
from lit_rl.data.image_parts import ImageReader
from lit_rl.data.image_prompts import Processor, count_of_placeholders
from lit_rl.data.offline.example_module import ExampleDataModule
from lit_rl.data.sources import Rows
from lit_rl.errors import DataError
from lit_rl.videos import VideoRef, Visual, shown_in

_NAMES, _BAD = 4, 10
"""Most names of a set, and most bad images, that are shown."""


@dataclass(frozen=True)
class SeenSet:
    """Images of one set."""

    name: str
    rows: Sequence[Sequence[Visual]]
    """Images and videos of each row, in the order in which they are shown."""
    tokens: Sequence[int]
    """Tokens of each row's prompt that stand for images; empty where that is not known."""

    @property
    def refs(self) -> list[Visual]:
        """References of all rows, each once."""
        return list(dict.fromkeys(ref for row in self.rows for ref in row))


def seen_sets(data: RolloutDataModule | ExampleDataModule, processor: Processor) -> list[SeenSet]:
    """Return the images of the training rows, and of each validation set. Prompts of rollouts that validate have no
    tokens."""
    tokens_of_images = partial(count_of_placeholders, processor.placeholders)
    if isinstance(data, RolloutDataModule):
        names = ["train", *map(set_key, data.val_names)]
        sets = zip(data.columns_of_sets(), (data.report[name]["kept"] for name in names))
        rows = [[shown_in(columns, row) for row in range(count)] for columns, count in sets]
        tokens = [list(map(tokens_of_images, data.peek(len(rows[0])).prompt_ids)), *((),) * len(data.val_names)]
        return [SeenSet(*each) for each in zip(names, rows, tokens)]
    sets = {"train": data.corpus.train} | {set_key(name): part for name, part in data.corpus.val.items()}
    return [
        SeenSet(
            name,
            [each.shown.visuals if each.shown else () for each in part.examples],
            [tokens_of_images(each.texts[0].ids) for each in part.examples],
        )
        for name, part in sets.items()
    ]


def say_images(console: Console, sets: Sequence[SeenSet]) -> None:
    """Print the images of each set."""
    console.print(Text("\nImages", style="bold"))
    for seen in sets:
        console.print(Text(f"{seen.name}: {_counted(seen)}"))
        if names := str(Pictures(tuple(seen.refs[:_NAMES]))).split("\n") if seen.refs else []:
            more = f" and {len(seen.refs) - len(names)} more" if len(seen.refs) > len(names) else ""
            console.print(Text(f"  {', '.join(printable(name, 60) for name in names)}{more}", style="dim"))


def _counted(seen: SeenSet) -> str:
    counts = [len(row) for row in seen.rows if row]
    said = f"{len(counts)} of {len(seen.rows)} rows show images"
    if not counts:
        return said
    sizes = sorted(((ref.width, ref.height) for ref in seen.refs), key=lambda size: (size[0] * size[1], size))
    low, middle, high = (f"{size[0]} x {size[1]}" for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]))
    said += f", {_spread(counts)} each; pixels {low}" + (f" to {high}, median {middle}" if low != high else "")
    if frames := [len(ref.frames) for ref in seen.refs if isinstance(ref, VideoRef)]:
        said += f"; {len(frames)} of them videos, of {_spread(frames)} frames"
    tokens = [count for count, row in zip(seen.tokens, seen.rows) if row]
    return f"{said}; image tokens of a prompt {_spread(tokens)}" if tokens else said


def _spread(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}, median {statistics.median(counts):g}"


# ---------------------------------------------------------------------- bad ones


def say_bad_images(console: Console, data: RolloutDataModule | ExampleDataModule) -> None:
    """Print the rows that `data.on_bad_row=skip` left out because of their images: everything is read once more for
    that."""
    bad = sum(counts.get("bad", 0) for counts in data.report.values())
    if not bad or getattr(data, "stream_buffer", None) is not None:  # of a stream only its beginning is read
        return
    found = list(islice(_bad_images(data), min(bad, _BAD)))
    if found:
        more = f", the first {_BAD}" if len(found) == _BAD < bad else ""
        console.print(Text(f"\nRows that are left out because of their images{more}", style="bold"))
    for line in found:
        console.print(Text(printable(line, 400)), soft_wrap=True)


def _bad_images(data: RolloutDataModule | ExampleDataModule) -> Iterator[str]:
    options: Any = data.options
    keys = (options.prompt_key,) if isinstance(data, RolloutDataModule) else ("prompt", "messages")
    for rows in (*data.train_rows(), *data.val_rows().values()):
        reader = ImageReader(rows.folder, options.max_image_pixels)
        for i in range(len(rows)):
            if row := _mapped(rows, i, options):
                try:
                    for ref in reader.read(row, rows.where(i), *keys)[1]:
                        ref.open()
                except DataError as error:
                    told = str(error)
                    yield told if told.startswith(rows.where(i)) else f"{rows.where(i)}: {told}"


def _mapped(rows: Rows, i: int, options: Any) -> dict[str, Any] | None:
    """Return the row under the names that it is read by; None where that fails, which is no matter of images."""
    try:
        return as_read(rows[i], rows.where(i), rename=options.rename, map_row=options.map_row).row
    except DataError:
        return None
