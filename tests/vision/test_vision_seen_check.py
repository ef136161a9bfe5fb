"""`lit-rl data-check` of images: what each set shows, and which images are no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vision_toys import picture

from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import DigitTexts
from lit_rl.models import LanguageModel
from lit_rl.runs.data_check import data_check

ASKED = [{"role": "user", "content": "Which?"}]


@pytest.fixture
def told(capsys: Any) -> Any:
    """What is printed of a data module, lines joined again."""

    def run(data: Any) -> str:
        assert data_check(data, LanguageModel("digits")) == 0
        return " ".join(capsys.readouterr().out.split())

    return run


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """24 rows of images that grow, every sixth without one; and two whose images are no use."""
    for i in range(24):
        picture(i, 32 + i, 32).save(tmp_path / f"{i}.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "3.png").read_bytes()[:600])
    names = [f"{i}.png" if i % 6 else None for i in range(24)] + ["cut.png", "gone.png"]
    rows = [{"prompt": ASKED, "image": name} for name in names]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "mine.jsonl"


def test_sizes_tokens_and_names_of_prompts_and_what_is_left_out(told: Any, mine: Path) -> None:
    shown = told(RolloutDataModule(path=str(mine), on_bad_row="skip", val_fraction=0.0, prompts_per_rollout=4))
    assert "train: 20 of 24 rows show images, 1 each; pixels 33 x 32 to 55 x 32, median 45 x 32;" in shown
    assert "; image tokens of a prompt 4 1.png, 2.png, 3.png, 4.png and 16 more" in shown
    assert "bad 2, kept 24" in shown
    bad = shown.partition("left out because of their images")[2]
    assert f"{mine}:25: cut.png: the image is damaged" in bad
    assert f"{mine}:26: the image {mine.parent / 'gone.png'} cannot be read" in bad


def test_every_set_of_texts(told: Any) -> None:
    shown = told(SupervisedDataModule(rows=DigitTexts().val()[:64], batch_size=8, val_fraction=0.25))
    images = "rows show images, 1 each; pixels 32 x 32; image tokens of a prompt 4"
    assert f"train: 48 of 48 {images} bytes " in shown and f"val: 16 of 16 {images} bytes " in shown
    assert "and 44 more" in shown and "left out because" not in shown


def test_several_images_a_row_and_none(told: Any) -> None:
    rows = [{"prompt": ASKED, "images": [picture(i), picture(i + 50)][: 1 + i % 2]} for i in range(8)]
    shown = told(RolloutDataModule(rows=rows, val_fraction=0.0, prompts_per_rollout=4))
    assert "1 to 2, median 1.5 each; pixels 32 x 32; image tokens of a prompt 4 to 8, median 6" in shown
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(8)]
    shown = told(RolloutDataModule(rows=rows, val_fraction=0.0, prompts_per_rollout=4))
    assert "Images train: 0 of 8 rows show images" in shown
