"""Data classes that travel between packages: sampling settings, prompts, completions, rollouts.

They are frozen: a step replaces an object and never edits it. Letters of shapes: ``b`` completions (rows),
``p`` prompt tokens, ``t`` response tokens, ``k`` reward functions. A row of a rollout is one completion; rows of
a group are neighbours, but statistics always go by ``group_id``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Episode, Prompt, Responder
from lit_rl.core.errors import ConfigError, check_strings, in_range
from lit_rl.core.other_names import reject_unknown_keywords
from lit_rl.core.transfers import CopiedToHost, HostCopy, to_device
from lit_rl.core.vision_inputs import PromptVision, Vision
from lit_rl.ops.distillation import TeacherScores
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, NotNegativeFinite, Portion, Positive, Share
from lit_rl.ops.sampling_distribution import Truncation

_LARGEST_BIAS = 100.0
"""The limit of every engine: vLLM clips larger biases to it, so they are refused here."""


class LogitBias(dict[int, float]):
    """Token ids and the biases added to their logits: an immutable, hashable dict (config systems know no other
    mapping).

    Args:
        biases: Ids as integers, or as strings of digits (keys of config files); biases in [-100, 100].

    Raises:
        ConfigError: a key is no token id, or a bias is no number in the range.
    """

    def __init__(self, biases: Any = None) -> None:
        try:
            chosen = dict(biases or {})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"sampling.logit_bias={biases!r} must map token ids to numbers, such as {{42: -5.0}}."
            ) from error
        checked: dict[int, float] = {}
        for key, value in chosen.items():
            text = str(key).strip()
            if isinstance(key, bool) or not (text.isascii() and text.isdigit()):
                raise ConfigError(
                    f"sampling.logit_bias has the key {key!r}, which is no token id: ids are integers from 0 on. "
                    "tokenizer.convert_tokens_to_ids(token) gives a token's."
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"sampling.logit_bias: {key}: {value!r} is no number.")
            in_range(f"sampling.logit_bias.{key}", value, low=-_LARGEST_BIAS, high=_LARGEST_BIAS)
            checked[int(text)] = float(value)
        super().__init__(checked)

    def _fixed(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("sampling.logit_bias cannot be changed: make another with dataclasses.replace.")

    __setitem__ = __delitem__ = __ior__ = popitem = clear = _fixed
    update = setdefault = _fixed  # pyright: ignore[reportAssignmentType]

    def pop(self, key: Any, *default: Any) -> Any:
        """Return the default for a missing key: LightningCLI's parser pops a key of its own from every dict."""
        return default[0] if default and key not in self else self._fixed()

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return LogitBias, (dict(self),)


@dataclass(frozen=True)
class Structured:
    """The form that every response must have, kept by the engine that samples. Exactly one of the four is set.

    Args:
        regex: A regular expression that the whole response matches.
        json_schema: A JSON schema, as a dict or as JSON text; kept as text.
        grammar: A context-free grammar (EBNF or Lark), as vLLM takes it.
        choice: The responses that are allowed.

    Raises:
        ConfigError: none or several are set, or the value is invalid.
    """

    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            fault = f"{' and '.join(given)} are set" if given else "none is set"
            raise ConfigError(f"sampling.structured takes exactly one of regex, json_schema, grammar, choice: {fault}.")
        for key in ("regex", "grammar"):
            text = getattr(self, key)
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"sampling.structured.{key}={text!r} must be a text that is not empty.")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            choice: Any = self.choice
            if isinstance(choice, str) or not choice or not all(isinstance(text, str) and text for text in choice):
                raise ConfigError(
                    f"sampling.structured.choice={choice!r} must be a list of texts, none of them empty: ['yes', 'no']."
                )
            object.__setattr__(self, "choice", tuple(choice))

    @property
    def kind(self) -> str:
        """The name of the constraint that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)


def _schema_text(schema: Any) -> str:
    """Return the schema as JSON text: a dict could be changed, and has no hash."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(parsed, Mapping):
            return json.dumps(parsed)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"sampling.structured.json_schema={schema!r} is no JSON: {error}.") from error
    raise ConfigError(f"sampling.structured.json_schema={schema!r} must be a JSON object, such as {{type: object}}.")


PromptForm = Literal["text", "messages"]
"""The form of a policy's input: plain text as it stands, or messages that its chat template renders."""


class Width(Enum):
    """The meaning of the second dimension of a column. It decides how rows are trimmed and joined."""

    NONE = "one value a row"
    PROMPT = "prompt tokens: padded on the left"
    RESPONSE = "response tokens: padded on the right"


PER_ROW, PER_PROMPT_TOKEN, PER_RESPONSE_TOKEN = ({"width": width} for width in Width)
"""The metadata of a field that holds a tensor of rows, or None."""


def columns_of(item: Any) -> Iterator[tuple[str, Width, Tensor | None]]:
    """Yield name, width and value of each column of a `Completions` or a `Rollout`.

    A column that may have one value per row or per token declares the wider of the two; its tensor decides.
    """
    for each in dataclasses.fields(item):
        if "width" in each.metadata:
            value = getattr(item, each.name)
            width = Width.NONE if value is not None and value.ndim == 1 else each.metadata["width"]
            yield each.name, width, value


@checked("sampling")
@reject_unknown_keywords("sampling")
@dataclass(frozen=True)
class Sampling:
    """Sampling settings, shared by the engine that samples and the module that scores.

    Args:
        temperature: Divides the logits, in [0, inf). 0 is greedy decoding.
        top_p: Keep the smallest set of tokens whose mass reaches this, in (0, 1]. 1 is off.
        top_k: Keep the k likeliest tokens. 0 is off.
        min_p: Keep tokens at least this share as likely as the likeliest, in [0, 1]. 0 is off.
        repetition_penalty: Divide (multiply, where negative) the logits of tokens seen in prompt or response, as in
            CTRL (1909.05858). 1 is off.
        max_new_tokens: Longest response, or turn of a conversation, in tokens, EOS included.
        min_new_tokens: No EOS and no stop string before this many tokens.
        stop: Strings that end a response; the token that completes one is kept.
        bad_words: Strings that no response may contain as the tokens they have at its start or after a space: the last
            of these tokens is never drawn after the others. Other tokens may still spell the same text.
        logit_bias: Token id to a number in [-100, 100] that is added to its logit before anything else is done to it.
        structured: The form of every response. None leaves it free. Only generators that are engines of their own
            (vllm, vllm_server) can keep one.
    """

    temperature: NotNegativeFinite = 1.0
    top_p: Share = 1.0
    top_k: AtLeastZero = 0
    min_p: Portion = 0.0
    repetition_penalty: Positive = 1.0
    max_new_tokens: AtLeastOne = 512
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=LogitBias)
    structured: Structured | None = None

    def __post_init__(self) -> None:
        in_range("sampling.min_new_tokens", self.min_new_tokens, low=0, high=self.max_new_tokens)
        for key in ("stop", "bad_words"):
            strings = getattr(self, key)
            check_strings(f"sampling.{key}", strings)
            object.__setattr__(self, key, tuple(strings))
        if "" in self.stop:
            raise ConfigError("sampling.stop holds an empty string, which would end every response at once.")
        if not all(word.strip() for word in self.bad_words):
            raise ConfigError(f"sampling.bad_words={list(self.bad_words)} holds a string without a character.")
        object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def truncation(self) -> Truncation:
        """The tokens that may be drawn at all; greedy decoding has no use for it."""
        return Truncation() if self.greedy else Truncation(self.top_k, float(self.top_p), float(self.min_p))

    @property
    def reshaped(self) -> list[str]:
        """The settings in force that make the sampled distribution differ from softmax(logits / temperature)."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
        off |= {"bad_words": (), "logit_bias": {}, "structured": None}
        return [name for name, value in off.items() if getattr(self, name) != value]

    @property
    def unscored(self) -> list[str]:
        """The settings in force that training's log-probs do not account for."""
        return [name for name in self.reshaped if name in ("bad_words", "logit_bias", "structured")]


@dataclass
class PromptBatch:
    """A batch of prompts on this rank, as the data module yields it. Text and ids only, so it lives on the CPU.

    To be treated as frozen like its neighbours; it is not declared so because Lightning's precision plugins rebuild
    every batch field by field, and refuse a frozen one.
    """

    prompts: Sequence[Prompt]
    """Prompts as rewards see them: text or messages."""
    prompt_ids: Sequence[list[int]]
    """The same prompts as token ids, rendered and tokenised once."""
    columns: Mapping[str, Sequence[Any]]
    """Every other column of the rows, by name: keyword arguments of the reward functions."""
    rows: Sequence[int]
    """Index of each prompt in its data set: with ``occurrences``, the name of its noise."""
    occurrences: Sequence[int]
    """Earlier occurrences of the same row in the same rollout, over all ranks."""
    rollout: int = 0
    """Index of the rollout since the start of the run, over all epochs."""
    slot: int = 0
    """0..R-1: which of the R micro-batches of this rollout Lightning's loop is at. 0 generates."""
    upcoming: Sequence[PromptBatch] = ()
    """At slot 0, if the generator lags: the prompts of the next `lag` rollouts, fewer at the end of a run. Else
    empty."""
    vision: Callable[[Sequence[int]], Sequence[PromptVision | None]] | None = None
    """Makes the vision inputs of prompts from the indices of their rows. None where no prompt of
    the data has images."""
    sharing: int = 1
    """Ranks that complete these prompts together: each draws, and learns from, an equal share of every group."""
    share: int = 0
    """Index of this rank among them: its completions are those of its share, in the order of samples."""

    def __len__(self) -> int:
        return len(self.prompts)

    def to(self, device: Any) -> PromptBatch:
        """Return itself, as there is nothing to move. Called by Lightning."""
        return self


@dataclass(frozen=True)
class Prompts:
    """A request to a generator: ``group_size`` completions of each prompt."""

    token_ids: Sequence[list[int]]
    """Prompt token ids, unpadded. Never empty."""
    keys: Sequence[int]
    """One 64-bit noise key a prompt, made of (seed, rollout, data-set row, occurrence) by ``generation.noise``."""
    group_size: int
    eos_ids: tuple[int, ...]
    """Every token that ends a response: the union over tokenizer, config and generation config."""
    pad_id: int
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids to text, special tokens kept. Needed only where ``Sampling.stop`` is set."""
    encode: Callable[[str], Sequence[int]] | None = None
    """Text to token ids, without special tokens around it. Needed only where ``Sampling.bad_words`` is set."""
    responder: Responder | None = None
    """The responder to each turn of a row. None: a row is over with its first turn."""
    vision: Sequence[PromptVision | None] = ()
    """Vision inputs of each prompt; empty where no prompt has images."""
    on_finished: Callable[[int, list[int]], None] | None = None
    """Callback for finished single-turn responses while others are still generated: called with the row and its tokens,
    EOS included, in the thread that called ``generate``. A generator calls it once per row, or not at all."""

    def longest_response(self, sampling: Sampling) -> int:
        """Return the most tokens that a row may have, including those of the environment between its turns."""
        return sampling.max_new_tokens if self.responder is None else self.responder.max_tokens

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Completions(CopiedToHost):
    """The result of a generator. Rows ``i * group_size ... (i + 1) * group_size - 1`` belong to prompt ``i``."""

    prompt_ids: Tensor = field(metadata=PER_PROMPT_TOKEN)
    """Long ``(b, p)``, padded on the left."""
    prompt_mask: Tensor = field(metadata=PER_PROMPT_TOKEN)
    """Bool ``(b, p)``: True on the prompt's tokens."""
    response_ids: Tensor = field(metadata=PER_RESPONSE_TOKEN)
    """Long ``(b, t)``, padded on the right."""
    response_mask: Tensor = field(metadata=PER_RESPONSE_TOKEN)
    """Bool ``(b, t)``: True on tokens that the policy sampled, EOS included. Made where the tokens are made, never
    derived from ``ids == pad``."""
    sampler_logprobs: Tensor = field(metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t)``: log-probs by the engine, of the distribution it drew from; 0 outside ``response_mask``."""
    ended: Tensor = field(metadata=PER_ROW)
    """Bool ``(b,)``: the response ended by EOS or a stop string, or its conversation reached its end; False where
    ``max_new_tokens``, or another limit, cut it."""
    group_id: Tensor = field(metadata=PER_ROW)
    """Long ``(b,)``: equal for completions of one prompt."""
    version: int = 0
    """The policy version that the generator was synced to."""
    attended: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Bool ``(b, t)``, a superset of ``response_mask``: also tokens that a tool or an environment wrote between turns.
    None where the policy wrote every token."""
    kept_logmass: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t)``: log of the probability that top-k, top-p and min-p left when the token was drawn; 0 where
    they cut nothing, and outside ``response_mask``. None where none of them is in force, or the engine cannot tell."""
    turn: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Long ``(b, t)``: index of the turn a token belongs to. None for single-turn responses."""
    follows: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Long ``(b, t)``: the column of the token that each stands behind; negative ones are the prompt's, see
    `lit_rl.core.branches`. None where each stands behind the one before it."""
    blocked_eos: Tensor | None = field(default=None, metadata=PER_ROW)
    """Long ``(b, k)``: the tokens that end a turn, blocked at its begin by ``Sampling.min_new_tokens``. None if none
    is blocked."""
    vision: Vision | None = None
    """Vision inputs of the rows. None where no prompt has images."""
    episodes: tuple[Episode, ...] | None = None
    """One finished conversation per row, in words. None where nothing answers the policy."""
    host: HostCopy | None = field(default=None, repr=False, compare=False)
    """See `with_host`: `select` and `trim` take it along. None where the host has no copy."""

    def __len__(self) -> int:
        return self.response_ids.shape[0]

    @property
    def device(self) -> torch.device:
        """The device on which the tokens lie."""
        return self.response_ids.device

    @property
    def _columns(self) -> dict[str, Tensor]:
        return {name: value for name, _, value in columns_of(self) if value is not None}

    @property
    def attention_mask(self) -> Tensor:
        """Bool ``(b, p + t)``."""
        attended = self.response_mask if self.attended is None else self.attended
        return torch.cat([self.prompt_mask, attended], dim=1)

    @property
    def without_episodes(self) -> Completions:
        """The tensors alone, for learning and for checkpoints."""
        return self if self.episodes is None else dataclasses.replace(self, episodes=None)

    @property
    def observed(self) -> Tensor:
        """Bool ``(b, t)``: True on tokens that a tool or an environment wrote between turns."""
        mask = self.response_mask
        return torch.zeros_like(mask) if self.attended is None else self.attended & ~mask

    @property
    def with_observations(self) -> Completions:
        """The same rows with what was observed counted as sampled, so that a forward pass scores these tokens too."""
        if self.attended is None:
            return self
        found, host = dataclasses.replace(self, response_mask=self.attended), self.kept_on_host
        return found.with_host(None if host is None else dataclasses.replace(host, response_mask=host.attended))

    @property
    def lengths(self) -> Tensor:
        """Long ``(b,)``: sampled tokens a row, EOS included."""
        return self.response_mask.sum(1)

    @property
    def index_in_turn(self) -> Tensor:
        """Long ``(b, t)``: index of each sampled token within its turn; undefined elsewhere."""
        before = self.response_mask.cumsum(1) - self.response_mask.long()
        if self.turn is None:
            return before
        begins = before.new_full(before.shape, before.shape[1]).scatter_reduce(1, self.turn, before, "amin")
        return before - begins.gather(1, self.turn)

    @property
    def read_lengths(self) -> Tensor:
        """Long ``(b,)``: tokens per row that a model reads after the prompt, including the environment's between
        turns."""
        return self.lengths if self.attended is None else self.attended.sum(1)


@dataclass(frozen=True)
class Rollout:
    """Scored completions: all that a policy-gradient loss needs, and only tensors (so a checkpoint can hold it)."""

    completions: Completions
    rewards: Tensor = field(metadata=PER_ROW)
    """Float32 ``(b,)``: weighted sum over functions, after shaping, normalisation, clipping and the KL in the reward;
    NaN where no function applied."""
    advantages: Tensor | None = field(metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b,)``, or ``(b, t)`` where tokens differ. None where pairs are learned; see ``verdicts``."""
    loss_mask: Tensor = field(metadata=PER_RESPONSE_TOKEN)
    """Bool ``(b, t)``: the tokens of the loss, a subset of ``response_mask`` (masked truncated rows are all False)."""
    verdicts: Tensor | None = field(default=None, metadata=PER_ROW)
    """Float32 ``(b,)``: 1 for the completion of a prompt that a judge found better, -1 for the worse one of the pair, 0
    for all others. None where no pairs are learned."""
    old_logprobs: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t)``: the policy when the rollout was taken. None where the ratio is 1 by construction."""
    ref_logprobs: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t)``: the reference. None where no term needs it."""
    weights: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t)``: factors of each token's loss, for an engine that samples from a slightly other
    policy. None where nothing is corrected."""
    old_values: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t)``: the critic when the rollout was taken. None without a critic."""
    returns: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t)``: the targets of the critic. None without a critic."""
    kl_factor: float = 1.0
    """The factor of the KL's controller when the rollout was taken. Both weights of the KL are multiplied by it."""
    teacher_logprobs: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t)``: a teacher's; anything outside `teacher_mask`. None without a teacher."""
    teacher_mask: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Bool ``(b, t)``: the tokens of the loss of which the teacher has an opinion. None without a teacher."""
    teacher_top_ids: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Long ``(b, t, k)``: the likeliest tokens of the teacher, or of the policy that took the rollout. None where none
    are learned."""
    teacher_top_logprobs: Tensor | None = field(default=None, metadata=PER_RESPONSE_TOKEN)
    """Float32 ``(b, t, k)``: the teacher's of these. None where none are learned."""

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def teacher(self) -> TeacherScores | None:
        """The teacher's scores of the tokens of the loss. None without a teacher."""
        if self.teacher_logprobs is None or self.teacher_mask is None:
            return None
        top = self.teacher_top_ids, self.teacher_top_logprobs
        return TeacherScores(self.teacher_logprobs, self.teacher_mask, *top)


def select(item: Any, rows: Tensor) -> Any:
    """Select rows of a frozen dataclass of tensors, recursively; values without a row dimension are kept.

    Rows are best passed in the host's memory: then the host does not wait for a device, and they are moved once.
    """
    return _selected(item, {rows.device: rows}, rows)


def _selected(item: Any, by_device: dict[torch.device, Tensor], rows: Tensor) -> Any:
    """Select rows as `select` does, with a cache of the rows on each device."""
    if isinstance(item, Tensor):
        if item.device not in by_device:
            by_device[item.device] = to_device(rows, item.device) if rows.device.type == "cpu" else rows.to(item.device)
        return item[by_device[item.device]]
    if isinstance(item, Vision):
        return item.select(rows)
    if isinstance(item, Mapping):
        return {key: _selected(value, by_device, rows) for key, value in item.items()}
    if isinstance(item, tuple):
        return tuple(item[row] for row in rows.tolist())
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [f.name for f in dataclasses.fields(item) if f.name != "host"]
        found: Any = dataclasses.replace(
            item, **{name: _selected(getattr(item, name), by_device, rows) for name in names}
        )
        if isinstance(item, Completions) and item.host is not None and (kept := item.kept_on_host) is not None:
            found = found.with_host(_selected(kept, by_device, rows))
        return found
    return item


def trim(completions: Completions) -> Completions:
    """Drop the columns that are padding in every row: cheaper, same result."""
    return _cut(completions, used_columns(completions))


def trim_rollout(rollout: Rollout, used: Mapping[Width, slice] | None = None) -> Rollout:
    """Drop the columns that are padding in every row: all but the `used` ones, if these are known."""
    used = used_columns(rollout.completions) if used is None else used
    return dataclasses.replace(_cut(rollout, used), completions=_cut(rollout.completions, used))


def used_columns(completions: Completions) -> dict[Width, slice]:
    """Return the columns that hold a token in some row: the last of the prompt's, the first of the response's."""
    return used_columns_of_parts(completions, [slice(None)])[0]


def used_columns_of_parts(completions: Completions, parts: Sequence[Tensor | slice]) -> list[dict[Width, slice]]:
    """Return `used_columns` of each part of the rows, from `Completions.on_host`: pass rows of the host."""
    p = completions.prompt_mask.shape[1]
    attended = completions.on_host.attention_mask
    columns = torch.arange(attended.shape[1], device=attended.device)
    bounds = []
    for rows in parts:
        used = attended[rows].any(0)
        prompt, response = torch.where(used, columns, p)[:p], (columns + 1 - p) * used
        bounds.append(torch.stack([F.pad(prompt, (0, 1), value=p).amin(), response.amax().clamp(min=1)]))
    return [
        {Width.PROMPT: slice(first, None), Width.RESPONSE: slice(0, last)}
        for first, last in torch.stack(bounds).tolist()
    ]


def _cut(item: Any, used: Mapping[Width, slice]) -> Any:
    cut = {
        name: value[:, used[width]]
        for name, width, value in columns_of(item)
        if value is not None and width is not Width.NONE
    }
    found = dataclasses.replace(item, **cut)
    if isinstance(item, Completions) and item.host is not None and (kept := item.kept_on_host) is not None:
        found = found.with_host(_cut(kept, used))
    return found


def join_completions(first: Completions, second: Completions) -> Completions:
    """Join the rows of both; `version` is the first's.

    A column that one of them lacks is filled with its meaning: all sampled tokens were attended, in the first turn,
    each behind the one before it; the mass left by truncation is known for all rows, or for none; rows without images
    see none.
    """
    joined = _joined(_filled(first, second), _filled(second, first))
    vision = None
    if first.vision is not None or second.vision is not None:
        vision = (first.vision or Vision.blind(len(first))).joined(second.vision or Vision.blind(len(second)))
    episodes = None if first.episodes is None or second.episodes is None else (*first.episodes, *second.episodes)
    return dataclasses.replace(joined, vision=vision, episodes=episodes)


def join_rollouts(first: Rollout, second: Rollout) -> Rollout:
    """Join the rows of both, which have the same columns; values that are no column are the first's."""
    joined = _joined(first, second)
    return dataclasses.replace(joined, completions=join_completions(first.completions, second.completions))


def _filled(one: Completions, other: Completions) -> Completions:
    changes: dict[str, Any] = {}
    if one.attended is None and other.attended is not None:
        changes["attended"] = one.response_mask
    if one.turn is None and other.turn is not None:
        changes["turn"] = torch.zeros_like(one.response_ids)
    if one.follows is None and other.follows is not None:
        changes["follows"] = (torch.arange(one.response_ids.shape[1], device=one.device) - 1).expand_as(
            one.response_ids
        )
    if other.kept_logmass is None:
        changes["kept_logmass"] = None
    return dataclasses.replace(one, **changes)


def _joined(one: Any, two: Any) -> Any:
    """Join columns at the width of the wider one; values outside the masks are 0, and never read."""
    values: dict[str, Tensor] = {}
    for (name, width, first), (_, _, second) in zip(columns_of(one), columns_of(two)):
        assert (first is None) == (second is None), name
        if first is None or second is None:
            continue
        parts = [first, second]
        if width is not Width.NONE:
            widest = max(part.shape[1] for part in parts)
            missing = [widest - part.shape[1] for part in parts]
            inner = (0, 0) * (first.ndim - 2)  # of several numbers a token
            pads = [(*inner, count, 0) if width is Width.PROMPT else (*inner, 0, count) for count in missing]
            parts = [F.pad(part, pad) for part, pad in zip(parts, pads)]
        values[name] = torch.cat(parts)
    return dataclasses.replace(one, **values)
