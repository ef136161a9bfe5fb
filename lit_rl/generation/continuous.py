"""transformers' continuous batching: a waiting sequence takes the place of one that ended, at the next token."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.errors import ConfigError, GenerationError, LitRLError
from lit_rl.generation.base import InProcessGenerator
from lit_rl.generation.batches import DecodeBatch, Decoded, decode_batches
from lit_rl.generation.continuous_draws import Draws
from lit_rl.generation.turn_by_turn import TurnByTurn
from lit_rl.rollout import Prompts, Sampling


class HFContinuousGenerator(InProcessGenerator):
    """A generator that decodes with the policy's continuous batching: `NativeGenerator`'s samples, another scheduler.

    Keys and values lie in pages, a prompt is read once a group, and no step waits for the longest sequence. It pays for
    responses of very different lengths on a GPU with model.attn_implementation=flash_attention_2. Any other attention
    compares every token with all that the cache holds, other sequences included: take generator=native there. The cache
    is made anew for every call, so nothing in it is older than the weights.

    Args:
        batch_size: Sequences that are decoded at a time, whose whole length the cache has room for; None decodes all at
            once. Bounds memory: samples do not depend on it.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__(batch_size)

    def _decode(
        self, policy: nn.Module, prompts: Prompts, sampling: Sampling, device: torch.device
    ) -> Iterator[tuple[Tensor, Decoded]]:
        decode = partial(self._decode_batch, _model(policy))
        if prompts.responder is not None:
            rows = torch.arange(len(prompts) * prompts.group_size)
            yield rows, TurnByTurn(decode, prompts, sampling, None, device).run()
            return
        (batch,) = decode_batches(prompts, None, device)  # the engine, which fills the places, has to see every row
        yield batch.rows, decode(batch, prompts, sampling)

    def _decode_batch(self, model: Any, batch: DecodeBatch, prompts: Prompts, sampling: Sampling) -> Decoded:
        with torch.inference_mode(False), _undisturbed(model, batch.keys.device):  # tensors that a thread writes into
            forks = _forks(batch, self.rows_a_batch)
            draws = Draws(batch, prompts, sampling, forks)
            try:
                manager = model.init_continuous_batching(
                    generation_config=_generation_config(sampling, batch.repeats if forks else 1),
                    continuous_batching_config=_engine_config(model, batch, sampling, self.rows_a_batch, forks),
                )
                manager.logit_processor = draws
                manager.warmup()  # makes the cache
                _keep_dtype(manager.batch_processor.cache, model.dtype)
            except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"generator=hf_continuous cannot decode {type(model).__name__}: {error} Use generator=native or "
                    "generator=hf with it."
                ) from error
            requests = (batch.prompt_ids, batch.prompt_mask) if forks else batch.repeated()
            _run(manager, requests, sampling, draws)
        return draws.decoded()


def _run(manager: Any, requests: tuple[Tensor, Tensor], sampling: Sampling, draws: Draws) -> None:
    """Let the engine's thread decode everything, and wait for it."""
    draws.end = manager.cancel_request
    for number, (ids, mask) in enumerate(zip(*(part.tolist() for part in requests), strict=True)):
        text = [token for token, there in zip(ids, mask, strict=True) if there]
        manager.add_request(text, request_id=str(number), max_new_tokens=sampling.max_new_tokens)
    try:
        manager.start()
        manager.stop(block=True)  # as soon as all of it is done, and not before: the requests are in already
    finally:
        if manager.is_running():  # interrupted while waiting
            manager.stop(block=True, hard_stop=True)
        manager.destroy()
        draws.end = None
    error = manager.background_thread_status.fatal_error
    if isinstance(error, LitRLError):
        raise error
    if error is not None or not draws.complete:
        failed = error or getattr(manager.get_result(), "error", None)
        raise GenerationError(
            f"transformers' continuous batching failed: {failed or 'sequences are missing'}"
        ) from error


def _forks(batch: DecodeBatch, batch_size: int | None) -> bool:
    """Tell whether a group is one request, which the engine forks once all of the prompt but its last token is read.

    With a prompt of one token that would be a step of nothing, which fails; and where not all rows have room, the forks
    take it from each other for ever.
    """
    room = batch_size is None or batch_size >= len(batch.keys)
    return room and batch.repeats > 1 and int(batch.prompt_mask.sum(1).min()) > 1


def _keep_dtype(cache: Any, dtype: torch.dtype) -> None:
    """Make the cache take keys and values of any dtype: autocast makes some of another than the weights'."""
    update = cache.update

    def cast(key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(key_states.to(dtype), value_states.to(dtype), *args, **kwargs)

    cache.update = cast


def _model(policy: nn.Module) -> Any:
    """Return the model of transformers, whose layers hold the adapters if there are any."""
    if getattr(getattr(policy, "active_peft_config", None), "is_prompt_learning", False):
        raise ConfigError(
            f"generator=hf_continuous cannot decode {type(policy).__name__}: its PEFT adapter adds virtual tokens to "
            "every call. Use generator=hf with it."
        )
    wrapped: Any = policy
    model = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    if not hasattr(model, "init_continuous_batching"):
        raise ConfigError(
            f"generator=hf_continuous needs a model of transformers that can generate; {type(model).__name__} has no "
            "continuous batching. Use generator=native with it."
        )
    return model


def _generation_config(sampling: Sampling, sequences: int) -> Any:
    """Return a config that is greedy over our processor's choice and without an EOS; the longest response alone is the
    engine's limit."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=sampling.max_new_tokens, do_sample=False)
    config.num_return_sequences = sequences  # refused by the constructor, which takes greedy ones to be equal
    config.eos_token_id = -1
    return config


def _engine_config(model: Any, batch: DecodeBatch, sampling: Sampling, batch_size: int | None, forks: bool) -> Any:
    """Return a config with room for `batch_size` sequences of the greatest length; by default the engine takes most of
    the memory."""
    from transformers import ContinuousBatchingConfig

    flash = "flash" in str(model.config._attn_implementation)
    rows = len(batch.keys) if batch_size is None else min(batch_size, len(batch.keys))
    page = 256 if flash else 32  # what the kernel takes; without it, what wastes little
    pages = math.ceil((batch.prompt_ids.shape[1] + sampling.max_new_tokens) / page) + 1  # one is copied at a fork
    # Without flash attention there is a mask of this many times all tokens in the cache.
    prompt_tokens = min(int(batch.prompt_mask.sum()), 4096 if flash else 512)
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=(rows + 1) * pages,
        max_batch_tokens=rows + prompt_tokens,
        max_requests_per_batch=rows,
        max_blocks_per_request=pages if flash else 0,
        safety_margin=0.0,  # there is room for all that run
        allow_block_sharing=not forks,  # a fork whose prompt was read by another but for one token is an empty step
        use_async_batching=False,  # a step would begin before the tokens of the last are known here
        use_cuda_graph=False,  # what is drawn is kept by Python
        auto_switch_to_flash=False,  # training scores with the attention that was asked for
        seed=0,
    )


@contextmanager
def _undisturbed(model: Any, device: torch.device) -> Iterator[None]:
    """Restore the random generators and the attention, silence the engine's log and freeze the garbage collector. The
    engine seeds the global generators, may switch the attention, logs errors that are raised here, and collects garbage
    twice a call, which takes half a second each over all of Python's objects."""
    attention, log = model.config._attn_implementation, logging.getLogger("ContinuousBatchingLogger")
    level, freezes = log.level, gc.get_freeze_count() == 0  # never what the user froze
    log.setLevel(logging.CRITICAL)
    if freezes:
        gc.freeze()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        if freezes:
            gc.unfreeze()
        log.setLevel(level)
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
