"""Does a model over images read a response from left to right? Some attend both ways wherever they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.models.policy.device import device_of
from lit_rl.models.policy.forward import score
from lit_rl.models.policy.modes import evaluation_mode
from lit_rl.models.policy.options import DEFAULT
from lit_rl.models.policy.trunk import base_of
from lit_rl.models.policy.vision_parts import placeholder_ids
from lit_rl.rollout import Completions, Sampling
from lit_rl.vision import PromptVision, Vision

_TOKENS = 4
_MOST = 0.02
"""The limit in nats: far above the rounding of half precision, far below what a model that looks ahead loses (0.3 to
0.5)."""


@torch.no_grad()
def refuse_foresight(model: nn.Module, prompt_ids: Sequence[int], vision: PromptVision | None) -> None:
    """Refuse a model in which a token of a response is scored by the tokens behind it, by one short forward pass.

    Models such as PaliGemma attend both ways over a prefix, which a value for each token marks. With the wrong values
    over the response, log-probs would know the answer, and nothing would say so.

    Args:
        model: A language model over images.
        prompt_ids: Of one prompt.
        vision: What it shows.

    Raises:
        ConfigError: the log-prob of a token changes with a later one.
    """
    device, config = device_of(model), base_of(model).config
    barred = placeholder_ids(config)
    tokens = islice((token for token in range(config.get_text_config().vocab_size) if token not in barred), _TOKENS + 1)
    *shared, last, another = tokens
    rows = torch.tensor([[*shared, last], [*shared, another]], device=device)
    prompts = torch.tensor([list(prompt_ids)] * 2, device=device)
    every = torch.ones_like(rows, dtype=torch.bool)
    completions = Completions(
        prompt_ids=prompts,
        prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
        response_ids=rows,
        response_mask=every,
        sampler_logprobs=torch.zeros(rows.shape, device=device),
        ended=every[:, 0],
        group_id=torch.zeros(2, dtype=torch.long, device=device),
        vision=Vision.of([vision], 2),
    )
    with evaluation_mode(model):
        sampling = Sampling(max_new_tokens=_TOKENS)
        try:
            first, second = score(model, completions, sampling, options=DEFAULT.in_one_call).logprobs[:, :-1]
        except ValueError as error:  # transformers counts placeholders and features, where it does
            raise ConfigError(
                f"{type(base_of(model)).__name__} cannot read the first prompt with images: {error}. Its processor's "
                "files may be another model's."
            ) from error
    moved = (first - second).abs().max().item()
    if not moved <= _MOST:
        raise ConfigError(
            f"{type(base_of(model)).__name__} scores a token of a response by tokens that follow it: log-probs move by "
            f"{moved:.2g} nats when only the last token is another. It cannot be trained by its log-probs here; take a "
            "model of another family, such as Idefics3, LLaVA, Gemma 3 or Qwen-VL."
        )
