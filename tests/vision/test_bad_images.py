"""Rows and settings that a model over images cannot learn from: each is refused by name, before a weight is read."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torchvision_beside
from vision_kinds import kinds
from vision_seen import Toy, image
from vision_toys import picture

from lit_rl.algorithms import GKD, GRPO, KTO
from lit_rl.core.errors import BackendError, ConfigError, DataError, LitRLError
from lit_rl.core.rollout import Sampling
from lit_rl.data.encode import Encoder
from lit_rl.data.example_reader import ExampleOptions
from lit_rl.data.example_reader import read_examples as read_texts
from lit_rl.data.kinds import Kind
from lit_rl.data.prompt_reader import PromptOptions, read_prompts
from lit_rl.data.sources import Rows
from lit_rl.data.supervised_text import SupervisedText
from lit_rl.generation.hf import HFContinuousGenerator
from lit_rl.generation.rollout_function import RolloutFunction
from lit_rl.models import LanguageModel, Lora

ASKED = [{"role": "user", "content": "Which?"}]
REPLY = [{"role": "assistant", "content": "7"}]


def read(toy: Toy, row: dict[str, Any], **options: Any) -> Any:
    encoder = Encoder(toy.model.tokenizer, processor=toy.model.processor)
    return read_prompts(Rows("rows", [row]), encoder, PromptOptions(**options))[0]


def learned(toy: Toy, row: dict[str, Any], kind: Kind = "texts", **options: Any) -> Any:
    how = ExampleOptions(**options)
    encoder = Encoder(toy.model.tokenizer, how.chat_template_kwargs, how.learn, toy.model.processor)
    return read_texts(Rows("rows", [row]), encoder, kind, how)[0]


def test_a_placeholder_that_is_written_is_no_image(toy: Toy) -> None:
    for token in toy.model.processor.reserved:  # type: ignore[union-attr]
        for row in ({"prompt": f"What is {token}?"}, {"prompt": [{"role": "user", "content": token}]}):
            with pytest.raises(DataError, match=r"^rows\[0\]"):
                read(toy, row)
    with pytest.raises(DataError, match="stands for an image"):
        learned(toy, {"text": f"It is {toy.model.processor.reserved[-1]}."})  # type: ignore[union-attr]


def test_a_template_that_shows_another_number_of_images(toy: Toy) -> None:
    processor: Any = toy.model.processor
    with pytest.raises(DataError, match="shows 0 of the prompt's 1 images.*chat_template"):
        processor.process("nothing to see", [image(1)], "rows[0]")
    with pytest.raises(DataError, match="shows 1 of the prompt's 2 images"):
        marker = min((token for token in processor.reserved if "video" not in token), key=len)
        processor.process(marker, [image(1), image(2)], "rows[0]")


def test_damaged_pixels_are_refused_with_their_row(toy_of: Any) -> None:
    whole = io.BytesIO()
    picture(1, 32, 32).save(whole, "PNG")
    with pytest.raises(DataError, match=r"^rows\[0\]: bytes: the image is damaged"):
        read(toy_of("idefics3"), {"prompt": ASKED, "image": whole.getvalue()[:-40]})


def test_rows_without_images_count_as_text(toy_of: Any) -> None:
    for nothing in ({"image": ""}, {"images": []}, {"image": None}):
        (example,) = read(toy_of("idefics3"), {"prompt": ASKED, **nothing})
        assert example.shown is None
    sees = toy_of("paligemma")
    for row in ({"prompt": ASKED, "completion": REPLY}, {"prompt": "Which?", "completion": "7"}):
        for reader in (read, learned):
            with pytest.raises(DataError, match=r"rows\[0\]: the prompt shows no image"):
                reader(sees, row)


def test_images_in_what_is_answered(toy_of: Any) -> None:
    shown = [{"role": "assistant", "content": [{"type": "image", "image": picture(1)}]}]
    with pytest.raises(DataError, match=r"images in what is answered \(parts of 'completion'\)"):
        learned(toy_of("idefics3"), {"prompt": ASKED, "completion": shown})


def test_texts_are_cut_behind_their_images_alone(toy_of: Any) -> None:
    toy, row = toy_of("idefics3"), {"prompt": ASKED, "image": picture(1), "completion": REPLY}
    (whole,) = learned(toy, row)
    (text,) = whole.texts
    (short,) = learned(toy, row, max_length=text.prompt_tokens + 1)
    assert len(short.texts[0]) == text.prompt_tokens + 1
    with pytest.raises(DataError, match="A cut would go through its images"):
        learned(toy, row, max_length=text.prompt_tokens - 1)


def test_no_placeholder_is_learned(toy: Toy) -> None:
    (whole,) = learned(toy, {"prompt": ASKED, "image": picture(1), "completion": REPLY}, learn="all")
    (text,) = whole.texts
    placeholders = set(toy.model.processor.placeholders)  # type: ignore[union-attr]
    assert placeholders & set(text.ids)
    assert not placeholders & {id for id, flag in zip(text.ids, text.learned) if flag}
    assert sum(text.learned) > 10, "the words of the prompt are"


def test_what_is_said_of_tokens_of_a_prompt_ends_with_it(toy: Toy) -> None:
    """PaliGemma ends every text by a line break, which is no part of a prompt that is followed by a reply."""
    from lit_rl.core.examples import Totals
    from lit_rl.data.example_set import ExampleSet

    examples = learned(toy, {"prompt": ASKED, "image": picture(1), "completion": REPLY})
    data = ExampleSet("texts", examples, toy.model.pad_id, processor=toy.model.processor)
    seen = data.batch([0], [0], Totals(1, 1, 1), step=0, slot=0).tokens.vision
    assert seen is not None
    for values in seen.rows[0].per_token.values():  # type: ignore[union-attr]
        assert len(values) == examples[0].texts[0].prompt_tokens


def never(completions: list[Any], **_: Any) -> list[float]:
    raise AssertionError("asked")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda folder: GRPO(folder, never, generator=HFContinuousGenerator()),
            "would not show it any.*native, hf, vllm or vllm_server",
        ),
        (lambda folder: GKD(folder, teacher=folder), "GKD reads prompts as text alone"),
    ],
    ids=["hf_continuous", "gkd"],
)
def test_what_no_model_over_images_can_do(toy_folder: Any, module: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        module(str(toy_folder("idefics3"))).configure_model()


@pytest.mark.skipif(bool(torchvision_beside.FOLDER), reason="torchvision is there")
def test_a_processor_that_lacks_a_package_or_its_files(toy_folder: Any, tmp_path: Path) -> None:
    folder = tmp_path / "smol"
    shutil.copytree(toy_folder("idefics3"), folder)
    file = folder / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processor_class": "SmolVLMProcessor"}))
    (folder / "video_preprocessor_config.json").write_text('{"video_processor_type": "SmolVLMVideoProcessor"}')
    with pytest.raises(BackendError, match=r"lacks a package: pip install torchvision"):
        _ = LanguageModel(str(folder)).processor
    file.unlink()
    (folder / "video_preprocessor_config.json").unlink()
    with pytest.raises(LitRLError, match=r"model\.name=.*preprocessor_config\.json"):
        _ = LanguageModel(str(folder)).processor


def test_a_processor_of_another_model_is_known_by_its_counts(toy_folder: Any, tmp_path: Path) -> None:
    """Idefics3 itself counts neither its placeholders nor its features."""
    folder = tmp_path / "idefics3"
    shutil.copytree(toy_folder("idefics3"), folder)
    file = folder / "processor_config.json"
    held = json.loads(file.read_text())
    file.write_text(json.dumps(held | {"image_seq_len": held["image_seq_len"] - 1}))
    with pytest.raises(BackendError, match=r"model\.name=.*placeholders for a tile .* of two models"):
        _ = LanguageModel(str(folder)).processor


def test_no_text_teaches_a_placeholder(toy: Toy, tmp_path: Path) -> None:
    """Neither rows that come as tokens nor the texts of algo.ptx."""
    assert toy.model.processor is not None
    barred, other = toy.model.processor.placeholders[0], 70
    (told,) = learned(toy, {"input_ids": [other, other, barred, other]})
    assert told.texts[0].learned == [False, True, False, True]
    with pytest.raises(DataError, match="hold nothing to learn from"):
        learned(toy, {"input_ids": [other, barred]})
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": f"see {toy.model.processor.reserved[0]}"}) + "\n")
    SupervisedText(str(texts)).check(Encoder(toy.model.tokenizer))
    with pytest.raises(DataError, match=r"texts\.jsonl:1 holds the text .* stands for an image"):
        SupervisedText(str(texts)).check(Encoder(toy.model.tokenizer, processor=toy.model.processor))


def test_new_tokens_of_a_template_and_adapters(toy_folder: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(toy_folder("idefics3"))
    tokenizer.add_tokens(["<|new|>"], special_tokens=True)
    tokenizer.chat_template = f"{tokenizer.chat_template}<|new|>"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="policy over images"):
        LanguageModel(str(toy_folder("idefics3")), lora=Lora(r=2), chat_template=str(tmp_path)).load()


@pytest.mark.parametrize("kind", kinds("smolvlm"))
def test_a_processor_that_lacks_what_spells_numbers(
    toy_folder: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setitem(sys.modules, "num2words", None)
    monkeypatch.setattr(processing_smolvlm, "num2words", None)  # what its import gives where it is missing
    with pytest.raises(BackendError, match=r"lacks a package: pip install num2words"):
        _ = LanguageModel(str(toy_folder(kind))).processor


def test_prompts_that_are_too_long_by_their_images_are_dropped_and_counted(toy_of: Any) -> None:
    toy = toy_of("llava")  # 16 tokens an image
    rows = [{"prompt": ASKED, "images": [picture(1)] * count} for count in (1, 3)]
    processor = toy.model.processor
    told = PromptOptions(max_prompt_tokens=60)
    made, report = read_prompts(Rows("rows", rows), Encoder(toy.model.tokenizer, processor=processor), told)
    assert len(made) == 1 and 1 in report.values(), report


def test_rollout_functions_of_a_model_over_images(toy_folder: Any, tmp_path: Any) -> None:
    from test_vision_training import fitted, rollouts

    env = RolloutFunction(lambda prompts, trainer: {}, max_tokens=60)
    module = GRPO(str(toy_folder("idefics3")), never, env=env, sampling=Sampling(max_new_tokens=5))
    with pytest.raises(ConfigError, match="env=rollout_func would not show it any"):
        fitted(module, rollouts(rows=[{"prompt": ASKED}] * 8), tmp_path)


def test_log_probs_of_a_reference_that_are_known_by_tokens(toy_folder: Any, tmp_path: Any) -> None:
    from test_vision_training import fitted, pairs

    from lit_rl.data.example_module import PreferenceDataModule

    module = KTO(str(toy_folder("idefics3")), precompute_reference=True)
    with pytest.raises(ConfigError, match=r"algo\.precompute_reference=true .*KTO"):
        fitted(module, PreferenceDataModule(rows=pairs(), batch_size=4, val_fraction=0.0), tmp_path)
