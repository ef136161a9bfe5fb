"""Harnesses of the package verifiers as a rollout function: agents play the tasks, and the policy writes every turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.core.task_sets import (
    VERIFIERS_COLUMN,
    VERIFIERS_SCORES,
    TaskRow,
    TaskSet,
    VerifiersScores,
    scores_of,
    verifiers,
)
from lit_rl.environments.tool_parsers import ParserName, check_parser
from lit_rl.generation.chat_conversation import MODEL
from lit_rl.generation.chat_endpoint import ChatEndpoint
from lit_rl.generation.rollout_function import RolloutHandle
from lit_rl.ops.ranges import NotNegative, Positive

ON_THIS_MACHINE = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""An agent that chats and calls the task's tools, as a process of this machine."""


@checked("")
class VerifiersHarness:
    """A rollout function for rows of `data=verifiers`: each completion is an episode of verifiers' own environment.

    The agent that is trained talks to the policy by OpenAI's API, and its conversation becomes the completion, with the
    tokens that were drawn. With `env.max_branches=1` it has to be one line of turns: an agent that rewrites earlier
    messages, or begins a second conversation, is refused, and its episode fails. The task is scored where verifiers
    scores it, with the runtime at hand; `reward=verifiers` gives that as the reward.

    Args:
        env: The config of the environment, see `TaskSet.environment`. None: of one agent, `ON_THIS_MACHINE`. An agent
            without `model` and `client` is the policy; there may be one that is trained.
        parser: Name of the parser of the policy's tool calls, see `env.parser`.
        call_pattern: Pattern for `parser=regex`.
        patience: See `ChatEndpoint`.
        agent_timeout: Seconds that an episode may take, see `ChatEndpoint`.

    Raises:
        ConfigError: `patience` or `agent_timeout` is out of range, or there is no such parser.
    """

    columns = (VERIFIERS_SCORES,)
    """Returned keys beside the tokens."""

    def __init__(
        self,
        env: Mapping[str, Any] | None = None,
        *,
        parser: ParserName = "auto",
        call_pattern: str | None = None,
        patience: NotNegative = 1.0,
        agent_timeout: Positive | None = None,
    ) -> None:
        check_parser(parser, call_pattern)
        self.env = {"agent": ON_THIS_MACHINE} if env is None else dict(env)
        self._endpoint = partial(
            ChatEndpoint[Any],
            parser=parser,
            call_pattern=call_pattern,
            patience=patience,
            agent_timeout=agent_timeout,
        )

    def __call__(self, prompts: Sequence[Any], trainer: RolloutHandle) -> dict[str, list[Any]]:
        if VERIFIERS_COLUMN not in trainer.columns:
            raise ConfigError("VerifiersHarness plays rows of data=verifiers, and the data is another.")
        rows = [TaskRow.read(text) for text in trainer.columns[VERIFIERS_COLUMN]]
        games = {taskset: taskset.environment(self.env) for taskset in dict.fromkeys(row.taskset for row in rows)}

        async def episode(number: int, url: str) -> VerifiersScores:
            vf = verifiers()
            client = vf.EvalClientConfig(base_url=url, api_key_var="LIT_RL_NO_KEY")
            context = vf.ModelContext(model=MODEL, client=client)
            return _scores(await games[rows[number].taskset].run_episode(rows[number].task(), context))

        played = self._endpoint(trainer).play(episode, around=_serving(games), instead=prompts)
        errors = [each if isinstance(each, Exception) else None for each in played.results]
        scores = [None if error else each for error, each in zip(errors, played.results)]
        # verifiers has scored none of these, so those whose completion was full have failed too.
        return {**played.rollout, "episode_error": errors, VERIFIERS_SCORES: scores}


@asynccontextmanager
async def _serving(games: Mapping[TaskSet, Any]) -> AsyncIterator[None]:
    """Enter the shared context of these environments' episodes: servers of tools, and verifiers' own endpoint."""
    async with AsyncExitStack() as stack:
        for game in games.values():
            await stack.enter_async_context(game.serving())
        yield


class EpisodeFailed(Exception):
    """An error of an episode, as verifiers reports it."""


def _scores(episode: Any) -> VerifiersScores:
    """Return the scores of the agent that is trained.

    Raises:
        EpisodeFailed: there are none.
    """
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeFailed(f"{errors[-1].type}: {errors[-1].message}" if errors else "it is not complete")
    if len(trained) != 1:
        raise EpisodeFailed(f"{len(trained)} agents of it are trained, and a completion is what one of them said")
    return scores_of(trained[0])
