"""Data sets that are written of rollouts with images: they load again, with the same images, and are learned from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vision_runs import by_letters, quiet_trainer
from vision_toys import picture

from lit_rl.algorithms import DPO, GRPO
from lit_rl.callbacks import PreferenceSets
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Digits
from lit_rl.models import LanguageModel

ASKED = [{"role": "user", "content": "Which?"}]


def path_of(folder: Path, name: str = "verdicts") -> Path:
    return folder / "datasets" / f"{name}.jsonl"


def written(folder: Path, model: Any, data: Any, name: str = "verdicts", steps: int = 1) -> list[dict[str, Any]]:
    """What a run writes of one kind."""
    module = GRPO(model, by_letters, group_size=4, sampling=Sampling(max_new_tokens=2), seed=0)
    quiet_trainer(folder, steps, callbacks=[PreferenceSets()]).fit(module, datamodule=data)
    return [json.loads(line) for line in path_of(folder, name).read_text().splitlines()]


@pytest.mark.all
def test_pairs_of_digits_are_data_of_dpo_again(tmp_path: Path) -> None:
    digits = RolloutDataModule(task=Digits(), prompts_per_rollout=16, seed=0)
    rows = written(tmp_path, "digits", digits, "pairs", steps=2)
    names = [row["image"] for row in rows]
    assert len(rows) > 16 and len(set(names)) == len(names), "one question of many images is as many prompts"
    kept = [path.name for path in (tmp_path / "datasets" / "images").iterdir()]
    assert set(names) <= {f"images/{name}" for name in kept} and all(name.endswith(".png") for name in kept)
    data = PreferenceDataModule(path=str(path_of(tmp_path, "pairs")), batch_size=8, val_fraction=0.0)
    module = DPO(LanguageModel("digits", freeze=()))
    quiet_trainer(tmp_path, 1).fit(module, datamodule=data)
    assert module.global_step == 1
    seen = {image.read() for example in data.corpus.train.examples if example.shown for image in example.shown.visuals}
    assert len(seen) == data.report["train"]["kept"] and seen <= {row["image"] for row in Digits().train()}


def test_files_stay_where_they_are_and_rows_without_images_are_text(toy_folder: Any, tmp_path: Path) -> None:
    photos = tmp_path / "data" / "photos"
    photos.mkdir(parents=True)
    for i in range(4):
        picture(i).save(photos / f"{i}.png")
    inside = [{"type": "image", "image": "photos/0.png"}, {"type": "text", "text": "Which?"}]
    lines = [
        *({"prompt": ASKED, "images": [f"photos/{i}.png", f"photos/{3 - i}.png"]} for i in range(2)),
        {"prompt": [{"role": "user", "content": inside}]},
        {"prompt": ASKED, "images": None},
    ]
    path = tmp_path / "data" / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    model = LanguageModel(str(toy_folder("idefics3")))
    found = written(tmp_path, model, RolloutDataModule(path=str(path), prompts_per_rollout=4, val_fraction=0.0))
    assert not (tmp_path / "datasets" / "images").exists()
    named = [row["images"] for row in found if row["images"]]
    assert {len(names) for names in named} == {1, 2} and len(found) > len(named)
    assert all(Path(name).parent == photos.resolve() for names in named for name in names)
    again = PreferenceDataModule(path=str(path_of(tmp_path)), batch_size=1, val_fraction=0.0)
    again.prepare(model.tokenizer, "verdicts", processor=model.processor)
    counts = [len(example.shown.visuals) for example in again.corpus.train.examples if example.shown]
    assert counts == [len(names) for names in named] and again.report["train"]["kept"] == len(found)


def test_a_second_file_of_an_image_is_not_written(tmp_path: Path) -> None:
    from lit_rl.callbacks.output_files import ImageWriter
    from lit_rl.data.row_visuals import image_of

    ref = image_of(Digits().train()[0]["image"], "row", max_pixels=10**6)
    images = ImageWriter(tmp_path)
    assert images.named({"image": ref, "answer": "7"}) == {"image": f"images/{ref.digest}.png", "answer": "7"}
    assert not list(tmp_path.iterdir()), "names alone write nothing"
    images.write({"image": ref})
    (path,) = (tmp_path / "images").iterdir()
    path.write_bytes(b"kept")
    images.write({"images": [ref, ref]})
    assert path.read_bytes() == b"kept"


@pytest.mark.all
def test_rows_of_a_run_that_goes_on_are_known_by_their_images(tmp_path: Path) -> None:
    def run() -> list[dict[str, Any]]:
        return written(tmp_path, "digits", RolloutDataModule(task=Digits(), prompts_per_rollout=4, seed=0))

    first = run()
    assert run() == first, "the same rollout again adds no row"
