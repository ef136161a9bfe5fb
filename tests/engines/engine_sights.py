"""Prompts with images for engines, and how far an engine is from the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vision_seen import image

from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.rendering import render_prompt
from lit_rl.data.visual_prompts import PromptVisuals
from lit_rl.generation.generator import rollout_mode
from lit_rl.models import LanguageModel
from lit_rl.models.forward import score
from lit_rl.models.vision_parts import part_of

SAMPLED = Sampling(max_new_tokens=8)
CLOSE = 1e-4


def prompt(model: LanguageModel, text: str, numbers: list[int], row: int) -> tuple[list[int], PromptVision | None]:
    assert model.processor is not None
    images = tuple(image(number, 32, 16 + 8 * number) for number in numbers)
    content = [*[{"type": "image"}] * len(images), {"type": "text", "text": text}]
    rendered = render_prompt(model.tokenizer, [{"role": "user", "content": content}], "prompt", {})
    ids, _ = model.processor.process(rendered, images, "prompt")
    return ids, PromptVisuals(rendered, images, "prompt").vision(model.processor, row)


def asked(model: LanguageModel, **changes: Any) -> Prompts:
    """One image, none, two; and a prompt of more than a block of the cache that begins with its image."""
    made = [
        prompt(model, "Which digit?", [1], 5),
        prompt(model, "No picture.", [], 6),
        prompt(model, "And these?", [2, 3], 7),
        prompt(model, "Which digit? " * 14, [2], 8),
    ]
    tokenizer: Any = model.tokenizer
    prompts = Prompts(
        [ids for ids, _ in made],
        [11, 12, 13, 14],
        group_size=3,
        eos_ids=(),
        pad_id=model.pad_id,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        vision=[vision for _, vision in made],
    )
    return replace(prompts, **changes)


def gap(policy: Any, completions: Completions) -> float:
    """The largest difference to a pass of the policy, in nats."""
    with rollout_mode(policy):
        logprobs = score(policy, completions, SAMPLED).logprobs
    return (logprobs - completions.sampler_logprobs)[completions.response_mask].abs().max().item()


def move_what_sees(policy: Any, seed: int, size: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if part_of(policy)(name) != "text":
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
