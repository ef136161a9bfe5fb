"""Uses of other packages beyond their public names, each with a test that would notice a change.

    python scripts/upstream.py        every use: where, what, and the test

Found in the syntax trees of lit_rl, so the list keeps itself; `tests/test_upstream.py` fails where a use has no test:

- *private*: a name with an underscore, imported or reached through imports; an attribute with one that lit_rl itself
  defines nowhere; a private method that nobody here calls, in a class over one of theirs, which calls it.
- *patch*: something of theirs is replaced, or something of ours is put among theirs.
- *signature*: a signature or the code of one of their functions is read.

Public methods that are overridden (Lightning's hooks, a dataset's ``__iter__``) are none of these.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERS = {
    *("accelerate", "antlr4", "bitsandbytes", "datasets", "deepspeed", "gymnasium", "huggingface_hub", "hydra"),
    *("jsonargparse", "liger_kernel", "lightning", "mcp", "mlflow", "omegaconf", "peft", "rich", "safetensors"),
    *(
        "tensorboard",
        "tokenizers",
        "torch",
        "torchmetrics",
        "trackio",
        "transformers",
        "trl",
        "verifiers",
        "vllm",
        "wandb",
    ),
}
"""Packages whose private names are looked for."""

_STRATEGIES = "tests/algorithms/test_strategies.py"
_DOOR = "tests/doors/test_lightning_cli.py"
_FAULTS = "tests/runs/test_faults.py"
_SHIPPING = "tests/models/test_shipping.py"
_LEAN = "tests/generation/test_lean_steps.py"
_GROUPED = "tests/generation/test_grouped_cache.py"
_CHECKPOINTS = "tests/runs/test_damaged_checkpoints.py"

TESTS = {
    # torch
    "torch._C": _CHECKPOINTS,
    "torch._foreach_copy_": "tests/runs/test_dist_masters.py",
    "torch.autograd.Variable._execution_engine": "tests/ops/test_ops_gradient_total.py",
    "torch.ops.aten._softmax_backward_data": "tests/ops/test_ops_folded_attention.py",
    "torch.utils._pytree.tree_leaves": _CHECKPOINTS,
    "torch.set_num_threads": "tests/engines/test_engine_contract.py",
    "._apply": "tests/models/test_models_sharding.py",
    "._buffers": _SHIPPING,
    "._compiled_call_impl": _LEAN,
    "._compiler_ctx": "tests/algorithms/test_trainer_settings.py",
    "._forward_hooks": _LEAN,
    "._forward_pre_hooks": _LEAN,
    "._fsdp_flattened": _SHIPPING,
    "._get_default_store": "tests/runs/test_ranks_end.py",
    "._get_process_group_backend": _STRATEGIES,
    "._last_lr": "tests/algorithms/test_optim_going_on.py",
    "._non_persistent_buffers_set": _SHIPPING,
    "._step_supports_amp_scaling": "tests/runs/test_dist_mixed.py",
    ".forward": "tests/models/test_models_fused_accumulation.py",
    # Lightning
    "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver": "tests/runs/test_ranks_end.py",
    "lightning.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin": "tests/models/test_models_sharding.py",
    "lightning.fabric.utilities.types._PATH": _CHECKPOINTS,
    "lightning.pytorch.trainer.call._call_callback_hooks": _FAULTS,
    "lightning.pytorch.trainer.call._call_lightning_module_hook": _FAULTS,
    "lightning.pytorch.utilities.exceptions._TunerExitException": _FAULTS,
    "._accelerator_connector": _FAULTS,
    "._batches_that_stepped": "tests/runs/test_resume.py",
    "._child_processes": "tests/runs/test_ranks_end.py",
    "._data_fetcher": _FAULTS,
    "._ddp_kwargs": "tests/algorithms/test_memory_plan.py",
    "._device_mesh": "tests/runs/test_dist_mesh.py",
    "._find_last_checkpoints": _DOOR,
    "._format_batch_size_and_grad_accum_config": "tests/zero/test_zero.py",
    "._get": _DOOR,
    "._init_config_if_needed": "tests/zero/test_zero.py",
    "._initialize_deepspeed_train": "tests/zero/test_zero.py",
    "._last_checkpoint_saved": "tests/runs/test_alarms.py",
    "._parse_ckpt_path": _DOOR,
    "._precision": "tests/cli/test_doctor.py",
    "._process_group_backend": _STRATEGIES,
    "._remove_checkpoint": "tests/runs/test_timed_checkpoint.py",
    "._run_subcommand": _DOOR,
    "._should_accumulate": _FAULTS,
    "._should_check_val_fx": _FAULTS,
    "._signal_connector": "tests/runs/test_signals.py",
    ".register_signal_handlers": "tests/runs/test_signals.py",
    "._skip_next_val": _FAULTS,
    "._start_method": "tests/cli/test_bad_config.py",
    "._val_check_time_interval": _FAULTS,
    # transformers, PEFT, Liger, the hub
    "transformers.AutoModelForImageTextToText._model_mapping": "tests/vision/test_vision_rewards.py",
    "transformers.AutoModelForSequenceClassification._model_mapping": "tests/vision/test_vision_rewards.py",
    "transformers.AutoModelForSequenceClassification.register": "tests/vision/test_vision_rewards.py",
    "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register": _GROUPED,
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register": _GROUPED,
    "._attn_implementation": _GROUPED,
    "._commit_hash": "tests/models/test_models_reference_other.py",
    "._model_mapping": "tests/models/test_models_scoring.py",
    "._name_or_path": "tests/doors/test_loaded_models.py",
    "._set_gradient_checkpointing": "tests/models/test_models_loading.py",
    "._weight_conversions": _SHIPPING,
    "liger_kernel.transformers._apply_liger_kernel_to_instance": "tests/models/test_models_liger.py",
    "huggingface_hub.constants.HF_HUB_OFFLINE": "tests/test_offline.py",
    # Hydra, OmegaConf, loggers
    "hydra._internal.config_loader_impl.ConfigLoaderImpl": "tests/cli/test_bad_config.py",
    "hydra._internal.hydra": "tests/cli/test_bad_config.py",
    "hydra._internal.hydra.ConfigLoaderImpl": "tests/cli/test_bad_config.py",
    "._get_node": "tests/cli/test_bad_config.py",
    "._get_root": "tests/cli/test_bad_config.py",
    "._is_missing": "tests/cli/test_bad_config.py",
    "._is_none": "tests/cli/test_bad_config.py",
    "._normalize_file_name": "tests/cli/test_configs.py",
    "._tracking_uri": "tests/agents/test_trackers.py",
    "wandb.Table.MAX_ROWS": "tests/agents/test_wandb.py",
    # signatures, by the file that reads them
    "lit_rl/algorithms/optim/schedule_by_path.py": "tests/doors/test_torch_schedules.py",
    "lit_rl/chat_template.py": "tests/data/test_rendering_cases.py",
    "lit_rl/generation/lean_steps.py": _LEAN,
    "lit_rl/generation/vllm/generator.py": "tests/generation/test_engine_kwargs.py",
    "lit_rl/models/policy/forward_names.py": "tests/generation/test_contract.py",
    "lit_rl/models/scoring/forward.py": "tests/models/test_models_scoring.py",
    "lit_rl/tasksets.py": "tests/agents/test_verifiers_rows.py",
}
"""What is used, and the test that would notice a change of it."""

OWN_SIGNATURES = {
    *("lit_rl/algorithms/kto.py", "lit_rl/algorithms/signatures.py", "lit_rl/keywords.py", "lit_rl/cli/schemas.py"),
    *(
        "lit_rl/algorithms/preflight/estimators.py",
        "lit_rl/algorithms/preflight/given.py",
        "lit_rl/commands/defaults.py",
    ),
    *("lit_rl/cli/lightning_app.py", "lit_rl/environments/user_class.py", "lit_rl/generation/rollout_function.py"),
    *("lit_rl/algorithms/rollouts/identity.py", "lit_rl/environments/tools.py"),
    *("lit_rl/algorithms/rollouts/user_code.py", "lit_rl/environments/source.py"),
    *("lit_rl/rewards/builtin/lengths.py", "lit_rl/rewards/functions/contract.py"),
}
"""Files that read signatures of lit_rl's own functions, or of the user's."""


@dataclass(frozen=True, order=True)
class Use:
    """One use of something that the other package may change without a word."""

    file: str
    line: int
    kind: str
    name: str
    """Dotted where imports say whose it is; ``.name`` of an object; of a signature: the file."""


@dataclass(frozen=True)
class Module:
    """A file of lit_rl as a tree, and what its names stand for."""

    file: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> dict[str, str]:
        """Dotted paths by local name."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {
                    a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
                }
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return found

    def path(self, node: ast.AST) -> str:
        """Return the dotted path of a name or a chain of attributes that begins with an import, or nothing."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return ""
        return ".".join([self.imports[node.id], *reversed(parts)])


def _words(node: ast.AST) -> str:
    """Return a name, or a chain of attributes of one, as it is written; of anything else the last attributes."""
    if isinstance(node, ast.Attribute):
        return f"{_words(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """Return whether it begins with one underscore, and is no key that Hydra documents."""
    return name.startswith("_") and not name.startswith("__") and name not in ("_target_", "_partial_")


def is_theirs(path: str) -> bool:
    return path.split(".")[0] in OTHERS


def modules(root: Path = ROOT) -> list[Module]:
    files = sorted((root / "lit_rl").rglob("*.py"))
    return [Module(str(file.relative_to(root)), ast.parse(file.read_text())) for file in files]


def uses(found: list[Module]) -> list[Use]:
    """Return every use in these files, in their order."""
    nodes = [node for module in found for node in module.nodes]
    ours, called = _defined(nodes), _called(nodes)
    over = _classes_over_theirs(found)
    return sorted({use for module in found for use in _of_module(module, ours, called, over)})


def _defined(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that lit_rl gives to something: definitions, attributes of ``self``, and attributes set by name."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _words(node.value) in ("self", "cls") or node.attr.startswith("_lit_rl"):
                names.add(node.attr)
        elif isinstance(node, ast.Call) and _words(node.func) == "object.__setattr__":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of attributes that are read of anything but ``super()``."""
    reads = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    return {
        node.attr for node in reads if not (isinstance(node.value, ast.Call) and _words(node.value.func) == "super")
    }


def _classes_over_theirs(found: list[Module]) -> set[str]:
    """Names of our classes with a class of another package above them."""
    bases: dict[str, set[str]] = {}
    theirs = set()
    for module in found:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                paths = {module.path(base) or ast.unparse(base) for base in node.bases}
                bases.setdefault(node.name, set()).update(path.split(".")[-1] for path in paths)
                theirs |= {node.name} if any(map(is_theirs, paths)) else set()
    while more := {name for name, above in bases.items() if above & theirs} - theirs:
        theirs |= more
    return theirs


def _of_module(module: Module, ours: set[str], called: set[str], over: set[str]) -> Iterator[Use]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom):
            names = [("private", f"{node.module}.{alias.name}") for alias in node.names]
            names = [(kind, path) for kind, path in names if is_theirs(path) and any(map(is_private, path.split(".")))]
        elif isinstance(node, ast.Attribute):
            names = list(_of_attribute(module, node, ours))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            names = [("patch", f".{each.attr}") for each in node.targets if isinstance(each, ast.Attribute)]
        elif isinstance(node, ast.Call):
            names = list(_of_call(module, node, ours))
        elif isinstance(node, ast.ClassDef) and node.name in over and not _dispatches(node):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            names = [("private", f".{each}") for each in methods if is_private(each) and each not in called]
        else:
            continue
        yield from (Use(module.file, node.lineno, kind, name) for kind, name in names)


def _dispatches(node: ast.ClassDef) -> bool:
    """Return whether a class calls its own methods by names that it puts together."""
    return any(
        isinstance(part, ast.Call) and ast.unparse(part).startswith("getattr(self, f") for part in ast.walk(node)
    )


def _of_attribute(module: Module, node: ast.Attribute, ours: set[str]) -> Iterator[tuple[str, str]]:
    path = module.path(node)
    if is_private(node.attr) and (is_theirs(path) or (not path and node.attr not in ours)):
        yield "private", path or f".{node.attr}"
    if isinstance(node.ctx, ast.Store) and (is_theirs(path) or node.attr == "forward"):
        yield "patch", path or ".forward"


def _of_call(module: Module, node: ast.Call, ours: set[str]) -> Iterator[tuple[str, str]]:
    called = _words(node.func)
    named = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
    if called in ("getattr", "hasattr", "setattr", "delattr") and isinstance(named, str):
        if is_private(named) and named not in ours:
            yield "private", f".{named}"
        if called == "setattr" and is_theirs(module.path(node.args[0])):
            yield "patch", f"{module.path(node.args[0])}.{named}"
    if called in ("inspect.signature", "inspect.unwrap") and module.file not in OWN_SIGNATURES:
        yield "signature", module.file
    if called.endswith(".register") and is_theirs(module.path(node.func)):
        yield "patch", module.path(node.func)


def main() -> None:
    for use in uses(modules()):
        print(f"{use.file}:{use.line}: {use.kind} {use.name}: {TESTS.get(use.name, 'NO TEST')}")


if __name__ == "__main__":
    main()
