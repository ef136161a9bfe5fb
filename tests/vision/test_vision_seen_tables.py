"""What a run over images shows: tables with small pictures, parquet files that give the images back, and a page."""

from __future__ import annotations

import io
import re
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from vision_runs import by_letters, quiet_trainer
from vision_toys import picture

from lit_rl.algorithms import GRPO
from lit_rl.callbacks import Samples
from lit_rl.callbacks.display import Pictures, console_table
from lit_rl.callbacks.output_files import write_parquet
from lit_rl.core.rollout import Sampling
from lit_rl.core.visuals import ImageRef
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.row_visuals import image_of
from lit_rl.data.sources import load_rows
from lit_rl.data.tasks import Digits
from lit_rl.reports.transcripts import transcripts

ASKED = [{"role": "user", "content": "Which?"}]


def ref(number: int, width: int = 32, height: int = 32) -> ImageRef:
    return image_of(picture(number, width, height), "row")


def digits_run(folder: Path, **more: Any) -> GRPO:
    module = GRPO("digits", by_letters, group_size=4, sampling=Sampling(max_new_tokens=2), seed=0)
    data = RolloutDataModule(task=Digits(), prompts_per_rollout=4, seed=0)
    quiet_trainer(folder, 1, callbacks=[Samples(print=2)], limit_val_batches=0, **more).fit(module, datamodule=data)
    return module


def test_thumbnails_are_small_and_never_larger_than_the_image() -> None:
    wide = ref(0, 300, 150)
    assert wide.thumbnail().size == (96, 48) and wide.thumbnail(30).size == (30, 15) and wide.open().size == (300, 150)
    assert (ref(1).thumbnail().size, ref(1).thumbnail().mode) == ((32, 32), "RGB")


def test_images_of_a_row_stand_side_by_side() -> None:
    strip = Pictures((ref(0, 300, 150), ref(1))).strip()
    assert strip is not None and strip.size == (96 + 4 + 32, 48)
    pixels = np.asarray(strip)
    assert (pixels[:32, 100:] == np.asarray(ref(1).open())).all() and (pixels[:, 96:100] == 255).all()
    assert Pictures(()).strip() is None and str(Pictures(())) == ""


def test_tensorboard_has_the_thumbnails_and_the_console_the_names(tmp_path: Path, capsys: Any) -> None:
    module = digits_run(tmp_path, logger=TensorBoardLogger(tmp_path, name="", version=""))
    first, second, *_ = dict.fromkeys(module.samples["image"])
    found = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "tensors": 0}).Reload()
    assert found.Tags()["images"] == ["samples/image_1", "samples/image_2"]
    (event,) = found.Images("samples/image_2")
    shown = Image.open(io.BytesIO(event.encoded_image_string))
    assert (np.asarray(shown) == np.asarray(second.open())).all()
    assert first.digest[:8] in capsys.readouterr().out.replace("\n", "")


@pytest.fixture
def photos(tmp_path: Path) -> dict[str, list[Any]]:
    """A table of samples: two rows of one photo, one without, one of two PIL images."""
    picture(3, 200, 100).save(tmp_path / "photo.png")
    photo = image_of("photo.png", "row", folder=tmp_path)
    return {
        "step": [0] * 4,
        "prompt": [ASKED] * 4,
        "completion": list("abcd"),
        "reward": [1.0, 0.0, 0.5, float("nan")],
        "ended": [True] * 4,
        "images": [[photo], [photo], None, [ref(1), ref(2)]],
    }


def test_files_give_images_back_to_datasets_and_to_our_own_reader(photos: Any, tmp_path: Path) -> None:
    path = tmp_path / "step_00000000.parquet"
    write_parquet(photos, path)
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.features["images"] == datasets.List(datasets.Image())  # pyright: ignore
    seen = [[np.asarray(image) for image in row["images"] or ()] for row in rows]  # pyright: ignore
    wanted = [[np.asarray(image.open()) for image in refs or ()] for refs in photos["images"]]
    assert [len(images) for images in seen] == [1, 1, 0, 2]
    assert all((one == other).all() for images, refs in zip(seen, wanted) for one, other in zip(images, refs))
    plain = load_rows(path)[0]["images"]
    assert plain == [{"bytes": None, "path": str((tmp_path / "photo.png").resolve())}], "a file is not copied"
    held = load_rows(path)[3]["images"][0]
    assert image_of(held, "row") == ref(1)


def test_a_column_of_single_images_stays_one(tmp_path: Path) -> None:
    write_parquet({"image": [ref(0), None], "answer": ["1", "2"]}, tmp_path / "one.parquet")
    rows: Any = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "one.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert rows.features["image"] == datasets.Image() and rows[1]["image"] is None
    assert (np.asarray(rows[0]["image"]) == np.asarray(ref(0).open())).all()


def test_bytes_of_a_group_are_in_the_file_once(tmp_path: Path) -> None:
    large = [ref(number, 700, 700) for number in range(3)]
    size = sum(len(each.read()) for each in large)
    write_parquet({"image": [each for each in large for _ in range(8)]}, tmp_path / "many.parquet")
    assert size > 2**22 and (tmp_path / "many.parquet").stat().st_size < 1.01 * size


def test_tables_of_text_are_written_as_before(photos: Any, tmp_path: Path) -> None:
    write_parquet({**photos, "images": ["a", "b", None, "c"]}, tmp_path / "text.parquet")
    schema = pyarrow.parquet.read_schema(tmp_path / "text.parquet")
    assert schema.metadata is None and schema.field("images").type == "string"


def test_the_page_of_a_run_shows_each_group_its_images(tmp_path: Path) -> None:
    module = digits_run(tmp_path, logger=False)
    transcripts(tmp_path)
    page = (tmp_path / "transcripts.html").read_text()
    groups = re.findall(r"<h3>group \d+: (.*?)</h3>\n(.*?)<details", page, re.DOTALL)
    assert len(groups) == 4 and all(words == "user: [image]Which digit?" for words, _ in groups)
    assert "img-src data:;" in page
    for image, (_, shown) in zip(module.samples["image"][::4], groups):
        (encoded,) = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
        found = Image.open(io.BytesIO(b64decode(encoded)))
        assert (np.asarray(found) == np.asarray(image.open())).all()


def test_a_page_names_images_that_are_gone_and_one_of_text_allows_none(photos: Any, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    write_parquet(photos, tmp_path / "samples" / "step_00000000.parquet")
    (tmp_path / "photo.png").unlink()
    transcripts(tmp_path)
    page = (tmp_path / "transcripts.html").read_text()
    assert f'<p class="pictures">[{(tmp_path / "photo.png").resolve()}]</p>' in page
    assert page.count("<img") == 2 and page.count("<h3>") == 3, "equal prompts with other images are other groups"
    del photos["images"]
    write_parquet(photos, tmp_path / "samples" / "step_00000000.parquet")
    transcripts(tmp_path)
    page = (tmp_path / "transcripts.html").read_text()
    assert "img" not in page.split("<style>")[0] and "<img" not in page


def test_tables_of_text_need_no_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.setitem(sys.modules, name, None)
    table = {"prompt": ["1+1="], "completion": ["2"], "reward": [1.0], "advantage": [0.5], "answer": ["2"]}
    write_parquet(table, tmp_path / "text.parquet")
    rows = Samples()._pick(table)
    assert list(rows[0]) == ["prompt", "completion", "reward", "advantage"]
    console_table("rows", rows)
