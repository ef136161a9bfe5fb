"""`lit-rl chat` with images."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.data.rendering import render_prompt
from lit_rl.data.row_visuals import image_of
from lit_rl.data.tasks import Digits
from lit_rl.generation.collect import response_ids
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.noise import prompt_key
from lit_rl.models import LanguageModel
from lit_rl.runs.chat import Chat
from lit_rl.runs.chat import chat as talk

ROWS = Digits().val()[:4]
ASKED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """A talk in a folder with the digits `0.png` to `3.png`: what is answered, and what else is said."""
    for i, row in enumerate(ROWS):
        (tmp_path / f"{i}.png").write_bytes(row["image"])
    monkeypatch.chdir(tmp_path)

    def run(model: str, *lines: str, **options: Any) -> tuple[list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        fabric = L.Fabric(accelerator="cpu", devices=1)
        assert talk(Chat(LanguageModel(model), Sampling(max_new_tokens=2), fabric, **options)) == 0
        told = capsys.readouterr()
        return told.out.splitlines(), " ".join(told.err.split())

    return run


def replies(messages: list[dict[str, Any]], images: list[bytes], turn: int) -> str:
    """What the generator of training writes."""
    model = LanguageModel("digits")
    assert model.processor is not None
    policy, generator = model.load(), NativeGenerator()
    generator.sync(policy, 0)
    refs = [image_of(image, "row") for image in images]
    ids, vision = model.processor.process(render_prompt(model.tokenizer, messages, "prompt", {}), refs, "prompt")
    key = int(prompt_key(0, turn, 0, 0))
    prompts = Prompts([ids], [key], 1, model.eos_ids, model.pad_id, model.tokenizer.decode, vision=[vision])
    (drawn,) = response_ids(generator.generate(prompts, Sampling(max_new_tokens=2)))
    return model.tokenizer.decode(drawn, skip_special_tokens=True)


def test_an_image_is_shown_with_the_next_line_as_in_training(chat: Any, tmp_path: Path) -> None:
    lines = ["/image 0.png", "Which digit?", f"/image '{tmp_path / '1.png'}'", "Which digit?", "/reset", "Which digit?"]
    answers, notes = chat("digits", *lines)
    first = replies([ASKED], [ROWS[0]["image"]], 0)
    before = [ASKED, {"role": "assistant", "content": first}, ASKED]
    second = replies(before, [ROWS[0]["image"], ROWS[1]["image"]], 1)
    blind = replies([{"role": "user", "content": "Which digit?"}], [], 0)
    assert answers == [first, second, blind]
    assert "/image FILE shows an image with the next line" in notes and "0.png, 32 x 32: it is shown" in notes


def test_what_cannot_be_shown_is_said_and_the_talk_goes_on(chat: Any, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(ROWS[0]["image"][:70])
    lines = ["/image", "/image 00.png", "/image cut.png", "/image https://a.b/c.png", "/image 2.png", "<image>"]
    answers, notes = chat("digits", *lines, "Which digit?")
    assert answers == [replies([{"role": "user", "content": "Which digit?"}], [], 0)]
    for said in (
        "/image needs the path of a file",
        "00.png cannot be read: No such file or directory. Did you mean '0.png'?",
        "cut.png: the image is damaged",
        "https://a.b/c.png is a URL, and nothing is fetched",
        "The line and its images are left out",
    ):
        assert said in notes


def test_a_model_over_text_says_that_it_sees_none(chat: Any) -> None:
    _, notes = chat("tiny", "/image 0.png")
    assert "tiny reads text only, no images. Take a model that reads them" in notes
    assert "/image FILE" not in notes
    _, notes = chat("digits", "/image 0.png", plain=True)
    assert "Images are shown in messages: set a chat template, and chat.plain=false." in notes
