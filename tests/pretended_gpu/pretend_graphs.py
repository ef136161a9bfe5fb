"""CUDA graphs of the pretended device: the operators of a captured block, run again on the very memory.

As on a GPU, a capture computes nothing: what it writes is put back, and what it makes holds rubbish until the first
replay. What breaks a capture there breaks it here (waits, copies from and to the host, tensors of the host), and so do
draws from a generator, which would have to be told of the replays. A replay that reads memory which was freed since
raises. Numbers that the host computed are those of the capture in every replay.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

capturing: _Recorder | None = None
"""The capture of this process that is under way."""

_pools = itertools.count(1)


class CaptureError(RuntimeError):
    """What a capture does not allow."""

    def __init__(self, what: str) -> None:
        super().__init__(f"CUDA error: operation not permitted when stream is capturing ({what})")


def refuse(what: str) -> None:
    """Raise where a capture is under way."""
    if capturing is not None:
        capturing.fail(what)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Notes each operator with aliases of its tensors, which are of no use to anybody else."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = False
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.aliases: dict[int, torch.Tensor] = {}
        self.made: dict[int, torch.Tensor] = {}
        self.given: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        ours = [each for each in tensors if each.is_cuda]
        self._check(func, tensors, ours, kwargs)
        taken, named = tree_map_only(torch.Tensor, self._alias, (args, kwargs))
        written = [t for t, arg in zip(args, func._schema.arguments) if arg.alias_info and arg.alias_info.is_write]
        written += [
            kwargs[arg.name]
            for arg in func._schema.arguments
            if arg.name in kwargs and arg.alias_info and arg.alias_info.is_write
        ]
        for tensor in written:
            if (key := _storage(tensor)) not in self.made and key not in self._before:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                self._before[key] = whole, whole.clone()
        out = func(*args, **kwargs)
        results = [each for each in tree_flatten(out)[0] if isinstance(each, torch.Tensor)]
        if not any(each.is_cuda for each in (*ours, *results)):
            return out
        known = {_storage(each) for each in ours}
        fresh = [each for each in results if _storage(each) not in known]
        for each in fresh:
            self.made.setdefault(_storage(each), each)
        if fresh or written:  # a view is the same view in every replay
            self.calls.append((func, taken, named, [self._alias(each) for each in fresh]))
        self._seen.extend(results)
        return out

    def _check(self, func: Any, tensors: list[torch.Tensor], ours: list[torch.Tensor], kwargs: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.fail(f"{func} draws from a generator")
        hosts = [each for each in tensors if not each.is_cuda]
        if not hosts or not (ours or torch.device(kwargs.get("device") or "cpu").type == "cuda"):
            return
        number = torch.Tag.pointwise in func.tags and func is not torch.ops.aten.where.self
        number = number or func in (torch.ops.aten.fill_.Tensor, torch.ops.aten.masked_fill.Tensor)
        if not number or any(each.ndim for each in hosts):
            self.fail(f"{func} reads a tensor of the host")

    def fail(self, what: str) -> None:
        self.failed = True
        raise CaptureError(what)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory by a tensor that nobody else holds."""
        if not tensor.is_cuda:
            return tensor.clone()
        if id(tensor) not in self.aliases:
            self._seen.append(tensor)  # so that its id stays its own
            self.aliases[id(tensor)] = tensor.detach()
            if _storage(tensor) not in self.made:
                self.given.setdefault(_storage(tensor), self.aliases[id(tensor)])
        return self.aliases[id(tensor)]

    def end(self) -> None:
        """Put back what was written, and leave rubbish in what was made."""
        for whole, before in self._before.values():
            whole.copy_(before)
        for tensor in self.made.values():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            whole.fill_(0x7F if tensor.is_floating_point() else 1)
        self._before.clear()
        self._seen.clear()
        # How many of those that hold the memory are ours.
        self.held = {
            key: sum(_storage(each) == key for each in self.aliases.values())
            for key in self.given
            if key not in self.made
        }


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    captures = 0
    replayed = 0
    """Of this process, as `captures`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recorder: _Recorder | None = None
        self._pool = (0, next(_pools))

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_others: Any) -> None:
        global capturing
        refuse("another capture")
        self._pool = pool or self._pool
        self._recorder = capturing = _Recorder()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        global capturing
        assert self._recorder is not None
        capturing = None
        self._recorder.__exit__(None, None, None)
        self._recorder.end()
        if self._recorder.failed:
            raise CaptureError("an error before ended the capture")
        Graph.captures += 1

    def replay(self) -> None:
        refuse("a replay")
        assert self._recorder is not None, "nothing was captured"
        for key, count in self._recorder.held.items():
            # ours, and the one that asks
            if torch._C._storage_Use_Count(key) <= count + 1:
                given = self._recorder.given[key]
                raise RuntimeError(f"CUDA error: an illegal memory access was encountered ({given.shape} was freed)")
        Graph.replayed += 1
        for func, args, kwargs, made in self._recorder.calls:
            out = func(*args, **kwargs)
            results = [each for each in tree_flatten(out)[0] if isinstance(each, torch.Tensor)]
            if not made:
                continue
            known = {_storage(each) for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)}
            fresh = [each for each in results if _storage(each) not in known]
            for place, each in zip(made, fresh, strict=True):
                place.copy_(each)

    def reset(self) -> None:
        self._recorder = None

    def pool(self) -> tuple[int, int]:
        return self._pool


def offer() -> None:
    """Put them in the place of `torch.cuda`'s."""
    places: tuple[Any, ...] = (torch.cuda, torch.cuda.graphs)
    for place in places:
        place.CUDAGraph, place.graph_pool_handle = Graph, lambda: (0, next(_pools))
    torch._C._host_emptyCache = lambda: None
