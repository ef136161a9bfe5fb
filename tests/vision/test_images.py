"""What a row may name as an image, what it may not, and the one rule by which it becomes RGB."""

from __future__ import annotations

import base64
import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_rl.core.errors import DataError
from lit_rl.core.visuals import ImageRef
from lit_rl.data.row_visuals import image_of

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def png(image: Image.Image, **how: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, "PNG", **how)
    return held.getvalue()


def read(value: Any, folder: Path | None = None, max_pixels: int = 1000) -> ImageRef:
    return image_of(value, "rows[3]", folder=folder, max_pixels=max_pixels)


def pixels(ref: ImageRef) -> Any:
    image = ref.open()
    assert image.mode == "RGB"
    return np.asarray(image)


ENCODED = png(Image.fromarray(PIXELS))


# ------------------------------------------------------------------ what is taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_bytes(ENCODED)
    return tmp_path


@pytest.mark.parametrize("kind", ["relative", "absolute", "bytes", "uri", "mapping", "mapped path", "pillow", "itself"])
def test_every_way_to_name_an_image_gives_its_pixels(folder: Path, kind: str) -> None:
    path = "photos/one.png"
    value = {
        "relative": path,
        "absolute": str(folder / path),
        "bytes": ENCODED,
        "uri": "data:image/png;base64," + base64.b64encode(ENCODED).decode(),
        "mapping": {"bytes": ENCODED, "path": "elsewhere.png"},
        "mapped path": {"bytes": None, "path": path},
        "pillow": Image.fromarray(PIXELS),
        "itself": ImageRef("mine", "0", 6, 4, data=ENCODED),
    }[kind]
    ref = read(value, folder)
    assert (ref.width, ref.height) == (6, 4)
    np.testing.assert_array_equal(pixels(ref), PIXELS)
    assert pickle.loads(pickle.dumps(ref)) == ref


def test_a_reference_to_a_file_holds_no_bytes_and_notices_a_change(folder: Path) -> None:
    ref = read("photos/one.png", folder)
    assert ref.data is None
    assert ref.digest == read(ENCODED).digest != read(png(Image.fromarray(PIXELS + 1))).digest
    (folder / "photos" / "one.png").write_bytes(png(Image.fromarray(PIXELS + 1)))
    with pytest.raises(DataError, match=r"photos/one\.png.*changed since the data were read"):
        ref.open()
    (folder / "photos" / "one.png").unlink()
    with pytest.raises(DataError, match=r"photos/one\.png.*cannot be read: No such file"):
        ref.open()


# ------------------------------------------------------------------ the rule of colours


def test_alpha_is_laid_over_white() -> None:
    values = np.zeros((1, 3, 4), dtype=np.uint8)
    values[0, :, 0], values[0, :, 3] = 200, [255, 0, 51]  # opaque, clear, a fifth
    assert pixels(read(png(Image.fromarray(values))))[0].tolist() == [[200, 0, 0], [255, 255, 255], [244, 204, 204]]


def test_sixteen_bits_are_divided_and_not_cut() -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    assert pixels(read(png(Image.fromarray(values))))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_palettes_with_a_clear_colour() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    found = pixels(read(png(image, transparency=1)))
    assert found[0].tolist() == [[10, 20, 30], [255, 255, 255]]


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr", "HSV", "LA", "RGBA", "P", "I", "I;16"])
def test_every_mode_of_pillow_is_read(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert("L").convert("I").point(lambda v: v * 257) if mode[0] == "I" else None
    image = Image.fromarray(PIXELS).convert(mode) if image is None else image.convert(mode)
    assert pixels(read(image)).shape == PIXELS.shape


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(DataError, match=r"rows\[3\].*floating-point"):
        read(Image.fromarray(PIXELS).convert("F"))


def test_exif_turns_the_picture() -> None:
    image, held = Image.fromarray(PIXELS), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    image.save(held, "PNG", exif=exif)
    np.testing.assert_array_equal(pixels(read(held.getvalue())), np.rot90(PIXELS, -1))


# ------------------------------------------------------------------ what is refused, by row and with the fix


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says a size, and that has no pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def animation() -> bytes:
    frames, held = [Image.new("L", (4, 4), shade) for shade in (0, 255)], io.BytesIO()
    frames[0].save(held, "GIF", save_all=True, append_images=frames[1:])
    return held.getvalue()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("photos/two.png", r"photos/two\.png cannot be read: No such file.*one\.png"),
        ("photos", r"photos cannot be read: Is a directory\.$"),
        ("https://example.org/one.png", "is a URL, and nothing is fetched.*Download it"),
        ("file:///etc/passwd", "is a URL"),
        ("../one.png", r"outside the data's folder.*absolute path"),
        ("photos/../../one.png", "outside the data's folder"),
        ("data:image/png,plain", "is a data: URI that is not base64"),
        ("data:image/png;base64,!!", "no sound base64"),
        (b"", "is empty"),
        (b"<html>", "no image that Pillow knows: it begins with b'<html>'"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        (7, r"the image is 7 \(int\); allowed are a path, bytes"),
        ({"pixels": 1}, "allowed are a path"),
        (bomb(40, 26), r"40 x 26 pixels, data\.max_image_pixels=1000"),
        (bomb(60_000, 60_000), "too large|60000 x 60000"),
        (bomb(201, 1), "201 x 1 pixels: one side is over 200 times"),
        (animation(), "is animated"),
    ],
)
def test_what_is_refused(folder: Path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^rows\[3\]: .*{message}"):
        read(value, folder)


def test_a_relative_path_of_rows_that_come_from_no_file() -> None:
    with pytest.raises(DataError, match="relative path, and these rows come from no file"):
        read("photos/one.png")


def test_damaged_bytes_are_found_when_it_is_opened() -> None:
    ref = read(ENCODED[:-30])
    with pytest.raises(DataError, match="bytes: the image is damaged"):
        ref.open()
