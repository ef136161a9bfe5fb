"""What is special to policies that see videos, beside the contract of `test_vision_contract`: their processors need
torchvision."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vision_contract import STACKED, close, logprobs, transformers_says
from vision_kinds import kinds
from vision_runs import by_letters, quiet_trainer
from vision_seen import Toy, image, video
from vision_toys import picture

from lit_rl.algorithms import DPO, GRPO, KTO, PPO
from lit_rl.algorithms.checks.memory import NumberSizes
from lit_rl.algorithms.checks.model_sizes import find_largest_prompt, vision_memory, vision_shape
from lit_rl.callbacks import PreferenceSets, Samples
from lit_rl.core.errors import DataError
from lit_rl.core.rollout import Sampling
from lit_rl.core.vision_inputs import Vision
from lit_rl.core.visuals import VideoRef
from lit_rl.data.encode import Encoder
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.example_reader import ExampleOptions
from lit_rl.data.example_reader import read_examples as read_texts
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.prompt_reader import PromptOptions, read_prompts
from lit_rl.data.prompt_set import PromptSet
from lit_rl.data.sources import Rows
from lit_rl.data.visual_prompts import count_placeholders
from lit_rl.generation.hf import HFGenerator
from lit_rl.models import LanguageModel
from lit_rl.models.vision_processor import VIDEO_FAMILIES
from lit_rl.reports.transcripts import transcripts
from lit_rl.runs.data_check import data_check

TIMED = kinds("qwen2_5_vl", "qwen3_vl", "smolvlm")


@pytest.fixture(params=kinds(*VIDEO_FAMILIES))
def toy(request: pytest.FixtureRequest, toy_of: Any) -> Toy:
    return toy_of(request.param)


@pytest.mark.parametrize("kind", TIMED)
def test_a_model_that_is_told_times_needs_them_and_reads_them(toy_of: Any, kind: str) -> None:
    """Of one video that lasts longer than the text behind it, and one that does not."""
    toy: Toy = toy_of(kind)
    with pytest.raises(DataError, match=rf"has no frame rate.*{kind}"):
        toy.prompt("What?", [replace(video(1), fps=None)])
    said: Any = [("What?", [video(1, fps=0.05)]), ("What?", [video(1)])]
    slow, fast = (toy.prompt(*each) for each in said)
    asked = toy.asked([slow, fast], 1)
    rows, theirs = toy.drawn(asked), toy.drawn(asked, HFGenerator())
    assert torch.equal(rows.response_ids, theirs.response_ids)
    close(rows.sampler_logprobs, theirs.sampler_logprobs)
    close(logprobs(toy, rows), rows.sampler_logprobs)
    close(logprobs(toy, rows), transformers_says(toy, rows, said))
    if kind == "qwen2_5_vl":  # the others write times into the prompt's words
        assert slow[0] == fast[0] and rows.vision is not None
        other = logprobs(toy, replace(rows, vision=Vision([fast[1], slow[1]], rows.vision.index)))
        assert float((other - logprobs(toy, rows)).abs().amax(1).min()) > 1e-3
    else:
        assert slow[0] != fast[0]


def test_what_a_family_cannot_be_shown_exactly(toy: Toy) -> None:
    tokenizer, processor = toy.model.tokenizer, toy.model.processor
    assert processor is not None

    def asking(*rows: dict[str, Any], **columns: Any) -> Rows:
        prompt = [{"role": "user", "content": "What?"}]
        return Rows("rows", [{"prompt": prompt, **row, **columns} for row in rows])

    def read(*rows: dict[str, Any], **options: Any) -> PromptSet:
        examples, _ = read_prompts(asking(*rows), Encoder(tokenizer, processor=processor), PromptOptions(**options))
        return PromptSet.of(examples, processor)

    if toy.kind in STACKED:
        with pytest.raises(DataError, match=r"rows\[0\]: the row's videos have 2 and 4 frames"):
            read({"videos": [video(1), video(2, 2)]})
    if toy.kind == "smolvlm":
        with pytest.raises(DataError, match=r"rows\[0\]: the row shows images and videos"):
            read({"video": video(1), "image": image(1)})
    if toy.kind == "llava_onevision":
        with pytest.raises(DataError, match=r"rows\[1\]: the video has 2 frames, one of rows\[0\] has 4"):
            read({"video": video(1)}, {"video": video(2, 2)})
        some = read({"video": video(1)}, {"video": video(2, 2)}, {"video": video(3)}, {}, on_bad_row="skip")
        assert [len(each.visuals[0].frames) if each else 0 for each in some.shown] == [4, 4, 0]  # pyright: ignore
        answered = asking(
            {"video": video(1)}, {"video": video(2, 2)}, completion=[{"role": "assistant", "content": "4"}]
        )
        encoder = Encoder(tokenizer, processor=processor)
        with pytest.raises(DataError, match=r"rows\[1\]: the video has 2 frames, one of rows\[0\] has 4"):
            read_texts(answered, encoder, "texts", ExampleOptions())
        kept, counts, _ = read_texts(answered, encoder, "texts", ExampleOptions(on_bad_row="skip"))
        assert len(kept) == counts["bad"] == 1
    with pytest.raises(DataError, match="shows 0 of the prompt's 1 videos"):
        processor.process("nothing to see", [video(1)], "row")
    before = read({"video": video(1)}).fingerprint
    assert before == read({"video": video(1)}).fingerprint
    assert before != read({"video": replace(video(1), frames=video(2).frames)}).fingerprint
    made_by: Any = processor.processor.video_processor  # type: ignore[attr-defined]
    made_by.rescale_factor = 1 / 127
    try:
        assert before != read({"video": video(1)}).fingerprint
    finally:
        made_by.rescale_factor = 1 / 255


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("kind", kinds("qwen2_5_vl", "smolvlm"))
def test_a_run_of_videos_its_records_and_what_is_learned_from_them(
    toy_folder: Any, kind: str, tmp_path: Path, capsys: Any
) -> None:
    """Frames in files, rows of all kinds, GRPO; then KTO from what it wrote, DPO, and PPO with a critic that sees."""
    names = [str(tmp_path / f"{i}.png") for i in range(16)]
    for i, name in enumerate(names):
        picture(i).save(name)
    ask = [{"role": "user", "content": "What?"}]
    shown = [{"video": {"frames": names[4 * i : 4 * i + 4], "fps": 2.0}} if i < 3 else {} for i in range(4)]
    rows = [{"prompt": ask, "answer": str(i), **row} for i, row in enumerate(shown)] * 2
    rows += [{"prompt": ask, "answer": "picture", "image": names[i]} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: list[VideoRef] = []

    def reward(completions: list[Any], video: list[Any], **more: Any) -> list[float]:
        seen.extend(each for each in video if each)
        return by_letters(completions)

    data = RolloutDataModule(path=str(tmp_path / "rows.jsonl"), prompts_per_rollout=12, val_fraction=0.0, shuffle=False)
    module = GRPO(str(toy_folder(kind)), reward, group_size=4, beta=0.1, sampling=Sampling(max_new_tokens=4), seed=0)
    quiet_trainer(tmp_path, 2, callbacks=[Samples(print=4), PreferenceSets()]).fit(module, datamodule=data)
    assert module.global_step == 2 and {len(each.frames) for each in seen} == {4}
    assert "frames)" in capsys.readouterr().out

    processor: Any = module.model.processor
    largest, shape = find_largest_prompt(data, processor), vision_shape(module.model)
    assert largest is not None and shape is not None
    assert largest.tokens == max(count_placeholders(processor.placeholders, ids) for ids in data.peek(12).prompt_ids)
    pixels = sum(value.numel() for name, value in largest.vision.inputs.items() if name.startswith("pixel_values"))
    assert pixels == 4 * 3 * 32 * 32, "of all frames"
    assert vision_memory(shape, largest, NumberSizes(4, 4, 0), ["vision"]).pixels >= 4 * pixels

    transcripts(tmp_path)
    page = next(tmp_path.rglob("*.html")).read_text()
    assert "data:image/png;base64" in page
    capsys.readouterr()
    assert data_check(data, LanguageModel(str(toy_folder(kind)))) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "train: 10 of 12 rows show images, 1 each" in told and "3 of them videos, of 4 frames" in told

    sets, off = tmp_path / "datasets", {"batch_size": 4, "val_fraction": 0.0}
    assert '"fps": 2.0' in (sets / "verdicts.jsonl").read_text()
    pairs = [{**row, "chosen": said("up"), "rejected": said("down")} for row in rows]
    for method, learned in (
        (KTO, PreferenceDataModule(path=str(sets / "verdicts.jsonl"), **off)),
        (DPO, PreferenceDataModule(rows=pairs, **off)),
    ):
        offline = method(LanguageModel(str(toy_folder(kind)), freeze=()))
        quiet_trainer(tmp_path, 1).fit(offline, datamodule=learned)
        assert offline.global_step == 1
    critic = PPO(str(toy_folder(kind)), by_letters, sampling=Sampling(max_new_tokens=4), seed=0)
    quiet_trainer(tmp_path, 1).fit(critic, datamodule=data)
    assert critic.global_step == 1
