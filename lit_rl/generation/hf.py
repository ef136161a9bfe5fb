"""transformers' own decoders under the contract of `Generator`, with our draws.

`HFGenerator` calls ``generate``: slower than native, and the oracle that native is tested against.
`HFContinuousGenerator` uses continuous batching: a waiting sequence takes the place of a finished one at once.
Neither keeps anything between two turns of a conversation, so `TurnByTurn` lets each turn read the whole text again.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, GenerationError, LitRLError
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.core.transfers import in_one_transfer, left_pad
from lit_rl.core.vision_inputs import Vision, with_later
from lit_rl.generation.engine_kwargs import KEY, transformers_names
from lit_rl.generation.generator import DecodeBatch, Decoded, InProcessGenerator, decode_batches, has_padding
from lit_rl.generation.responses import Responses
from lit_rl.generation.token_sampler import Drawn, TokenSampler
from lit_rl.models.forward_inputs import forward_parameters, masks_that_hide
from lit_rl.ops.ranges import AtLeastOne


@checked("generator")
class HFGenerator(InProcessGenerator):
    """A generator that decodes with the policy's ``generate``: any model of transformers, and no shared prompts.

    The model's generation config is replaced by a blank one for the call, since ``generate`` takes all unset options
    from it.

    Args:
        batch_size: Sequences that are decoded at a time; None decodes all at once. Bounds memory: samples do not depend
            on it.
        static_cache: Hold keys and values in a cache of the longest length from the first token on. On a GPU
            transformers then compiles the decode step to a CUDA graph, again for other numbers of rows and for longer
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
        batch_size: AtLeastOne | None = None,
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
            if prompts.on_finished is not None:
                for row, ids, mask in zip(batch.rows.tolist(), decoded.ids, decoded.mask):
                    prompts.on_finished(row, ids[mask].tolist())
            yield batch.rows, decoded

    def _decode_batch(self, policy: nn.Module, batch: DecodeBatch, prompts: Prompts, sampling: Sampling) -> Decoded:
        model: Any = policy
        if not hasattr(model, "generate"):
            raise ConfigError(f"generator=hf needs a model with a generate method; {type(policy).__name__} has none.")
        ids, mask = batch.repeated()
        names = forward_parameters(policy)
        sampler = TokenSampler(batch, prompts, sampling)
        config = _generation_config(prompts, sampling, self.generation_kwargs)
        if self.static_cache:
            # It has one type for both, and autocast gives float32 keys and narrow values.
            if torch.is_autocast_enabled(ids.device.type):
                raise ConfigError(
                    "generator.static_cache=true cannot decode under autocast: set trainer.precision=bf16-true or "
                    "32-true, or generator.static_cache=false."
                )
            config.cache_implementation = "static"
        draws = _BatchDraws(sampler, Responses(prompts, sampling, len(ids), ids.device), ids)
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


class _BatchDraws:
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
        if (input_ids.shape[1] - self._prompt_width) % self.responses.poll_every == 0:
            self.responses.end_at_stop_strings(self._rows)
        return self.responses.finished(self._rows)


def _reshaped_by(kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields that change the distribution, after a check that `GenerationConfig` has and accepts all."""
    if not kwargs:
        return ()
    from transformers import GenerationConfig

    found = transformers_names(vars(GenerationConfig())).reshaped_by(kwargs)
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


# ------------------------------------------------------------------ continuous batching


@checked("generator")
class HFContinuousGenerator(InProcessGenerator):
    """A generator that decodes with the policy's continuous batching: `NativeGenerator`'s samples, another scheduler.

    Keys and values lie in pages, a prompt is read once a group, and no step waits for the longest sequence. It pays for
    responses of very different lengths on a GPU with model.attn_implementation=flash_attention_2. Any other attention
    compares every token with all that the cache holds, other sequences included: take generator=native there. The cache
    is made for every call, so nothing in it is older than the weights.

    Args:
        batch_size: Sequences that are decoded at a time, whose whole length the cache has room for; None decodes all at
            once. Bounds memory: samples do not depend on it.
    """

    def __init__(self, batch_size: AtLeastOne | None = None) -> None:
        super().__init__(batch_size)

    def _decode(
        self, policy: nn.Module, prompts: Prompts, sampling: Sampling, device: torch.device
    ) -> Iterator[tuple[Tensor, Decoded]]:
        if getattr(getattr(policy, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigError(
                f"generator=hf_continuous cannot decode {type(policy).__name__}: its PEFT adapter adds virtual tokens "
                "to every call. Use generator=hf with it."
            )
        wrapped: Any = policy  # the layers of the model inside hold the adapters, if there are any
        model = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
        if not hasattr(model, "init_continuous_batching"):
            raise ConfigError(
                f"generator=hf_continuous needs a model of transformers that can generate; {type(model).__name__} has "
                "no continuous batching. Use generator=native with it."
            )
        decode = partial(self._decode_batch, model)
        if prompts.responder is not None:
            rows = torch.arange(len(prompts) * prompts.group_size)
            yield rows, TurnByTurn(decode, prompts, sampling, None, device).run()
            return
        (batch,) = decode_batches(prompts, None, device)  # the engine, which fills the places, has to see every row
        yield batch.rows, decode(batch, prompts, sampling)

    def _decode_batch(self, model: Any, batch: DecodeBatch, prompts: Prompts, sampling: Sampling) -> Decoded:
        from transformers import GenerationConfig

        # Not inference mode: a thread writes into the tensors.
        with torch.inference_mode(False), _restored_state(model, batch.keys.device):
            # A group is one request, which the engine forks once all of the prompt but its last token is read. With a
            # prompt of one token that would be an empty step, which fails; and where not all rows have room, the forks
            # take it from each other forever.
            room = self.rows_a_batch is None or self.rows_a_batch >= len(batch.keys)
            forks = room and batch.repeats > 1 and int(batch.prompt_mask.sum(1).min()) > 1
            draws = ContinuousDraws(batch, prompts, sampling, forks)
            try:
                # Greedy over our draws and without an EOS: the longest response alone is the engine's limit.
                config = GenerationConfig(max_new_tokens=sampling.max_new_tokens, do_sample=False)
                config.num_return_sequences = batch.repeats if forks else 1  # the constructor refuses greedy ones
                config.eos_token_id = -1
                batching = _continuous_batching_config(model, batch, sampling, self.rows_a_batch, forks)
                manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
                manager.logit_processor = draws
                manager.warmup()  # makes the cache
                _keep_dtype(manager.batch_processor.cache, model.dtype)
            except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"generator=hf_continuous cannot decode {type(model).__name__}: {error} Use generator=native or "
                    "generator=hf with it."
                ) from error
            requests = (batch.prompt_ids, batch.prompt_mask) if forks else batch.repeated()
            _run_requests(manager, requests, sampling, draws)
        return draws.decoded()


class ContinuousDraws:
    """The engine's logits processors: draws every token with our noise, and leaves the engine no other choice.

    The engine names the requests of a step just before it. Tokens and log-probs are kept here, and the engine's own
    answers are not read.
    """

    do_processing = True
    tensors_required = 0

    def __init__(self, batch: DecodeBatch, prompts: Prompts, sampling: Sampling, forks: bool) -> None:
        device = batch.keys.device
        self._sampler = TokenSampler(batch, prompts, sampling)
        self._responses = Responses(prompts, sampling, len(batch.keys), device)
        self._device, self._longest = device, sampling.max_new_tokens
        # The row of a decode batch by the engine's name for it.
        count, names = batch.repeats, ["", *(f"__child#{fork}" for fork in range(batch.repeats - 1))]
        self._rows = {str(row): row for row in range(len(batch.keys))}
        if forks:
            prompts_of_batch = range(len(batch.prompt_ids))
            self._rows = {f"{i}{name}": i * count + k for i in prompts_of_batch for k, name in enumerate(names)}
        self._all = torch.arange(len(batch.keys), device=device)
        self._requests: list[str] = []
        self._running, self._steps = self._all, 0
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.end: Callable[[str], None] | None = None
        """Ends a request of the engine."""

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept any: requests have no settings of their own."""

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Do nothing: there are no arguments."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Record the requests whose logits the next call gets, in order. Called in the engine's thread."""
        requests = [request.state.request_id for request in requests_in_batch if request.has_new_token]
        if requests != self._requests:
            self._requests = requests
            self._running = torch.tensor([self._rows[name] for name in requests], device=self._device, dtype=torch.long)
        # Autocast is set per thread, and its cache of weights is shared with the training.
        kind = self._device.type
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_enabled(kind, self._autocast[0])
        torch.set_autocast_dtype(kind, self._autocast[1])
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Draw the next tokens. ``scores``: float32 ``(n, v)`` or more rows; those beyond the n requests belong to
        unread prompts."""
        forced = torch.full_like(scores, -torch.inf)
        if not self._requests:
            return forced
        rows = self._running
        drawn = self._sampler(scores[: len(rows)], self._responses.lengths[rows], rows)
        self._responses.add(rows, drawn)
        self._steps += 1
        if self._steps % self._responses.poll_every == 0:
            states = self._responses.read_states(self._all)  # at rows that the engine has ended since the last look too
            for request in self._requests:
                row = self._rows[request]
                # The engine ends longer ones by itself.
                if not states.running[row] and states.lengths[row] < self._longest:
                    assert self.end is not None
                    self.end(request)
        forced[: len(rows)].scatter_(1, drawn.tokens[:, None], 0.0)
        return forced

    @property
    def complete(self) -> bool:
        """Tell whether every row ended or has its full length."""
        self._responses.end_at_stop_strings(self._all)
        return self._responses.complete

    def decoded(self) -> Decoded:
        return self._responses.decoded()


def _run_requests(manager: Any, requests: tuple[Tensor, Tensor], sampling: Sampling, draws: ContinuousDraws) -> None:
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


def _keep_dtype(cache: Any, dtype: torch.dtype) -> None:
    """Make the cache take keys and values of any dtype: autocast makes some of another than the weights'."""
    update = cache.update

    def cast(key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(key_states.to(dtype), value_states.to(dtype), *args, **kwargs)

    cache.update = cast


def _continuous_batching_config(
    model: Any, batch: DecodeBatch, sampling: Sampling, batch_size: int | None, forks: bool
) -> Any:
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
def _restored_state(model: Any, device: torch.device) -> Iterator[None]:
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


# ------------------------------------------------------------------ conversations


class TurnByTurn:
    """The conversations of a request, held by an engine that decodes one turn of some rows at a time.

    Args:
        decode: Decodes a batch of one turn, of a request without a responder.
        prompts: The requested completions; their responder answers.
        sampling: How to draw; ``max_new_tokens`` are those of a turn.
        places: Most rows that are decoded at a time; None: all.
        device: The device of the tokens.
    """

    def __init__(
        self,
        decode: Callable[[DecodeBatch, Prompts, Sampling], Decoded],
        prompts: Prompts,
        sampling: Sampling,
        places: int | None,
        device: torch.device,
    ) -> None:
        self._decode, self._prompts, self._sampling, self._places = decode, prompts, sampling, places
        (self._whole,) = decode_batches(prompts, None, device)
        self._responses = Responses(prompts, sampling, len(self._whole.rows), device)

    def run(self) -> Decoded:
        """Return the responses of all rows."""
        responder, device = self._prompts.responder, self._whole.keys.device
        assert responder is not None
        self._speak(decode_batches(self._prompts, self._places, device))
        unanswered = len(self._whole.rows)
        while unanswered:
            answers = [*responder.answers(wait=True), *responder.answers(wait=False)]
            speaking = [each.row for each in answers if self._responses.add_answer(each)]
            unanswered -= len(answers) - len(speaking)
            self._speak(self._batches(speaking))
        return self._responses.decoded()

    def _speak(self, batches: Iterable[DecodeBatch]) -> None:
        """Decode a turn for the rows of each batch, and pass it to the responder."""
        responder, device = self._prompts.responder, self._whole.keys.device
        assert responder is not None
        alone = dataclasses.replace(self._prompts, responder=None)
        for batch in batches:
            rows, room = batch.rows.to(device), self._responses.tokens_left(int(batch.rows[0]))
            least = min(self._sampling.min_new_tokens, room)
            turn = dataclasses.replace(self._sampling, max_new_tokens=room, min_new_tokens=least)
            decoded = self._decode(batch, alone, turn)
            for column in range(decoded.ids.shape[1]):
                mass = None if decoded.kept_logmass is None else decoded.kept_logmass[:, column]
                self._responses.add(rows, Drawn(decoded.ids[:, column], decoded.logprobs[:, column], mass))
            self._responses.read_states(rows)
            for answered in self._responses.newest_turns(batch.rows.tolist()):
                responder.tell(answered)

    def _batches(self, rows: Sequence[int]) -> Iterator[DecodeBatch]:
        """Yield the next turn of these rows: those with equal room together, so that none leaves the model's
        context."""
        by_room: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: int(self._responses.lengths[row])):
            by_room.setdefault(self._responses.tokens_left(row), []).append(row)
        for together in by_room.values():
            for start in range(0, len(together), self._places or len(together)):
                yield self._batch(together[start : start + (self._places or len(together))])

    def _batch(self, rows: Sequence[int]) -> DecodeBatch:
        prompts, device = self._prompts, self._whole.keys.device
        written = self._responses.texts(rows)
        numbers = [row // prompts.group_size for row in rows]
        texts = [[*prompts.token_ids[number], *text] for number, text in zip(numbers, written)]
        which = torch.tensor(rows)
        ids, mask, at = in_one_transfer(device, *left_pad(texts, prompts.pad_id), which)
        seen = tuple(
            with_later(
                prompts.vision[number] if prompts.vision else None,
                len(prompts.token_ids[number]),
                self._responses.images(row),
                len(text),
            )
            for row, number, text in zip(rows, numbers, written)
        )
        keys, begun = self._whole.keys[at], self._responses.lengths[at]
        return DecodeBatch(ids, mask, 1, keys, which, rows, begun, seen, padded=has_padding(texts))
