"""What constructors allow of a setting that is one number or one word, read from their own calls of `in_range` and
`one_of`.

So that a range stands once, where it is refused, and is known before a constructor can be imported:
`scripts/config_reference.py` writes what this finds to `schema_keys.yaml`, and `lit_rl.cli.fast_checks` reads it there.
Found is what is asked of every value that is not null. What depends on other settings is left to the constructor.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.utils import get_object

from lit_rl.algorithms.signatures import annotated_metadata, annotations_of
from lit_rl.cli import schemas
from lit_rl.core import errors
from lit_rl.ops.ranges import Range

_DEEPEST = 5
"""Calls inside calls that are followed."""

Found = dict[str, list[dict[str, Any]]]
"""By a parameter's name: the arguments of each call, `key` first."""


@dataclass(frozen=True)
class _Setting:
    """A parameter of the constructor that is looked at, as it was given."""

    name: str


@dataclass(frozen=True)
class _Constant:
    value: Any


_Scope = Mapping[str, Any]
"""What names stand for: a `_Setting` or a `_Constant`; others are not there."""


def of(target: Any) -> Found:
    """Of a class or a function that a config builds."""
    names = {parameter.name: _Setting(parameter.name) for parameter, _ in schemas.parameters(target)}
    return _Calls(target).of_call(target, names, 0)


def of_loss(loss: Callable[..., Any]) -> Found:
    """Of a loss, whose annotations declare its ranges."""
    found: Found = {}
    for name, annotation in annotations_of(loss).items():
        for each in annotated_metadata(annotation):
            if isinstance(each, Range):
                found[name] = [{"key": f"algo.loss.{name}", **_without_defaults(dataclasses.asdict(each))}]
    return found


def every() -> dict[str, Found]:
    """By the path of what is built; and the words of Lightning's Trainer."""
    found = {path: of(get_object(path)) for path in schemas.TARGETS.values() if path.startswith("lit_rl.")}
    losses = {
        path: of_loss(get_object(path)) for path in schemas.public_functions().values() if ".ops.policy_losses." in path
    }
    lora = get_object("lit_rl.models.Lora")  # a schema beside the model's names it by the module that it is in
    found[f"{lora.__module__}.{lora.__qualname__}"] = found["lit_rl.models.Lora"]
    found |= losses
    return {path: found[path] for path in sorted(found) if found[path]} | {"lightning.Trainer": _of_trainer()}


def _of_trainer() -> Found:
    import lightning as L
    from lightning.pytorch.accelerators import AcceleratorRegistry
    from lightning.pytorch.strategies import StrategyRegistry

    hints = {parameter.name: hint for parameter, hint in schemas.parameters(L.Trainer)}
    words = {
        "accelerator": ["auto", "gpu", *sorted(AcceleratorRegistry.available_accelerators())],
        "precision": ["auto", *(str(word) for word in dict.fromkeys(map(str, _literals(hints["precision"]))))],
        "strategy": ["auto", *sorted(StrategyRegistry.available_strategies())],
    }
    return {name: [{"key": f"trainer.{name}", "allowed": allowed}] for name, allowed in words.items()}


def _literals(hint: Any) -> Iterator[Any]:
    for each in typing.get_args(hint):
        if typing.get_origin(hint) is typing.Literal:
            yield each
        else:
            yield from _literals(each)


def _without_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not False and value != float("inf")}


class _Calls:
    """Follows what a constructor does with its parameters."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.found: Found = {}

    def of_call(self, called: Any, scope: _Scope, depth: int) -> Found:
        """What is asked where a function or a class is called with these arguments."""
        if not isinstance(called, type):
            self.of_function(called, None, 0, scope, depth, {})
            return self.found
        name = "__post_init__" if dataclasses.is_dataclass(called) else "__init__"
        place = next((i for i, owner in enumerate(called.__mro__) if name in vars(owner)), None)
        if place is not None:
            self.of_function(vars(called.__mro__[place])[name], called, place, scope, depth, {})
        return self.found

    def of_function(
        self, function: Any, owner: type | None, place: int, scope: _Scope, depth: int, attributes: dict[str, Any]
    ) -> None:
        """The same of a function; `owner` has it as a method, at this place of its bases."""
        if depth > _DEEPEST or not inspect.isfunction(function) or not function.__module__.startswith("lit_rl."):
            return
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        if isinstance(tree, ast.FunctionDef):
            _Function(self, function, owner, place, depth, attributes).read(tree.body, dict(scope))


class _Function:
    """One function: its statements in order, as far as every value reaches them."""

    def __init__(
        self, calls: _Calls, function: Any, owner: type | None, place: int, depth: int, attributes: dict[str, Any]
    ) -> None:
        self.calls, self.function, self.owner, self.place, self.depth = calls, function, owner, place, depth
        self.attributes = attributes

    def read(self, body: Sequence[ast.stmt], scope: dict[str, Any]) -> bool:
        """Whether what follows is reached too."""
        for statement in body:
            if isinstance(statement, ast.If):
                if self._is_given(statement.test, scope) and not self.read(statement.body, scope):
                    return False
            elif isinstance(statement, ast.For):
                self._each(statement, scope)
            elif isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign)) and statement.value is not None:
                self._calls_in(statement.value, scope)
            if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
                return False
            self._keep(statement, scope)
        return True

    def _is_given(self, test: ast.expr, scope: _Scope) -> bool:
        """Whether it asks of one setting that it is not None."""
        match test:
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return isinstance(self._meant(left, scope), _Setting)
        return False

    def _each(self, loop: ast.For, scope: dict[str, Any]) -> None:
        """A loop over a row that stands there, of settings and constants."""
        targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
        for row in loop.iter.elts if isinstance(loop.iter, ast.Tuple) else ():
            values = row.elts if isinstance(loop.target, ast.Tuple) and isinstance(row, ast.Tuple) else [row]
            inner = dict(scope)
            for target, value in zip(targets, values):
                if isinstance(target, ast.Name):
                    inner[target.id] = self._meant(value, scope)
            self.read(loop.body, inner)

    def _calls_in(self, value: ast.expr, scope: _Scope) -> None:
        """The calls that are made whatever came, innermost first."""
        inner = [*value.args, *(word.value for word in value.keywords)] if isinstance(value, ast.Call) else []
        for each in value.elts if isinstance(value, ast.Tuple) else inner:
            self._calls_in(each, scope)
        if isinstance(value, ast.Call):
            self._call(value, scope)

    def _keep(self, statement: ast.stmt, scope: dict[str, Any]) -> None:
        """Note which names and attributes of the object are settings, and which are none any longer."""
        meant = self._meant(statement.value, scope) if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts))
            for place, what in pairs:
                if isinstance(place, ast.Attribute) and ast.unparse(place.value) == "self":
                    self.attributes[place.attr] = self._meant(what, scope)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                scope.pop(node.id, None)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and meant is not None:
            scope[statement.targets[0].id] = meant

    def _call(self, call: ast.Call, scope: _Scope) -> None:
        if any(isinstance(each, ast.Starred) for each in call.args):
            return
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "super()":
            return self._parent(call.func.attr, call, scope)
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self":
            return self._method(call.func.attr, call, scope)
        called = self._object(call.func)
        if called in (errors.in_range, errors.one_of):
            self._record(call, scope)
        elif callable(called) and (given := self._bound(called, call, scope)):
            self.calls.of_call(called, given, self.depth + 1)

    def _parent(self, name: str, call: ast.Call, scope: _Scope) -> None:
        """`super().__init__(...)`, which takes what its keywords say, and the rest by `**`."""
        for place, owner in list(enumerate(self.owner.__mro__ if self.owner else ()))[self.place + 1 :]:
            if name in vars(owner):
                known = self._given(list(inspect.signature(vars(owner)[name]).parameters)[1:], call, scope)
                if any(word.arg is None for word in call.keywords):
                    own = inspect.signature(self.function).parameters
                    handed_on = {each.name for each in scope.values() if isinstance(each, _Setting)} - {*own}
                    known = {name: _Setting(name) for name in handed_on} | known
                elif name == "__post_init__":
                    known = dict(scope)
                return self._follow(vars(owner)[name], place, known)

    def _method(self, name: str, call: ast.Call, scope: _Scope) -> None:
        """`self.name(...)`, as the class that is built has it."""
        for place, owner in enumerate(self.owner.__mro__ if self.owner else ()):
            if inspect.isfunction(method := vars(owner).get(name)):
                known = self._given(list(inspect.signature(method).parameters)[1:], call, scope)
                fields = dict(scope) if dataclasses.is_dataclass(self.owner) else {}
                return self._follow(method, place, fields | known)

    def _follow(self, function: Any, place: int, scope: _Scope) -> None:
        self.calls.of_function(function, self.owner, place, scope, self.depth + 1, self.attributes)

    def _given(self, names: Sequence[str], call: ast.Call, scope: _Scope) -> dict[str, Any]:
        given = {**dict(zip(names, call.args)), **{word.arg: word.value for word in call.keywords if word.arg}}
        return {name: meant for name, value in given.items() if (meant := self._meant(value, scope)) is not None}

    def _bound(self, called: Any, call: ast.Call, scope: _Scope) -> dict[str, Any]:
        """Its parameters as they are given here; empty where no setting is."""
        try:
            names = [name for name in inspect.signature(called).parameters]
        except (TypeError, ValueError):
            return {}
        known = self._given(names, call, scope)
        return known if any(isinstance(each, _Setting) for each in known.values()) else {}

    def _record(self, call: ast.Call, scope: _Scope) -> None:
        setting = self._meant(call.args[1], scope)
        try:
            key = self._plain(call.args[0], scope)
            how = {word.arg: self._plain(word.value, scope) for word in call.keywords}
            if len(call.args) > 2:
                how["allowed"] = [str(each) for each in self._plain(call.args[2], scope)]
        except _NotPlain:
            return
        if isinstance(setting, _Setting):
            asked = self.calls.found.setdefault(setting.name, [])
            asked.append({"key": key, **_without_defaults(how)})

    def _meant(self, value: ast.expr, scope: _Scope) -> Any:
        """The setting or the constant that an expression is; None where it is neither."""
        match value:
            case ast.Constant(value=constant):
                return _Constant(constant)
            case ast.Name(id=name):
                return scope.get(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._field(name, scope)
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), name]):
                constant = self._meant(name, scope)
                return self._field(constant.value, scope) if isinstance(constant, _Constant) else None
            case ast.IfExp(test=ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None)])):
                given = self._meant(value.orelse, scope)  # null stands for something else
                return given if isinstance(given, _Setting) and given == self._meant(left, scope) else None
        return None

    def _field(self, name: str, scope: _Scope) -> Any:
        return scope.get(name) if dataclasses.is_dataclass(self.owner) else self.attributes.get(name)

    def _plain(self, value: ast.expr, scope: _Scope) -> Any:
        """The value of an expression of constants, of names of the module and of the class."""
        known = {name: each.value for name, each in scope.items() if isinstance(each, _Constant)}
        for node in ast.walk(value):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                if self._field(node.attr, scope) is not None or not hasattr(self.owner, node.attr):
                    raise _NotPlain
            elif isinstance(node, ast.Name) and node.id not in {*known, *self.function.__globals__, "self"}:
                raise _NotPlain
        source = compile(ast.Expression(ast.fix_missing_locations(value)), "<range>", "eval")
        return eval(source, dict(self.function.__globals__), {**known, "self": self.owner})  # noqa: S307 (our own)

    def _object(self, named: ast.expr) -> Any:
        """A function or class of the module, or of a module that it names."""
        match named:
            case ast.Name(id=name):
                return self.function.__globals__.get(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                return getattr(self.function.__globals__.get(module), name, None)
        return None


class _NotPlain(Exception):
    """It depends on what is given."""
