"""Videos of rows: what a row may list as one, which video stands where, and what becomes of it in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from vision_seen import Toy
from vision_toys import picture

from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.callbacks.display import Pictures
from lit_rl.callbacks.output_files import ImageWriter, write_parquet
from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.core.vision_inputs import PromptVision, Vision
from lit_rl.core.visuals import VideoRef, shown_in
from lit_rl.data.encode import Encoder
from lit_rl.data.prompt_reader import PromptOptions, read_prompts
from lit_rl.data.row_visuals import PART, VIDEO_PART, ImageReader, image_of, read_images, video_of
from lit_rl.data.sources import Rows
from lit_rl.data.visual_prompts import PromptVisuals
from lit_rl.generation.vllm.engine import requests_of

READER = ImageReader(None, 10**6)
WORDS = {"type": "text", "text": "What happens?"}


def frames(number: int, count: int = 2) -> list[Any]:
    return [picture(10 * number + i, 8, 8) for i in range(count)]


def video(number: int, count: int = 2, fps: float | None = None) -> VideoRef:
    return video_of({"frames": frames(number, count), "fps": fps}, "row")


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": list(parts)}]


def test_parts_show_their_own_video_or_the_next_of_the_column_and_images_theirs() -> None:
    own = {"type": "video", "video": frames(2), "fps": 2.0, "image": None}
    row = {
        "prompt": asked(VIDEO_PART, PART, own, VIDEO_PART, WORDS),
        "videos": [frames(1), {"frames": frames(3), "fps": 1}],
        "image": picture(5, 8, 8),
    }
    found, shown = READER.read(row, "rows[0]", "prompt")
    assert found["prompt"][1]["content"] == [VIDEO_PART, PART, VIDEO_PART, VIDEO_PART, WORDS]
    image = image_of(picture(5, 8, 8), "row")
    assert shown == (video(1), image, video(2, fps=2.0), video(3, fps=1.0))
    assert found["videos"] == [video(1), video(2, fps=2.0), video(3, fps=1.0)], "rewards find all of them here"
    assert found["image"] == image and row["videos"][0][0].size == (8, 8)
    table = {"videos": [found["videos"]], "image": [image]}
    assert shown_in(table, 0) == (image, *found["videos"])


def test_what_columns_have_stands_before_the_text_images_first() -> None:
    row = {"prompt": asked(WORDS), "video": frames(1), "images": [picture(5, 8, 8)]}
    found, shown = READER.read(row, "rows[0]", "prompt")
    assert found["prompt"][1]["content"] == [PART, VIDEO_PART, WORDS]
    assert found["video"] == shown[1] == video(1)
    found, _ = READER.read({"prompt": WORDS["text"], "video": frames(1)}, "rows[0]", "prompt")
    assert found["prompt"] == [{"role": "user", "content": [VIDEO_PART, WORDS]}], "a plain text is the user's message"
    for nothing in ({"video": None}, {"video": ""}, {"videos": []}, {"videos": None}):
        row = {"prompt": asked(WORDS), **nothing}
        assert READER.read(row, "rows[0]", "prompt") == (row, ())


def test_another_frame_or_time_is_another_video() -> None:
    one = video(1, fps=2.0)
    others = [video(1), video(1, 3, fps=2.0), replace(one, frames=one.frames[::-1]), replace(one, fps=1.0)]
    assert len({each.digest for each in [one, *others]}) == 5 and one not in others
    assert one == video(1, fps=2.0) and str(one) == f"a PIL image (2 frames) {one.digest}"
    assert [frame.tobytes() for frame in one.open()] == [frame.tobytes() for frame in frames(1)]
    assert one.thumbnail().size == (8, 8)


FILE = "is a file, and nothing here decodes one. Cut it into frames first"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "path": ({"video": "clip.mp4"}, f"'clip.mp4' {FILE}.*ffmpeg"),
    "bytes": ({"video": b"\0\0ftyp"}, FILE),
    "of datasets": ({"videos": [{"bytes": None, "path": "clip.mp4"}]}, FILE),
    "part of a path": ({"prompt": asked({"type": "video", "path": "clip.mp4"})}, FILE),
    "address": ({"prompt": asked({"type": "video_url", "video_url": {"url": "http://a.b/c.mp4"}})}, FILE),
    "no frame": ({"video": []}, "has no frame"),
    "none of them": ({"videos": [[]]}, "has no frame"),
    "one image": ({"video": picture(1)}, "the video is one image .*allowed are a list of frames"),
    "number": ({"videos": [5]}, r"the video is 5 \(int\)"),
    "sizes": ({"video": [picture(1), picture(2, 16, 16)]}, "frame 1 of the video .* has 16 x 16 .*frame 0 has 32 x 32"),
    "frame": ({"video": [picture(1), "http://a.b/c.png"]}, r"^rows\[0\]: frame 1 of the video: the image .* is a URL"),
    "rate": ({"video": {"frames": [picture(1)], "fps": 0}}, "fps=0: frames a second"),
    "key": ({"video": {"frames": [picture(1)], "start": 3}}, "has the keys start; allowed are frames, fps"),
    "both": ({"video": frames(1), "videos": [frames(2)]}, "both the columns video and videos"),
    "fewer": ({"prompt": asked(VIDEO_PART)}, "1 video parts without frames of their own, and the row has 0 videos"),
    "more": ({"prompt": asked(VIDEO_PART), "videos": [frames(1), frames(2)]}, "1 video parts .*the row has 2 videos"),
    "settings": ({"prompt": asked({"type": "video", "video": frames(1), "nframes": 4})}, "has the keys nframes"),
    "rate alone": ({"prompt": asked({**VIDEO_PART, "fps": 2}), "video": frames(1)}, "sets fps and lists no frames"),
}


def test_rows_whose_videos_are_no_use() -> None:
    for row, message in BAD.values():
        with pytest.raises(DataError, match=message) as error:
            READER.read({"prompt": asked(WORDS), **row}, "rows[0]", "prompt")
        assert str(error.value).startswith("rows[0]")


def test_policies_that_see_no_video(toy_of: Any) -> None:
    named = {"prompt": "What?", "video": "clip.mp4", "videos": None}
    assert read_images(None, named, "rows[0]", "prompt") == (named, ()), "a column of text is what it was"
    ids = {"prompt": "What?", "videos": ["a12", "b7"]}
    assert read_images(None, ids, "rows[0]", "prompt") == (ids, ()), "and so is one of names"
    shown = ({"video": frames(1)}, {"videos": [["a/1.png", "a/2.png"]]}, {"prompt": asked(VIDEO_PART)})
    for row in ({"prompt": "What?", **each} for each in shown):
        with pytest.raises(ConfigError, match="the policy is a language model over text"):
            read_images(None, row, "rows[0]", "prompt")
    toy: Toy = toy_of("idefics3")
    rows = Rows("rows", [{"prompt": asked(WORDS), "video": frames(1)}])
    with pytest.raises(ConfigError, match=r"rows\[0\]: .*'idefics3' .*qwen3_vl"):
        read_prompts(
            rows, Encoder(toy.model.tokenizer, processor=toy.model.processor), PromptOptions(on_bad_row="skip")
        )


def test_vllm_is_given_no_video_and_no_image_of_an_environment() -> None:
    seen = PromptVision({}, row=4, source=PromptVisuals("ab<video>", (video(1),), "rows[4]"))
    begun = PromptVision(
        {}, source=PromptVisuals("ab<image>", (image_of(picture(1), "row"),), "row 4"), from_environment=True
    )
    refused = {"Prompt 1 of the batch, row 4 .*shows the video": seen, "An environment began an episode": begun}
    for words, vision in refused.items():
        prompts = Prompts([[3], [1, 9]], [5, 6], 2, (0,), 0, encode=lambda text: [1], vision=[None, vision])
        with pytest.raises(ConfigError, match=f"{words}.*generator=native"):
            requests_of(prompts, Sampling(max_new_tokens=4))


def test_files_of_a_run_give_videos_back(tmp_path: Path) -> None:
    """JSON Lines to our own reader; Parquet to datasets, as lists of images, and to people as first frames."""
    for i in range(2):
        picture(i, 8, 8).save(tmp_path / f"{i}.png")
    files = video_of(["0.png", "1.png"], "row", folder=tmp_path)
    table: dict[str, list[Any]] = {
        "prompt": [asked(WORDS)] * 2,
        "video": [files, None],
        "videos": [None, [video(1), video(2, 3, fps=2.0)]],
    }
    kept = ImageWriter(tmp_path / "sets")
    rows = [{name: values[i] for name, values in table.items()} for i in range(2)]
    (tmp_path / "sets").mkdir()
    for row in rows:
        kept.write(row)
    again = [kept.named(row) for row in rows]
    assert again[0]["video"] == [str((tmp_path / f"{i}.png").resolve()) for i in range(2)]
    read = [video_of(each, "row", folder=tmp_path / "sets") for each in again[1]["videos"]]
    assert [each.digest for each in read] == [each.digest for each in table["videos"][1]]

    write_parquet(table, tmp_path / "samples.parquet")
    found: Any = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "samples.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert [len(frames) for frames in found[1]["videos"]] == [2, 3] and found[0]["video"][1].size == (8, 8)
    assert found[1]["videos"][1][2].tobytes() == frames(2, 3)[2].tobytes()
    strip = Pictures.of(table, 1).strip()
    assert strip is not None and strip.size == (8 + 4 + 8, 8)
    assert str(Pictures.of(table, 0)) == "0.png (2 frames)"


def test_a_checkpoint_keeps_a_video_beside_an_image_that_an_environment_gave(tmp_path: Path) -> None:
    """No row of the data has both: the encoded bytes come back, and the frames' rate."""
    visuals = (video(1, 3, fps=2.0), video(2), image_of(picture(5, 8, 8), "row"))
    seen = PromptVision({}, source=PromptVisuals("a text", visuals, "row 1"), from_environment=True)
    content = [{"type": "image", "image": visuals[2]}, WORDS]
    episode = Episode(asked(WORDS), [{"role": "user", "content": content}], "answered", 1)
    ids, mask = torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool)
    drawn = Completions(
        *(ids, mask, ids, mask, torch.zeros(1, 2), mask[:, 0], ids[:, 0]),
        vision=Vision((seen,), torch.tensor([0])),
        episodes=(episode,),
    )
    torch.save(checkpoints.to_plain(drawn), tmp_path / "drawn.pt")
    loaded = torch.load(tmp_path / "drawn.pt", weights_only=True)
    again = checkpoints.completions_from_plain(loaded, torch.device("cpu"))
    assert again.vision is not None and again.vision.prompts[0] is not None
    assert again.vision.prompts[0].source == seen.source and again.vision.prompts[0].from_environment
    assert again.episodes == (episode,), "with the image that its messages show"
