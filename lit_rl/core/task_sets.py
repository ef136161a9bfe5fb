"""Tasks of other packages that bring their own scorers: problems of reasoning-gym, task sets of verifiers.

A row holds its task as JSON, from which it can be made again where it is scored.

reasoning-gym (2505.24760): a problem is a function of the generator's name, its settings, a seed, the number of
problems (some generators make all of them at once) and an index. The global random numbers of Python and NumPy,
from which generators draw too, are set by seed and index meanwhile, and restored.

verifiers: names are those of the package. A task set yields tasks; a task has data, and methods that are its
rewards and metrics; these read a trace, which holds the messages of one conversation; a runtime is where an
agent's program ran, which does not exist for a single completion.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_rl.core.episode import Message
from lit_rl.core.errors import BackendError, ConfigError, did_you_mean
from lit_rl.core.process_state import preserve_generators
from lit_rl.core.user_functions import importable_folder

# ------------------------------------------------------------------ reasoning-gym

REASONING_GYM_COLUMN = "reasoning_gym"
"""The column of a row that names its problem, as JSON."""


@dataclass(frozen=True)
class ReasoningGymProblem:
    """The name of one problem of one generator.

    Args:
        name: Of the generator, such as "chain_sum".
        settings: Of its config, such as `{"max_terms": 3}`.
        seed: Of all its problems.
        size: How many these are.
        index: Of this one, below `size`.
    """

    name: str
    settings: Mapping[str, Any]
    seed: int
    size: int
    index: int

    @classmethod
    def read(cls, text: str) -> ReasoningGymProblem:
        """Parse `text`."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """JSON, for the column of a row."""
        return json.dumps(asdict(self), sort_keys=True)

    def entry(self) -> dict[str, Any]:
        """Return the generator's dict with `question`, `answer` and `metadata`.

        Raises:
            BackendError: reasoning-gym is not installed.
            ConfigError: the generator has no such name or setting.
        """
        generator = self._generator()
        with _own_random_numbers(f"{self.seed} {self.index}"):
            return generator[self.index]

    def scorer(self) -> Callable[[str], float]:
        """Return the generator's own scorer: from an answer to a number in [0, 1]."""
        generator, entry = self._generator(), self.entry()
        return lambda answer: float(generator.score_answer(answer, entry))

    def _generator(self) -> Any:
        return _generator(self.name, json.dumps(dict(self.settings), sort_keys=True), self.seed, self.size)


@functools.lru_cache(maxsize=32)
def _generator(name: str, settings: str, seed: int, size: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise BackendError(
            "Problems of reasoning-gym need the package reasoning-gym: pip install 'lit-rl[reasoning]'."
        ) from error
    if name not in DATASETS:
        raise ConfigError(f"data.task.name={name!r} is no generator of reasoning-gym.{did_you_mean(name, DATASETS)}")
    try:
        with _own_random_numbers(f"{seed}"):
            generator = reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))
            generator[0]  # some generators read their settings only when they make a problem
            return generator
    except (ImportError, OSError):
        raise
    except Exception as error:
        allowed = ", ".join(sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"}))
        raise ConfigError(
            f"data.task.settings={settings} does not suit reasoning-gym's {name!r} "
            f"({type(error).__name__}: {error}). Its settings: {allowed}."
        ) from error


@contextmanager
def _own_random_numbers(seed: str) -> Iterator[None]:
    import numpy

    with preserve_generators():
        random.seed(seed)
        numpy.random.seed(random.getrandbits(32))
        yield


# ------------------------------------------------------------------ verifiers: task sets, and tasks in rows


VERIFIERS_COLUMN = "verifiers"
"""The column of a row that holds its task, as JSON."""

VERIFIERS_SCORES = "verifiers_scores"
"""The column of scores by a harness, if one has played: `VerifiersScores`, or None where the episode failed."""

VerifiersScores = dict[str, Any]
"""``reward``, the weighted sum; ``rewards`` and ``metrics``, the numbers by name, before any weight."""


@dataclass(frozen=True)
class TaskSet:
    """A set of tasks with its settings.

    Args:
        id: The module that has it: an installed package, one of verifiers' own, or a file in the current directory.
        settings: Of its config, as JSON.
    """

    id: str
    settings: str

    @classmethod
    def of(cls, id: str, settings: Mapping[str, Any]) -> TaskSet:
        """Make the set with these settings."""
        return cls(id, json.dumps(dict(settings), sort_keys=True))

    def made(self) -> Any:
        """Return verifiers' own object.

        Raises:
            BackendError: verifiers is not installed.
            ConfigError: there is no such set, or it has no such setting.
        """
        return _made(self)

    def environment(self, settings: Mapping[str, Any]) -> Any:
        """Return verifiers' `Env` that plays these tasks.

        Args:
            settings: Of its config: `id` where it is not that of the set, and a block for each of its agents.

        Raises:
            BackendError, ConfigError: see `made`; or a setting of the environment is wrong.
        """
        self.made()
        taskset = {**json.loads(self.settings), "id": self.id}
        try:
            vf = verifiers()
            return vf.load_environment(vf.resolve_env_config({**settings, "taskset": taskset}))
        except Exception as error:  # plugins of anybody's, and pydantic's own errors
            raise ConfigError(
                f"verifiers cannot play {self.id!r} with {dict(settings)} ({_describe(error)}). It takes the keys of "
                "an environment's config, such as {'agent': {'harness': {'id': 'null'}, 'runtime': {'type': "
                "'subprocess'}}}."
            ) from error


@dataclass(frozen=True)
class TaskRow:
    """One task of a set."""

    taskset: TaskSet
    data: Mapping[str, Any]
    """The data in verifiers' own JSON form."""

    @classmethod
    def read(cls, text: str) -> TaskRow:
        """Parse `text`.

        Raises:
            ValueError, TypeError, KeyError: it is no such text.
        """
        read = json.loads(text)
        return cls(TaskSet.of(read["id"], read["settings"]), read["data"])

    @property
    def text(self) -> str:
        """JSON, for the column of a row."""
        of_set = {"id": self.taskset.id, "settings": json.loads(self.taskset.settings)}
        return json.dumps({**of_set, "data": self.data}, sort_keys=True)

    def task(self) -> Any:
        """Return verifiers' own object.

        Raises:
            BackendError, ConfigError: see `TaskSet.made`; or the set declares another kind of data.
        """
        made = self.taskset.made()
        kind = type(made).task_type()
        try:
            return kind(kind.data_type().model_validate(self.data), made.config.task)
        except Exception as error:
            raise ConfigError(
                f"A task of {self.taskset.id!r} cannot be made again of what verifiers wrote down of it "
                f"({_describe(error)}). {kind.__name__} has to take (data, config), and its data be a pydantic model "
                "that survives JSON."
            ) from error


def row_of_task(taskset: TaskSet, task: Any) -> TaskRow:
    """Return a task of the set in the form that a row holds.

    Raises:
        ConfigError: its data does not survive being written down, or it is of another kind than the set declares.
    """
    row = TaskRow(taskset, task.data.model_dump(mode="json"))
    again = row.task()
    if type(again) is not type(task) or again.data.model_dump(mode="json") != row.data:
        raise ConfigError(
            f"A task of {taskset.id!r} is a {type(task).__name__} with {type(task.data).__name__}, and is another one "
            f"when it is made again of what verifiers wrote down of it, {type(again).__name__} with "
            f"{type(again.data).__name__}. Declare both: class Mine(vf.Task[MyData]), class Set(vf.Taskset[Mine])."
        )
    return row


def prompt_of(task: Any) -> list[Message]:
    """Return the policy's input as messages.

    Raises:
        ConfigError: the task has no prompt, or one with images or calls of tools.
    """
    data, name = task.data, f"the task {task.data.idx} of {type(task).__name__}"
    if data.prompt is None:
        raise ConfigError(
            f"{name} has no prompt: somebody else opens its conversation. Play it by its environment, "
            "env=rollout_func with lit_rl.generation.VerifiersHarness, on a set whose tasks have one."
        )
    messages: list[Message] = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    for message in data.prompt:
        images = [part for part in message.content or () if getattr(part, "type", "text") != "text"]
        if images or getattr(message, "tool_calls", None):
            raise ConfigError(f"{name} has a prompt with images or calls of tools, and data=verifiers shows texts.")
        messages.append({"role": message.role, "content": verifiers("types").content_text(message.content)})
    return messages


# ------------------------------------------------------------------ verifiers: scores of a completion


def obstacles_to_scoring(row: TaskRow) -> list[str]:
    """Return the reasons why the tasks of its set cannot be scored from a completion alone; empty if they can."""
    vf, discover_decorated = verifiers(), verifiers("utils.decorators").discover_decorated
    task, made = row.task(), row.taskset.made()
    scored = [(f"@{kind} {each.__name__}", each) for kind in ("reward", "metric") for each in task.hooks(kind)]
    scored += [(f"the judge {judge.reward_name}", judge.score) for judge in task.plugged_judges()]
    own = [name for name in ("setup", "finalize") if getattr(type(task), name) is not getattr(vf.Task, name)]
    asked = [*scored, *((name, getattr(task, name)) for name in own)]
    found = [
        f"{name} reads the runtime"
        for name, function in asked
        if (runtime := inspect.signature(function).parameters.get("runtime")) and runtime.default is runtime.empty
    ]
    tools = [*task.toolsets(task.config), *made.toolsets(made.config)]
    found += [f"{type(each).__name__} gives it tools" for each in tools]
    found += [f"@intercept {each.__name__} changes what is said" for each in discover_decorated(task, "intercept")]
    if task.NEEDS_CONTAINER:
        found.append(f"{type(task).__name__} needs a container")
    kind = vf.environment_class(row.taskset.id)
    if kind is not vf.SingleAgentEnv:
        found.append(f"{kind.__name__} plays it")
    if not any(name.startswith(("@reward", "the judge")) for name, _ in scored):
        found.append(f"{type(task).__name__} has no @reward")
    return found


async def score_completion(row: TaskRow, prompt: Sequence[Message], completion: Sequence[Message]) -> VerifiersScores:
    """Return the scores by the task's own rewards and metrics for a completion.

    Args:
        row: The task.
        prompt: The policy's input.
        completion: Its turns, and the answers to them.
    """
    task, invoke = row.task(), verifiers("utils.decorators").invoke
    base = verifiers().Task
    trace = _trace(task, prompt, completion)
    arguments = {"task": task.data, "trace": trace}
    async with asyncio.timeout(task.data.timeout.scoring):
        if type(task).setup is not base.setup:
            await invoke(task.setup, arguments)
        if type(task).finalize is not base.finalize:
            await invoke(task.finalize, arguments)
        await task.score(trace)
    return scores_of(trace)


def scores_of(trace: Any) -> VerifiersScores:
    """Return the scores of a trace that its task has scored."""
    return {
        "reward": trace.reward,
        "rewards": {name: each.score for name, each in trace.rewards.items() if each is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
    }


def _trace(task: Any, prompt: Sequence[Message], completion: Sequence[Message]) -> Any:
    """Return a finished trace with one line of messages, without tokens and usage."""
    vf, parse_message = verifiers(), verifiers("dialects").parse_message
    parsed = [parse_message(_openai_message(message, number)) for number, message in enumerate((*prompt, *completion))]
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=verifiers("state").state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig(model="policy", runtime=vf.SubprocessConfig())),
    )
    trace.nodes = [
        vf.MessageNode(
            parent=number - 1 if number else None,
            message=message,
            sampled=number >= len(prompt) and message.role == "assistant",
        )
        for number, message in enumerate(parsed)
    ]
    trace.stop("agent_completed")
    trace.ok = True
    return trace


def _openai_message(message: Message, number: int) -> Message:
    """Return a message in the format of OpenAI's API: arguments of calls as text, and an id that answers refer to."""
    wire = dict(message)
    if calls := message.get("tool_calls"):
        wire["tool_calls"] = [
            {
                "id": call.get("id") or f"call{number}_{place}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": arguments
                    if isinstance(arguments := call["function"]["arguments"], str)
                    else json.dumps(arguments),
                },
            }
            for place, call in enumerate(calls)
        ]
    return wire


# ------------------------------------------------------------------ verifiers: its own objects


@functools.lru_cache(maxsize=32)
def _made(taskset: TaskSet) -> Any:
    loaders = verifiers("utils.loaders")
    id, settings = taskset.id, json.loads(taskset.settings)
    try:
        with importable_folder(Path.cwd()):
            kind, config = loaders.taskset_class(id), loaders.taskset_config_type(id)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.task.id={id!r} is no task set of verifiers ({_describe(error)}). It is the name of a module, "
            "installed or a file in the current directory, whose __all__ names one subclass of verifiers.v1.Taskset."
        ) from error
    try:
        checked = config.model_validate({**settings, "id": id})
    except ValueError as error:  # pydantic's own
        known = ", ".join(sorted({*config.model_fields} - {"id"}))
        raise ConfigError(
            f"data.task.settings={settings} does not suit {id!r} ({_describe(error)}). Its settings: {known}."
        ) from error
    return kind(checked)


def verifiers(module: str = "") -> Any:
    """Import verifiers' public module, or one below it.

    Raises:
        BackendError: it is not.
    """
    try:
        return importlib.import_module(f"verifiers.v1.{module}" if module else "verifiers.v1")
    except ImportError as error:
        raise BackendError(
            f"Tasks of verifiers need the package verifiers ({error}): pip install 'lit-rl[verifiers]'."
        ) from error


def _describe(error: BaseException) -> str:
    cause = f", from {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}{cause}"
