"""The main function of an environment worker process, which holds objects of the user's from first call to last.

It loads the standard library, and of lit_rl only what a worker of rewards loads too. It keeps accidents away from the
training (endless loops, memory, exits) and is no sandbox against malice.
"""

from __future__ import annotations

import inspect
import pickle
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rl.core.process_state import seed_generators
from lit_rl.core.user_functions import load_source
from lit_rl.rewards.jobs import failure_of
from lit_rl.rewards.worker_main import connect, receive, send, serve, set_limits


@dataclass(frozen=True)
class Target:
    """A class, or a function, by where it is found."""

    source: str
    """File or module."""
    text: bytes | None
    """The file's text; None for a module."""
    name: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the constructor."""

    def found(self) -> Any:
        """Return the class or function itself."""
        return getattr(load_source(self.source, self.text), self.name)


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to a worker."""

    targets: Sequence[Target]
    memory_mb: int | None
    parent: int
    """Process id of the training process."""


@dataclass(frozen=True)
class WorkerCall:
    """One call of a function, or of a method of an object, which is made by its first call."""

    target: int
    """Place among the targets."""
    object: int | None
    """The number of the object; None: the target is a function, and is called itself."""
    method: str
    """``close`` lets the object go, whether it has such a method or not."""
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    seed: int
    """Seed of the global random generators, in [0, 2^32)."""


class Unsendable:
    """A placeholder for a returned value that cannot be pickled, with the value's own text."""

    def __init__(self, kind: str, text: str) -> None:
        self._kind, self._text = kind, text

    def __repr__(self) -> str:
        return f"{self._text} ({self._kind})"


def main(fd: int) -> None:
    """Serve calls on this socket until the other side closes it."""
    connection = connect(fd)
    setup: WorkerSetup = receive(connection)
    try:
        set_limits(setup.memory_mb, setup.parent)
        objects = _Objects(setup.targets)
    except BaseException as error:
        send(connection, failure_of(error))
        return
    send(connection, None)
    serve(connection, objects.answer)


class _Objects:
    """Objects that live in this process."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = [(target.found(), target.keywords) for target in targets]
        self._objects: dict[int, Any] = {}
        self._loop: Any = None

    def answer(self, call: WorkerCall) -> Any:
        """Return the result of a call, awaited where it has to be."""
        seed_generators(call.seed)
        result = self._call(call)
        if inspect.isawaitable(result):
            import asyncio  # takes half of a worker's start time, and few methods are async

            async def wait(awaitable: Any) -> Any:
                return await awaitable

            if self._loop is None:  # one for all calls: a client may keep its connections
                self._loop = asyncio.new_event_loop()
            result = self._loop.run_until_complete(wait(result))
        return _sendable(result)

    def _call(self, call: WorkerCall) -> Any:
        target, keywords = self._targets[call.target]
        if call.object is None:
            return target(*call.arguments, **call.keywords)
        if call.method == "close":
            return getattr(self._objects.pop(call.object, None), "close", lambda: None)()
        if call.object not in self._objects:
            self._objects[call.object] = target(**keywords)
        return getattr(self._objects[call.object], call.method)(*call.arguments, **call.keywords)


def _sendable(value: Any) -> Any:
    """Return the value, with parts that cannot be pickled replaced."""
    try:
        pickle.dumps(value)
    except Exception:
        if isinstance(value, tuple | list):
            return type(value)(map(_sendable, value))
        return Unsendable(type(value).__name__, reprlib.repr(value))
    return value
