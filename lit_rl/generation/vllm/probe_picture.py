"""The probe's prompt with an image, made by the policy's own processor and chat template alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lit_rl.data.image_prompts import Shown
from lit_rl.data.images import image_of
from lit_rl.data.templates import render_prompt
from lit_rl.errors import DataError
from lit_rl.images import ImageRef, as_png, pillow
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.rollout import Prompts

_SIDE = 64
_WHERE = "the probe of the generator"
_ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is 7 + 5?"}]}]


def picture_prompt(model: LanguageModel) -> Prompts | None:
    """Return one prompt with an image, for one completion that nothing ends; None where the model takes none.

    Those are a model over text, and one whose chat template shows no images: no data with images can be read for it.
    """
    if model.processor is None:
        return None
    tokenizer: Any = model.tokenizer
    picture = _picture()
    try:
        text = render_prompt(tokenizer, _ASKED, _WHERE, {})  # pyright: ignore[reportArgumentType]
        ids, vision = model.processor.process(text, (picture,), _WHERE)
    except DataError:
        return None
    assert vision is not None
    encode = partial(tokenizer.encode, add_special_tokens=False)
    seen = replace(vision, source=Shown(text, (picture,), _WHERE))
    return Prompts([ids], [0], 1, (), model.pad_id, encode=encode, vision=[seen])


def _picture() -> ImageRef:
    """Return an image of bands and a slope, in which any vision tower finds a signal."""
    places = ((x, y) for y in range(_SIDE) for x in range(_SIDE))
    pixels = bytes(value for x, y in places for value in (x * 4, y * 4, 255 * (x // 8 + y // 16 & 1)))
    return image_of(as_png(pillow().frombytes("RGB", (_SIDE, _SIDE), pixels)), _WHERE)
