"""Checks of `env=` before any weight is loaded, and the source of its episodes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.message_forms import tools_argument
from lit_rl.data.rendering import KWARGS_COLUMN
from lit_rl.environments.environment_base import EpisodeSource, Interactive
from lit_rl.environments.episode_replay import Journal
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.interaction import Interaction
from lit_rl.environments.user_environments import ENVIRONMENT_COLUMN
from lit_rl.generation.generator import Generator
from lit_rl.generation.rollout_function import RolloutCalls, RolloutFunction
from lit_rl.models.language_model import LanguageModel
from lit_rl.rewards.contract import FunctionFromPath
from lit_rl.rewards.jobs import OBJECTS
from lit_rl.rewards.task_rewards import environment, environment_turns
from lit_rl.rewards.weighted_rewards import Rewards


def check_episodes(env: Interactive, generator: Generator, sampling: Sampling, evaluation: Evaluation) -> None:
    """Refuse settings that do not work with episodes.

    Raises:
        ConfigError: the generator supports no conversations, or draws while the policy learns; an episode is shorter
            than a turn; or the evaluation compares completions of one turn.
    """
    if env.converses:
        generator.check_converses()
    else:
        generator.check_asked_alone()
        if not sampling.truncation.off:
            raise ConfigError(
                "sampling.top_k, top_p or min_p cut the distribution, and a rollout function does not return how much "
                "of it was left. Set top_k=0, top_p=1 and min_p=0 with env=rollout_func."
            )
        if sampling.repetition_penalty != 1 or sampling.min_new_tokens:
            raise ConfigError(
                "sampling.repetition_penalty and min_new_tokens depend on the tokens before each one, and a rollout "
                "function does not return what came before a token when it was drawn. Set repetition_penalty=1 and "
                "min_new_tokens=0 with env=rollout_func."
            )
    if generator.lag:
        raise ConfigError(
            f"generator.lag={generator.lag} draws while the policy learns, so the environments of env= would run in "
            "this process at the same time and could change the training's random generators. Set generator.lag=0."
        )
    if evaluation.win_rate_against is not None:
        raise ConfigError(
            f"eval.win_rate_against={evaluation.win_rate_against!r} compares completions of one turn, but env= makes "
            "episodes. Leave one of the two out."
        )
    turns = {"sampling": sampling.max_new_tokens, "eval": evaluation.max_new_tokens or 0}
    for group, tokens in turns.items():
        if env.max_tokens < tokens:
            raise ConfigError(
                f"env.max_tokens={env.max_tokens} is less than {group}.max_new_tokens={tokens}, but an episode has at "
                "least one turn. Raise the first, or lower the second."
            )


def open_journal(env: Interactive, folder: str, rank: int) -> Journal | None:
    """Return the journal of the replies of a run's environments; None where there is none.

    Args:
        env: Settings of the environments.
        folder: Folder of the run.
        rank: Rank of this process.

    Raises:
        ConfigError: the folder of ``env.journal`` holds the replies of another run.
    """
    if not env.journal:
        return None
    if not isinstance(env.journal, str):
        return Journal(Path(folder) / "env_journal", rank)
    journal, run = Path(env.journal).expanduser(), Path(folder).resolve()
    if rank == 0:  # replies are keyed by their place in a run, so two runs would mix them up
        owner = journal / "run.txt"
        if not owner.exists():
            journal.mkdir(parents=True, exist_ok=True)
            owner.write_text(f"{run}\n", encoding="utf-8")
        elif (other := owner.read_text(encoding="utf-8").strip()) != str(run):
            raise ConfigError(
                f"env.journal={str(journal)!r} holds the replies of the run in {other}, but this run is in {run}. Set "
                f"another folder, or remove {owner} if that run was moved here."
            )
    return Journal(journal, rank)


def make_episode_source(
    env: Interactive, model: LanguageModel, data: Any, journal: Journal | None = None
) -> EpisodeSource:
    """Return the source of the episodes of a run.

    Args:
        env: Settings of the environments.
        model: The description of the policy.
        data: The data module.
        journal: The journal of replies, see `open_journal`.

    Raises:
        ConfigError: the data's rows do not fit the environments, or see `Interaction`.
    """
    if data.options.overlong == "truncate_left":
        raise ConfigError(
            "data.overlong=truncate_left cuts tokens off the start of a prompt, but env= renders prompts itself. Set "
            "data.overlong=drop, or error."
        )
    for columns in data.columns_of_sets():
        env.check_columns(columns)
    if isinstance(env, RolloutFunction):
        longest = max(getattr(data, "longest_prompt", 0), data.longest_val_prompt)
        return RolloutCalls(env, model.tokenizer, data.options.chat_template_kwargs, longest)
    assert isinstance(env, EnvironmentFactory)
    _warn_other_tools(env, data)
    interaction = Interaction(
        env,
        model.tokenizer,
        eos_ids=model.eos_ids,
        chat=not isinstance(data.peek(1).prompts[0], str),
        template_kwargs=data.options.chat_template_kwargs,
        journal=journal,
        processor=model.processor,
        max_image_pixels=data.options.max_image_pixels,
    )
    for row in islice(_rows_of_arguments(env, data), _MOST_TRIED):  # an error is found now, and not at the row's step
        interaction.ready_for(row)
    return interaction


_MOST_TRIED = 256
"""Most distinct arguments of rows with which the chat template is tried before a run begins."""


def _rows_of_arguments(env: EnvironmentFactory, data: Any) -> Iterator[dict[str, Any]]:
    """Yield the first row of each kind of environment and arguments of the chat template."""
    seen: set[tuple[str, str]] = set()
    for columns in data.columns_of_sets():
        kinds = columns.get(ENVIRONMENT_COLUMN)
        for number, kwargs in enumerate(columns.get(KWARGS_COLUMN) or ()):
            if not kwargs:
                continue
            kind = env.kind_of({ENVIRONMENT_COLUMN: kinds[number]} if kinds else {})
            key = kind, json.dumps(kwargs, sort_keys=True, default=str)
            if key not in seen:
                seen.add(key)
                yield {name: values[number] for name, values in columns.items()}


def _warn_other_tools(env: EnvironmentFactory, data: Any) -> None:
    """Warn of rows with a column of tools that differ from the environment's, or that it does not answer."""
    for columns in data.columns_of_sets():
        for row, tools in enumerate(columns.get("tools", ())):
            if not (row_tools := tools_argument(tools)):
                continue
            kind = env.kinds[env.kind_of({name: values[row] for name, values in columns.items()})]
            answered = [] if kind.toolbox is None else kind.toolbox.schemas
            if row_tools["tools"] == answered:
                continue
            names = ", ".join(tool["function"]["name"] for tool in answered)
            what = f"prompts show the tools of env= alone ({names})" if answered else "env= answers no calls of them"
            rank_zero_warn(f"The rows have a column tools (the first is row {row}), but {what}.")
            return


def shorten_episodes(
    env: Interactive, model: LanguageModel, source: EpisodeSource, longest: int, new_tokens: int
) -> Interactive:
    """Return the settings with default sizes lowered to the model's context, with a warning where needed.

    Where it leaves no room for a turn they are unchanged, and `check_episode_length` refuses them.

    Args:
        env: The settings as given; they are not changed.
        model: The policy, with its context length.
        source: The source made with these settings, which knows the other parts of the context.
        longest: Tokens of the longest prompt of the data.
        new_tokens: Tokens of the longest turn.
    """
    parts, context = source.lengths(longest), model.context_length
    if context is None or sum(parts.values()) <= context or not env.untyped:
        return env
    left = context - sum(tokens for key, tokens in parts.items() if not key.startswith("env."))
    sizes = {"max_observation_tokens": max(1, left // 4)} if "max_observation_tokens" in env.untyped else {}
    opening = parts.get("env.max_observation_tokens", 0)
    left -= min(opening, sizes.get("max_observation_tokens", opening))
    sizes |= {"max_tokens": left} if "max_tokens" in env.untyped else {}
    smaller = copy.copy(env)
    for key, size in sizes.items():
        setattr(smaller, key, min(size, getattr(env, key)))
    if not new_tokens <= smaller.max_tokens <= left:
        return env
    lowered = ", ".join(f"env.{key}={getattr(smaller, key)}" for key in sizes)
    rank_zero_warn(f"{lowered}, in place of the default: the context of {model.name} ({context} tokens) has no more.")
    return smaller


def check_episode_length(model: LanguageModel, interaction: EpisodeSource, longest: int) -> None:
    """Refuse episodes that the model's context cannot hold.

    Raises:
        ConfigError: names the parts with their tokens, and the settings to lower.
    """
    parts = interaction.lengths(longest)
    context, needed = model.context_length, sum(parts.values())
    if context is None or needed <= context:
        return
    listed = ", ".join(f"{key} {tokens}" for key, tokens in parts.items() if tokens)
    raise ConfigError(
        f"An episode may have {needed} tokens ({listed}), but the context of {model.name} holds {context}. Lower "
        f"{' or '.join(key for key in parts if key.startswith('env.') and parts[key])}, or data.max_prompt_tokens."
    )


def with_objects(env: Interactive, rewards: Rewards, generator: Generator, columns: Sequence[str]) -> Interactive:
    """Return the settings with the objects of environments as a column for rewards, if a function names it.

    Args:
        env: The settings as given; they are not changed.
        rewards: The reward functions.
        generator: The generator.
        columns: Columns of the data: one of that name is what the function means.

    Raises:
        ConfigError: the objects are in other processes, are replayed, or the function is.
    """
    naming = rewards.naming(OBJECTS)
    if not naming or not env.has_objects or OBJECTS in columns or OBJECTS in env.columns:
        return env
    elsewhere = [name for name in naming if isinstance(rewards.functions[name], FunctionFromPath)]
    workers, pool = rewards.settings.workers, getattr(env, "pool", None)
    reasons = {
        "env.workers: the objects are in other processes. Set env.workers=0": pool is not None,
        "env.journal: a resumed run has their answers, not the objects. Set env.journal=false": bool(env.journal),
        f"generator.lag={generator.lag}: a checkpoint cannot hold them. Set generator.lag=0": generator.lag > 0,
        f"reward.workers={workers}: it runs in another process. Set reward.workers=0": bool(elsewhere and workers),
        "reward.cache: its value depends on an object. Set reward.cache=0": rewards.settings.cache > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"The reward function {naming[0]!r} names {OBJECTS}, objects of env=environment, which it cannot get "
                f"with {reason}, or name episodes instead, which has all messages."
            )
    given = copy.copy(env)
    given.columns = (*env.columns, OBJECTS)
    return given


def check_episode_rewards(env: Interactive, rewards: Rewards) -> None:
    """Refuse episodes that nothing rewards.

    Raises:
        ConfigError: the reward is the environment's own, and it gives none.
    """
    from_env = [name for name, function in rewards.functions.items() if function in (environment, environment_turns)]
    if from_env and not env.gives_reward:
        raise ConfigError(
            f"reward={from_env[0]} takes the reward of the environments, but env= has none with a reward. Define "
            "get_reward(self) or step(self, action) in your class, or set another reward."
        )
