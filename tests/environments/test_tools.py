"""Tools: what is told of them, what is checked of a call, and that every call has one answer."""

from __future__ import annotations

import asyncio
import copy
import datetime
import functools
import json
import math
import warnings
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from chat_templates import tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from lit_rl.algorithms.checks import episode_checks
from lit_rl.algorithms.checks.episode_checks import make_episode_source
from lit_rl.core.errors import ConfigError
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.environments.interaction import Interaction
from lit_rl.environments.observations import content_of
from lit_rl.environments.tools import FunctionTool, ToolAnswer, Toolbox, ToolCall, _whole
from lit_rl.environments.user_environments import CustomEnvironment, FunctionTools


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: Left.
        b: Right.
    """
    return a * b


async def look_up(key: str, places: list[float] | None = None, order: Literal["up", "down"] = "up") -> dict[str, Any]:
    """Look up.

    Args:
        key: What.
        places: Where.
        order: How.
    """
    await asyncio.sleep(0)
    return {"key": key, "places": places, "order": order}


def fail(why: str) -> str:
    """Fail.

    Args:
        why: The reason.
    """
    raise RuntimeError(why)


BOX = Toolbox([multiply, look_up, fail])


def asked(name: str, **arguments: Any) -> ToolAnswer:
    return asyncio.run(BOX.answer(ToolCall(name, arguments)))


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_an_answer_is_what_the_function_returns(a: int, b: int) -> None:
    assert asked("multiply", a=a, b=b) == ToolAnswer(str(a * b))


def test_what_is_no_text_is_answered_as_json_and_async_functions_are_awaited() -> None:
    found = json.loads(asked("look_up", key="ä", places=[1, 2.5]).text)
    assert found == {"key": "ä", "places": [1, 2.5], "order": "up"}
    assert json.loads(asked("look_up", key="x", places=None).text)["places"] is None
    assert "ä" in asked("look_up", key="ä").text, "as it is written, not as an escape"


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown tool": ("divide", {"a": 1}, "no tool 'divide'; there are multiply, look_up, fail"),
    "missing": ("multiply", {"a": 3}, "'b' is a required property"),
    "too many": ("multiply", {"a": 3, "b": 4, "c": 5}, "'c' was unexpected"),
    "a word for a number": ("multiply", {"a": "three", "b": 4}, "'three' is not of type 'integer' of a"),
    "a fraction": ("multiply", {"a": 1.5, "b": 4}, "1.5 is not of type 'integer' of a"),
    "truth for a number": ("multiply", {"a": True, "b": 4}, "True is not of type 'integer' of a"),
    "null": ("multiply", {"a": None, "b": 4}, "None is not of type 'integer' of a"),
    "nan": ("look_up", {"key": "x", "places": [math.nan]}, "nan is no number of places"),
    "infinite": ("look_up", {"key": "x", "places": [math.inf]}, "inf is no number of places"),
    "of a list": ("look_up", {"key": "x", "places": ["far"]}, "places"),
    "another choice": ("look_up", {"key": "x", "order": "left"}, "'left' is not one of ['up', 'down'] of order"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_answered_with_what_is_wrong(name: str) -> None:
    tool, arguments, words = WRONG[name]
    answer = asked(tool, **arguments)
    assert answer.failed and answer.text.startswith("error: ") and words in answer.text
    assert "\n" not in answer.text


def typed(
    whole: int,
    broken: float = 0.0,
    either: int | float = 0,
    maybe: int | None = None,
    listed: list[list[int]] | None = None,
    named: dict[str, int] | None = None,
    one_of: Literal[1, 2] = 1,
) -> str:
    """Say what came.

    Args:
        whole: An integer.
        broken: A number.
        either: Either.
        maybe: An integer or nothing.
        listed: Integers in lists.
        named: Integers by name.
        one_of: One of two.
    """
    return repr((whole, broken, either, maybe, listed, named, one_of))


def test_a_whole_number_is_an_int_where_the_schema_asks_for_an_integer() -> None:
    """And nowhere else: JSON does not tell 3.0 from 3, but it tells both from true and from a text."""
    tool = FunctionTool(typed)
    every = {"broken": 3.0, "either": 3.0, "maybe": 3.0, "listed": [[3.0, 4]], "named": {"a": 3.0}, "one_of": 2.0}
    answer = asyncio.run(tool.answer({"whole": 3.0, **every}))
    assert answer == ToolAnswer("(3, 3.0, 3.0, 3, [[3, 4]], {'a': 3}, 2)")
    for wrong in (True, "3", 3.5, math.inf):
        assert asyncio.run(tool.answer({"whole": wrong})).failed


def test_integers_are_found_behind_references_and_alternatives() -> None:
    """As in the schemas of servers of tools."""
    node = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
    schema = {
        "$defs": {"Node": {"type": "object", "properties": {"n": {"type": "integer"}, "next": node}}},
        "properties": {
            "first": {"$ref": "#/$defs/Node"},
            "pair": {"prefixItems": [{"type": "number"}, {"type": "integer"}], "items": {"type": "integer"}},
            "choice": {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"items": {"type": "integer"}}]},
            "lost": {"$ref": "#/$defs/nothing"},
        },
    }
    given_ = {"first": {"n": 1.0, "next": {"n": 2.0, "next": None}}, "pair": [1.0, 2.0, 3.0], "choice": [4.0]}
    read = _whole(given_, schema, Draft202012Validator(schema))
    assert repr(read) == "{'first': {'n': 1, 'next': {'n': 2, 'next': None}}, 'pair': [1.0, 2, 3], 'choice': [4]}"
    assert repr(_whole({"lost": 1.0}, schema, Draft202012Validator(schema))) == "{'lost': 1.0}"


class Colour(Enum):
    RED = "red"


def described(annotation: str) -> Any:
    """A tool of one argument."""
    scope: dict[str, Any] = {"Any": Any, "Literal": Literal, "Colour": Colour, "date": datetime.date}
    exec(f"def tool({annotation}) -> str:\n    return repr(a)", scope)
    scope["tool"].__doc__ = "Say.\n\n    Args:\n        a: What.\n    "
    return scope["tool"]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        ("a: Colour", "its argument 'a' is a Colour, and a call gives it text"),
        ("a: list[date] | None", "its argument 'a' is a date"),
        ("*a: int", r"takes \*a, and the arguments of a call come by their names"),
        ("**a: int", r"takes \*\*a, and the arguments"),
        ("a: int, /", "takes a, /, and the arguments"),
    ],
)
def test_an_argument_that_no_call_can_give_is_refused_at_the_start(annotation: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"The tool 'tool'.*{words}"):
        FunctionTool(described(annotation))


@pytest.mark.parametrize(
    "type_", ["Any", "dict", "dict[str, list[int]]", "tuple[int, str]", "Literal['b'] | None", "str"]
)
def test_an_argument_of_json_is_taken(type_: str) -> None:
    assert FunctionTool(described(f"a: {type_}")).name == "tool"


def test_null_is_what_an_argument_is_by_default_where_that_is_none() -> None:
    assert asyncio.run(FunctionTool(described("a: int = None")).answer({"a": None})) == ToolAnswer("None")
    assert asyncio.run(FunctionTool(described("a: int = 3")).answer({"a": None})).failed


def test_a_tool_that_raises_is_answered_in_a_line_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tool = FunctionTool(fail)
    for _ in range(3):
        answer = asyncio.run(tool.answer({"why": "no such place"}))
        assert answer == ToolAnswer("error: fail raised RuntimeError: no such place", failed=True)
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None


def test_what_cannot_be_answered_is_an_error_that_names_the_tool(caplog: pytest.LogCaptureFixture) -> None:
    def shapes() -> Any:
        """Get shapes."""
        return {3}

    answer = asyncio.run(Toolbox([shapes]).answer(ToolCall("shapes", {})))
    assert answer == ToolAnswer("error: shapes gave no answer that can be written", failed=True)
    assert "'shapes' returned {3}, which is neither text nor JSON" in caplog.text


def test_tools_that_nothing_describes_are_refused_by_name() -> None:
    def untyped(a, b: int) -> int:
        """X.

        Args:
            a: left
            b: right
        """
        return b

    def undocumented(a: int, b: int) -> int:
        """X.

        Args:
            a: left
        """
        return b

    with pytest.raises(ConfigError, match="'untyped' .*Argument a is missing"):
        FunctionTool(untyped)
    with pytest.raises(ConfigError, match="tool 'undocumented'.* argument 'b'"):
        FunctionTool(undocumented)
    with pytest.raises(ConfigError, match="Two tools are called 'multiply'"):
        Toolbox([multiply, multiply])


def test_the_policy_is_told_what_transformers_says_of_the_functions() -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    assert BOX.schemas == [get_json_schema(function) for function in (multiply, look_up, fail)]


# ---------------------------------------------------------------------- what is called, and what it gets and gives


def shift(by: int, points: list, named: dict) -> int:
    """Shift points.

    Args:
        by: How far.
        points: Which.
        named: Others.
    """
    points[0]["x"] += by
    points.append(by)
    named.setdefault("seen", []).append(by)
    return points[0]["x"]


def test_a_tool_gets_copies_of_what_the_policy_wrote() -> None:
    """Seen as a call that the policy reads again, in its context, otherwise than it wrote it."""
    wrote = {"by": 2, "points": [{"x": 1}], "named": {"seen": [0]}}
    kept = copy.deepcopy(wrote)
    toolbox = Toolbox([shift])
    for _ in range(2):
        assert asyncio.run(toolbox.answer(ToolCall("shift", wrote))).text == "3"
    assert wrote == kept


def search(word: str, index) -> int:  # a type of somebody's
    """Search.

    Args:
        word: For what.
    """
    return len(word) + len(index)


def test_what_a_partial_has_set_needs_neither_type_nor_description() -> None:
    tool = FunctionTool(functools.partial(search, index=[1, 2]))
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["word"]
    assert asyncio.run(tool.answer({"word": "abc"})).text == "5"


class Adder:
    def __call__(self, a: int, b: int = 1) -> int:
        """Add.

        Args:
            a: Left.
            b: Right.
        """
        return a + b


def counted(by: int) -> Any:
    """Count.

    Args:
        by: How far.
    """
    yield by


async def counted_later(by: int) -> Any:
    """Count.

    Args:
        by: How far.
    """
    yield by


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (counted, "'counted' is a generator"),
        (counted_later, "'counted_later' is a generator"),
        (Adder.__call__, r"needs the argument 'self', which no call can give.*MyTools\(\)\.__call__"),
    ],
)
def test_what_no_call_can_be_answered_by_is_refused_at_the_start(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FunctionTools([function])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (np.float32(1.5), "1.5"),
        ([np.int64(3), np.bool_(True)], "[3, true]"),
        ({"grid": np.eye(2)}, '{"grid": [[1.0, 0.0], [0.0, 1.0]]}'),
        (torch.tensor(2.5, requires_grad=True), "2.5"),
        (Decimal("0.5"), "0.5"),
    ],
)
def test_numbers_of_other_packages_are_written_as_json_has_them(result: Any, text: str) -> None:
    assert content_of(result, "it") == text


class Greeter:
    """Begins with a text, and has no tools."""

    def reset(self, **_: Any) -> str:
        return " hello"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, True


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("env", "tools", "told", "said"),
    [
        (lambda: FunctionTools([multiply]), [WEATHER], ["multiply"], "env= alone (multiply)"),
        (lambda: FunctionTools([multiply]), json.dumps([WEATHER]), ["multiply"], "env= alone (multiply)"),
        (lambda: FunctionTools([multiply]), [FunctionTool(multiply).schema], ["multiply"], ""),
        (lambda: FunctionTools([multiply]), None, ["multiply"], ""),
        (lambda: FunctionTools([multiply]), "a note", ["multiply"], ""),
        (lambda: CustomEnvironment(Greeter), [WEATHER], ["weather"], "env= answers no calls of them"),
    ],
)
def test_tools_of_rows_are_told_where_the_environment_has_none_and_named_where_it_has_others(env, tools, told, said):
    tokenizer, ends = tokenizer_of("qwen3")
    rows = [{"prompt": [{"role": "user", "content": "a"}], "tools": tools}]
    data = RolloutDataModule(rows, val_fraction=0.0, max_prompt_tokens=4096)
    data.prepare(tokenizer)
    model: Any = SimpleNamespace(tokenizer=tokenizer, eos_ids=ends, processor=None)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        source: Any = make_episode_source(env(), model, data)
    opened, conversations = source.begin(data.peek(1), [0], max_new_tokens=4)
    conversations.close()
    text = tokenizer.decode(opened[0].ids)
    assert [name for name in ("multiply", "weather") if name in text] == told
    lines = [str(each.message) for each in heard if "column tools" in str(each.message)]
    assert len(lines) == bool(said) and said in "".join(lines)


def test_arguments_of_rows_are_tried_once_each_the_first_256_and_64_are_kept(monkeypatch):
    tokenizer, ends = tokenizer_of("qwen3")
    interaction = Interaction(FunctionTools([multiply]), tokenizer, eos_ids=ends, chat=True, template_kwargs={})
    asked_for: list[int] = []
    (ready,) = interaction._prepared.values()

    def made_ready(kind: Any, own: Any) -> Any:
        asked_for.append(own["n"])
        return ready

    monkeypatch.setattr(interaction, "_prepare_kind", made_ready)
    numbers = [n // 2 for n in range(600)]
    columns = {"prompt": numbers, "chat_template_kwargs": [{"n": n, "other": [1]} for n in numbers]}
    data = SimpleNamespace(columns_of_sets=lambda: [columns, columns])
    rows = [*episode_checks._rows_of_arguments(interaction.factory, data)]
    assert [row["prompt"] for row in rows] == [*range(300)]
    for row in [*rows[:70], rows[69], rows[6], rows[70], rows[6], rows[7]]:
        interaction.ready_for(row)
    assert len(interaction._prepared_of_rows) == 64
    assert asked_for == [*range(71), 7], "the one that was asked for longest ago has gone"


async def later(key: str, place: int) -> str:
    """Look up later.

    Args:
        key: What.
        place: Where.
    """
    return f"{key}{place}"


@pytest.mark.parametrize(
    ("function", "name", "takes", "arguments", "answer"),
    [
        (functools.partial(multiply, b=3), "multiply", ["a"], {"a": 2}, "6"),
        (functools.partial(multiply, 5), "multiply", ["b"], {"b": 2}, "10"),
        (functools.partial(functools.partial(multiply, b=3), a=4), "multiply", [], {}, "12"),
        (Adder(), "adder", ["a", "b"], {"a": 2}, "3"),
        (Adder().__call__, "__call__", ["a", "b"], {"a": 2, "b": 2}, "4"),
        (functools.partial(Adder(), b=5), "adder", ["a"], {"a": 2}, "7"),
        (functools.partial(later, place=7), "later", ["key"], {"key": "x"}, "x7"),
        (functools.lru_cache(multiply), "multiply", ["a", "b"], {"a": 2, "b": 2}, "4"),
    ],
)
def test_whatever_can_be_called_is_a_tool_and_what_a_partial_has_set_is_not_asked_for(
    function: Any, name: str, takes: list[str], arguments: dict[str, Any], answer: str
) -> None:
    tool = FunctionTool(function)
    assert (tool.name, list(tool.schema["function"]["parameters"]["properties"])) == (name, takes)
    assert tool.schema["function"]["description"]
    assert asyncio.run(tool.answer(arguments)) == ToolAnswer(answer)
    assert tool.is_async == (name == "later")
    assert asyncio.run(tool.answer({**arguments, "c": 1})).failed


def test_what_a_partial_has_set_cannot_be_set_by_the_policy() -> None:
    tool = FunctionTool(functools.partial(multiply, b=3))
    assert asyncio.run(tool.answer({"a": 2, "b": 100})).failed


def test_a_class_is_no_tool_and_an_object_of_it_is() -> None:
    with pytest.raises(ConfigError, match=r"'Adder' is a class. Give an object of it"):
        FunctionTools([Adder])
