"""A script that runs a program and its tests in two processes which share nothing but a socket.

`sandbox.py` starts both. The process of the program runs what a model wrote; the process of the tests runs the
tests and gives the verdict. Calls by the tests are carried to the program, and their results come back as
copies made of plain values: None, numbers, texts, bytes, lists, tuples, dicts and sets. So the program sees
neither tests nor verdict, and no object of it decides what a plain value is equal to. An object of a class of
its own stays where it is, and the tests hold a `Remote` for it. Standard library only; every message is JSON
behind its length.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import json
import operator
import os
import resource
import socket
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!I")
_MESSAGE = 4 * 2**20  # bytes of one message
_LONGEST_ERROR = 300
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_X86_64 = 0xC000003E
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
_CLONE, _CLONE3, _NEW_USER = 56, 435, 0x10000000
_CALLS = {  # numbers of x86_64: other namespaces, other processes, and memory that no process has mapped
    "unshare": 272, "setns": 308, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438,
    "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "memfd_create": 319, "memfd_secret": 447,
    "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
}  # fmt: skip
_SPECIAL: dict[str, Callable[..., Any]] = {
    "__len__": len, "__iter__": iter, "__next__": next, "__bool__": bool, "__str__": str, "__repr__": repr,
    "__int__": int, "__float__": float, "__index__": operator.index, "__abs__": abs, "__neg__": operator.neg,
    "__getitem__": operator.getitem, "__setitem__": operator.setitem, "__delitem__": operator.delitem,
    "__contains__": operator.contains, "__add__": operator.add, "__radd__": lambda a, b: b + a,
    "__sub__": operator.sub, "__rsub__": lambda a, b: b - a, "__mul__": operator.mul, "__rmul__": lambda a, b: b * a,
    "__truediv__": operator.truediv, "__floordiv__": operator.floordiv, "__mod__": operator.mod,
    "__pow__": operator.pow,
    "__enter__": lambda a: a.__enter__(), "__exit__": lambda a, *rest: a.__exit__(None, None, None),
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
}  # fmt: skip
_COMPARED = {"__eq__": operator.eq, "__ne__": operator.ne, "__lt__": operator.lt, "__le__": operator.le,
             "__gt__": operator.gt, "__ge__": operator.ge}  # fmt: skip
_OPERATIONS = _SPECIAL | _COMPARED | {"getattr": getattr, "setattr": setattr}


class Gone(BaseException):
    """The other side has closed its end, or sent an invalid message. No `except Exception` of a test catches it."""


class Remote:
    """A handle of the tests on an object of the program: every use of it happens in the program's process.

    Raises:
        TypeError: it is compared with a plain value, which it might pretend to be.
    """

    def __init__(self, ask: Callable[..., Any], number: int, kind: str) -> None:
        self.__dict__.update(_ask=ask, _number=number, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self, *args, **kwargs)

    __hash__ = object.__hash__


def _forwarded(name: str) -> Callable[..., Any]:
    def ask(self: Remote, *args: Any) -> Any:
        if name in _COMPARED and not isinstance(args[0], Remote):
            if args[0] is None and name in ("__eq__", "__ne__"):
                return name == "__ne__"
            raise TypeError(f"the program gave an object of its own ({self._kind}) where a plain value is compared")
        return self._ask(name, self, *(args if name != "__exit__" else ()))

    return ask


for _name in (*_SPECIAL, *_COMPARED):
    setattr(Remote, _name, _forwarded(_name))


class Peer:
    """One end of the socket: sends requests, and answers those of the other side, also while it waits for an answer."""

    def __init__(self, channel: socket.socket, *, is_program: bool) -> None:
        self.channel, self.is_program = channel, is_program
        self.kept: list[Any] = []  # objects that the other side knows by their number here
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Any] = {}
        self.raised: dict[int, type[BaseException]] = {}

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        if len(data) > _MESSAGE:
            raise ValueError(f"{len(data)} bytes are more than one message holds ({_MESSAGE})")
        self.channel.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MESSAGE:
            raise Gone("the program sent what is no message")
        try:
            return json.loads(self._exactly(length))
        except ValueError:
            raise Gone("the program sent what is no message") from None

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.channel.recv(count - len(data))
            if not part:
                raise Gone("ended by itself before its tests did")
            data += part
        return bytes(data)

    def ask(self, operation: str, target: Remote, *args: Any, **kwargs: Any) -> Any:
        """Return the result of an operation on the other side; lists, dicts and sets that it changed there are
        changed here."""
        named = {name: self.encode(value) for name, value in kwargs.items()}
        self.send(["ask", operation, target._number, [self.encode(arg) for arg in args], named])
        while True:
            message = self.receive()
            try:
                if message[0] == "ask":
                    self.answer(message)
                    continue
                if message[0] == "raised":
                    break
                _, value, changed = message
                for i, after in changed:
                    _replace(args[i], self.decode(after))
                return self.decode(value)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise Gone(f"the program sent what is no answer ({error})") from None
        raise self.error(message)

    def answer(self, message: Any) -> None:
        """Do a request, and send its result. The tests let nothing be called but functions that they passed."""
        try:
            _, operation, number, sent, named = message
            target, args = self.kept[number], [self.decode(arg) for arg in sent]
            if operation == "call":
                value = target(*args, **{name: self.decode(arg) for name, arg in named.items()})
            elif self.is_program:
                value = _OPERATIONS[operation](target, *args)
            else:
                raise TypeError("a function of the tests can be called, and nothing else")
            changed = [(i, self.encode(arg)) for i, arg in enumerate(args) if type(arg) in (list, dict, set, bytearray)]
            self.send(["is", self.encode(value), [(i, after) for i, after in changed if after != sent[i]]])
        except Gone:
            raise
        except BaseException as error:
            self.send(self.describe_error(error))

    def describe_error(self, error: BaseException) -> list[Any]:
        """Return a raised error as a message."""
        text, args = f"{error}"[:_LONGEST_ERROR], None
        with contextlib.suppress(Exception):
            args = self.encode(list(error.args))
            args = args if len(json.dumps(args)) < _LONGEST_ERROR else None
        return ["raised", self.class_of(type(error)), text, args]

    def error(self, message: Any) -> BaseException:
        """Return the error that such a message describes."""
        try:
            _, kind, text, args = message
            made = self.class_from(kind)
            return made(*self.decode(args)) if args is not None else made(str(text))
        except Exception:
            return RuntimeError(str(message)[:_LONGEST_ERROR])

    def class_of(self, kind: type[BaseException]) -> list[Any]:
        if kind.__module__ == "builtins":
            return ["builtin", kind.__name__]
        return ["own", self.number(kind), kind.__name__, self.class_of(kind.__bases__[0])]

    def class_from(self, described: Any) -> type[BaseException]:
        if described[0] == "builtin":
            found = getattr(builtins, described[1], Exception)
            return found if isinstance(found, type) and issubclass(found, BaseException) else Exception
        _, number, name, base = described
        if number not in self.raised:
            self.raised[number] = type(str(name), (self.class_from(base),), {})
        return self.raised[number]

    def number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.kept.append(value)  # kept alive, so that no other object gets its id
            self.numbers[id(value)] = len(self.kept) - 1
        return self.numbers[id(value)]

    def encode(self, value: Any) -> Any:
        """Return a value as JSON: a plain value by content and plain class, any other as a reference."""
        if value is None or isinstance(value, bool | str):
            return value if value is None or isinstance(value, bool) else str(value)
        if isinstance(value, int):
            return ["i", hex(value)] if abs(value) >> 53 else int(value)
        if isinstance(value, float):
            return float(value)
        for letter, kinds in (("l", list), ("t", tuple), ("s", set), ("f", frozenset)):
            if isinstance(value, kinds):
                return [letter, *(self.encode(item) for item in value)]
        if isinstance(value, dict):
            return ["d", *([self.encode(key), self.encode(item)] for key, item in value.items())]
        if isinstance(value, bytes | bytearray):
            return ["b" if isinstance(value, bytes) else "a", value.hex()]
        if isinstance(value, complex):
            return ["c", value.real, value.imag]
        return self._elsewhere(value)

    def _elsewhere(self, value: Any) -> Any:
        if self.is_program:
            numpy = sys.modules.get("numpy")
            if numpy is not None and isinstance(value, numpy.generic):
                return self.encode(value.item())
            if isinstance(value, type) and issubclass(value, BaseException):
                return ["x", self.class_of(value)]
            return ["o", self.number(value), type(value).__name__[:60]]
        if isinstance(value, Remote):
            return ["r", value._number]
        if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
            return ["o", self.number(value), "function of the tests"]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if callable(value) and module in sys.stdlib_module_names and "." not in name:
            return ["n", module, name]  # resolved by the program itself: only functions of this process are exposed
        raise TypeError(f"a {type(value).__name__} of the tests is no plain value, and cannot be given to the program")

    def decode(self, encoded: Any) -> Any:
        """Return the value of such JSON."""
        if not isinstance(encoded, list):
            return encoded
        letter, rest = encoded[0], encoded[1:]
        if letter in "ltsf":
            return {"l": list, "t": tuple, "s": set, "f": frozenset}[letter](self.decode(item) for item in rest)
        if letter == "d":
            return {self.decode(key): self.decode(item) for key, item in rest}
        if letter == "i":
            return int(rest[0], 16)
        if letter in "ab":
            return (bytes if letter == "b" else bytearray).fromhex(rest[0])
        if letter == "c":
            return complex(*rest)
        if letter == "x":
            return self.class_from(rest[0])
        if letter == "o":
            number = int(rest[0])
            return self.remotes.setdefault(number, Remote(self.ask, number, str(rest[1])))
        if letter == "r" and self.is_program:
            return self.kept[rest[0]]
        if letter == "n" and self.is_program:
            return getattr(importlib.import_module(rest[0]), rest[1])
        raise ValueError(f"{letter!r} is no kind of value")


def _replace(value: Any, after: Any) -> None:
    if isinstance(value, list | bytearray):
        value[:] = after
    else:
        value.clear()
        value.update(after)


def run_program(request: dict[str, Any], peer: Peer) -> None:
    """Run the model's code, and serve the requests of the tests until they are over."""
    peer.send(["here"])
    module = types.ModuleType("__main__")  # dataclasses and pickle look their module up
    sys.modules["__main__"] = module
    try:
        exec(compile(request["code"], "completion", "exec"), module.__dict__)  # noqa: S102 (the purpose of this file)
    except BaseException as error:
        peer.send(peer.describe_error(error))
        return
    names: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if not name.startswith("__") and not hasattr(builtins, name):
            names[name] = _named(peer, value)
    peer.send(["names", names])
    while True:
        peer.answer(peer.receive())


def _named(peer: Peer, value: Any) -> Any:
    if isinstance(value, types.ModuleType):
        return ["m", value.__name__]
    with contextlib.suppress(Exception):
        encoded = peer.encode(value)
        if len(json.dumps(encoded)) < 2**16:
            return encoded
    return ["o", peer.number(value), type(value).__name__[:60]]


def run_tests(request: dict[str, Any], peer: Peer, output: int) -> str:
    """Return `passed`, or a short reason for the failure. Built-in names and modules are the tests' own, never the
    program's."""
    peer.receive()
    os.write(output, b"begun\n")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        message = peer.receive()
        if message[0] != "names":
            raise peer.error(message)
        text = "\n".join(request["tests"])
        for name, encoded in message[1].items():
            if isinstance(encoded, list) and encoded[0] == "m":
                if name in text:
                    module.__dict__[name] = importlib.import_module(str(encoded[1]))
            else:
                module.__dict__[name] = peer.decode(encoded)
        for i, test in enumerate(request["tests"]):
            exec(compile(test, f"test {i}", "exec"), module.__dict__)  # noqa: S102 (the purpose of this file)
    except Gone as gone:
        return str(gone)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return "passed"


def confine(limits: dict[str, int]) -> None:
    """Limit the resources of this process and its children, and block system calls that nobody needs.

    Raises:
        OSError: the system does not filter calls.
    """
    os.nice(10)
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    rules = [_load(4), _jump(0x15, _X86_64, 1, 0), _return(_REFUSE), _load(0)]  # the machine, then the call's number
    rules += [_jump(0x35, 0x40000000, 0, 1), _return(_REFUSE)]  # numbers of another way to call
    rules += [_jump(0x15, _CLONE, 0, 4), _load(16), _jump(0x45, _NEW_USER, 0, 1), _return(_REFUSE), _return(_ALLOW)]
    rules += [
        _jump(0x15, _CLONE3, 0, 1),
        _return(_UNKNOWN),
    ]  # its flags cannot be read; the C library falls back to clone
    for number in _CALLS.values():
        rules += [_jump(0x15, number, 0, 1), _return(_REFUSE)]
    rules.append(_return(_ALLOW))
    program = b"".join(rules)
    held = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(held))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or library.prctl(_SECCOMP, _FILTER, head, 0, 0):
        raise OSError(ctypes.get_errno(), "the system filters no calls (seccomp)")


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(code: int, value: int, yes: int, no: int) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _return(value: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, value)


def main() -> None:
    """Run as `sandbox_script.py program|tests FD`, with the request as JSON on the standard input."""
    is_program = sys.argv[1] == "program"
    request, channel = json.load(sys.stdin), socket.socket(fileno=int(sys.argv[2]))
    output, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    confine(request["limits"])
    os.dup2(null, 2)
    peer = Peer(channel, is_program=is_program)
    if is_program:
        with contextlib.suppress(Gone, OSError):
            run_program(request, peer)
        os._exit(0)
    try:
        verdict = run_tests(request, peer, output)
    except (Gone, OSError) as error:
        verdict = f"ended before it began: {error}"
    os.write(output, json.dumps(verdict).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
