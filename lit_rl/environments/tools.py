"""Tools: what the policy calls between its turns, with checked arguments and one answer a call."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator

from lit_rl.core.errors import ConfigError
from lit_rl.core.process_state import is_raised_by_user_code
from lit_rl.environments.observations import Content, ImageReturned, content_of, replace_surrogates
from lit_rl.environments.runner import NoReply
from lit_rl.rewards.contract import name_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the policy."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    """The id that the reply refers to, where the template gives calls one."""


@dataclass(frozen=True)
class ToolAnswer:
    """A tool's reply to the policy."""

    text: str
    failed: bool = False
    """True if the call was wrong, or the tool raised: the text says why."""
    parts: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Content in the place of the text, where the answer has images: see `lit_rl.environments.observations.Content`."""

    @classmethod
    def of(cls, content: Content) -> ToolAnswer:
        """Make a reply of a tool's result."""
        return cls(content) if isinstance(content, str) else cls("", parts=content)

    @property
    def content(self) -> Content:
        """Content of the message that answers."""
        return self.parts or self.text


class Tool(ABC):
    """Something that the policy may call by a name.

    Args:
        schema: Schema for the chat template: ``{"type": "function", "function": {"name": ..., "description": ...,
            "parameters": ...}}``.
        validator: Validator of the arguments of a call.
    """

    def __init__(self, schema: dict[str, Any], validator: Validator) -> None:
        self.schema, self._validator = schema, validator
        self.name: str = schema["function"]["name"]

    @property
    @abstractmethod
    def is_async(self) -> bool:
        """True if it has to be awaited."""

    def of(self, made: Any) -> Tool:
        """Return the same tool of another object, where it is a method."""
        return self

    def argument_error(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the error in the arguments of a call; None where there is none."""
        error = next(
            iter(sorted(self._validator.iter_errors(dict(arguments)), key=lambda e: list(map(str, e.path)))), None
        )
        if error is None:
            return _find_non_finite(arguments)
        where = f" of {'.'.join(map(str, error.path))}" if error.path else ""
        return f"{error.message}{where}"

    async def answer(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Return one answer to a call, whatever its arguments are like; 3.0 is read as 3 for an integer.

        The tool gets copies: the call stays what the policy wrote, in its context, in the record and for rewards.
        """
        arguments = _whole(copy.deepcopy(dict(arguments)), self._validator.schema, self._validator)
        if wrong := self.argument_error(arguments):
            return ToolAnswer(f"error: {self.name}: {wrong}", failed=True)
        return await self._answer(arguments)

    @abstractmethod
    async def _answer(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Answer a call whose arguments are right."""


class FunctionTool(Tool):
    """One function that the policy may call.

    Args:
        function: Function with a type and a line in its docstring's ``Args:`` for every argument, as transformers'
            ``get_json_schema`` reads them. It may be ``async def``, an object with such a ``__call__``, or a
            `functools.partial`, whose bound arguments are hidden from the policy. Its result is answered as text,
            as JSON, or as images beside texts: see `content_of`.

    Raises:
        ConfigError: a type or a line of the docstring is missing, or no JSON can be given to an argument; names it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        from transformers.utils.chat_template_utils import get_json_schema

        self.function = function
        name = name_of(function)
        try:
            described, bound = _described_function(function)
            schema = get_json_schema(_without_arguments(described, bound) if bound else described)
            schema["function"]["name"] = name
        except Exception as error:  # the docstring parser may raise anything
            raise ConfigError(f"The tool {name!r} {_why_no_tool(function, error)}") from error
        if inspect.isgeneratorfunction(described) or inspect.isasyncgenfunction(described):
            raise ConfigError(
                f"The tool {name!r} is a generator, and a call has one answer: return it, and do not yield."
            )
        strict = _strict(schema["function"]["parameters"])
        for argument in _arguments(described, name, bound):
            if argument.default is argument.empty and argument.name not in strict.get("properties", {}):
                raise ConfigError(
                    f"The tool {name!r} needs the argument {argument.name!r}, which no call can give. Of a "
                    f"class give the method of an object: MyTools().{name}."
                )
            if argument.default is None and argument.name in strict.get("properties", {}):
                strict["properties"][argument.name] = {"anyOf": [strict["properties"][argument.name], {"type": "null"}]}
        super().__init__(schema, Draft202012Validator(strict))
        self._told: set[str] = set()
        """Messages that were logged; shared with the same method of other objects."""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(_described_function(self.function)[0])

    def of(self, made: Any) -> FunctionTool:
        """Return the same method of another object."""
        return self.by(getattr(made, self.name))

    def by(self, function: Callable[..., Any]) -> FunctionTool:
        """Return the same tool with another function behind it."""
        bound = copy.copy(self)
        bound.function = function
        return bound

    async def _answer(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call the function. An exception is answered in a line, and logged with its traceback once; so is
        what can neither be written as text nor as JSON."""
        try:
            result = self.function(**arguments)
            if inspect.isawaitable(result):
                result = await result
            return ToolAnswer.of(content_of(result, f"The tool {self.name!r}"))
        except (NoReply, ImageReturned):
            raise  # not the policy's fault: the episode fails, or the run ends
        except ConfigError as error:
            self._log_once(str(error), shows_trace=False)
            return ToolAnswer(f"error: {self.name} gave no answer that can be written", failed=True)
        except BaseException as error:  # the tool's own error is its answer
            if not is_raised_by_user_code(error):
                raise
            self._log_once(f"tool {self.name!r} raised; it is answered, and not logged again:")
            return ToolAnswer(
                replace_surrogates(f"error: {self.name} raised {type(error).__name__}: {error}"), failed=True
            )

    def _log_once(self, what: str, *, shows_trace: bool = True) -> None:
        if not self._told:
            self._told.add(what)
            _log.warning(what, exc_info=shows_trace)


class Toolbox:
    """The tools of a conversation.

    Args:
        functions: See `FunctionTool`; or tools of another kind.

    Raises:
        ConfigError: no function, two of one name, or one that cannot be described.
    """

    def __init__(self, functions: Sequence[Callable[..., Any] | Tool]) -> None:
        if not functions:
            raise ConfigError("env.functions is empty: name at least one function, or leave the environment out.")
        self.tools: dict[str, Tool] = {}
        for each in functions:
            _add(self.tools, each if isinstance(each, Tool) else FunctionTool(each))

    @property
    def is_async(self) -> bool:
        """True if any of them has to be awaited."""
        return any(tool.is_async for tool in self.tools.values())

    def of(self, made: Any) -> Toolbox:
        """Return the same methods of another object."""
        bound = copy.copy(self)
        bound.tools = {name: tool.of(made) for name, tool in self.tools.items()}
        return bound

    def beside(self, more: Toolbox) -> Toolbox:
        """Return these tools and others together.

        Raises:
            ConfigError: two have one name.
        """
        merged = copy.copy(self)
        merged.tools = dict(self.tools)
        for tool in more.tools.values():
            _add(merged.tools, tool)
        return merged

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas for the chat template."""
        return [tool.schema for tool in self.tools.values()]

    async def answer(self, call: ToolCall) -> ToolAnswer:
        """Answer one call, whatever its form."""
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools)
            return ToolAnswer(f"error: there is no tool {call.name!r}; there are {known}", failed=True)
        return await tool.answer(call.arguments)


def _add(tools: dict[str, Tool], tool: Tool) -> None:
    if tool.name in tools:
        raise ConfigError(f"Two tools are called {tool.name!r}, and the policy could not tell them apart: rename one.")
    tools[tool.name] = tool


def _described_function(function: Callable[..., Any]) -> tuple[Callable[..., Any], frozenset[str]]:
    """Return the function whose types and docstring describe a tool, and the arguments that are bound already."""
    if isinstance(function, functools.partial):
        inner, bound = _described_function(function.func)
        arguments = inspect.signature(inner).bind_partial(*function.args, **function.keywords).arguments
        return inner, bound | arguments.keys()
    if inspect.isroutine(function) or isinstance(function, type):
        return function, frozenset()
    return getattr(function, "__wrapped__", function.__call__), frozenset()  # the first of functools.lru_cache


def _without_arguments(function: Callable[..., Any], bound: Collection[str]) -> Callable[..., Any]:
    """Return a function that stands for another one where it is described, and lacks some of its arguments."""

    def described() -> None: ...

    signature, types = inspect.signature(function), get_type_hints(function)
    kept = [each for each in signature.parameters.values() if each.name not in bound]
    described.__name__, described.__doc__ = getattr(function, "__name__", ""), inspect.getdoc(function)
    described.__signature__ = signature.replace(parameters=kept)  # pyright: ignore[reportFunctionMemberAccess]
    described.__annotations__ = {name: type_ for name, type_ in types.items() if name not in bound}
    return described


def _why_no_tool(function: Any, error: Exception) -> str:
    """Return why something cannot be a tool.

    Args:
        function: The user's value.
        error: Error of the reader of docstrings.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        return f"is a class. Give an object of it, made by {function.__name__}(...), or one of its methods."
    if not callable(function):
        return f"is {function!r:.80}, which cannot be called: give a function."
    if getattr(function, "__name__", "") == "<lambda>":
        return (
            "is a lambda, which has no types and no docstring to describe it to the policy by: write a def with both."
        )
    if inspect.isbuiltin(function):
        return (
            "is built in, and has no types to describe it to the policy by: write a def around it, with a type for "
            "every argument and a docstring."
        )
    return (
        f"cannot be described to the policy: {error} Every argument takes a type, and a line under `Args:` in the "
        "docstring, which begins with what the tool does."
    )


def _arguments(function: Callable[..., Any], name: str, bound: Collection[str]) -> list[inspect.Parameter]:
    """Return the parameters of a function that are not bound.

    Raises:
        ConfigError: it takes something that no JSON object can give it.
    """
    arguments = [each for each in inspect.signature(function).parameters.values() if each.name not in bound]
    types = get_type_hints(function)
    for argument in arguments:
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise ConfigError(
                f"The tool {name!r} takes {argument.replace(annotation=argument.empty)}"
                f"{', /' * (argument.kind is argument.POSITIONAL_ONLY)}, and the "
                "arguments of a call come by their names: give each a name and a type of its own, or take a list or a "
                "dict."
            )
        if (odd := _no_json(types.get(argument.name))) is not None:
            raise ConfigError(
                f"The tool {name!r}: its argument {argument.name!r} is a {odd.__name__}, and a call gives it text, a "
                "number, a list or a dict. Take one of these (for one of several words Literal['a', 'b']), and make a "
                f"{odd.__name__} of it in the function."
            )
    return arguments


def _no_json(type_: Any) -> type | None:
    """Return the class in a type that no JSON value is an instance of; None where there is none."""
    for part in get_args(type_) if get_origin(type_) is not Literal else ():
        if (odd := _no_json(part)) is not None:
            return odd
    if not isinstance(type_, type) or get_origin(type_) is not None or type_ in _JSON:
        return None
    return None if issubclass(type_, Mapping) or type_.__module__ in ("typing", "collections.abc") else type_


_JSON = (int, float, str, bool, type(None), list, tuple, dict, object)


def _strict(schema: Any) -> Any:
    """Return the schema made strict: no additional arguments, and null only where it is allowed."""
    if not isinstance(schema, dict):
        return schema
    strict: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            strict[key] = {name: _strict(part) for name, part in value.items()}
        elif key != "nullable":
            listed = isinstance(value, list) and key != "enum"
            strict[key] = [_strict(part) for part in value] if listed else _strict(value)
    if schema.get("type") == "object" and "properties" in schema:
        strict.setdefault("additionalProperties", False)
    return {"anyOf": [strict, {"type": "null"}]} if schema.get("nullable") else strict


def _whole(value: Any, schema: Any, validator: Validator) -> Any:
    """Convert each float that its schema takes for an integer to an int, and no other number.

    Args:
        value: A value read from JSON.
        schema: Schema of the value, a part of the validator's. Of alternatives (``anyOf``) the first that takes the
            value counts.
        validator: Validator of all arguments, whose schema ``$ref`` refers to.
    """
    for _ in range(_REFERENCES):
        if not (isinstance(schema, Mapping) and str(schema.get("$ref", "")).startswith("#")):
            break
        schema = _resolve_reference(validator.schema, schema["$ref"])
    if not isinstance(schema, Mapping):
        return value
    for part in schema.get("allOf", ()):
        value = _whole(value, part, validator)
    if alternatives := (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        taking = (part for part in alternatives if validator.evolve(schema=part).is_valid(value))
        value = _whole(value, next(taking, None), validator)
    if isinstance(value, float):
        types = schema.get("type", ())
        integer = types == "integer" or ("integer" in types and "number" not in types)
        return int(value) if integer and value.is_integer() else value
    if isinstance(value, list):
        first, rest = schema.get("prefixItems", ()), schema.get("items")
        parts = [*first, *[rest] * (len(value) - len(first))]
        return [_whole(each, part, validator) for each, part in zip(value, parts)]
    if isinstance(value, dict):
        named, rest = schema.get("properties", {}), schema.get("additionalProperties")
        return {key: _whole(each, named.get(key, rest), validator) for key, each in value.items()}
    return value


_REFERENCES = 32
"""The most steps from one ``$ref`` to the next: one may refer to itself."""


def _resolve_reference(root: Any, reference: str) -> Any:
    """Resolve a ``$ref`` within a schema; None where it points nowhere."""
    for part in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        key = part.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def _find_non_finite(value: Any, name: str = "") -> str | None:
    """Return a message about NaN or infinity, which JSON lacks and Python reads; None where there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is no number of {name}" if name else f"{value} is no number"
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return next((found for key, part in parts if (found := _find_non_finite(part, name or str(key)))), None)
