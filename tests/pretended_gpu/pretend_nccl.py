"""NCCL of the pretended devices: gloo on the same memory. Like NCCL it refuses tensors of the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pretend import ledger
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future
from torch.distributed import distributed_c10d
from torch.futures import Future

NCCL, WITH_GLOO = "pretended_nccl", "pretended_nccl_and_gloo"
"""Names of the backends, as PyTorch registers them: of devices alone, of devices and of the host."""


class Group(dist.ProcessGroup):
    """A process group whose collectives take tensors of this process's device.

    Args:
        host_too: It takes tensors of the host as well, as ``cpu:gloo,cuda:nccl`` does.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, host_too: bool) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._host_too = rank, size, host_too
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def pg_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")] if self._host_too else [torch.device("cuda")]

    @property
    def bound_device_id(self) -> None:
        return None

    def _host(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Return the tensor as gloo takes it: the same memory."""
        if not tensor.is_cuda:
            if self._host_too:
                return tensor
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type} ({what})")
        if tensor.device.index != torch.cuda.current_device():
            here = torch.cuda.current_device()
            raise RuntimeError(f"{what}: a tensor of {tensor.device}, and this process is on cuda:{here}")
        with torch.no_grad():
            return torch.ops.pretend.host(tensor.detach())

    def _hosts(self, tensors: Any, what: str) -> Any:
        return [self._hosts(t, what) if isinstance(t, list | tuple) else self._host(t, what) for t in tensors]

    @staticmethod
    def _done(work: Any, result: Any) -> Any:
        if work is not None:
            work.wait()
        future: Future[Any] = Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def _reduce(self, host: torch.Tensor, options: Any) -> None:
        """Reduce in place; gloo has no mean."""
        asked = dist.ReduceOp.SUM if options is None else options.reduceOp
        mean, reduction = asked == dist.ReduceOp.AVG, dist.AllreduceOptions()
        reduction.reduceOp = dist.ReduceOp.SUM if mean else asked
        self._gloo.allreduce([host], reduction).wait()
        if mean:
            host /= self._size

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        for host in self._hosts(tensors, "allreduce"):
            self._reduce(host, options)
        return self._done(None, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        hosts = self._hosts(tensors, "broadcast")
        return self._done(self._gloo.broadcast(hosts, options or dist.BroadcastOptions()), tensors)

    def allgather(self, out: list[Any], mine: list[torch.Tensor], options: Any = None) -> Any:
        return self._done(self._gloo.allgather(self._hosts(out, "allgather"), self._hosts(mine, "allgather")), out)

    def all_gather_single(self, out: torch.Tensor, mine: torch.Tensor, options: Any = None) -> Any:
        parts = list(self._host(out, "all_gather").view(-1).chunk(self._size))
        return self._done(self._gloo.allgather([parts], [self._host(mine, "all_gather").reshape(-1)]), out)

    def all_gather_single_coalesced(self, out: list[Any], mine: list[Any], options: Any = None) -> Any:
        for one, other in zip(out, mine, strict=True):
            self.all_gather_single(one, other)
        return self._done(None, out)

    def reduce_scatter(self, out: list[Any], parts: list[Any], options: Any = None) -> Any:
        for one, each in zip(out, parts, strict=True):
            whole = torch.stack([self._host(part, "reduce_scatter").clone() for part in each])
            self._reduce(whole, options)
            self._host(one, "reduce_scatter").copy_(whole[self._rank])
        return self._done(None, out)

    def reduce_scatter_single(self, out: torch.Tensor, parts: torch.Tensor, options: Any = None) -> Any:
        whole = self._host(parts, "reduce_scatter").clone()
        self._reduce(whole, options)
        mine = self._host(out, "reduce_scatter")
        mine.copy_(whole.view(self._size, -1)[self._rank].view_as(mine))
        return self._done(None, out)

    def reduce_scatter_single_coalesced(self, out: list[Any], parts: list[Any], options: Any = None) -> Any:
        for one, other in zip(out, parts, strict=True):
            self.reduce_scatter_single(one, other, options)
        return self._done(None, out)

    # Their names up to torch 2.12 and in its C++.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, out: list[Any], mine: list[Any], options: Any = None) -> Any:
        return self._done(self._gloo.gather(self._hosts(out, "gather"), self._hosts(mine, "gather"), options), out)

    def scatter(self, out: list[Any], parts: list[Any], options: Any = None) -> Any:
        return self._done(self._gloo.scatter(self._hosts(out, "scatter"), self._hosts(parts, "scatter"), options), out)

    def barrier(self, opts: Any = None) -> Any:
        ledger.note("sync", "nccl.barrier", 0)
        return self._done(self._gloo.barrier(), None)

    def send(self, tensors: list[Any], destination: int, tag: int = 0) -> Any:
        return self._done(self._gloo.send(self._hosts(tensors, "send"), destination, tag), tensors)

    def recv(self, tensors: list[Any], source: int, tag: int = 0) -> Any:
        return self._done(self._gloo.recv(self._hosts(tensors, "recv"), source, tag), tensors)


def offer() -> None:
    """Let `init_process_group` and `new_group` make such groups where NCCL is asked for."""

    def maker(host_too: bool) -> Any:
        return lambda store, rank, size, timeout: Group(store, rank, size, timeout, host_too)

    dist.Backend.register_backend(NCCL, maker(False), devices=["cpu", "cuda"])
    dist.Backend.register_backend(WITH_GLOO, maker(True), devices=["cpu", "cuda"])

    def ours(backend: Any) -> Any:
        if backend in ("nccl", "cuda:nccl"):
            return NCCL
        return WITH_GLOO if isinstance(backend, str) and "nccl" in backend else backend

    init, new, get = distributed_c10d.init_process_group, distributed_c10d.new_group, distributed_c10d.get_backend

    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init(ours(backend), *args, **kwargs)

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> Any:
        return new(ranks, timeout, ours(backend), *args, **kwargs)

    def get_backend(group: Any = None) -> str:
        return {NCCL: "nccl", WITH_GLOO: "cpu:gloo,cuda:nccl"}.get(get(group), get(group))

    for place in (dist, distributed_c10d):
        place.init_process_group, place.new_group, place.get_backend = init_process_group, new_group, get_backend
