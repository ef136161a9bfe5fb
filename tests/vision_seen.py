"""Toys that are loaded, and prompts with images for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vision_toys import picture

from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.core.visuals import ImageRef, VideoRef, Visual
from lit_rl.data.rendering import render_prompt
from lit_rl.data.row_visuals import PART, VIDEO_PART, image_of, video_of
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel


@dataclass(frozen=True)
class Toy:
    """A model, loaded, and what makes its prompts."""

    kind: str
    model: LanguageModel
    policy: Any

    def rendered(self, text: str, visuals: Sequence[Visual]) -> str:
        parts = [VIDEO_PART if isinstance(each, VideoRef) else PART for each in visuals]
        content: Any = [*parts, {"type": "text", "text": text}] if visuals else text
        return render_prompt(self.model.tokenizer, [{"role": "user", "content": content}], "prompt", {})

    def prompt(self, text: str, visuals: Sequence[Visual], row: int = 0) -> tuple[list[int], PromptVision | None]:
        assert self.model.processor is not None
        ids, vision = self.model.processor.process(self.rendered(text, visuals), visuals, "prompt")
        return ids, None if vision is None else replace(vision, row=row)

    def asked(self, prompts: Sequence[tuple[list[int], PromptVision | None]], group_size: int = 2) -> Prompts:
        return Prompts(
            [ids for ids, _ in prompts],
            list(range(7, 7 + len(prompts))),
            group_size,
            self.model.eos_ids,
            self.model.pad_id,
            vision=[vision for _, vision in prompts],
        )

    def drawn(self, prompts: Prompts, generator: Any = None, **sampling: Any) -> Completions:
        generator = generator or NativeGenerator()
        generator.sync(self.policy, 0)
        return generator.generate(prompts, Sampling(**{"max_new_tokens": 6} | sampling))


def image(number: int, width: int = 32, height: int = 32) -> ImageRef:
    return image_of(picture(number, width, height), "image", max_pixels=10**6)


def video(number: int, count: int = 4, width: int = 32, height: int = 32, fps: float = 2.0) -> VideoRef:
    frames = [picture(100 * number + i, width, height) for i in range(count)]
    return video_of({"frames": frames, "fps": fps}, "row")


SEEN: list[tuple[str, list[Visual]]] = [
    ("What?", [image(1)]),
    ("And these two, please?", [image(2, 40, 24), image(4, 24, 32)]),
    ("Well?", [image(3, 24, 48)]),
]
"""What prompts say and show: images of several sizes, and two of them."""


def prompts(toy: Toy, *more: tuple[str, list[Visual]]) -> list[tuple[list[int], PromptVision | None]]:
    return [toy.prompt(text, images, row) for row, (text, images) in enumerate([*SEEN, *more])]


def drawn(toy: Toy, *more: tuple[str, list[Visual]], group_size: int = 2) -> Completions:
    return toy.drawn(toy.asked(prompts(toy, *more), group_size))
