"""`env=rollout_func`: a user's function makes the rollouts, by TRL's signature and keys.

It is called as ``function(prompts, trainer)`` with a prompt for each completion of this process, those of a group being
neighbours; ``trainer`` is a `RolloutHandle`. It returns a dict of lists, one entry a completion: ``prompt_ids``,
``completion_ids`` and ``logprobs``; ``env_mask``, with 1 for the tokens that the policy wrote, where it did not write
all; ``ended`` where more than an EOS ends a completion; ``episode_messages`` where the conversation is more than the
text of the tokens; ``episode_error``, the error of completions that failed by no fault of the policy; ``env_follows``,
the token that each stands behind, where the policy did not read one text that goes on (`lit_rl.core.branches`); and
``episode_limit``, the limit that ended it. Other keys go to the reward functions under their names.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby
from typing import Any, Literal

import torch

from lit_rl.core import ranks
from lit_rl.core.branches import Branch, branches_of_row
from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import End, Episode, Message, Prompt
from lit_rl.core.errors import ConfigError, GenerationError, LitRLError, NumericError, describe_error, excerpt, in_range
from lit_rl.core.interrupts import TimeLimitExceeded, time_limit
from lit_rl.core.process_state import is_raised_by_user_code, mix_seed, preserve_process_state, seed_generators
from lit_rl.core.ranks import background_thread
from lit_rl.core.rollout import Completions, PromptBatch, Prompts
from lit_rl.core.transfers import right_pad
from lit_rl.core.user_functions import load_by_path
from lit_rl.data.rendering import encode_prompt
from lit_rl.environments.environment_base import EpisodeRequest, EpisodeSource, Interactive
from lit_rl.environments.episode_replay import error_line
from lit_rl.generation.generator import Decoded, assemble
from lit_rl.generation.noise import sample_key, turn_key
from lit_rl.ops.ranges import AtLeastOne, Portion, Positive
from lit_rl.rewards.contract import ARGUMENTS, SINGULAR


@checked("env")
class RolloutFunction(Interactive):
    """The settings of `env=rollout_func`.

    Args:
        path: ``package.module:name`` or ``./file.py:name``; in Python also the function itself.
        columns: Further keys of the returned dict, which reward functions take as arguments. A function may name them
            itself, by an attribute ``columns``.
        max_tokens: Most tokens of a completion, or of each of its branches, with those that the policy did not write.
            None: 2048, or as many as the model's context leaves.
        max_prompt_tokens: Most tokens of a prompt; None: those of the longest prompt of the data.
        max_branches: Texts that the policy may read and write in one completion: more than 1 for agents that shorten
            their history, branch or drop thoughts. Memory is planned for as many rows a completion.
        rollout_timeout: Seconds that a call of the function may take. After a timeout its rollout is lost, and the run
            is saved and ends. None is no limit.
        max_failed: Share of a rollout's completions that the function may mark as failed. They are not learned from; a
            larger share ends the run.

    Raises:
        ConfigError: there is no such function, it cannot be called so, or a setting is out of range.
    """

    converses = False

    def __init__(
        self,
        path: str | Callable[..., Any],
        *,
        columns: Sequence[str] = (),
        max_tokens: AtLeastOne | None = None,
        max_prompt_tokens: AtLeastOne | None = None,
        max_branches: AtLeastOne = Interactive.max_branches,
        rollout_timeout: Positive | None = None,
        max_failed: Portion = Interactive.max_failed,
    ) -> None:
        if isinstance(columns, str):
            raise ConfigError(f"env.columns={columns!r} is a text; it takes a list of names: [{columns}].")
        self.function, self.name = _load_function(path)
        self.max_tokens = Interactive.max_tokens if max_tokens is None else max_tokens
        self.untyped, self.max_prompt_tokens = frozenset(("max_tokens",) * (max_tokens is None)), max_prompt_tokens
        self.max_branches, self.rollout_timeout, self.max_failed = max_branches, rollout_timeout, max_failed
        self.columns = ("episodes", *dict.fromkeys([*getattr(self.function, "columns", ()), *columns]))


def _load_function(path: str | Callable[..., Any]) -> tuple[Callable[..., Any], str]:
    """Return the function and its name. Refuse one that cannot be called with two arguments."""
    function: Any = load_by_path(path, "env.path").value if isinstance(path, str) else path
    name = path if isinstance(path, str) else getattr(path, "__name__", type(path).__name__)
    if not callable(function):
        raise ConfigError(f"env.path={name} is a {type(function).__name__}; it takes a function(prompts, trainer).")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"env.path={name} is async. It is called as function(prompts, trainer) and waited for: write it as `def`, "
            "with asyncio.run inside where it needs one."
        )
    try:
        inspect.signature(function).bind([], None)
    except TypeError as error:
        raise ConfigError(f"env.path={name} cannot be called as function(prompts, trainer): {error}.") from error
    except ValueError:
        pass  # a builtin without a signature
    return function, name


class RolloutCalls(EpisodeSource):
    """The calls of a rollout function.

    Args:
        settings: The settings that name the function.
        tokenizer: The policy's.
        template_kwargs: The data's arguments of the chat template.
        longest: Tokens of the longest prompt of the data.
    """

    def __init__(
        self, settings: RolloutFunction, tokenizer: Any, template_kwargs: Mapping[str, Any], longest: int
    ) -> None:
        self._settings, self._tokenizer, self._template_kwargs = settings, tokenizer, dict(template_kwargs)
        self._longest_prompt = self.longest_prompt(longest)

    @property
    def settings(self) -> RolloutFunction:
        return self._settings

    def lengths(self, longest: int) -> dict[str, int]:
        most = self._settings.max_prompt_tokens
        prompt = {"the longest prompt": longest} if most is None else {"env.max_prompt_tokens": most}
        return {**prompt, "env.max_tokens": self._settings.max_tokens}

    def draw(self, request: EpisodeRequest) -> Completions:
        encode = partial(encode_prompt, self._tokenizer, chat_template_kwargs=self._template_kwargs)
        limits = self._settings.max_tokens, self._settings.max_branches
        handle = RolloutHandle(request, encode, self._tokenizer, self._template_kwargs, *limits)
        return request.agree(lambda: self._drawn(handle, request))

    def _drawn(self, handle: RolloutHandle, request: EpisodeRequest) -> Completions:
        batch, asked = request.batch, request.prompts
        begun, count = time.perf_counter(), len(batch) * asked.group_size
        returned = ReturnedRollout(
            self._called(batch, handle, mix_seed("env.path", *request.row_keys)),
            self._settings.name,
            count,
            group_size=asked.group_size,
            max_prompt_tokens=self._longest_prompt,
            max_tokens=self._settings.max_tokens,
            max_branches=self._settings.max_branches,
        )
        waited = time.perf_counter() - begun - handle.seconds
        self.waited, seconds = self.waited + waited, waited / count
        extra = returned.extra(list(batch.columns), self._settings.columns[1:])
        asked = replace(asked, token_ids=[row.prompt_ids for row in returned.rows[:: asked.group_size]])
        decoded = returned.decoded(asked)
        completions = assemble(asked, [(torch.arange(count), decoded)], version=0, device=torch.device("cpu"))
        completions = replace(completions, follows=returned.follows())
        facts = zip(returned.rows, handle.of_completions(batch.prompts), decoded.ended.tolist(), extra, strict=True)
        return replace(completions, episodes=tuple(self._episode(*each, seconds) for each in facts))

    def _called(self, batch: PromptBatch, handle: RolloutHandle, seed: int) -> Any:
        limit, prompts = self._settings.rollout_timeout, handle.of_completions(batch.prompts)
        try:
            with preserve_process_state(f"env.path={self._settings.name}"), time_limit(limit, "env.rollout_timeout"):
                seed_generators(seed)
                return self._settings.function(prompts, handle)
        except LitRLError:
            raise
        except TimeLimitExceeded as error:
            raise GenerationError(
                f"env.path={self._settings.name} took longer than env.rollout_timeout={limit:g} s. Nothing of what it "
                "made can be learned from: limit inside it what it waits for, or allow more."
            ) from error
        except BaseException as error:
            if not is_raised_by_user_code(error):
                raise
            raise GenerationError(f"env.path={self._settings.name} raised {describe_error(error)}") from error

    def _episode(self, row: ReturnedRow, prompt: Prompt, ended: bool, extra: dict[str, Any], seconds: float) -> Episode:
        messages = row.messages
        if messages is None:
            # A stretch of tokens by one author is a message. Tokens do not name the author of answers: it is the user.
            messages, parts = [], zip(row.written, row.turns, row.token_ids, strict=True)
            for (by_policy, _), part in groupby(parts, key=lambda each: each[:2]):
                text = self._tokenizer.decode([token for *_, token in part], skip_special_tokens=True)
                messages.append({"role": "assistant" if by_policy else "user", "content": str(text)})
        end: End = row.limit or ("answered" if ended else "cut")
        return Episode(
            prompt=prompt,
            messages=messages,
            end=end if row.failure is None else row.failure.end,
            turns=row.turns[-1] + 1,
            observed_tokens=row.written.count(False),
            seconds=seconds,
            extra=extra,
            error=None if row.failure is None else row.failure.error,
            branches=len(row.branches) if self._settings.max_branches > 1 else None,
            read_again=sum(len(branch.places) for branch in row.branches)
            - len({*chain(*(branch.places for branch in row.branches))}),
            forks=row.forks,
        )


# ------------------------------------------------------------------ the second argument

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of the sampling that have the same name in TRL."""

_DOCUMENTED_IN = "(docs/agents.md, A function that makes the rollouts)"


class TrainerPart:
    """A part of TRL's trainer, with those of its names that rollout functions read.

    Args:
        part: Its name in the trainer.
        named: The values by name.
    """

    def __init__(self, part: str, **named: Any) -> None:
        self._part = part
        vars(self).update(named)

    def __getattr__(self, name: str) -> Any:
        """Refuse another name of TRL's.

        Raises:
            AttributeError: always: Python finds existing attributes first.
        """
        if name == "_part":  # of a copy that is being made
            raise AttributeError(name)
        known = sorted(each for each in {*vars(self), *vars(type(self))} if not each.startswith("_"))
        raise AttributeError(
            f"trainer.{self._part} of a rollout function has no {name!r}. It has {', '.join(known)} {_DOCUMENTED_IN}."
        )


class VLLMGenerationCalls(TrainerPart):
    """`trainer.vllm_generation`: TRL's call of its engine, answered by the run's generator of any kind.

    Args:
        handle: The trainer of the function.
    """

    def __init__(self, handle: RolloutHandle) -> None:
        super().__init__("vllm_generation")
        self._handle = handle

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        num_generations: int | None = None,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Let the policy continue the tokens of each completion, once.

        Args:
            prompts: The tokens for each completion, those of a prompt repeated, as TRL passes them.
            images: Not supported.
            num_generations: Completions of a prompt, which are in `prompts`.
            profiler: Not used.

        Returns:
            Prompt ids, completion ids, and for each token a list of one log-prob and one of its id.

        Raises:
            GenerationError: there are images, or not one text for each completion.
        """
        if images is not None and any(each is not None for each in images):
            raise GenerationError("trainer.vllm_generation.generate got images, which a rollout function does not see.")
        drawn = self._handle.generate(prompts)
        logprobs = [[[value] for value in values] for values in drawn["logprobs"]]
        ids = [[[token] for token in tokens] for tokens in drawn["completion_ids"]]
        return drawn["prompt_ids"], drawn["completion_ids"], logprobs, ids

    def sync_weights(self) -> None:
        """Do nothing: the generator has the current weights before the function is called."""


class RolloutHandle:
    """The `trainer` of a rollout function: the tokenizer, and the run's generator, synced to the policy.

    The names of TRL's trainer that its rollout functions read are there too: settings of the sampling, also in `args`,
    `state.global_step`, places and device in `accelerator`, and `vllm_generation.generate`.

    Args:
        request: The requested completions.
        encode: From a prompt to its tokens, as the run does it.
        tokenizer: The policy's.
        template_kwargs: Arguments of the chat template.
        max_tokens: Most tokens of a completion, with those that the policy did not write.
        max_branches: Most branches of a completion.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        encode: Callable[..., list[int]],
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        max_tokens: int,
        max_branches: int = 1,
    ) -> None:
        self._generate, self._asked, self._keys = request.generate, request.prompts, request.row_keys
        self._thread, self._calls = threading.get_ident(), [0] * len(request.row_keys)
        self._context = request.context
        self.seconds = 0.0
        """Seconds that `generate` has taken so far."""
        self.sampling = request.sampling
        """The run's sampling."""
        self.encode = encode
        """A function from a prompt to its tokens, by the chat template and its arguments."""
        self.tokenizer = self.processing_class = tokenizer
        self.template_kwargs, self.max_tokens, self.max_branches = dict(template_kwargs), max_tokens, max_branches
        self.eos_ids = tuple(request.prompts.eos_ids)
        """Every token that ends a turn."""
        self.count = len(request.row_keys)
        """Completions of this process."""
        self.columns = {name: self.of_completions(values) for name, values in request.batch.columns.items()}
        """The columns of the data, one entry a completion."""
        self.num_generations = self._asked.group_size
        """Completions of each prompt."""
        sampling, place = self.sampling, ranks.rank()
        named = {name: getattr(sampling, name) for name in _SAMPLING}
        named |= {"max_completion_length": sampling.max_new_tokens, "num_generations": self.num_generations}
        named |= {"chat_template_kwargs": self.template_kwargs}
        vars(self).update(named)
        self.args = TrainerPart("args", **named)
        self.state = TrainerPart("state", global_step=request.version)
        self.accelerator = TrainerPart(
            "accelerator",
            device=torch.device(request.device),
            process_index=place,
            num_processes=ranks.world_size(),
            is_main_process=place == 0,
        )
        self.vllm_generation = VLLMGenerationCalls(self)

    def __getattr__(self, name: str) -> Any:
        """Refuse a name of TRL's trainer, with a list of the names that exist.

        Raises:
            AttributeError: always: Python finds existing attributes first.
        """
        known = sorted({*vars(self), "generate"} - {each for each in vars(self) if each.startswith("_")})
        raise AttributeError(
            f"The trainer of a rollout function has no {name!r}: it is not TRL's GRPOTrainer. It has "
            f"{', '.join(known)} {_DOCUMENTED_IN}. "
            "Completions are drawn by trainer.generate(ids)."
        )

    def of_completions(self, values: Sequence[Any]) -> list[Any]:
        """Return copies of values that are there once a prompt, one for each completion."""
        return [copy.deepcopy(value) for value in values for _ in range(self._asked.group_size)]

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        *,
        rows: Sequence[int] | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
    ) -> dict[str, list[Any]]:
        """Let the policy continue texts. A sample depends on its completion and on how often that was continued so far,
        and on no other text; with vLLM, a first one that is requested without the others differs from one with them.

        Args:
            prompt_ids: The tokens of each text.
            rows: The completion of each text. None: there is one for every completion, in order.
            max_new_tokens: One number, or one for each text. None is `sampling.max_new_tokens`. Texts are drawn
                together as long as they fit in the model's context, and each is cut to its own number: it gets the
                tokens that it would have got alone.

        Returns:
            ``prompt_ids``, ``completion_ids`` and ``logprobs``, as a rollout function returns them, and ``ended``:
            whether each came to its end.

        Raises:
            GenerationError: a text for no completion, or called in another thread than the function.
        """
        numbers = list(range(len(self._keys))) if rows is None else list(rows)
        if threading.get_ident() != self._thread:
            raise GenerationError(
                "trainer.generate was called in another thread than the rollout function: call it there."
            )
        known = set(range(len(self._keys)))
        if len(prompt_ids) != len(numbers) or len(set(numbers)) < len(numbers) or not set(numbers) <= known:
            raise GenerationError(
                f"trainer.generate got {len(prompt_ids)} texts for the completions {excerpt(repr(numbers))}. "
                f"There are {len(self._keys)}, each at most once in a call: say with rows=[...] which they are for."
            )
        if not numbers:
            return {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "ended")}
        texts, limits = [list(ids) for ids in prompt_ids], self._limits(max_new_tokens, len(numbers))
        drawn: dict[int, tuple[list[int], list[float], bool]] = {}
        for together in self._together(texts, limits):
            most = max(limits[place] for place in together)
            parts = self._drawn([texts[place] for place in together], [numbers[place] for place in together], most)
            for place, (ids, logprobs, ended) in zip(together, parts):
                limit = limits[place]  # a longer completion has not come to its end there
                drawn[place] = ids[:limit], logprobs[:limit], ended and len(ids) <= limit
        completions = [drawn[place] for place in range(len(texts))]
        columns = dict(zip(("completion_ids", "logprobs", "ended"), map(list, zip(*completions))))
        return {"prompt_ids": texts, **columns}

    def _limits(self, max_new_tokens: int | Sequence[int] | None, count: int) -> list[int]:
        """Return the most new tokens of each of ``count`` texts."""
        given = self.sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        limits = [given] * count if isinstance(given, int) else list(given)
        if len(limits) != count:
            raise GenerationError(
                f"trainer.generate got {count} texts and {len(limits)} values of max_new_tokens. Give one number for "
                "all, or one per text."
            )
        for limit in set(limits):
            in_range("max_new_tokens", limit, low=1)
        return limits

    def _together(self, texts: Sequence[list[int]], limits: Sequence[int]) -> Iterator[list[int]]:
        """Yield the places of the texts of each call. All are drawn with the largest limit, which changes nothing
        for a text that stays in the context, and whose EOS `min_new_tokens` blocks for as long as it would alone."""
        left, least = list(range(len(texts))), self.sampling.min_new_tokens
        while left:
            most = max(limits[place] for place in left)
            together = [
                place
                for place in left
                if limits[place] == most
                or (min(least, limits[place]) == min(least, most) and len(texts[place]) + most <= self._context)
            ]
            yield together
            left = [place for place in left if place not in together]

    def _drawn(
        self, texts: Sequence[list[int]], rows: Sequence[int], limit: int
    ) -> list[tuple[list[int], list[float], bool]]:
        """Return tokens and log-probs of the continuations, and whether each came to its end."""
        sampling = replace(self.sampling, max_new_tokens=limit, min_new_tokens=min(self.sampling.min_new_tokens, limit))
        begun = time.perf_counter()
        with background_thread():  # ranks call it as often as they like: none waits for another
            out = self._generate(self._prompts(texts, rows), sampling)
        self.seconds += time.perf_counter() - begun
        for row in rows:
            self._calls[row] += 1
        within = [mask.nonzero()[:, 0] for mask in out.response_mask]
        return [
            (ids[columns].tolist(), logprobs[columns].tolist(), ended)
            for ids, logprobs, ended, columns in zip(
                out.response_ids, out.sampler_logprobs, out.ended.tolist(), within, strict=True
            )
        ]

    def _prompts(self, prompt_ids: Sequence[list[int]], rows: Sequence[int]) -> Prompts:
        """Return the request: whole groups at their first turn, as it would be without a rollout function."""
        group, asked = self._asked.group_size, self._asked
        firsts = prompt_ids[::group]
        whole = list(rows) == list(range(len(self._keys))) and not any(self._calls)
        if whole and prompt_ids == [ids for ids in firsts for _ in range(group)]:
            return replace(asked, token_ids=firsts)
        keys = [
            turn_key(self._keys[row], self._calls[row])
            if self._calls[row]
            else sample_key(asked.keys[row // group], row % group)
            for row in rows
        ]
        return replace(asked, token_ids=prompt_ids, keys=keys, group_size=1)


# ------------------------------------------------------------------ the returned dict

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"
ENDED = "ended"
MESSAGES = "episode_messages"
ERROR = "episode_error"
FOLLOWS = "env_follows"
LIMIT = "episode_limit"
_OPTIONAL = (MASK, ENDED, MESSAGES, ERROR, FOLLOWS, LIMIT)

_OWN = (*REQUIRED, *_OPTIONAL)
"""Keys of its own; all others are for rewards."""

_LIMITS: tuple[End, ...] = ("max_turns", "max_tokens", "max_branches", "cut")


class ReturnedRollout:
    """The dict of a rollout function.

    Args:
        returned: The function's value.
        who: The function's name, for messages.
        count: Requested completions.
        group_size: Completions of each prompt.
        max_prompt_tokens: Most tokens of a prompt.
        max_tokens: Most tokens of a completion, or of each of its branches.
        max_branches: Most branches of a completion.

    Raises:
        GenerationError: it is no dict of lists of the right lengths; names the key and the completion.
        NumericError: a log-prob is not finite.
    """

    def __init__(
        self,
        returned: Any,
        who: str,
        count: int,
        *,
        group_size: int,
        max_prompt_tokens: int,
        max_tokens: int,
        max_branches: int = 1,
    ) -> None:
        self._who, self._count = who, count
        missing = [key for key in REQUIRED if not isinstance(returned, Mapping) or key not in returned]
        if missing:
            kind = f"a dict without {', '.join(missing)}" if isinstance(returned, Mapping) else type(returned).__name__
            raise self._wrong(
                f"returned {kind}, expected a dict with {', '.join(REQUIRED)}: lists with one entry per completion"
            )
        self._returned = returned
        columns = [self._list(key) for key in REQUIRED]
        columns += [self._list(key) if returned.get(key) is not None else [None] * count for key in _OPTIONAL]
        self.rows = [self._row(index, *parts) for index, parts in enumerate(zip(*columns, strict=True))]
        self.has_mask = any(returned.get(key) is not None for key in (MASK, FOLLOWS))
        for index, row in enumerate(self.rows):
            if row.prompt_ids != self.rows[index // group_size * group_size].prompt_ids:
                raise self._wrong(
                    f"gave completion {index} other prompt_ids than the first of its group: the {group_size} "
                    "completions of a prompt are compared, and answer the same"
                )
            if len(row.prompt_ids) > max_prompt_tokens:
                raise self._wrong(
                    f"gave completion {index} a prompt of {len(row.prompt_ids)} tokens, and the run is planned for "
                    f"{max_prompt_tokens}: set env.max_prompt_tokens"
                )
            longest = max(len(branch.places) - branch.prompt for branch in row.branches)
            if longest > max_tokens:
                of_one = " in one branch" if len(row.branches) > 1 else ""
                raise self._wrong(
                    f"gave completion {index} {longest} tokens{of_one}, and env.max_tokens={max_tokens}: raise it, "
                    "or end conversations earlier"
                )
            if len(row.branches) > max_branches:
                raise self._wrong(
                    f"gave completion {index} {len(row.branches)} branches by {FOLLOWS}, and env.max_branches="
                    f"{max_branches}: raise it, or go on with one text"
                )
            if not all(branch.prompt for branch in row.branches):
                raise self._wrong(f"gave completion {index} a token of the policy with nothing before it, by {FOLLOWS}")

    def _wrong(self, what: str) -> GenerationError:
        return GenerationError(f"env.path={self._who} {what}.")

    def _list(self, key: str) -> Sequence[Any]:
        values = self._returned[key]
        if not _is_listed(values) or len(values) != self._count:
            length = f"{len(values)} entries" if _is_listed(values) else type(values).__name__
            raise self._wrong(f"returned {length} as {key}, expected a list of {self._count}, one per completion")
        return values

    def _row(self, index: int, prompt_ids: Any, token_ids: Any, logprobs: Any, *optional: Any) -> ReturnedRow:
        mask, ended, messages, error, follows, limit = optional
        prompt, tokens = self._ids(index, "prompt_ids", prompt_ids), self._ids(index, "completion_ids", token_ids)
        lengths = {"logprobs": logprobs} | ({} if mask is None else {MASK: mask})
        lengths |= {} if follows is None else {FOLLOWS: follows}
        for key, values in lengths.items():
            if not hasattr(values, "__len__") or len(values) != len(tokens):
                length = len(values) if hasattr(values, "__len__") else repr(values)
                raise self._wrong(
                    f"gave completion {index} {length} {key} for {len(tokens)} tokens, expected one per token"
                )
        written = [True] * len(tokens) if mask is None else [self._bit(index, MASK, value) for value in mask]
        if not any(written):
            raise self._wrong(f"gave completion {index} an {MASK} without a token of the policy")
        end = len(written) - written[::-1].index(True)
        found = [self._number(index, value) if ours else 0.0 for value, ours in zip(logprobs, written)]
        is_ended = None if ended is None else self._bit(index, ENDED, ended)
        failure = None if error is None else self._failure(index, error)
        places = self._places(index, follows, len(tokens), len(prompt))[:end]
        if limit not in (None, *_LIMITS):
            raise self._wrong(
                f"gave completion {index} {excerpt(repr(limit))} as {LIMIT}, expected None, or the limit that ended "
                f"it: {', '.join(_LIMITS)}"
            )
        row = ReturnedRow(prompt, tokens[:end], found[:end], written[:end], is_ended, places, limit, failure=failure)
        if messages is None:
            return row
        try:
            return replace(row, messages=read_messages(messages, row.turns[-1] + 1))
        except InvalidMessages as why:
            raise self._wrong(f"gave completion {index} {MESSAGES}, which {why}") from why

    def _failure(self, index: int, error: Any) -> CompletionFailure:
        if isinstance(error, Exception):
            return CompletionFailure("timeout" if isinstance(error, TimeoutError) else "failed", error_line(error))
        if not isinstance(error, str) or not error:
            raise self._wrong(
                f"gave completion {index} {excerpt(repr(error))} as {ERROR}, expected a text or an exception that says "
                "what went wrong, and None where nothing did"
            )
        return CompletionFailure("failed", excerpt(error, 200))

    def _ids(self, index: int, key: str, ids: Any) -> list[int]:
        listed: Any = ids.tolist() if hasattr(ids, "tolist") else ids
        if not isinstance(listed, Sequence) or not listed or not all(isinstance(i, int) and i >= 0 for i in listed):
            raise self._wrong(f"gave completion {index} {excerpt(repr(ids))} as {key}, expected one token id or more")
        return list(listed)

    def _places(self, index: int, follows: Any, count: int, prompt: int) -> list[int]:
        """Return the place that each token stands behind."""
        if follows is None:
            return list(range(-1, count - 1))
        listed: list[Any] = list(follows.tolist() if hasattr(follows, "tolist") else follows)
        for column, place in enumerate(listed):
            if not isinstance(place, int) or not -prompt - 1 <= place < column:
                raise self._wrong(
                    f"gave completion {index} {excerpt(repr(place))} in {FOLLOWS} for token {column}, expected the "
                    f"number of an earlier token, -1 to {-prompt} for one of the prompt, or {-prompt - 1} for none"
                )
        return listed

    def _bit(self, index: int, key: str, value: Any) -> bool:
        if value not in (0, 1):
            raise self._wrong(f"gave completion {index} {excerpt(repr(value))} in {key}, expected 1 or 0")
        return bool(value)

    def _number(self, index: int, value: Any) -> float:
        alone: Any = value[0] if isinstance(value, Sequence) and len(value) == 1 else value  # as vLLM has them
        try:
            number = float(alone)
        except (TypeError, ValueError):
            wrong = f"gave completion {index} the log-prob {excerpt(repr(value))}, which is no number"
            raise self._wrong(wrong) from None
        if not math.isfinite(number):
            raise NumericError(f"env.path={self._who} gave completion {index} the log-prob {number}.")
        return number

    def extra(self, columns: Sequence[str], declared: Sequence[str]) -> list[dict[str, Any]]:
        """Return the other columns of each completion: an entry of a list, or one value for all.

        Args:
            columns: Columns of the data, whose names are taken.
            declared: Names that it has to return.
        """
        others = {key: value for key, value in self._returned.items() if key not in _OWN}
        if missing := [name for name in declared if name not in others]:
            raise self._wrong(f"did not return {', '.join(missing)}, which env.columns names")
        if taken := [name for name in others if name in (*columns, "episodes", *ARGUMENTS, *SINGULAR)]:
            raise self._wrong(f"returned {', '.join(taken)}, which rewards get already: give it another name")
        lists = {key: self._list(key) for key, value in others.items() if _is_listed(value)}
        return [{key: lists[key][i] if key in lists else others[key] for key in others} for i in range(self._count)]

    def follows(self) -> torch.Tensor | None:
        """Return `Completions.follows`; None where every token stands behind the one before it."""
        if not any(row.forks for row in self.rows):
            return None
        return right_pad([row.follows for row in self.rows], 0)[0]

    def decoded(self, asked: Prompts) -> Decoded:
        """Return the completions as tensors."""
        ids, there = right_pad([row.token_ids for row in self.rows], asked.pad_id)
        return Decoded(
            ids=ids,
            mask=right_pad([row.written for row in self.rows], False)[0],
            logprobs=right_pad([row.logprobs for row in self.rows], 0.0)[0].float(),
            ended=torch.tensor(
                [row.token_ids[-1] in asked.eos_ids if row.ended is None else row.ended for row in self.rows]
            ),
            kept_logmass=None,
            attended=there if self.has_mask else None,
            turn=right_pad([row.turns for row in self.rows], 0)[0] if self.has_mask else None,
        )


@dataclass(frozen=True)
class ReturnedRow:
    """One completion."""

    prompt_ids: list[int]
    token_ids: list[int]
    """Up to the last one that the policy wrote: later ones have no effect."""
    logprobs: list[float]
    """0 where the policy did not write."""
    written: list[bool]
    """True for the tokens that the policy wrote."""
    ended: bool | None
    """True where it came to its end; None where that was not returned."""
    follows: list[int]
    """The place that each token stands behind, see `lit_rl.core.branches`."""
    limit: End | None = None
    """The limit that ended it, where the function says so."""
    messages: list[Message] | None = None
    """Its messages, where they were returned: one of the assistant for each turn of the policy."""
    failure: CompletionFailure | None = None
    """None where nothing failed."""

    @property
    def turns(self) -> list[int]:
        """The turn of each token: tokens between two turns of the policy count to the first."""
        turns, now, begun = list[int](), 0, False
        for column, (before, written) in enumerate(zip([False, *self.written], self.written)):
            now += begun and written and not (before and self.follows[column] == column - 1)
            begun = begun or written
            turns.append(now)
        return turns

    @cached_property
    def branches(self) -> list[Branch]:
        """The texts that the policy read and wrote."""
        return branches_of_row(self.follows, self.written, len(self.prompt_ids))

    @property
    def forks(self) -> list[list[int | None]]:
        """See `Episode.forks`."""
        turns, found = self.turns, list[list[int | None]]()
        for column, place in enumerate(self.follows):
            if place == column - 1:
                continue
            turn = next(turns[later] for later in range(column, len(turns)) if self.written[later])
            found.append([turn, turns[place] if place >= 0 else -1 if place == -1 else None])
        return found


@dataclass(frozen=True)
class CompletionFailure:
    """The reason why a completion is neither scored nor learned from."""

    end: Literal["failed", "timeout"]
    error: str


def _is_listed(value: Any) -> bool:
    """Tell whether it is a list, a tuple or an array: an entry a completion."""
    return isinstance(value, list | tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0)


# ------------------------------------------------------------------ messages

_ROLES = ("assistant", "tool", "user", "system")


class InvalidMessages(ValueError):
    """Returned messages that are invalid, and the reason."""


def read_messages(given: Any, turns: int) -> list[Message]:
    """Return the messages of a rollout function, with the arguments of calls as mappings.

    Args:
        given: The messages of one completion.
        turns: The policy's turns, by the tokens.

    Raises:
        InvalidMessages: one has no role, text or readable call; or there is not one message for each turn.
    """
    listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not all(isinstance(each, Mapping) and each.get("role") in _ROLES for each in listed):
        raise InvalidMessages(
            f"takes messages, each a dict with one of the roles {', '.join(_ROLES)}; here {excerpt(repr(given))}"
        )
    by_assistant = sum(message["role"] == "assistant" for message in listed)
    if by_assistant != turns:
        raise InvalidMessages(
            f"takes a message of the assistant for each of the {turns} turns that env_mask has; here {by_assistant}"
        )
    messages: list[Message] = []
    for message in listed:
        calls = message.get("tool_calls") or []
        content = "" if message.get("content") is None and calls else message.get("content")
        if not isinstance(content, str):
            raise InvalidMessages(f"takes a text under 'content'; here {excerpt(repr(dict(message)))}")
        messages.append({**message, "content": content})
        if calls:
            messages[-1]["tool_calls"] = [_read_call(call) for call in calls]
        try:
            json.dumps(messages[-1])
        except (TypeError, ValueError) as error:
            raise InvalidMessages(f"takes what JSON can write ({error}); here {excerpt(repr(messages[-1]))}") from error
    return messages


def _read_call(call: Any) -> Message:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return {**call, "function": {**function, "name": str(function["name"]), "arguments": dict(arguments)}}
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidMessages(
            "takes calls such as {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}; here "
            f"{excerpt(repr(call))}"
        ) from error
