"""Ways for the policy's weights to reach an engine.

`WeightSender` chooses the content: all weights, or the adapter alone once the base is there. A `Transport` carries an
update to the workers of all servers at once, one tensor or chunk at a time: by files in memory, gloo or NCCL.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from lit_rl.core import ranks
from lit_rl.core.errors import BackendError, ConfigError, GenerationError
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.core.machine import is_loopback
from lit_rl.generation.vllm.client import Client, ServerDead, on_all
from lit_rl.generation.vllm.engine import Engine, Facts, Shapes, Weights, push_adapter, push_weights
from lit_rl.models.engine_weights import adapter_only, write_adapter


class WeightSender:
    """A sender of a policy's weights to an engine.

    Args:
        push: "adapter", "merged", or "auto": the adapter alone where the engine can run it.
    """

    def __init__(self, push: str) -> None:
        self._push = push
        self._base_is_there = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def forget(self) -> None:
        """Forget what the engine holds: it has lost its weights."""
        self._base_is_there = False

    def __call__(self, engine: Engine, facts: Facts, weights: Weights, version: int, *, sends: bool) -> None:
        """Send the weights; `sends` is False on ranks whose engine another rank sends to. A collective.

        Raises:
            GenerationError: the engine did not take them.
            ConfigError: the adapter alone is wanted, and cannot be sent.
        """
        if not self.by_adapter(weights.policy, facts):
            self._send(engine, weights, version, sends)
            return
        if not self._base_is_there:
            self._send(engine, Weights(weights.policy, weights.dtype, base_only=True), version, sends)
            self._base_is_there = True
        # Kept until the next one is there: a server reads it again whenever it loads the adapter again.
        before = self._folder
        self._folder = tempfile.TemporaryDirectory(prefix="lit_rl_adapter_", dir=shared_memory())
        folder = ranks.broadcast_object(self._folder.name)  # rank 0 writes, for all of one machine
        write_adapter(weights.policy, folder)
        # Together, because who has not read the folder yet must find it.
        ranks.run_on_all_ranks(lambda: push_adapter(engine, folder, version) if sends else None)
        if before is not None:
            before.cleanup()

    def _send(self, engine: Engine, weights: Weights, version: int, sends: bool) -> None:
        def work() -> None:
            if sends:
                push_weights(engine, weights, version)
            else:
                for _ in weights:  # gathering them is a collective
                    pass

        ranks.run_on_all_ranks(work)

    def by_adapter(self, policy: nn.Module, facts: Facts) -> bool:
        """Tell whether the adapter is sent by itself."""
        why = adapter_only(policy)
        rank, room = rank_of_adapter(policy), facts.max_lora_rank or 0
        if why is None and rank is not None and rank > room:
            why = f"its rank is {rank}, and the engine has room for {room}: raise generator.max_lora_rank"
        if self._push == "adapter" and why is not None:
            raise ConfigError(f"generator.push=adapter: the adapter cannot be sent by itself: {why}. Take merged.")
        return self._push != "merged" and why is None


def rank_of_adapter(policy: nn.Module) -> int | None:
    """Return the highest rank of an adapter that an engine can run by itself; None where the policy has none."""
    if adapter_only(policy) is not None:
        return None
    lora: Any = policy
    config = lora.peft_config[lora.active_adapter]
    return max(config.r, *(config.rank_pattern or {}).values(), 0)


# ------------------------------------------------------------------ transports to servers

Result = TypeVar("Result")

CHUNK_BYTES = 2**28
"""Bytes of weights in flight, beside the policy itself: 256 MiB, or one larger tensor."""


class Transport(ABC):
    """Abstract: a way for an open update's tensors to reach the servers.

    Args:
        clients: The servers.
        deadline: Seconds for a call, and for a chunk to arrive.
    """

    def __init__(self, clients: Sequence[Client], deadline: float) -> None:
        self.clients, self.deadline = list(clients), deadline

    def begin(self, shapes: Shapes) -> None:
        """Open an update on every server, once it has agreed to the names and shapes of the weights."""
        self.everywhere(lambda client: client.rpc("lit_rl_expect", [json_shapes(shapes)], deadline=self.deadline))
        self.everywhere(lambda client: client.rpc("lit_rl_begin", deadline=self.deadline))

    @abstractmethod
    def send(self, weights: Iterator[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype) -> None:
        """Bring every tensor to every server."""

    def finish(self, version: int) -> None:
        """Close the update on every server, and stamp it."""
        self.everywhere(lambda client: client.rpc("lit_rl_finish", [version], deadline=self.deadline))

    def everywhere(self, call: Callable[[Client], Awaitable[Result]]) -> list[Result]:
        """Call every server at the same time, and wait for all; see `on_all`."""
        return HTTP_LOOP.wait(on_all(self.clients, call))

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Release the resources of `send`."""


class SharedMemory(Transport):
    """A transport by files in this machine's memory: the fastest way on one host, and the simplest."""

    def send(self, weights: Iterator[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        with memory_folder("lit_rl_weights_") as folder:
            for number, chunk in enumerate(chunks(weights)):
                path = folder / f"{number}.safetensors"
                try:
                    save_file({name: tensor.cpu().contiguous() for name, tensor in chunk}, path)
                except (OSError, SafetensorError) as error:
                    raise GenerationError(
                        f"{folder} cannot take {sum(t.nbytes for _, t in chunk)} bytes of weights ({error}). "
                        "Give this machine more shared memory (docker --shm-size), or set generator.transport=gloo."
                    ) from error
                self.everywhere(lambda client: client.rpc("lit_rl_load_file", [str(path)], deadline=self.deadline))  # noqa: B023
                path.unlink()


class Gloo(Transport):
    """A transport by a process group of its own over TCP, with the trainer as rank 0: for other hosts without NCCL."""

    def __init__(self, clients: Sequence[Client], deadline: float) -> None:
        super().__init__(clients, deadline)
        self._group: Any = None
        self._store: Any = None

    def _join(self) -> Any:
        if self._group is None:
            distributed: Any = torch.distributed
            sizes = self.everywhere(lambda client: client.world_size(self.deadline))
            world, patience = 1 + sum(sizes), timedelta(seconds=self.deadline)
            host = own_address(self.clients[0].url)
            self._store = distributed.TCPStore(host, 0, world, is_master=True, timeout=patience, wait_for_workers=False)
            firsts = {client.url: 1 + sum(sizes[:index]) for index, client in enumerate(self.clients)}

            def join(client: Client) -> Awaitable[Any]:
                arguments = [host, self._store.port, firsts[client.url], world, self.deadline]
                return client.rpc("lit_rl_join", arguments, deadline=self.deadline)

            joined = HTTP_LOOP.submit(on_all(self.clients, join))
            try:
                self._group = distributed.ProcessGroupGloo(
                    distributed.PrefixStore("lit_rl", self._store), 0, world, patience
                )
            except RuntimeError as error:  # of the store too, whose connection one of them may break
                self.close()
                joined.result()  # raises the server's error, if there is one
                call = "gloo transport: its workers did not join"
                raise ServerDead(self.clients[0].url, call, str(error).partition("\n")[0]) from error
            joined.result()
        return self._group

    def send(self, weights: Iterator[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype) -> None:
        group = self._join()
        for chunk in chunks(weights):
            described = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in chunk]

            def receive(client: Client) -> Awaitable[Any]:
                return client.rpc("lit_rl_receive", [described], deadline=self.deadline)  # noqa: B023

            received = HTTP_LOOP.submit(on_all(self.clients, receive))
            try:
                for _, tensor in chunk:
                    group.broadcast(tensor.cpu().contiguous(), 0).wait()
            except RuntimeError as error:
                self.close()  # a group that has lost a member is of no use
                received.result()  # raises that member's error, if there is one
                raise ServerDead(self.clients[0].url, "broadcast of weights", str(error)) from error
            received.result()

    def close(self) -> None:
        self._group = self._store = None


class NCCL(Transport):
    """A transport by vLLM's own weight-transfer engine, from GPU to GPU. Not tested: it needs a GPU on both sides."""

    def __init__(self, clients: Sequence[Client], deadline: float) -> None:
        super().__init__(clients, deadline)
        self._senders: list[Any] = []

    def begin(self, shapes: Shapes) -> None:
        """Agree to names and shapes; vLLM's engine opens its update itself."""
        self.everywhere(lambda client: client.rpc("lit_rl_expect", [json_shapes(shapes)], deadline=self.deadline))

    def send(self, weights: Iterator[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype) -> None:
        if not self._senders:
            self._senders = [self._sender()]
        sender = self._senders[0]
        sender.source = _weight_source(weights, shapes, dtype)
        sender.send_weights()

    def _sender(self) -> Any:
        from vllm.distributed.weight_transfer import clients, nccl_engine  # pyright: ignore[reportMissingImports]

        url = self.clients[0].url
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("", 0))
            port = int(listener.getsockname()[1])
        info = nccl_engine.NCCLTrainerInitInfo(
            rank=0,
            master_address=own_address(url),
            master_port=port,
            world_size=1 + self.everywhere(lambda client: client.world_size(self.deadline))[0],
        )
        client = clients.HTTPVLLMWeightSyncClient(url, timeout=self.deadline)
        return nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=client, source=_weight_source(iter(()), {}, torch.float32)
        )

    def finish(self, version: int) -> None:
        self.everywhere(lambda client: client.rpc("lit_rl_stamp", [version], deadline=self.deadline))

    def close(self) -> None:
        for sender in self._senders:
            sender.shutdown()
        self._senders = []


TRANSPORTS: dict[str, type[Transport]] = {"shared_memory": SharedMemory, "gloo": Gloo, "nccl": NCCL}


def transport_for(kind: str, clients: Sequence[Client], deadline: float, device: torch.device) -> Transport:
    """Return the transport of a name; "auto" takes shared memory on one machine, else NCCL from a GPU, else gloo.

    Args:
        kind: Its name, or "auto".
        clients: The servers.
        deadline: Seconds for an answer.
        device: The policy's.

    Raises:
        BackendError: NCCL, and the policy is on no GPU.
    """
    if kind == "auto":
        names, hosts = (socket.gethostname(), os.uname().nodename), [urlsplit(each.url).hostname for each in clients]
        here = all(is_loopback(host) or host in names for host in hosts)
        kind = "shared_memory" if here else "nccl" if device.type == "cuda" and len(clients) == 1 else "gloo"
    elif kind == "nccl" and device.type != "cuda":
        raise BackendError(
            f"generator.transport=nccl sends from GPU to GPU, and the policy is on {device.type}. Take "
            "generator.transport=shared_memory (one host) or gloo."
        )
    return TRANSPORTS[kind](clients, deadline)


def _weight_source(weights: Iterator[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype) -> Any:
    from vllm.distributed.weight_transfer import base  # pyright: ignore[reportMissingImports]

    class Source(base.WeightSource):  # vLLM's name for what is iterated once and described before
        def metadata(self) -> Any:
            return [base.ParamMeta(name, dtype, shape) for name, shape in shapes.items()]

        def __iter__(self) -> Any:
            return weights

    return Source()


def chunks(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield neighbouring tensors of at most `CHUNK_BYTES` together, or a single larger one."""
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


def json_shapes(shapes: Shapes) -> dict[str, list[int]]:
    """Return shapes in the form for JSON."""
    return {name: list(shape) for name, shape in shapes.items()}


def own_address(url: str) -> str:
    """Return this host's address as seen from the host of `url`."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # chooses a route, and sends nothing
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise GenerationError(
                f"{url}: this machine finds no way of its own to it ({error}), which weights over the network need. "
                "Name the server by an address that this machine knows, or on one host set "
                "generator.transport=shared_memory."
            ) from error
        return str(probe.getsockname()[0])


# ------------------------------------------------------------------ folders in memory

_YOUNG = 60.0
"""Seconds in which a new folder may not be locked yet by the process that made it."""


@contextmanager
def memory_folder(prefix: str, root: str | None = None) -> Iterator[Path]:
    """Yield a folder that other processes read, in memory where that is possible; it is removed afterwards.

    A process that is killed leaves its own behind, so unlocked ones are removed first.

    Args:
        prefix: The start of its name, and of the names of old ones.
        root: The parent folder; None is `shared_memory`, or else the folder of temporary files.
    """
    root = root or shared_memory() or tempfile.gettempdir()
    for left in Path(root).glob(f"{prefix}*"):
        with suppress(OSError), _open_descriptor(left) as held:  # another user's, or it is in use
            if time.time() - os.fstat(held).st_ctime > _YOUNG:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root) as folder, _open_descriptor(Path(folder)) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield Path(folder)


@contextmanager
def _open_descriptor(folder: Path) -> Iterator[int]:
    """Open a folder's descriptor. The lock of a process that is killed is released with it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def shared_memory() -> str | None:
    """Return the folder of shared memory that other processes of this machine can read, or None."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
