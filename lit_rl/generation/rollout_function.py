"""`env=rollout_func`: a user's function makes the rollouts, by TRL's signature and keys.

It is called as ``function(prompts, trainer)`` with a prompt for each completion of this process, those of a group being
neighbours. It returns a dict of lists, one entry a completion: ``prompt_ids``, ``completion_ids`` and ``logprobs``;
``env_mask``, with 1 for the tokens that the policy wrote, where it did not write all; ``ended`` where more than an EOS
ends a completion; ``episode_messages`` where the conversation is more than the text of the tokens; and
``episode_error``, the error of completions that failed by no fault of the policy. Other keys go to the reward functions
under their names.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lit_rl.by_path import named_by
from lit_rl.data.templates import encode_prompt
from lit_rl.environments.source import EpisodeRequest, EpisodeSource, Interactive
from lit_rl.episodes import End, Episode
from lit_rl.errors import ConfigError, GenerationError, LitRLError, in_range, with_its_line
from lit_rl.generation.batches import assemble
from lit_rl.generation.returned import Returned, ReturnedRow
from lit_rl.generation.returned_messages import decoded_messages
from lit_rl.generation.rollout_handle import RolloutHandle
from lit_rl.process_state import mixed, process_kept, raised_by_itself, seed_generators
from lit_rl.rollout import Completions, Prompt, PromptBatch
from lit_rl.time_limit import TookTooLong, time_limit


class RolloutFunction(Interactive):
    """The settings of `env=rollout_func`.

    Args:
        path: ``package.module:name`` or ``./file.py:name``; in Python also the function itself.
        columns: Further keys of the returned dict, which reward functions take as arguments. A function may name them
            itself, by an attribute ``columns``.
        max_tokens: Most tokens of a completion, with those that the policy did not write. None: 2048, or as many as the
            model's context leaves.
        max_prompt_tokens: Most tokens of a prompt; None: those of the longest prompt of the data.
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
        max_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
        rollout_timeout: float | None = None,
        max_failed: float = Interactive.max_failed,
    ) -> None:
        if max_tokens is not None:
            in_range("env.max_tokens", max_tokens, low=1)
        if isinstance(columns, str):
            raise ConfigError(f"env.columns={columns!r} is a text; it takes a list of names: [{columns}].")
        if max_prompt_tokens is not None:
            in_range("env.max_prompt_tokens", max_prompt_tokens, low=1)
        if rollout_timeout is not None:
            in_range("env.rollout_timeout", rollout_timeout, low=0, open_low=True)
        in_range("env.max_failed", max_failed, low=0, high=1)
        self.function, self.name = _function(path)
        self.max_tokens = Interactive.max_tokens if max_tokens is None else max_tokens
        self.untyped, self.max_prompt_tokens = frozenset(("max_tokens",) * (max_tokens is None)), max_prompt_tokens
        self.rollout_timeout, self.max_failed = rollout_timeout, max_failed
        self.columns = ("episodes", *dict.fromkeys([*getattr(self.function, "columns", ()), *columns]))


def _function(path: str | Callable[..., Any]) -> tuple[Callable[..., Any], str]:
    """Return the function and its name. Refuse one that cannot be called with two arguments."""
    function: Any = named_by(path, "env.path").value if isinstance(path, str) else path
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
        handle = RolloutHandle(request, encode, self._tokenizer, self._template_kwargs, self._settings.max_tokens)
        return request.agree(lambda: self._drawn(handle, request))

    def _drawn(self, handle: RolloutHandle, request: EpisodeRequest) -> Completions:
        batch, asked = request.batch, request.prompts
        begun, count = time.perf_counter(), len(batch) * asked.group_size
        returned = Returned(
            self._called(batch, handle, mixed("env.path", *request.row_keys)),
            self._settings.name,
            count,
            group_size=asked.group_size,
            max_prompt_tokens=self._longest_prompt,
            max_tokens=self._settings.max_tokens,
        )
        waited = time.perf_counter() - begun - handle.seconds
        self.waited, seconds = self.waited + waited, waited / count
        extra = returned.extra(list(batch.columns), self._settings.columns[1:])
        asked = replace(asked, token_ids=[row.prompt_ids for row in returned.rows[:: asked.group_size]])
        decoded = returned.decoded(asked)
        completions = assemble(asked, [(torch.arange(count), decoded)], version=0, device=torch.device("cpu"))
        facts = zip(returned.rows, handle.of_completions(batch.prompts), decoded.ended.tolist(), extra, strict=True)
        return replace(completions, episodes=tuple(self._episode(*each, seconds) for each in facts))

    def _called(self, batch: PromptBatch, handle: RolloutHandle, seed: int) -> Any:
        limit, prompts = self._settings.rollout_timeout, handle.of_completions(batch.prompts)
        try:
            with process_kept(f"env.path={self._settings.name}"), time_limit(limit, "env.rollout_timeout"):
                seed_generators(seed)
                return self._settings.function(prompts, handle)
        except LitRLError:
            raise
        except TookTooLong as error:
            raise GenerationError(
                f"env.path={self._settings.name} took longer than env.rollout_timeout={limit:g} s. Nothing of what it "
                "made can be learned from: limit inside it what it waits for, or allow more."
            ) from error
        except BaseException as error:
            if not raised_by_itself(error):
                raise
            raise GenerationError(f"env.path={self._settings.name} raised {with_its_line(error)}") from error

    def _episode(self, row: ReturnedRow, prompt: Prompt, ended: bool, extra: dict[str, Any], seconds: float) -> Episode:
        messages = row.messages
        if messages is None:
            messages = decoded_messages(row.token_ids, row.written, self._tokenizer)
        end: End = "answered" if ended else "cut"
        return Episode(
            prompt=prompt,
            messages=messages,
            end=end if row.failure is None else row.failure.end,
            turns=row.turns[-1] + 1,
            observed_tokens=row.written.count(False),
            seconds=seconds,
            extra=extra,
            error=None if row.failure is None else row.failure.error,
        )
