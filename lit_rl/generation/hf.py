"""transformers' own ``generate`` under the same contract: slower than native, and the oracle it is tested against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.generation.base import InProcessGenerator
from lit_rl.generation.batches import DecodeBatch, Decoded, decode_batches
from lit_rl.generation.engine_kwargs import KEY, of_transformers
from lit_rl.generation.finished import tell_batch
from lit_rl.generation.responses import Responses
from lit_rl.generation.transforms import TokenSampler
from lit_rl.generation.turn_by_turn import TurnByTurn
from lit_rl.models.policy.forward_names import forward_parameters
from lit_rl.models.policy.known_masks import masks_that_hide
from lit_rl.rollout import Prompts, Sampling
from lit_rl.vision import Vision


class HFGenerator(InProcessGenerator):
    """A generator that decodes with the policy's ``generate``: any model of transformers, and no shared prompts.

    The model's generation config is replaced by a blank one for the call, since ``generate`` takes all unset options
    from it.

    Args:
        batch_size: Sequences per decode batch; None decodes all at once. Bounds memory: samples do not depend on it.
        static_cache: Hold keys and values in a cache of the longest length from the first token on. On a GPU
            transformers then compiles the decode step to a CUDA graph, anew for other numbers of rows and for longer
            texts than before.
        generation_kwargs: Further fields of `GenerationConfig`, such as `no_repeat_ngram_size`. With one that changes
            what is drawn the samples are weighted as those of another engine (`algo/correction`). Its processors read
            the padding of a batch as text: with `batch_size: 1` there is none.

    Raises:
        ConfigError: no such field, or one that is set elsewhere; or transformers refuses its value.
    """

    sees = True

    def __init__(
        self,
        batch_size: int | None = None,
        static_cache: bool = False,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(batch_size)
        self.static_cache = static_cache
        self.generation_kwargs = dict(generation_kwargs or {})
        self.reshaped_by = _reshaped_by(self.generation_kwargs)
        self.exact = not self.reshaped_by

    def _decode(
        self, policy: nn.Module, prompts: Prompts, sampling: Sampling, device: torch.device
    ) -> Iterator[tuple[Tensor, Decoded]]:
        decode = partial(self._decode_batch, policy)
        if prompts.responder is not None:
            rows = torch.arange(len(prompts) * prompts.group_size)
            yield rows, TurnByTurn(decode, prompts, sampling, self.rows_a_batch, device).run()
            return
        for batch in decode_batches(prompts, self.rows_a_batch, device):
            decoded = decode(batch, prompts, sampling)
            tell_batch(prompts.on_finished, batch.rows, decoded)
            yield batch.rows, decoded

    def _decode_batch(self, policy: nn.Module, batch: DecodeBatch, prompts: Prompts, sampling: Sampling) -> Decoded:
        model: Any = policy
        if not hasattr(model, "generate"):
            raise ConfigError(f"generator=hf needs a model with a generate method; {type(policy).__name__} has none.")
        ids, mask = batch.repeated()
        names = forward_parameters(policy)
        sampler = TokenSampler.of(batch, prompts, sampling)
        config = _generation_config(prompts, sampling, self.generation_kwargs)
        if self.static_cache:
            _refuse_autocast(ids.device)
            config.cache_implementation = "static"
        draws = _Draws(sampler, Responses(prompts, sampling, len(ids), ids.device), ids)
        # By its number, not as a slice: see `DecodingSteps`.
        named = {"logits_to_keep": torch.full((1,), -1, device=ids.device)} if "logits_to_keep" in names else {}
        if seen := Vision.of(batch.vision, batch.repeats):
            named |= seen.model_inputs(ids.shape[1], 0, ids.device)
        hidden = masks_that_hide(ids.device) if batch.padded else nullcontext()
        with blank_generation_config(policy), hidden:
            model.generate(
                input_ids=ids,
                attention_mask=mask.long(),
                generation_config=config,
                logits_processor=[draws.force],
                stopping_criteria=[draws.over],
                synced_gpus=False,
                **named,
            )
        return draws.responses.decoded()


class _Draws:
    """The last logits processor and the stopping criterion of a batch.

    Args:
        sampler: Draws the tokens.
        responses: The responses that they are added to.
        prompt_ids: Long ``(b, p)``.
    """

    def __init__(self, sampler: TokenSampler, responses: Responses, prompt_ids: Tensor) -> None:
        self.responses = responses
        self._sampler, self._prompt_width = sampler, prompt_ids.shape[1]
        self._rows = torch.arange(len(prompt_ids), device=prompt_ids.device)

    def force(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw the token with our noise, and leave it the only one that argmax can choose."""
        drawn = self._sampler(scores, input_ids.shape[1] - self._prompt_width)
        self.responses.add(self._rows, drawn)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn.tokens[:, None], 0.0)

    def over(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return bool ``(b,)``: the finished rows. Stop strings are searched every few tokens."""
        if (input_ids.shape[1] - self._prompt_width) % self.responses.look_every == 0:
            self.responses.look_for_stops(self._rows)
        return self.responses.over(self._rows)


def _reshaped_by(kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields that change the distribution, after a check that `GenerationConfig` has and accepts all."""
    if not kwargs:
        return ()
    from transformers import GenerationConfig

    found = of_transformers(vars(GenerationConfig())).reshaped_by(kwargs)
    try:
        GenerationConfig(**kwargs).validate()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}={kwargs}: transformers refuses it: {error}") from error
    return found


def _generation_config(prompts: Prompts, sampling: Sampling, kwargs: dict[str, Any]) -> Any:
    """Return a config that is greedy over our processor's choice, so that ``generate`` builds no sampling processor of
    its own."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=0,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        repetition_penalty=1.0,
        eos_token_id=list(prompts.eos_ids) or None,
        pad_token_id=prompts.pad_id,
        use_cache=True,
        **kwargs,
    )


def _refuse_autocast(device: torch.device) -> None:
    """Refuse autocast: transformers' static cache has one type for both, and autocast gives float32 keys and narrow
    values."""
    if torch.is_autocast_enabled(device.type):
        raise ConfigError(
            "generator.static_cache=true cannot decode under autocast: set trainer.precision=bf16-true or 32-true, or "
            "generator.static_cache=false."
        )


@contextmanager
def blank_generation_config(policy: nn.Module) -> Iterator[None]:
    """Put a blank generation config on the model, under a PEFT wrapper too, and restore the old one at the end."""
    from transformers import GenerationConfig

    # PeftModel.generate copies its own attribute to the model inside, so every holder gets a blank one.
    holders = [module for module in policy.modules() if "generation_config" in vars(module)]
    kept = [vars(module)["generation_config"] for module in holders]
    try:
        for module in holders:
            vars(module)["generation_config"] = GenerationConfig()
        yield
    finally:
        for module, config in zip(holders, kept):
            vars(module)["generation_config"] = config
