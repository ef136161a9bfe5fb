"""Global state of the process that users' code may change: random generators and process-wide settings.

Standard library only: worker processes load this file; NumPy and PyTorch are used only if already imported.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)


def mix_seed(*parts: object) -> int:
    """Return a seed in [0, 2^32) that is another one for other parts, and the same in every process."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def seed_generators(seed: int) -> None:
    """Seed Python's generator, NumPy's and PyTorch's; a GPU's where one is in use.

    Args:
        seed: In [0, 2^32).
    """
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
        if (gpu := _gpu_module(torch)) is not None:
            gpu.manual_seed(seed)


def is_raised_by_user_code(error: BaseException) -> bool:
    """Tell whether a user's code raised this itself: anything but Ctrl-C, and the cancellation of the task that awaits
    it.

    Not every error is an `Exception`: ``sys.exit()``, a panic in code of Rust, and a cancellation inside the code.
    """
    if isinstance(error, KeyboardInterrupt):  # Python raises it in the main thread alone
        return threading.current_thread() is not threading.main_thread()
    if isinstance(error, GeneratorExit):
        return False
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or not isinstance(error, asyncio.CancelledError):
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return True
    return task is None or not task.cancelling()


CHOSEN_FOR_SPEED = ("torch.set_float32_matmul_precision", "torch.set_num_threads", "torch.backends.cudnn.benchmark")
"""Settings that a user's file may change for the whole run on import."""


@contextmanager
def preserve_process_state(whose: str, left: Collection[str] = ()) -> Iterator[None]:
    """Restore generators and settings of the process after the block, also if it raised.

    Generators are put back without a word, as any code may draw from them. A setting that was changed is logged once
    for each user. Environment variables, log levels, warning filters and imported modules stay: a library that is
    imported in the block sets them once. Signal handlers are the main thread's, and are left alone elsewhere.

    Args:
        whose: Code that runs in the block, for the message.
        left: Names of settings that stay as the block leaves them.
    """
    in_main = threading.current_thread() is threading.main_thread()
    with preserve_settings(whose, left, _SIGNAL_HANDLERS if in_main else ()):
        yield


@contextmanager
def preserve_settings(whose: str, left: Collection[str] = (), others: Sequence[_Setting] = ()) -> Iterator[None]:
    """Put back generators and settings, as `preserve_process_state` does, around code in which the run's own signal
    handlers may come and go.

    Args:
        whose: Code that runs in the block, for the message.
        left: Names of settings that stay as the block leaves them.
        others: Further settings.
    """
    settings = [
        (setting, _read_or_none(setting)) for setting in (*_known_settings(), *others) if setting.name not in left
    ]
    try:
        with preserve_generators():
            yield
    except KeyboardInterrupt:  # the signal's handler has restored the handlers
        settings = [(setting, before) for setting, before in settings if setting not in _SIGNAL_HANDLERS]
        raise
    finally:
        changed: list[str] = []
        for setting, before in settings:
            after = _read_or_none(setting)
            if before is not None and after is not before and after != before:
                setting.write(before)
                changed.append(setting.name)
        if changed and (whose, *changed) not in _warned:
            _warned.add((whose, *changed))
            _log.warning(
                "%s changed %s of the whole process; put back behind the call, as all else of the run reads it too.",
                whose,
                ", ".join(changed),
            )


_warned: set[tuple[str, ...]] = set()


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Put the random generators back behind the block as they were before it, whatever it drew or raised."""
    numpy, torch = sys.modules.get("numpy"), _imported_torch()
    python = random.getstate()
    array = None if numpy is None else numpy.random.get_state()
    tensor = None if torch is None else torch.get_rng_state()
    gpu = None if torch is None else _gpu_module(torch)
    drawn = None if gpu is None else gpu.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
        if torch is not None:
            torch.set_rng_state(tensor)
        if gpu is not None:
            gpu.set_rng_state(drawn)


@contextmanager
def temporarily_seeded(seed: int) -> Iterator[None]:
    """Let a short call draw from generators that are seeded for it: as `preserve_generators` and `seed_generators`, in
    a tenth of the time.

    NumPy's own state takes 0.2 ms to read, so its generator is replaced by another one meanwhile. Half of the last
    pair of Gaussian numbers is forgotten, if a single one was drawn before.

    Args:
        seed: In [0, 2^32).
    """
    python, torch, numpy = random.getstate(), _imported_torch(), sys.modules.get("numpy")
    tensor = None if torch is None else torch.get_rng_state()
    random.seed(seed)
    if torch is not None:
        torch.default_generator.manual_seed(seed)
    array = None
    if numpy is not None:
        array = numpy.random.get_bit_generator()
        if not _replacement:
            _replacement.append(numpy.random.MT19937(0))
        numpy.random.set_bit_generator(_replacement[0])
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        if torch is not None:
            torch.set_rng_state(tensor)
        if array is not None and numpy is not None:
            numpy.random.set_bit_generator(array)


_replacement: list[Any] = []
"""The replacement of NumPy's generator."""


class _Setting(NamedTuple):
    """One setting of the process."""

    name: str
    """A name for messages."""
    read: Callable[[], Any]
    """Returns its value."""
    write: Callable[[Any], Any]
    """Sets it."""


def _read_or_none(setting: _Setting) -> Any:
    """Return the value of a setting; None where it cannot be read."""
    with suppress(RuntimeError):  # torch refuses to read the precision that its other interface has set
        return setting.read()
    return None


def _known_settings() -> list[_Setting]:
    """Return the settings of Python, and of PyTorch and NumPy where these are imported."""
    found = list(_PYTHON_SETTINGS)
    if (torch := _imported_torch()) is not None:
        if not _TORCH_SETTINGS:
            _TORCH_SETTINGS.extend(_settings_of_torch(torch))
        found += _TORCH_SETTINGS
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "geterr"):
        found.append(_Setting("numpy.seterr", numpy.geterr, lambda before: numpy.seterr(**before)))
    return found


def _gpu_module(torch: ModuleType) -> Any:
    """Return the module of the kind of GPU that this process uses, which has a generator of its own; None without."""
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_initialized():
            return getattr(torch, kind)
    return torch.mps if torch.backends.mps.is_available() else None


def _imported_torch() -> ModuleType | None:
    """Return PyTorch, where its import is over."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_default_device") else None


def _current_folder() -> str | None:
    with suppress(OSError):  # it is gone
        return os.getcwd()
    return None


def _return_to_folder(folder: str) -> None:
    with suppress(OSError):
        os.chdir(folder)


_PYTHON_SETTINGS = (
    _Setting("the current directory", _current_folder, _return_to_folder),
    _Setting("sys.stdout", lambda: sys.stdout, partial(setattr, sys, "stdout")),
    _Setting("sys.stderr", lambda: sys.stderr, partial(setattr, sys, "stderr")),
    _Setting(
        "socket.setdefaulttimeout", lambda: (socket.getdefaulttimeout(),), lambda one: socket.setdefaulttimeout(*one)
    ),
    _Setting("logging.disable", lambda: logging.root.manager.disable, logging.disable),
)
_SIGNAL_HANDLERS = [
    _Setting(f"the handler of {number.name}", partial(signal.getsignal, number), partial(signal.signal, number))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if (number := getattr(signal, name, None)) is not None
]
_TORCH_SETTINGS: list[_Setting] = []


def _settings_of_torch(torch: Any) -> list[_Setting]:
    return [
        _Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
        _Setting(
            "torch.set_default_device",
            torch.get_default_device,
            lambda before: torch.set_default_device(None if before.type == "cpu" else before),
        ),
        _Setting("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads),
        _Setting("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
        _Setting(
            "torch.use_deterministic_algorithms",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
        ),
        _Setting(
            "torch.set_float32_matmul_precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        _Setting(
            "torch.autograd.set_detect_anomaly",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda before: torch.autograd.set_detect_anomaly(*before),
        ),
        *(
            _Setting(
                f"torch.backends.cudnn.{flag}",
                partial(getattr, torch.backends.cudnn, flag),
                partial(setattr, torch.backends.cudnn, flag),
            )
            for flag in ("enabled", "benchmark", "deterministic")
        ),
    ]
