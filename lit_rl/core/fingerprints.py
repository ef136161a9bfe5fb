"""Fingerprints of users' functions: their code, and the values, helpers and modules that they read.

A function that is passed to a constructor is identified by its text; but a resumed run also has another reward
if a helper that it calls, a constant of its module or the threshold in a closure has changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_OURS = ("lit_rl.", "torch.")


def text_digest(text: str | bytes) -> str:
    """Return a short digest."""
    plain = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return f"#{hashlib.blake2b(plain, digest_size=6).hexdigest()}"


def fingerprint_of(function: Any) -> str:
    """Return the name of a function or class; of code that is not this package's also a mark of its text."""
    plain = inspect.unwrap(function)
    name = f"{getattr(plain, '__module__', '')}.{getattr(plain, '__qualname__', type(plain).__name__)}"
    if name.startswith(_OURS):
        return name
    return f"{name.rpartition('.')[2]} {text_digest(_text(function, plain))}"


def _text(function: Any, plain: Any) -> str | bytes:
    text = getattr(function, "text", None)  # of a function in a file: the bytes that were read
    if isinstance(text, str | bytes):
        return text
    code = getattr(plain, "__code__", None)
    if code is not None and plain.__name__ == "<lambda>":  # its source is the whole line around it
        return _instructions(code)
    try:
        return inspect.getsource(plain)
    except (OSError, TypeError):  # typed into a shell, or made by `exec`
        return _instructions(code) if code is not None else ""


def _instructions(code: CodeType) -> str:
    """Return a code object as text that does not depend on its place in a file."""
    constants = [_constant(each) for each in code.co_consts]
    return repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars))


def _constant(value: Any) -> str:
    """Return a constant of code as text; a set's order is another one in each process."""
    if isinstance(value, CodeType):
        return _instructions(value)
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"({', '.join(map(_constant, value))})" if isinstance(value, tuple) else repr(value)


def dependencies_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a user's function or class reads, by name; nothing of installed code.

    Values it encloses, defaults of its parameters and globals that it names are yielded as they are, functions and
    classes of its own file too, each once; of a module of the user's, or an object from one, the module and those
    that it imports in turn, as marks of their files.
    """
    seen: set[int] = set()
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # users' objects may raise on any access, and no run ends by that
        for name, value in _reads(inspect.unwrap(getattr(function, "function", function)), seen):
            found.setdefault(name, value)
    yield from found.items()


def _reads(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(function) in seen or not is_users(getattr(function, "__module__", None)):
        return
    seen.add(id(function))
    if inspect.isclass(function):
        for each in [*vars(function).values(), *function.__bases__]:
            plain = getattr(each, "__func__", getattr(each, "fget", each))
            if isinstance(plain, FunctionType) or (inspect.isclass(plain) and plain is not function):
                yield from _other(plain, function.__module__, seen)
        return
    if not isinstance(function, FunctionType):
        return
    for name, parameter in inspect.signature(function).parameters.items():  # its source may be a name
        if isinstance(parameter.default, bool | int | float | str) and parameter.default is not parameter.empty:
            yield name, parameter.default
    enclosed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values: dict[str, Any] = {}
    for name, cell in enclosed:
        with contextlib.suppress(ValueError):  # of a name that is not bound yet
            if cell.cell_contents is not None:
                values[name] = cell.cell_contents
    names = dict.fromkeys(_names(function.__code__))
    values |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, value in values.items():
        if isinstance(value, ModuleType) or inspect.isclass(value) or isinstance(value, FunctionType):
            yield from _other(value, function.__module__, seen)
        else:
            yield name, value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _other(value: Any, home: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the dependencies of a module, function or class that user code in the module `home` names."""
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    if not isinstance(module, ModuleType) or not is_users(module):
        return
    if module.__name__ != home:
        yield from _files(module, seen)
        return
    if id(value) not in seen:
        yield value.__name__, _Mark(fingerprint_of(value))
    yield from _reads(value, seen)


class _Mark(str):
    """A digest in place of its source."""


def _files(file: ModuleType, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield a mark of a module's file, and of those that it imports."""
    if id(file) in seen or not is_users(file):
        return
    seen.add(id(file))
    try:
        yield file.__name__, _Mark(f"{file.__name__} {text_digest(Path(str(file.__file__)).read_bytes())}")
    except OSError:
        return
    for value in list(vars(file).values()):
        other = value if isinstance(value, ModuleType) else sys.modules.get(str(getattr(value, "__module__", "")))
        if other is not None and isinstance(value, ModuleType | FunctionType | type):
            yield from _files(other, seen)


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(f"{Path(paths[name]).resolve()}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_users(owner: str | ModuleType | None) -> bool:
    """Tell whether a module is neither installed nor this package's: a script, a notebook, a file beside them."""
    found = owner if isinstance(owner, ModuleType) else sys.modules.get(str(owner))
    name = getattr(found, "__name__", "lit_rl")
    if f"{name}.".startswith(_OURS) or name in sys.builtin_module_names:
        return False
    if name == "__main__":
        return True
    file = getattr(found, "__file__", None)
    if file is None:
        return False
    path = Path(file)
    return not ({"site-packages", "dist-packages"} & {*path.parts}) and not str(path.resolve()).startswith(_installed())


def is_mark(value: Any) -> bool:
    """Tell whether it is a name with a mark, which `dependencies_of` made."""
    return isinstance(value, _Mark)
