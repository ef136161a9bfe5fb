"""The contract of a reward function: what it sees, what it may take, log and return, how it is named by path.

Every breach is a RewardError that names the function. Metrics and columns that a run has itself are reserved:
what a function logs stands beside them, never in their place.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from lit_rl.core.episode import Message
from lit_rl.core.errors import RewardError, did_you_mean
from lit_rl.core.user_functions import load_by_path
from lit_rl.core.visuals import shown_in
from lit_rl.rewards.jobs import SERVICES, Opaque

Completion = str | Sequence[Message]
"""A completion as reward functions see it: text, or messages where the prompt is a list of messages. Those of an
episode are by the assistant, with the answers of tools and environments between them."""


def text_of(completion: Completion) -> str:
    """Return the text of a completion: itself, or the contents of its assistant messages joined by newlines.

    Text of others between them earns no reward.

    Raises:
        RewardError: see `turns_of`.
    """
    return "\n".join(turns_of(completion))


def turns_of(completion: Completion) -> list[str]:
    """Return the text of a completion alone, or that of each of its assistant messages.

    Raises:
        RewardError: it is neither text nor messages with text (None counts as empty: a message that only calls a tool).
    """
    if isinstance(completion, str):
        return [completion]
    if not isinstance(completion, list | tuple):
        raise RewardError(f"a completion must be a text or a list of messages, not a {type(completion).__name__}.")
    return [
        content_of(message)
        for message in completion
        if not isinstance(message, dict) or message.get("role", "assistant") == "assistant"
    ]


def content_of(message: Message) -> str:
    """Return the text of one message of any role; "" where its content is None.

    Raises:
        RewardError: it is no message with text.
    """
    content = message.get("content", "") if isinstance(message, dict) else message
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if isinstance(content, str) and isinstance(message, dict):
        return content
    raise RewardError(f"the message {message!r:.80} has no text under 'content'.")


Function = Callable[..., Any]

_SPAN = ("start", "end", "value")

Span = tuple[int, int, float]
"""``(start, end, value)``: characters ``start`` to ``end`` (exclusive) of the text of a completion earned ``value``."""

TurnReward = tuple[int, float]
"""``(turn, value)``: the policy's turn ``turn``, counted from 0, earned ``value``."""

Part = Span | TurnReward
"""A part of a reward, with the place in a completion where it was earned."""


def is_turn_reward(part: Part) -> bool:
    """Tell whether a part is of a turn; else it is of a span of characters."""
    return len(part) != len(_SPAN)


ARGUMENTS = ("prompts", "completions", "completion_ids", *SERVICES)
"""The names that a reward function may use besides the columns of the data."""

SINGULAR = ("prompt", "completion", "completion_ids", *SERVICES)
"""The same for a function that takes one completion at a time."""


@runtime_checkable
class LooksAtData(Protocol):
    """A reward function that may refuse rows before a run begins."""

    def check_columns(self, columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
        """Raise if the function cannot score rows with these values; `given` names its arguments from episodes."""
        ...


def refuse_images(columns: Mapping[str, Sequence[Any]], asker: str) -> None:
    """Refuse rows that show images or videos, for a reward or a judge that reads text alone.

    Args:
        columns: Of the data, by name.
        asker: Its name in messages, as judge=llm.

    Raises:
        RewardError: a row shows some.
    """
    for row in range(max(map(len, columns.values()), default=0)):
        if shown := shown_in(columns, row):
            raise blind(asker, f"row {row} of the prompts shows {shown[0].name}")


def blind(asker: str, shows: str = "a prompt shows images") -> RewardError:
    """Return the error of a reward or a judge that reads text alone and would be asked about what it has not seen."""
    return RewardError(
        f"{asker} reads text alone, and {shows}: it would judge answers to what it has not seen. Take a reward or a "
        "judge that sees them (judge=reward, judge=function, reward=function)."
    )


@runtime_checkable
class TakesRewardName(Protocol):
    """A reward function that logs, and speaks of its settings, under its name among the functions of a `Rewards`."""

    def take_reward_name(self, name: str) -> None:
        """Take the name."""
        ...


_RENAME = "Rename the argument, or the column with data.rename."
_FIX = {
    "solution_str": "In verl this is the text of one completion. Call it completion here, and name the column that "
    "holds the right answer instead of ground_truth.",
    "ground_truth": "In verl this is the right answer of one row. Name the column that holds it here, such as answer.",
    "queries": "In OpenRLHF a query is a prompt and its response as one text. Name prompts and completions here.",
    "self": "This is a method without its object: pass the method of an object, CLASS(...).METHOD.",
    "episodes": "There are episodes only if an environment answers the policy: set env=tools or env=environment.",
    "environments": "There are objects of environments only if a class of yours answers the policy, env=environment. "
    "The argument episodes has all messages of any.",
}

_LARGEST = float(torch.finfo(torch.float32).max)


def name_of(function: Any) -> str:
    """Return the name a function is logged under: its own, or its class's in snake case."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()
    return name.strip("<>")


def check_callable(name: str, function: Any) -> None:
    """Refuse anything that cannot be called for numbers: objects, classes, PyTorch modules, async generators."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        raise RewardError(
            f"reward function {name!r} is a PyTorch module ({type(function).__name__}), which takes tensors and no "
            "texts. For a reward model give lit_rl.rewards.RewardModel(folder_or_hub_id), or, loaded already, "
            "lit_rl.rewards.RewardModel(model, tokenizer=...) (in a config: "
            "reward=reward_model). For any other module write def f(prompts, completions, **columns), which calls "
            "it and returns one number a completion."
        )
    if isinstance(function, type):
        raise RewardError(
            f"reward function {name!r} is a class. Pass an object of it, made by {function.__name__}(...). For a "
            "config, make the object in the file and give its name."
        )
    if not callable(function):
        raise RewardError(f"reward function {name!r} is {reprlib.repr(function)}, which cannot be called.")
    for part in (function, type(function).__call__):  # an object's __call__ may be the async one
        if inspect.isasyncgenfunction(part):
            raise RewardError(f"reward function {name!r} is an async generator. Return a list; do not yield.")


def argument_names(name: str, function: Function) -> set[str]:
    """Return the names in a function's signature."""
    return {parameter.name for parameter in _parameters(name, function)}


def takes(name: str, function: Function, argument: str) -> bool:
    """Return whether a function names an argument, or takes all by ``**kwargs`` and may use it there.

    A function of lit_rl names all that it uses, and ``**_`` is ignored.
    """
    inner: Any = getattr(function, "function", function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    ours = str(getattr(inner, "__module__", "")).startswith("lit_rl.")
    parameters = _parameters(name, function)
    rest = any(each.kind is each.VAR_KEYWORD and each.name != "_" for each in parameters)
    return any(each.name == argument for each in parameters) or (rest and not ours)


def is_per_sample(name: str, function: Function) -> bool:
    """Tell whether a function takes one completion at a time: it names `prompt` or `completion`, and neither plural."""
    arguments = argument_names(name, function)
    return bool(arguments & {"prompt", "completion"}) and not arguments & {"prompts", "completions"}


def keywords(name: str, function: Function, columns: Iterable[str]) -> list[str]:
    """Return the arguments to call a function with: all on offer if it takes ``**kwargs``, else those it names.

    Raises:
        RewardError: it needs an argument that is no column, or a column has the name of a standard argument.
    """
    columns = list(columns)
    standard = SINGULAR if is_per_sample(name, function) else ARGUMENTS
    # `prompt` and `completion` are fine names for columns as long as no function means something else by them.
    if clashing := [column for column in columns if column in ARGUMENTS or column in standard]:
        raise RewardError(
            f"the data column {clashing[0]!r} has the name of an argument that reward function {name!r} may take. "
            f"Rename it: data.rename={{{clashing[0]}:{clashing[0]}_column}}."
        )
    offered = [*standard, *columns]
    parameters = _parameters(name, function)
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variadic or parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"reward function {name!r} takes {parameter.name!r} by position only, and every argument is passed by "
                "keyword. Remove the '/' from its signature, or wrap it: def f(completions, **columns)."
            )
        if parameter.name not in offered:
            raise RewardError(
                f"reward function {name!r} needs the argument {parameter.name!r}, which is no column of the data. "
                f"Columns: {', '.join(columns) or 'none'}. Any function may also name {', '.join(standard)}."
                f"{did_you_mean(parameter.name, offered)} {_FIX.get(parameter.name, _RENAME)}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    by_keyword = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return [argument for argument in offered if argument in by_keyword]


def columns_read(name: str, function: Function, columns: Iterable[str]) -> set[str]:
    """Return the columns that a function may read: all if it takes ``**kwargs``, none for ``**_``, and those it
    names."""
    parameters = _parameters(name, function)
    if any(parameter.kind is parameter.VAR_KEYWORD and parameter.name != "_" for parameter in parameters):
        return {*columns}
    return {*columns} & {parameter.name for parameter in parameters}


def _parameters(name: str, function: Function) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {name!r} has no readable signature. Wrap it in a def.") from error


def check_rows(name: str, returned: Any, rows: int) -> None:
    """Refuse a result that `to_plain` could not read as a list of one entry per completion.

    Raises:
        RewardError: the result is no list, tuple or 1-D array, or not of this length.
    """
    if isinstance(returned, Opaque):
        raise RewardError(
            f"reward function {name!r} returned {returned.text}; expected a list of {rows} numbers or None, one a "
            f"completion.{returned.hint}"
        )


def check_value(name: str, index: int, value: Any, completion: Completion) -> tuple[float, list[Part] | None]:
    """Return one entry as a finite float, NaN standing for None, and the parts that it is the sum of, if it was a list.

    Raises:
        RewardError: it is neither a finite number, nor None, nor a list of turns, or of spans inside the text of the
            completion.
    """
    if value is None:
        return math.nan, None
    parts = None
    if isinstance(value, list):
        if len(set(map(len, value))) > 1:
            raise RewardError(
                f"reward function {name!r} returned {reprlib.repr(value)} for completion {index}, which mixes spans "
                "and turns: a list holds (start, end, value), or it holds (turn, value)."
            )
        parts = [_part(name, index, part, completion) for part in value]
        value = math.fsum(part[-1] for part in parts)
    return _number(name, index, value, completion), parts


def _number(name: str, index: int, value: Any, completion: Completion) -> float:
    if isinstance(value, Opaque):
        shown, fault = (
            value.text,
            f"is {_with_article(value.kind)}, not a number, None or a list of (start, end, value) or of (turn, value)",
        )
        if value.kind == "dict":
            fault += "; return its score alone, and give the rest to log_metric or log_extra"
    elif isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:  # 10**400
            number = math.inf
        if abs(number) <= _LARGEST:
            return number
        shown, fault = reprlib.repr(value), "is not finite in float32; return None where the reward does not apply"
    else:
        shown, fault = reprlib.repr(value), f"is {_with_article(type(value).__name__)}, not a number"
    raise RewardError(
        f"reward function {name!r} returned {shown} for completion {index}, which {fault}. "
        f"The completion starts {text_of(completion)[:80]!r}."
    )


def _with_article(kind: str) -> str:
    return "a coroutine (await it, in an async def)" if kind == "coroutine" else f"a {kind}"


def _part(name: str, index: int, part: Any, completion: Completion) -> Part:
    if not is_turn_reward(part):
        start, end, value = part
        length = len(text_of(completion))
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= length):
            shown = tuple(each.text if isinstance(each, Opaque) else each for each in part)
            raise RewardError(
                f"reward function {name!r} returned the span {shown} for completion {index}, which has {length} "
                "characters. A span is (start, end, value) with whole numbers 0 <= start < end <= length; end is "
                "exclusive."
            )
        return start, end, _number(name, index, value, completion)
    turn, value = part
    if not isinstance(turn, int) or turn < 0:
        shown = turn.text if isinstance(turn, Opaque) else reprlib.repr(turn)
        raise RewardError(
            f"reward function {name!r} returned the turn {shown} for completion {index}. The reward of a turn is "
            "(turn, value), and turns of the policy are counted 0, 1, 2, ..."
        )
    return turn, _number(name, index, value, completion)


_IN_GROUPS = {
    "": (
        "reward reward_std frac_reward_zero_std frac_rows_skipped num_tokens num_input_tokens_seen loss entropy "
        "kl ratio_mean approx_kl cispo_clip_ratio off_policy_kept policy_loss entropy_coef kl_coef reward_kl_coef "
        "ptx_loss ptx_coef echo_loss lr_critic grad_norm skipped_steps lr contain_eos_token model_contain_eos_token "
        "ref_contain_eos_token beta alpha mixture_coef aux_loss"
    ),
    "completions": (
        "mean_length min_length max_length clipped_ratio mean_terminated_length min_terminated_length "
        "max_terminated_length repetition unscored observation_length"
    ),
    "turns": "mean max",
    "branches": "mean max forked refused read_again",
    "tools": "call_frequency failure_frequency parse_failures",
    "template": "rewritten",
    "env": "failed timeouts cut seconds_mean seconds_p50 seconds_max",
    "groups": "dropped drawn empty kept_length best_reward tied unscored",
    "replay": "groups age",
    "sampling/sampling_logp_difference": "mean max probe_mean probe_max",
    "sampling/importance_sampling_ratio": "mean min max",
    "sampling": "kl k3 chi2 ppl_ratio ess truncated masked kept_mass rejected",
    "sampling/staleness": "mean max",
    "objective": "scores kl entropy non_score_reward rlhf_reward scores_margin model_scores ref_scores",
    "value": "num_eos_tokens ratio ratio_var clipfrac_avg error mean explained_variance",
    "clip_ratio": "low_mean high_mean region_mean low_min high_max delta_mean",
    "fipo": "weight_mean",
    "m2po": "dropped",
    "vespo": "phi_seq_mean",
    "clip_cov": "share",
    "kl_cov": "share",
    "policy": "approxkl_avg clipfrac_avg entropy_avg",
    "loss": "policy_avg value_avg dpo xpo kl score",
    "return": "mean",
    "rewards": "chosen rejected accuracies margins probabilities",
    "logps": "chosen rejected",
    "judge": "failures ties",
}

RUN_METRICS = {f"{group}/{name}".lstrip("/") for group, names in _IN_GROUPS.items() for name in names.split()}
"""Metrics that methods on rollouts log under ``train/``, whatever the settings of the run at hand: a `kl` that
belongs to a reward would be read as the policy's. A test compares them with docs/metrics.md."""

_WITH_OWN_NAMES = re.compile(
    r"rewards/.+/(mean|std|failure_ratio|timeout_ratio|cache_hit_ratio)|(curriculum|role|teacher)/.+"
)
"""Metrics with the name of a function, of a pool, of a role or of a teacher in theirs."""

SAMPLE_COLUMNS = {"step", "rank", "prompt", "completion", "reward", "advantage", "length", "ended"}
SAMPLE_COLUMNS |= {"opponent", "opponent_reward", "win", "win_rate"}
"""Columns that samples have themselves, beside those of `_OF_SAMPLES`."""

EPISODE_COLUMNS = {"group", "turns", "end", "turn_rewards", "episode_reward", "calls", "failed_calls", "messages"}
EPISODE_COLUMNS |= {"unreadable_calls", "observed_tokens", "episode_error", "returned_images", "branches", "forks"}
"""Columns that they have besides where something answers the policy."""

_OF_SAMPLES = re.compile(r"rewards/[^/]+|tokens/.*")


def is_taken(name: str) -> bool:
    """Tell whether a run logs ``train/<name>`` itself."""
    return name in RUN_METRICS or _WITH_OWN_NAMES.fullmatch(name) is not None


def check_metric_names(function: str, names: Iterable[str]) -> None:
    """Refuse metric names that the run logs itself.

    Raises:
        RewardError: names a free one.
    """
    for name in names:
        if is_taken(name):
            raise RewardError(
                f"log_metric({name!r}, ...) of {function!r}: the run itself logs train/{name}. Log it under "
                f"another name; {_free(function, name)!r} is free."
            )


def check_extra_names(function: str, names: Iterable[str], of_the_data: Collection[str]) -> None:
    """Refuse extra columns that the samples have already.

    Raises:
        RewardError: names a free one.
    """
    taken = SAMPLE_COLUMNS | EPISODE_COLUMNS if "episodes" in of_the_data else SAMPLE_COLUMNS
    for name in names:
        if name in taken or _OF_SAMPLES.fullmatch(name) or name in of_the_data:
            whose = "the data have" if name in of_the_data else "the samples have"
            raise RewardError(
                f"log_extra({name!r}, ...) of {function!r}: {whose} a column of this name. Log it under another "
                f"name; {_free(function, name)!r} is free."
            )


def _free(function: str, name: str) -> str:
    return f"{function}/{name.replace('/', '_')}"


class FunctionFromPath:
    """A callable that pickles as the path it came from, and so reaches worker processes.

    Args:
        path: ``package.module:name``, or ``file.py:name`` with a file relative to the current directory. Kept absolute.
        key: The setting that named it, for messages.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import, or the object cannot be called.
    """

    def __init__(self, path: str, key: str = "reward.fn") -> None:
        named = load_by_path(path, key)
        check_callable(path, named.value)
        self.source, self.text, self.function = named.source, named.text, named.value
        functools.update_wrapper(self, self.function, updated=())
        self.__name__ = named.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"FunctionFromPath({self.path!r})"

    def __reduce__(self) -> tuple[type[FunctionFromPath], tuple[str]]:
        return FunctionFromPath, (self.path,)

    @property
    def path(self) -> str:
        """`source:name`."""
        return f"{self.source}:{self.__name__}"

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionFromPath:
        return self  # as for any function; reading the file again could pick up an edit in the middle of a run

    @property
    def owner(self) -> str:
        """The file or module without folders, packages and ending."""
        return self.source.rpartition(".")[2] if self.text is None else Path(self.source).stem


def load_function(path: str, key: str = "reward.fn") -> FunctionFromPath:
    """Return the callable at ``package.module:name``, ``./file.py:name`` or ``/folder/file.py:name``; `key` is its
    setting.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import.
    """
    return FunctionFromPath(path, key)


def is_async(function: Any) -> bool:
    """Tell whether a function, or the call of an object, is a coroutine function."""
    inner = function.function if isinstance(function, FunctionFromPath) else function
    return any(inspect.iscoroutinefunction(part) for part in (inner, type(inner).__call__))
