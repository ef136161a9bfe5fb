"""A CUDA device that is the memory of the host: PyTorch, Lightning, transformers and lit_rl take it for a GPU.

    export PYTHONPATH=tests/pretended_gpu/site
    PRETEND=1 python train.py trainer.max_steps=3
    PRETEND=2 PRETEND_REPORT=waits.json python train.py strategy=ddp trainer.devices=2

Kernels are the CPU's, on the same memory (pretend.cpp). What a GPU refuses is refused: tensors on two devices,
generators of another device, integers in matrix products, kernels that CUDA lacks, and under
``trainer.deterministic=true`` those that add in no fixed order. Every wait for the device and every copy between host
and device is counted with the lines that asked for it; ``PRETEND_REPORT`` names a JSON file that gets them at the end.
``PRETEND_POISON=1`` fills memory that was not written yet with NaN. It needs Linux, g++ (12 seconds, once) and the
torch of constraints.txt: it stands on PyTorch's internals.

Not pretended: CUDA's kernels (numbers, speed, layouts, fused attention: the formula stands in), streams (all is done at
once, so a race is not seen), torch.compile, Triton, sparse tensors on the device. CUDA graphs: see pretend_graphs.py.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend_graphs
import torch

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "pretend.cpp"
NAME = "Pretended GPU"
MEMORY = 80 << 30
"""Bytes that each device says it has."""

STRICT, WAITS, NATIVE, MISSING, FLOATS, UNORDERED = 1, 2, 4, 8, 16, 32
"""Bits of an operator's rule, as in pretend.cpp."""

_OF_RULE = {
    # the host reads what the device computed
    WAITS: "_local_scalar_dense nonzero nonzero.out equal masked_select masked_select.out _unique _unique2 unique_dim"
    " unique_consecutive unique_dim_consecutive bincount _linalg_check_errors",
    # they look at sizes and storages alone
    NATIVE: "view as_strided _reshape_alias unfold set_.source_Storage set_.source_Storage_storage_offset"
    " set_.source_Tensor resize_ is_set_to view_as_real view_as_complex _resize_output_",
    # cuBLAS has them for floating point alone
    FLOATS: "mm.out bmm.out addmm.out baddbmm.out addmv.out addbmm.out dot",
    # the documentation of torch.use_deterministic_algorithms says that they raise
    UNORDERED: "cumsum.out histc nll_loss2d_forward.output put_ median.dim_values"
    " upsample_bilinear2d_backward.grad_input upsample_linear1d_backward.grad_input"
    " upsample_bicubic2d_backward.grad_input grid_sampler_2d_backward"
    " reflection_pad2d_backward _ctc_loss_backward",
}

Frame = tuple[str, int, str]
"""File, line, qualified name."""


class Ledger:
    """Waits for the device and copies between it and the host, each under the frames that led to it.

    A kind is ``sync``, ``h2d`` and ``d2h`` (copies for which the host waits), ``h2d_async`` (of pageable memory: the
    host does not wait, and nothing overlaps), ``h2d_pinned_async``, ``d2h_async``, or ``peer``.
    """

    WAITING = ("sync", "h2d", "d2h")

    def __init__(self) -> None:
        self.events: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self.bytes: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self._paused = False
        self._lock = threading.Lock()

    def note(self, kind: str, operator: str, size: int) -> None:
        if self._paused:
            return
        pretend_graphs.refuse(f"{kind}: {operator}")
        key = (kind, operator.removeprefix("aten::"), *_frames())
        with self._lock:
            self.events[key] += 1
            self.bytes[key] += size

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What the pretence itself copies is not counted."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def clear(self) -> None:
        self.events.clear()
        self.bytes.clear()

    def waits(self, below: str = "") -> int:
        """Return how often the host waited, below functions whose qualified name ends like this."""
        return sum(
            count
            for (kind, _operator, *frames), count in self.events.items()
            if kind in self.WAITING and any(name.endswith(below) for _file, _line, name in frames)
        )

    def write(self, path: str | Path) -> None:
        rows = [
            {"kind": key[0], "operator": key[1], "frames": key[2:], "count": count, "bytes": self.bytes[key]}
            for key, count in self.events.most_common()
        ]
        Path(path).write_text(json.dumps(rows, indent=1))


ledger = Ledger()
_OWN = ("/pretend.py", "/torch/_ops.py", "/torch/library.py", "/torch/utils/_contextlib.py", "<frozen")


def _frames() -> list[Frame]:
    """The frames of lit_rl, outermost first, and below them the innermost of another package.

    In a thread of autograd's engine there may be none of lit_rl.
    """
    package = sys.modules.get("lit_rl")
    root = os.path.dirname(package.__file__ or "") + "/" if package else "/no/package/"
    found: list[Frame] = []
    frame, innermost = sys._getframe(0), True
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(root) or (innermost and not any(own in file for own in _OWN)):
            innermost = False
            short = "lit_rl/" + file.removeprefix(root) if file.startswith(root) else file.split("site-packages/")[-1]
            found.append((short, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return found[::-1]


def unavailable() -> str | None:
    """Return why this Python cannot pretend a GPU, or None where it can."""
    if sys.platform != "linux":
        return f"the pretended GPU needs Linux, and this is {sys.platform}"
    if torch.version.cuda or torch.version.hip:
        return "the pretended GPU needs a PyTorch for the CPU alone, and this one is built for real GPUs"
    if _is_due(_library()) and shutil.which("g++") is None:
        return "the pretended GPU is compiled once with g++, which is not there"
    return None


def _library() -> Path:
    """Return where the compiled library lies: in ``build/``, or in the temporary folder if this one is read-only."""
    folder = HERE / "build" if os.access(HERE, os.W_OK) else Path(tempfile.gettempdir(), "lit_rl_pretended_gpu")
    return folder / f"pretend-{torch.__version__}-{sysconfig.get_platform()}.so"


def _is_due(library: Path) -> bool:
    return not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime


def compiled() -> Path:
    """Return the library of pretend.cpp for this PyTorch. It is compiled first where it is missing or older."""
    library = _library()
    if _is_due(library):
        library.parent.mkdir(parents=True, exist_ok=True)
        root, abi = Path(torch.__file__).parent, int(torch._C._GLIBCXX_USE_CXX11_ABI)
        half = library.with_suffix(f".{os.getpid()}.tmp")  # moved when whole: several processes may compile at once
        command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-w"]
        command += [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", str(SOURCE)]
        subprocess.run([*command, f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-o", str(half)], check=True)
        half.replace(library)
    return library


@functools.cache
def rules() -> dict[str, int]:
    """Return the bits of each operator, from what torchgen's native_functions.yaml says of its CUDA kernel."""
    import torchgen
    import yaml

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    functions = {each["func"].split("(")[0]: each for each in yaml.load(path.read_text(), loader)}
    found: collections.Counter[str] = collections.Counter()
    for name, function in functions.items():
        structured = functions.get(function.get("structured_delegate", ""), function)
        lines = [*structured.get("dispatch", {}), *function.get("dispatch", {})]
        keys = {key.strip() for line in lines for key in line.split(",")}
        composite = not keys or any(key.startswith("Composite") for key in keys)
        if "CUDA" in keys and structured.get("device_check") != "NoCheck":
            found[name] |= STRICT
        if "CPU" in keys and "CUDA" not in keys and not composite:
            found[name] |= MISSING
    for bit, names in _OF_RULE.items():
        for name in names.split():
            found[name] = bit if bit == NATIVE else found[name] & ~MISSING | bit
    return dict(found)


class Stream:
    """The one stream of a device: what is asked for is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        index = torch.cuda.current_device() if device is None else torch.cuda._utils._get_device_index(device, True)
        self.device, self.device_index, self.cuda_stream, self.stream_id = torch.device("cuda", index), index, 0, 0
        self.device_type, self.priority = 1, priority

    def wait_event(self, _event: Any) -> None: ...
    def wait_stream(self, _stream: Any) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        ledger.note("sync", "Stream.synchronize", 0)


class Event:
    """An event that has always happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def record(self, _stream: Any = None) -> None: ...
    def wait(self, _stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        ledger.note("sync", "Event.synchronize", 0)


def _offer_torch_cuda(devices: int) -> None:
    """Put the Python side of `torch.cuda` in its place."""
    ops, cuda = torch.ops.pretend, torch.cuda
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=1, warp_size=32, gcnArchName="",
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, is_integrated=0, L2_cache_size=0, uuid="",
        pci_bus_id=0, pci_device_id=0, pci_domain_id=0, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    )  # fmt: skip

    def init() -> None:
        cuda.default_generators = tuple(ops.default_generator(index) for index in range(devices))

    def statistics(_device: int) -> dict[str, Any]:
        held = {"current": ops.allocated(), "peak": ops.peak(False), "allocated": ops.allocated(), "freed": 0}
        return {f"{kind}_bytes": {"all": dict(held)} for kind in ("allocated", "reserved", "active")}

    in_c = {
        "init": init,
        "getDeviceCount": lambda: devices,
        "getDevice": ops.device,
        "setDevice": lambda index: ops.set_device(index) and None,
        "exchangeDevice": ops.set_device,
        "maybeExchangeDevice": ops.set_device,
        "synchronize": lambda: ledger.note("sync", "torch.cuda.synchronize", 0),
        "emptyCache": lambda *_: None,
        "ipc_collect": lambda: None,
        "memoryStats": statistics,
        "resetPeakMemoryStats": lambda _device: ops.peak(True) and None,
        "resetAccumulatedMemoryStats": lambda _device: None,
        "getAllocatorBackend": lambda: "native",
        "isInBadFork": lambda: False,
        "getArchFlags": lambda: "sm_90",
        "isCurrentStreamCapturing": lambda: pretend_graphs.capturing is not None,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _mode: None,
        "getDeviceProperties": lambda _index: properties,
        "getCurrentRawStream": lambda _index: 0,
        "clearCublasWorkspaces": lambda: None,
    }
    for name, function in in_c.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch._C._nccl_version = lambda: (2 << 32) | (27 << 16)  # messages of failed collectives name it
    torch._C._has_cuda = True
    in_python = {
        "_cudart": SimpleNamespace(cudaMemGetInfo=lambda _index: (MEMORY - ops.allocated(), MEMORY)),
        "_get_device_properties": lambda _index: properties,
        "get_device_properties": lambda _device=None: properties,
        "_is_in_bad_fork": lambda: False,
        "_exchange_device": ops.set_device,
        "_maybe_exchange_device": ops.set_device,
        "device_count": lambda: devices,
        "_cached_device_count": devices,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "default_stream": Stream,
        "set_stream": lambda _stream: None,
    }
    for name, value in in_python.items():
        setattr(cuda, name, value)


def _offer_storages() -> None:
    """Let Python make and resize storages of the device: deep copies, checkpoints and FSDP ask for them."""
    make, resize = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **({"device": device} if device is not None else {}), **kwargs)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        torch.ops.pretend.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    torch.UntypedStorage.__new__, torch.UntypedStorage.resize_ = staticmethod(new), resize_


def _depthwise(x: Any, weight: Any, _size: Any, bias: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    """Stand in for a convolution that CUDA alone has as an operator of its own."""
    host = torch.ops.pretend.host
    with ledger.paused():
        bias = None if bias is None else host(bias)
        made = torch.nn.functional.conv2d(host(x), host(weight), bias, stride, padding, dilation, x.shape[1])
        return torch.empty_like(made, device=x.device).copy_(made)


_libraries: list[torch.library.Library] = []
"""Kept, since what a library registers goes with it."""


def start(devices: int = 1) -> None:
    """Give this process CUDA devices for good. Call it before anything has asked for CUDA.

    Args:
        devices: How many, 1 or more. A second call does nothing.

    Raises:
        RuntimeError: it cannot be done here; the message says why.
    """
    if _libraries:
        return
    if reason := unavailable():
        raise RuntimeError(reason)
    os.environ["PRETEND_DEVICES"] = str(devices)
    torch.ops.load_library(str(compiled()))
    fragment, aten = torch.library.Library("pretend", "FRAGMENT"), torch.library.Library("aten", "IMPL")
    _libraries.extend([fragment, aten])
    fragment.impl("note", ledger.note, "CompositeExplicitAutograd")
    aten.impl("_fused_sdp_choice", lambda *_args, **_kwargs: 0, "CUDA")  # attention's formula: no fused kernels here
    aten.impl("_conv_depthwise2d", _depthwise, "CUDA")
    for name, bits in rules().items():
        torch.ops.pretend.rule(f"aten::{name}", bits)
    _offer_torch_cuda(devices)
    _offer_storages()
    pretend_graphs.offer()
    if devices > 1:
        import pretend_nccl

        pretend_nccl.offer()
    if report := os.environ.get("PRETEND_REPORT"):
        atexit.register(ledger.write, report)
