"""Each private name of another package that `lit_rl/core/upstream.py` uses, or that a class of ours overrides, is there
in the installed version. Where one is gone, the message has its place, the version and the function that needs it."""

from __future__ import annotations

import ast
import importlib
import inspect
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import OmegaConf

from lit_rl.core import upstream

_CALL = "lightning.pytorch.trainer.call"
_FIT = "lightning.pytorch.loops.fit_loop:_FitLoop"
_EPOCH = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_OBSERVER = "lightning.fabric.strategies.launchers.subprocess_script:_ChildProcessObserver"
_CHECKPOINT = "lightning.pytorch.callbacks:ModelCheckpoint"
_DEEPSPEED = "lightning.pytorch.strategies:DeepSpeedStrategy"
_PARALLEL = "lightning.pytorch.strategies:ModelParallelStrategy"
_CLI = "lightning.pytorch.cli:LightningCLI"
_NODE = "omegaconf:Node"
_SCHEDULER = "torch.optim.lr_scheduler:LambdaLR"

NAMES = {
    "hydra-core": {
        "hydra._internal.hydra": ("ConfigLoaderImpl",),
        "hydra._internal.config_loader_impl:ConfigLoaderImpl": ("load_configuration",),
        "hydra.plugins.config_source:ConfigSource": ("load_config", "_normalize_file_name"),
    },
    "jsonargparse": {"jsonargparse.typing:Path": ("read_text", "absolute")},
    "omegaconf": {
        "omegaconf:DictConfig": ("_get_node", "items_ex"),
        _NODE: ("_value", "_is_optional", "_get_root", "_is_none", "_is_missing"),
    },
    "lightning": {
        _FIT: ("_should_accumulate", "_data_fetcher"),
        _EPOCH: ("_should_check_val_fx", "_skip_next_val", "_batches_that_stepped", "val_loop"),
        "lightning.pytorch:Trainer": ("_accelerator_connector", "_signal_connector"),
        "lightning.pytorch.trainer.setup:_init_debugging_flags": ("_val_check_time_interval",),
        "lightning.pytorch.trainer.connectors.accelerator_connector:_AcceleratorConnector": ("cluster_environment",),
        "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector": ("register_signal_handlers",),
        _CALL: ("_call_callback_hooks", "_call_lightning_module_hook"),
        "lightning.pytorch.utilities.exceptions": ("_TunerExitException",),
        "lightning.pytorch:LightningModule": ("_trainer", "_compiler_ctx"),
        "lightning.fabric:Fabric": ("_precision",),
        "lightning.fabric.plugins:Precision": ("convert_module",),
        "lightning.fabric.utilities.device_dtype_mixin:_DeviceDtypeModuleMixin": ("_device",),
        _CHECKPOINT: (
            *("_last_checkpoint_saved", "_find_last_checkpoints"),
            *("_last_global_step_saved", "_should_remove_checkpoint", "_remove_checkpoint"),
        ),
        "lightning.pytorch.loggers:MLFlowLogger": ("_tracking_uri",),
        "lightning.pytorch.strategies:DDPStrategy": ("_start_method", "_ddp_kwargs", "_timeout"),
        _PARALLEL: (
            *("_tensor_parallel_size", "_timeout", "_device_mesh"),
            *("_get_process_group_backend", "_process_group_backend"),
        ),
        _DEEPSPEED: (
            *("_timeout", "_format_batch_size_and_grad_accum_config"),
            *("_init_config_if_needed", "_initialize_deepspeed_train"),
        ),
        _OBSERVER: ("_child_processes",),
        _CLI: ("_parse_ckpt_path", "_run_subcommand"),
    },
    "torch": {
        "torch": ("_foreach_copy_",),
        "torch._C": ("PyTorchFileReader",),
        "torch.autograd.graph": ("_engine_run_backward",),
        "torch.distributed.distributed_c10d": ("_get_default_store",),
        "torch.utils._pytree": ("tree_leaves",),
        _SCHEDULER: ("_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"),
        "torch.amp.grad_scaler:GradScaler": ("_step_supports_amp_scaling",),
    },
}
"""Private names by package, and by the module, `module:Class` or `module:function`, that they are in."""


def test_each_is_there() -> None:
    for package, owners in NAMES.items():
        here, read = metadata.version(package), upstream.READ_IN[package]
        for owner, name in ((owner, name) for owner, names in owners.items() for name in names):
            gone = f"{package} {here} has no {owner.replace(':', '.')}.{name}. {_needed_by(name)}"
            assert _has(owner, name), f"{gone} It was read in {read}: look for what replaced it."


def _has(owner: str, name: str) -> bool:
    """Tell whether a module has the name, or a class or a function: as a member, or as what its code reads or sets."""
    module, _, kind = owner.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    if not kind:
        return hasattr(found, name)
    class_ = getattr(found, kind, None)
    if class_ is None or hasattr(class_, name):
        return class_ is not None
    sources = (
        inspect.getsource(each)
        for each in getattr(class_, "__mro__", [class_])
        if each.__module__.partition(".")[0] != "builtins"
    )
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    return name in {
        text
        for node in nodes
        for text in (getattr(node, "attr", None), getattr(node, "value", None))
        if isinstance(text, str)
    }


def _needed_by(name: str) -> str:
    """Return the functions of `lit_rl/core/upstream.py` that use it; else where scripts/upstream.py says."""
    tree = ast.parse(Path(upstream.__file__).read_text())
    users = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and name in ast.unparse(node)]
    where = f"upstream.{', '.join(users)}" if users else "A class derived from theirs (HOOKS in scripts/upstream.py)"
    return f"{where} uses it."


def test_the_table_tells_what_is_gone() -> None:
    assert not _has("lightning.pytorch.loops.fit_loop:_FitLoop", "_no_such_name")
    assert not _has("lightning.pytorch.no_such_module", "x") and not _has("lightning.pytorch:NoClass", "x")
    assert "upstream.is_accumulating uses it" in _needed_by("_should_accumulate")
    assert "HOOKS" in _needed_by("_run_subcommand")


# ---------------------------------------------------------------------- what they do


def test_configs_are_looked_up_as_omegaconf_stores_them() -> None:
    config = OmegaConf.create({"a": {"b": "${c}", "d": None}, "c": 1, "e": None, "f": "???", "g": {"d": 2}})
    assert upstream.value_and_optional(config.a, "b") == ("${c}", True)
    assert upstream.value_and_optional(config.a, "no") == upstream.value_and_optional(None, "b") == (None, False)
    assert upstream.keys_of_groups(config.a) == {"b": "a.b", "d": "a.d"}


def test_a_trainer_that_has_not_begun() -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    trainer = L.Trainer(**quiet, enable_progress_bar=False, enable_model_summary=False)
    module = L.LightningModule()
    assert not upstream.is_compiled(module)
    assert not upstream.validates_by_timer(trainer) and not upstream.validates_next(trainer)
    assert upstream.cluster_environment(trainer) is not None
    assert upstream.start_method(trainer.strategy) == "popen"
    assert upstream.process_group_timeout(trainer.strategy) is None
    own = trainer._signal_connector.register_signal_handlers
    with upstream.without_signal_handlers(trainer):
        assert trainer._signal_connector.register_signal_handlers() is None
    assert trainer._signal_connector.register_signal_handlers == own


def test_parts_of_torch() -> None:
    weights = [torch.zeros(2), torch.zeros(1)]
    upstream.copy_tensors(weights, [torch.ones(2), torch.ones(1)])
    assert torch.cat(weights).tolist() == [1, 1, 1]
    assert upstream.leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    upstream.set_last_rates(schedule, [0.5])
    assert schedule.get_last_lr() == [0.5]
    assert {*upstream.SCHEDULER_COUNTS} <= schedule.state_dict().keys()


def test_the_observer_of_lightning_looks_at_no_process_any_more() -> None:
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    observer = _ChildProcessObserver(main_pid=0, child_processes=[object()], sleep_period=60)  # pyright: ignore
    observer.run = lambda: ended.wait(10)
    ended = threading.Event()
    observer.start()
    upstream.disarm_lightning_observer()
    ended.set()
    observer.join()
    assert observer._child_processes == []
