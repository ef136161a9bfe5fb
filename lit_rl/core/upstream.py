"""Patches and private members of Hydra, OmegaConf, jsonargparse, Lightning and torch that the command line and the
Trainer need.

Each says why no public name does it. `READ_IN` has the versions that they were read in, and
`tests/test_upstream_names.py` names the one that is gone from a newer version. Nothing is loaded before a function
needs it. What stands elsewhere: the internals of models (`models`, `generation`, `ops`), and the private methods that a
class of ours overrides (`CommandLine`, `TimedCheckpoint`, the strategies).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor, nn

READ_IN = {
    "hydra-core": "1.3.8",
    "jsonargparse": "4.53.0",
    "lightning": "2.6.6",
    "omegaconf": "2.3.1",
    "torch": "2.13.0",
}

# ---------------------------------------------------------------------- config files


def compose_with(load: Callable[..., DictConfig]) -> None:
    """Let `hydra.main` compose by `load(compose, config_name, overrides, ...)`, whose first argument is Hydra's own.

    Hydra makes objects of `hydra.callbacks`, launchers, sweepers and loggers before it calls the main function, and has
    no hook in front of that.
    """
    from hydra._internal import hydra
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    class Loader(ConfigLoaderImpl):
        def load_configuration(self, *arguments: Any, **named: Any) -> DictConfig:
            return load(super().load_configuration, *arguments, **named)

    hydra.ConfigLoaderImpl = Loader  # pyright: ignore[reportPrivateImportUsage]


def before_hydra_reads(check: Callable[[Path], None]) -> AbstractContextManager[None]:
    """Call `check` with each config file before Hydra reads it, in a `with` block: it has no hook there."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigSource

    # Hydra loads its plugins by itself: the class that an import gives is another one.
    kinds: list[Any] = Plugins.instance().discover(ConfigSource)
    files = next(kind for kind in kinds if kind.scheme() == "file")

    def look(source: Any, config_path: str) -> None:
        check(Path(source.path) / source._normalize_file_name(config_path))

    return _before(files, "load_config", look)


def before_jsonargparse_reads(check: Callable[[Path], None]) -> AbstractContextManager[None]:
    """Call `check` with each config file before jsonargparse reads it, in a `with` block: it has no hook there."""
    from jsonargparse.typing import Path as ConfigPath

    return _before(ConfigPath, "read_text", lambda path, *_, **__: check(Path(path.absolute)))


@contextmanager
def _before(kind: type, method: str, look: Callable[..., None]) -> Iterator[None]:
    """Call `look` with the arguments of a method, and `self` first, before each call of it in this block."""
    read = getattr(kind, method)

    def looked(*arguments: Any, **named: Any) -> Any:
        look(*arguments, **named)
        return read(*arguments, **named)

    setattr(kind, method, looked)
    try:
        yield
    finally:
        setattr(kind, method, read)


def value_and_optional(group: Any, name: str) -> tuple[Any, bool]:
    """Return the unresolved value of a key of OmegaConf's, and whether its type takes null: no public name tells."""
    from omegaconf import DictConfig, Node

    node = group._get_node(name) if isinstance(group, DictConfig) else None
    return (node._value(), node._is_optional()) if isinstance(node, Node) else (None, False)


def keys_of_groups(node: Any) -> dict[str, str]:
    """Return `group.key` by key, of all groups of the config that a node is in: only a private name leads up to it."""
    from omegaconf import OmegaConf

    keys: dict[str, str] = {}
    for group, inner in node._get_root().items_ex(resolve=False):
        for name in inner if OmegaConf.is_dict(inner) and not inner._is_none() and not inner._is_missing() else ():
            keys.setdefault(str(name), f"{group}.{name}")
    return keys


# ---------------------------------------------------------------------- Lightning's loops


def is_accumulating(trainer: Any) -> bool:
    """Tell whether the micro-batch that just ended is followed by no optimizer step. Lightning has no public word for
    it before the step is counted."""
    return trainer.fit_loop._should_accumulate()


def validates_next(trainer: Any) -> bool:
    """Tell whether Lightning validates after this optimizer step: four settings of the Trainer decide, and its own
    method reads them."""
    epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    batches = sum(epoch_loop.val_loop.max_batches)
    return fetcher is not None and batches > 0 and epoch_loop._should_check_val_fx(fetcher)


def validates_by_timer(trainer: Any) -> bool:
    """Tell whether validations are due by the clock. The Trainer turns `val_check_interval` into seconds, and keeps
    them private."""
    return trainer._val_check_time_interval is not None


def skip_validation(trainer: Any) -> None:
    """Let a fit that stops after this batch end without a validation, which Lightning makes where `should_stop` is
    set."""
    trainer.fit_loop.epoch_loop._skip_next_val = True


def end_fit(trainer: Any) -> NoReturn:
    """End a fit in the middle of a loop, with the hooks of a regular end. This exception is the only one that Lightning
    takes for a regular end."""
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.exceptions import _TunerExitException

    trainer.training = True
    call._call_callback_hooks(trainer, "on_train_end")
    call._call_lightning_module_hook(trainer, "on_train_end")
    raise _TunerExitException


def count_steps_as_logged(trainer: Any) -> None:
    """Set the step under which loggers get what comes next to that of the weights. A fit that is resumed at its last
    step trains nothing, and does not count it."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


# ---------------------------------------------------------------------- Lightning's parts


def is_compiled(module: Any) -> bool:
    """Tell whether Lightning has compiled a module (`torch.compile` around a LightningModule), which leaves no public
    mark."""
    return module._compiler_ctx is not None


def convert_precision(fabric: Any, module: nn.Module) -> None:
    """Convert a module to a Fabric's precision without wrapping it, as the public `setup_module` does."""
    fabric._precision.convert_module(module)


def tell_device(part: nn.Module, device: Any) -> None:
    """Set what `module.device` says of a module whose weights were moved one by one: only `to()` does it in public."""
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin

    if isinstance(part, _DeviceDtypeModuleMixin):
        part._device = device


def last_saved(callback: Any) -> str:
    """Return the checkpoint that a `ModelCheckpoint` saved last, best or not; empty where it saved none.
    `last_model_path` is set with `save_last` alone."""
    return str(getattr(callback, "_last_checkpoint_saved", ""))


def has_last_checkpoint(callback: Any, trainer: Any) -> bool:
    """Tell whether `ckpt_path="last"` finds a checkpoint of a `ModelCheckpoint`: where it finds none Lightning begins
    anew."""
    return bool(callback._find_last_checkpoints(trainer))


def mlflow_address(logger: Any) -> str:
    """Return the address that an MLFlowLogger sends to: the public client does not say it of every kind of store."""
    return str(logger._tracking_uri)


# ---------------------------------------------------------------------- strategies, processes and signals


def start_method(strategy: Any) -> str:
    """Return how a DDPStrategy starts its processes: `popen`, or by a copy of this one."""
    return getattr(strategy, "_start_method", "popen")


def tensor_parallel_size(strategy: Any) -> int:
    """Return the ranks that share rows under a ModelParallelStrategy. Its public mesh exists once processes are
    started."""
    asked = strategy._tensor_parallel_size
    return strategy.num_processes if isinstance(asked, str) else asked  # "auto"


def views_gradients(strategy: Any) -> bool:
    """Tell whether DDP keeps gradients as views of its buckets: the wrapped module, which knows it, is made later."""
    return bool(strategy._ddp_kwargs.get("gradient_as_bucket_view"))


def process_group_timeout(strategy: Any) -> Any | None:
    """Return the timeout that a strategy was given for its process group; None where it sets none."""
    return getattr(strategy, "_timeout", None)


def cluster_environment(trainer: Any) -> Any | None:
    """Return the Trainer's cluster environment: the strategy, which shows its own in public, has none of one device."""
    return trainer._accelerator_connector.cluster_environment


@contextmanager
def without_signal_handlers(trainer: Any) -> Iterator[None]:
    """Keep Lightning from installing its handlers of signals in this block: they would replace those of the caller."""
    connector = trainer._signal_connector
    connector.register_signal_handlers = lambda: None
    try:
        yield
    finally:
        del connector.register_signal_handlers


def disarm_lightning_observer() -> None:
    """Keep Lightning from killing this process, which ends by itself where another one fails.

    A thread of Lightning's looks every five seconds, and kills this process once one that it started has failed.
    """
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []  # it looks at none, and has nothing else to do


# ---------------------------------------------------------------------- torch


def default_store() -> Any:
    """Return the key-value store of the process group, which all ranks reach. `torch.distributed` gives it to nobody
    who has not made it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


BACKWARD = "_engine_run_backward"
"""The function in which a backward pass waits, as it is called in the frames of a thread."""

SCHEDULER_COUNTS = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial")
"""Parts of a scheduler's state that change with its steps: all others are settings."""


def set_last_rates(scheduler: Any, rates: Sequence[float]) -> None:
    """Set what a scheduler says of its learning rates (`get_last_lr`), after they were changed in the optimizer."""
    scheduler._last_lr = list(rates)


def keep_gradients_scaled(optimizer: Any) -> None:
    """Let Lightning unscale fp16 gradients before they are clipped: a fused optimizer declares to do it itself, in its
    step."""
    optimizer._step_supports_amp_scaling = False


def copy_tensors(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others by one call, which torch has under a private name only."""
    import torch

    torch._foreach_copy_(into, values)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]


def read_archive_index(path: str) -> None:
    """Read the index of a file of `torch.save`. It is stricter than Python's own reader, and reads no weights.

    Raises:
        RuntimeError: the index is damaged, or it is no such file.
    """
    import torch

    torch._C.PyTorchFileReader(path)


def leaves(tree: Any) -> Iterable[Any]:
    """Return the values in nested dictionaries, lists and tuples, as torch saves them."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)
