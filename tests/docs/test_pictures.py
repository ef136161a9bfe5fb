"""The pictures of pages can be made again, are small, and show what they are taken for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from chromium import CHROMIUM
from doc_runs import script
from PIL import Image


@pytest.fixture(scope="module")
def pictures(root: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "scripts"))
        yield script(root, "pictures")


def test_every_picture_that_it_makes_is_there_small_and_shown_by_a_page(pictures: ModuleType, root: Path) -> None:
    shown = {
        name
        for page in (root / "docs").glob("*.md")
        for name in re.findall(r"\]\(images/(\w+)\.png\)", page.read_text(encoding="utf-8"))
    }
    for name in pictures.PICTURES:
        file = pictures.FILES.get(name, name)
        assert file in shown and (root / "docs" / "images" / f"{file}.png").stat().st_size <= pictures.MOST


@pytest.mark.all
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_picture_is_of_the_elements_that_it_names_in_the_scheme_that_it_is_asked_for(
    pictures: ModuleType, tmp_path: Path
) -> None:
    """A red band of 40 pixels between two others, green in the dark; a frame with a sandbox runs its own script."""
    page = tmp_path / "page.html"
    page.write_text(
        "<style>body { margin: 0 } div { height: 40px; background: blue } #one { background: light-dark(red, lime) } "
        ":root { color-scheme: light dark }</style><div></div><div id='one'></div><div id='two'></div>"
        "<iframe sandbox='allow-scripts' srcdoc='<script>var inside = 6 * 7</script>'></iframe>"
    )

    async def looked_at(dark: bool) -> tuple[Image.Image, int]:
        async with pictures.browser() as tab:
            await tab.open(page.as_uri(), width=300, dark=dark)
            with pytest.raises(RuntimeError, match="not_there"):
                await tab.run("not_there")
            image = await tab.picture(await tab.box("#one", until="#two", margin=0))
            return image, await tab.run("inside", framed=True)

    for dark, colour in ((False, (255, 0, 0)), (True, (0, 255, 0))):
        image, inside = asyncio.run(looked_at(dark))
        assert image.size == (300, 40) and image.getcolors() == [(12000, colour)] and inside == 42
