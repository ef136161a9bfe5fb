"""The contract of a generator, and what generators of this process share.

`Generator` has two verbs, `sync` and `generate`, and one contract test. `InProcessGenerator` runs the policy itself:
checks of a request, the policy's rollout mode, prompts cut into decode batches, and their responses joined again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, GenerationError, NumericError, is_out_of_memory
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.core.transfers import in_one_transfer, left_pad
from lit_rl.core.vision_inputs import Later, PromptVision, Vision
from lit_rl.generation import noise
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.modes import evaluation_mode
from lit_rl.ops.ranges import AtLeastOne


@dataclass(frozen=True)
class Gap:
    """Absolute differences of log-probs that a probe found, in nats, over every token of both requests."""

    mean: float
    max: float
    tokens: int
    dtype: str
    """The coarser type of engine and trainer."""


class Generator(ABC):
    """A map from prompt token ids to completions. A subclass writes `sync` and `generate`; the rest has defaults.

    Every implementation passes one contract test:

    - Rows: completions of prompt ``i`` are rows ``i * group_size`` to ``(i + 1) * group_size - 1``, for any decode
      batches.
    - Noise: a token depends on the prompt, its row's key and its position (``generation.noise``), and on nothing else:
      not on the batch, the rank, the padding or a global random generator, which stays untouched. The noise is exact;
      logits differ by a rounding between batch shapes, which may change a token very rarely.
    - Greedy (temperature 0): the likeliest token after repetition penalty, the lowest id of equals. Two engines may
      differ only where the two best logits are closer than 1e-4.
    - Ends: every id of ``Prompts.eos_ids`` ends a response, and the EOS is part of it: kept in ``response_mask``. So is
      the token that completes a stop string.
    - ``Sampling`` is the whole setting. The model's own generation config has no say.
    - Turns: where ``converses``, a row continues with the answers of ``Prompts.responder`` (``lit_rl.core.episode``),
      to the last answer of the last row. The noise of a token goes by its column, with the answers counted; lengths and
      stop strings are those of a turn. ``attended`` and ``turn`` are set, and log-probs are 0 where nothing was
      sampled.
    - ``sampler_logprobs``: the log of the distribution that was drawn from, after every transform, renormalised. For
      greedy, of the softmax at temperature 1 after repetition penalty.
    - ``kept_logmass``: where top-k, top-p or min-p is in force, ``log softmax(logits / temperature)`` of a token, after
      repetition penalty, is ``sampler_logprobs + kept_logmass``. None from an engine that does not report it.
    - ``version`` is the one of the last ``sync``.
    """

    exact: bool = True
    """True where samples are drawn from the learning policy itself, by its own forward pass. False for an engine with
    weights or kernels of its own: its log-probs are then compared with the training's, and its samples weighted."""

    lag: int = 0
    """The age of a rollout's samples, in rollouts before the current policy. With 1 the generator runs elsewhere:
    ``generate`` is called in a thread while the policy learns, on every rank by itself. It uses no collective, no
    random generator of this process and no part of the policy. With 2 or more, ``sync`` is called there too, with a
    copy of the policy that nothing else has, in a run of one process."""

    reports_kept_mass: bool = False
    """True where ``Completions.kept_logmass`` is set whenever truncation is in force. Without it, training with top-k,
    top-p or min-p is refused unless samples are weighted: engine and training may truncate different tokens, and that
    would go unseen."""

    reshaped_by: tuple[str, ...] = ()
    """Settings of the engine that change its distribution, and that training's scoring does not apply."""

    converses: bool = False
    """True where ``generate`` passes each turn to ``Prompts.responder``, and continues with the answer."""

    sees: bool = False
    """True where ``generate`` gives the policy the images of ``Prompts.vision``."""

    gap: Gap | None = None
    """The gap that the probe of the last update found; None without a probe."""

    seconds: Mapping[str, float] = MappingProxyType({})
    """Parts of the time that the last update took, by name: logged as ``time/<name>``."""

    @abstractmethod
    def sync(self, policy: nn.Module, version: int) -> None:
        """Take over the policy's current weights. Always called before ``generate``."""

    @abstractmethod
    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        """Return ``prompts.group_size`` completions of every prompt.

        Raises:
            GenerationError: never synced, no or empty prompts, or the engine failed.
            ConfigError: the lengths do not fit the model, or stop strings without ``prompts.decode``.
            NumericError: the policy's logits hold NaN.
            DecodingMemoryError: memory ran out, of a generator of this process.
        """

    @property
    def context(self) -> float:
        """The tokens that a prompt and its response may have together, known from the first sync on; 0: unknown, `inf`:
        no bound. Texts with different length limits are drawn in one call where all fit."""
        return 0

    @property
    def share_of_device(self) -> float:
        """The share of the device's memory that an engine holds while the policy learns, in [0, 1)."""
        return 0.0

    def prepare(self, model: LanguageModel) -> None:  # noqa: B027 (optional)
        """Receive the description of the policy, once, before the first sync. Does nothing by default."""

    def check(self, sampling: Sampling, longest: int) -> None:  # noqa: B027 (optional)
        """Refuse, before the run begins, what `generate` would refuse in it. Refuses nothing by default.

        Args:
            sampling: How completions will be drawn; ``max_new_tokens`` are those of a whole response.
            longest: Tokens of the longest prompt.

        Raises:
            ConfigError: the settings or the lengths cannot be generated.
        """

    def check_asked_alone(self) -> None:  # noqa: B027 (optional)
        """Refuse requests that each rank makes as often as it likes, as a rollout function does. Refuses nothing by
        default.

        Raises:
            ConfigError: ranks can only ask together.
        """

    def check_converses(self) -> None:
        """Refuse conversations where the generator cannot hold them.

        Raises:
            ConfigError: it draws completions of a single turn.
        """
        if not self.converses:
            raise ConfigError(
                f"{type(self).__name__} draws completions of a single turn, and cannot continue them after answers of "
                "an environment. Use generator=native, hf, hf_continuous, vllm or vllm_server."
            )

    def rest(self) -> None:  # noqa: B027 (optional)
        """Release memory: nothing is drawn until the next sync. Does nothing by default."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Stop processes and engines outside of the policy; the next sync starts them again. Does nothing by
        default."""


def as_generator(generator: Any) -> Generator:
    """Return the generator itself, if it is one.

    Raises:
        ConfigError: it does not subclass `Generator`.
    """
    if isinstance(generator, Generator):
        return generator
    if isinstance(generator, str):
        raise ConfigError(
            f"generator={generator!r} is a text, and no generator: pass an object. Of lit_rl.generation: "
            "native.NativeGenerator(), hf.HFGenerator(), hf.HFContinuousGenerator(), "
            "vllm.in_process.VLLMGenerator(), vllm.server.VLLMServerGenerator(urls=[...]) (docs/generators.md)."
        )
    description = f"the class {generator.__name__}" if isinstance(generator, type) else type(generator).__name__
    fix = (
        "pass an instance of it"
        if isinstance(generator, type) and issubclass(generator, Generator)
        else "subclass lit_rl.generation.Generator and write its two verbs, sync(policy, version) and "
        "generate(prompts, sampling) -> Completions; the rest has defaults"
    )
    raise ConfigError(f"generator={description} is no generator: {fix} (docs/generators.md).")


class EngineLost(GenerationError):
    """An engine that died, hangs, or was restarted: it may be brought back, and synced again."""


class ConversationsLost(GenerationError):
    """An engine that was lost and is back, synced: its conversations have to begin again, environments included."""


class DecodingMemoryError(MemoryError):
    """A lack of memory while the policy was decoding in this process.

    Args:
        at_once: Sequences that were decoded together.
        cause: The allocator's error.
    """

    def __init__(self, at_once: int, cause: BaseException) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.at_once = at_once


@checked("generator")
class InProcessGenerator(Generator):
    """A generator that runs the policy itself, by reference: a sync copies nothing.

    The reference is dropped from copies and pickles, so that a callback that deep-copies the module does not drag a
    second policy along. A copy is synced before it generates, like any generator.

    Args:
        batch_size: Sequences per decode batch; None decodes all at once. Bounds memory: samples do not depend on it.
    """

    reports_kept_mass = True
    converses = True

    def __init__(self, batch_size: AtLeastOne | None = None) -> None:
        self.batch_size = batch_size
        self.bound: int | None = None
        self._policy: nn.Module | None = None
        self._version = 0

    @property
    def rows_a_batch(self) -> int | None:
        """The most rows that the decode loop gets together; None gives all.

        Where `batch_size` is None it is ``bound``, which a memory plan may set: samples do not depend on it.
        """
        return self.bound if self.batch_size is None else self.batch_size

    @property
    def context(self) -> float:
        return 0 if self._policy is None else context_length(self._policy) or math.inf

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_policy": None}

    def sync(self, policy: nn.Module, version: int) -> None:
        self._policy, self._version = policy, version

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        if self._policy is None:
            raise GenerationError(f"{type(self).__name__}.generate was called before sync: it holds no policy yet.")
        check_request(prompts, sampling, self._policy)
        device = next(self._policy.parameters()).device
        decoded = []
        with rollout_mode(self._policy), self._memory_errors(len(prompts) * prompts.group_size):
            for rows, part in self._decode(self._policy, prompts, sampling, device):
                if not part.logprobs.isfinite().all():
                    why = (
                        "its weights diverged. Lower optimizer.lr or set trainer.gradient_clip_val; with"
                        if self._version
                        else "no step was taken yet, so they came with its weights. Look at the model's files; with"
                    )
                    raise NumericError(
                        f"The policy gave NaN or infinite logits while generating (policy version {self._version}): "
                        f"{why} 16-bit weights, try model.dtype=float32."
                    )
                decoded.append((rows, part))
        return assemble(prompts, decoded, version=self._version, device=device)

    @contextmanager
    def _memory_errors(self, rows: int) -> Iterator[None]:
        """Raise a lack of memory with the number of rows that were decoded together."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DecodingMemoryError(min(rows, self.rows_a_batch or rows), error) from error

    @abstractmethod
    def _decode(
        self, policy: nn.Module, prompts: Prompts, sampling: Sampling, device: torch.device
    ) -> Iterator[tuple[Tensor, Decoded]]:
        """Decode every row, at most `rows_a_batch` at a time: yield parts of them, each with its row numbers, long on
        the CPU."""


def check_request(prompts: Prompts, sampling: Sampling, policy: nn.Module, *, structured: bool = False) -> None:
    """Refuse a request that cannot be generated, before the policy runs.

    Args:
        prompts: The requested completions.
        sampling: How to draw.
        policy: The model whose context the texts have to fit.
        structured: True where the generator can constrain a response to ``sampling.structured``.
    """
    if not prompts.token_ids or prompts.group_size < 1 or len(prompts.keys) != len(prompts):
        raise GenerationError(
            f"Nothing to generate, or a key missing: {len(prompts)} prompts, {len(prompts.keys)} keys, "
            f"group_size={prompts.group_size}. It takes one prompt or more, one key a prompt and group_size >= 1."
        )
    for index, ids in enumerate(prompts.token_ids):
        if not len(ids):
            raise GenerationError(
                f"Prompt {index} of the batch has no tokens. It needs at least one: check the text of the row, the "
                "chat template and the tokenizer."
            )
    if sampling.stop and prompts.decode is None:
        raise ConfigError(
            f"sampling.stop={list(sampling.stop)} needs a tokenizer to find them: Prompts.decode is None."
        )
    if sampling.structured is not None and not structured:
        raise ConfigError(
            f"sampling.structured.{sampling.structured.kind} is set, and decoding in this process cannot hold a "
            "response to a form: leave it out, or take generator=vllm or generator=vllm_server, which can."
        )
    if sampling.bad_words and prompts.encode is None:
        raise ConfigError(
            f"sampling.bad_words={list(sampling.bad_words)} needs a tokenizer to know their tokens: Prompts.encode is "
            "None."
        )
    context = context_length(policy)
    longest = max(map(len, prompts.token_ids))
    if prompts.responder is not None and longest + prompts.responder.max_tokens > (context or math.inf):
        most = prompts.responder.max_tokens
        raise ConfigError(
            f"The longest prompt ({longest} tokens) plus the {most} tokens that a conversation may have (max_tokens of "
            f"the responder) is {longest + most} tokens, but the model's context holds {context}. Let it have fewer, "
            "or bound the prompts: data.max_prompt_tokens."
        )
    if context is not None and longest + sampling.max_new_tokens > context:
        raise ConfigError(
            f"The longest prompt ({longest} tokens) plus sampling.max_new_tokens={sampling.max_new_tokens} is "
            f"{longest + sampling.max_new_tokens} tokens, but the model's context holds {context}. Lower "
            f"sampling.max_new_tokens to {max(context - longest, 0)} or less, or bound the prompts: "
            "data.max_prompt_tokens, or data.max_length of data that is learned from as it is."
        )


def context_length(policy: nn.Module) -> int | None:
    """Return the positions that the policy was built for, by its config; None where the config does not say."""
    config: Any = getattr(policy, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


@contextmanager
def rollout_mode(policy: nn.Module) -> Iterator[None]:
    """Set evaluation mode, no gradient, dropout and gradient checkpointing off, cache on; restore all at the end.

    Not ``inference_mode``: its tensors could never enter a loss.
    """
    checkpointing: list[Any] = [m for m in policy.modules() if getattr(m, "gradient_checkpointing", False) is True]
    config: Any = getattr(policy, "config", None)
    cache_off = getattr(config, "use_cache", None) is False
    try:
        for module in checkpointing:
            module.gradient_checkpointing = False
        if cache_off:
            config.use_cache = True
        with evaluation_mode(policy), torch.no_grad():
            yield
    finally:
        for module in checkpointing:
            module.gradient_checkpointing = True
        if cache_off:
            config.use_cache = False


# ---------------------------------------------------------------------- decode batches


@dataclass(frozen=True)
class DecodeBatch:
    """Rows that are decoded together: ``repeats`` completions of each of ``n`` prompts, neighbours by prompt."""

    prompt_ids: Tensor
    """Long ``(n, p)``, padded on the left."""
    prompt_mask: Tensor
    """Bool ``(n, p)``."""
    repeats: int
    keys: Tensor
    """Int64 ``(n * repeats,)``: the noise key of each row."""
    rows: Tensor
    """Long ``(n * repeats,)``, on the CPU: where each row stands in the completions."""
    numbers: Sequence[int]
    """The indices of the ``n`` prompts in the request."""
    begun: Tensor | None = None
    """Long ``(n * repeats,)``: tokens of each response that are part of the prompt here. None: none."""
    vision: tuple[PromptVision | None, ...] = ()
    """The images of each of the ``n`` prompts; empty where the request has none."""
    padded: bool = True
    """False where no prompt is padded, by the lengths on the host: no query of the device is needed."""

    def repeated(self) -> tuple[Tensor, Tensor]:
        """Return prompt ids and mask of every row, both ``(n * repeats, p)``."""
        return self.prompt_ids.repeat_interleave(self.repeats, 0), self.prompt_mask.repeat_interleave(self.repeats, 0)


@dataclass(frozen=True)
class Decoded:
    """The responses of a decode batch, with arbitrary padding on the right; fields as in ``Completions``."""

    ids: Tensor
    mask: Tensor
    logprobs: Tensor
    ended: Tensor
    kept_logmass: Tensor | None
    attended: Tensor | None = None
    turn: Tensor | None = None
    later: tuple[tuple[Later, ...], ...] | None = None
    """The images in each row's response. None: there are none."""


def has_padding(token_ids: Sequence[Sequence[int]]) -> bool:
    """Tell whether `left_pad` pads any of them."""
    return len({len(ids) for ids in token_ids}) > 1


class WaitingRows:
    """Rows that are still to be decoded, as batches that fit into the free places.

    A batch has whole groups, or a slice of one group larger than all places. Prompts of similar length stand together,
    the longest first: little padding, and a lack of memory shows immediately.

    Args:
        prompts: The requested completions.
        places: Rows that may be decoded at a time, 1 or more; None: all.
        device: The device of the batches.
    """

    def __init__(self, prompts: Prompts, places: int | None, device: torch.device) -> None:
        group, n = prompts.group_size, len(prompts)
        self._prompts, self._device = prompts, device
        self._keys = noise.row_keys(prompts.keys, group)
        self._slice = group if places is None else math.ceil(group / math.ceil(group / places))
        together = places is None or places >= n * group
        order = range(n) if together else sorted(range(n), key=lambda i: -len(prompts.token_ids[i]))
        self.groups = deque((i, first) for i in order for first in range(0, group, self._slice))
        """Prompts, each with the first sample of a slice of its group, that were not taken yet."""

    def take(self, places: int | None) -> DecodeBatch | None:
        """Return the next rows, as many as fit into the places; None where the next group, or slice of one, does
        not."""
        prompts, group = self._prompts, self._prompts.group_size
        count = len(self.groups) if places is None else min(places // self._slice, len(self.groups))
        if self._slice < group:
            count = min(count, 1)
        if count <= 0:
            return None
        taken = [self.groups.popleft() for _ in range(count)]
        chosen, first = [i for i, _ in taken], taken[0][1]
        samples = torch.arange(first, min(first + self._slice, group))
        rows = (torch.tensor(chosen)[:, None] * group + samples).flatten()
        texts = [prompts.token_ids[i] for i in chosen]
        ids, mask, keys = in_one_transfer(self._device, *left_pad(texts, prompts.pad_id), self._keys[rows])
        seen = tuple(prompts.vision[i] for i in chosen) if prompts.vision else ()
        padded = has_padding(texts)
        return DecodeBatch(ids, mask, len(samples), keys, rows, chosen, vision=seen, padded=padded)


def decode_batches(prompts: Prompts, batch_size: int | None, device: torch.device) -> Iterator[DecodeBatch]:
    """Yield all rows in batches of at most ``batch_size``, as `WaitingRows` makes them."""
    waiting = WaitingRows(prompts, batch_size, device)
    while batch := waiting.take(batch_size):
        yield batch


def assemble(
    prompts: Prompts, decoded: Sequence[tuple[Tensor, Decoded]], *, version: int, device: torch.device
) -> Completions:
    """Join decoded batches, each with its row numbers, in the order of the prompts."""
    places = [rows for rows, _ in decoded]
    ids, mask, *placed = in_one_transfer(device, *left_pad(prompts.token_ids, prompts.pad_id), *places)
    ids, mask = (part.repeat_interleave(prompts.group_size, 0) for part in (ids, mask))
    shape = (len(ids), max(part.ids.shape[1] for _, part in decoded))

    def joined(name: str, fill: float, within: str = "mask") -> Tensor:
        parts = [getattr(part, name).masked_fill(~getattr(part, within), fill) for _, part in decoded]
        whole = torch.full(shape, fill, dtype=parts[0].dtype, device=device)
        for rows, values in zip(placed, parts, strict=True):
            whole[rows, : values.shape[1]] = values
        return whole

    ended = torch.zeros(shape[0], dtype=torch.bool, device=device)
    for rows, (_, part) in zip(placed, decoded, strict=True):
        ended[rows] = part.ended
    turns = decoded[0][1].attended is not None
    later: list[tuple[Later, ...]] = [()] * len(ids)
    for rows, part in decoded:
        for row, seen in zip(rows.tolist(), part.later or ()):
            later[row] = seen
    vision = None
    if prompts.vision or any(later):
        vision = Vision.of(prompts.vision or [None] * len(prompts), prompts.group_size, later)
    return Completions(
        prompt_ids=ids,
        prompt_mask=mask,
        response_ids=joined("ids", prompts.pad_id, "attended" if turns else "mask"),
        response_mask=joined("mask", False),
        sampler_logprobs=joined("logprobs", 0.0),
        ended=ended,
        group_id=torch.arange(len(prompts), device=device).repeat_interleave(prompts.group_size),
        version=version,
        attended=joined("attended", False, "attended") if turns else None,
        kept_logmass=None if decoded[0][1].kept_logmass is None else joined("kept_logmass", 0.0),
        turn=joined("turn", 0, "attended") if turns else None,
        vision=vision,
    )
