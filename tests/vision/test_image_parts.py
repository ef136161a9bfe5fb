"""Parts of messages and columns of images: which image stands where, and rows in which that cannot be said."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lit_rl.core.errors import DataError
from lit_rl.data.row_visuals import PART, ImageReader, check_parts, text_of

READER = ImageReader(None, max_pixels=1000)


def image(shade: int) -> bytes:
    held = io.BytesIO()
    Image.new("L", (3, 2), shade).save(held, "PNG")
    return held.getvalue()


def shades(refs: Any) -> list[int]:
    return [ref.open().getpixel((0, 0))[0] for ref in refs]


def asked(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": list(content)}]


def test_images_of_a_column_stand_before_the_text_of_the_first_message_of_the_user() -> None:
    row = {"prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}], "answer": "7"}
    for columns in ({"image": image(3)}, {"images": [image(3)]}):
        found, refs = READER.read({**row, **columns}, "rows[0]", "prompt")
        assert found["prompt"][1]["content"] == [PART, {"type": "text", "text": "Which?"}]
        assert found["prompt"][0] == row["prompt"][0] and found["answer"] == "7"
        assert shades(refs) == [3]
        (name,) = columns
        assert found[name] == (refs[0] if name == "image" else [refs[0]])


@given(st.lists(st.sampled_from(["text", "empty", "held"]), min_size=1, max_size=6), st.booleans())
def test_parts_show_their_own_image_or_the_next_of_the_column(kinds: list[str], mapped: bool) -> None:
    """By another way: what every part should show, written down while the row is made."""
    content, column, wanted = [], [], []
    for number, kind in enumerate(kinds):
        if kind == "text":
            content.append({"type": "text", "text": f"{number}"})
            continue
        wanted.append(number)
        if kind == "empty":
            content.append({"type": "image", "image": None})
            column.append(image(number))
        else:
            held = image(number)
            content.append({"type": "image", **({"bytes": held, "path": None} if mapped else {"image": held})})
    row = {"prompt": asked(*content), "images": column}
    before = copy.deepcopy(row)
    found, refs = READER.read(row, "rows[0]", "prompt")
    assert shades(refs) == wanted
    assert row == before, "the data set's own row is left as it is"
    if wanted:
        kept = [part if part["type"] == "text" else PART for part in content]
        assert found["prompt"][1]["content"] == kept


@pytest.mark.parametrize("nothing", [{}, {"image": None}, {"images": None}, {"images": []}])
def test_a_row_without_images_is_left_as_it_is(nothing: dict[str, Any]) -> None:
    row = {"prompt": asked({"type": "text", "text": "Which?"}), **nothing}
    assert READER.read(row, "rows[0]", "prompt") == (row, ())
    assert READER.read({"prompt": "2+2=", **nothing}, "rows[0]", "prompt") == ({"prompt": "2+2=", **nothing}, ())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Which?", "image": image(1)}, "images come without a prompt"),
        ({"prompt": asked(PART, PART), "images": [image(1)]}, "2 image parts without.*the row has 1 images"),
        ({"prompt": asked(PART), "images": [image(1), image(2)]}, "1 image parts without.*the row has 2 images"),
        ({"prompt": asked(PART)}, "1 image parts without.*the row has 0 images"),
        ({"prompt": asked({"type": "image", "image": image(1)}), "image": image(2)}, None),
        ({"prompt": asked(PART), "image": image(1), "images": [image(2)]}, "both the columns image and images"),
        ({"prompt": [{"role": "system", "content": "Look."}], "image": image(1)}, "no message of the user"),
        ({"prompt": asked({"type": "image_url", "image_url": {"url": "http://a.b/c.png"}})}, "is a URL"),
    ],
)
def test_rows_of_which_nobody_can_say_what_they_show(row: dict[str, Any], message: str | None) -> None:
    if message is None:  # the column's goes before the text, the part keeps its own
        _, refs = READER.read(row, "rows[5]", "prompt")
        assert shades(refs) == [2, 1]
        return
    with pytest.raises(DataError, match=rf"^rows\[5\]: .*{message}"):
        READER.read(row, "rows[5]", "prompt")


def test_words_of_a_message() -> None:
    assert text_of("abc") == "abc"
    assert text_of([{"type": "text", "text": "a"}, PART, {"type": "text", "text": "b"}]) == "ab"


def test_parts_in_one_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, PART, {"type": "text", "text": "c"}]
    assert check_parts(parts, "m") == [{"type": "text", "text": "ab"}, PART, {"type": "text", "text": "c"}]
    for bad in ({"type": "audio"}, {"type": "text"}, "a", {"type": "image", "image": 1}):
        with pytest.raises(DataError, match="^m has content parts that are neither text nor images"):
            check_parts([bad], "m")
