"""The packages that lit_rl stands on: uses beyond their public names, each with a test that would notice a change, and
their versions (the oldest that it allows, those that are here, those that moved).

    python scripts/upstream.py               every use: where, what, and the test
    python scripts/upstream.py oldest        requirement lines: the lower bound of each range in pyproject.toml
    python scripts/upstream.py versions      what is installed of constraints.txt, on one line
    python scripts/upstream.py all           every package that is installed, as lines `name==version`
    python scripts/upstream.py moved FILE    those whose version is another than in FILE, that came or that went

Uses are found in the syntax trees of lit_rl, so the list keeps itself; `tests/test_upstream.py` fails where one has no
test:

- *private*: a name with an underscore, imported or reached through imports; an attribute with one that no class of the
  file, or of a file that it imports from, defines; a private method that nobody here calls, in a class over one of
  theirs, which calls it.
- *patch*: something of theirs is replaced, or something of ours is put among theirs.
- *signature*: a signature or the code of one of their functions is read.

Those of the command line and the Trainer stand in one module (`HOME`), which says why; `astray` finds others.

Names in texts, and those that a class of ours shares with the class of theirs above it, are listed by hand (`BY_HAND`).
Public methods that are overridden (Lightning's hooks, a dataset's ``__iter__``) are none of these.

`all` in an environment whose tests passed is kept in tests/stack: newest.txt of `make test-newest`, and oldest.txt. The
standard library alone is imported here: `oldest` is asked for in an environment that has nothing else yet.
"""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
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

_COMPILED = "tests/models/test_models_compiled.py"
_GOING_ON = "tests/algorithms/test_optim_going_on.py"
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
    "torch._dynamo.config": _COMPILED,
    "torch._dynamo.config.recompile_limit": _COMPILED,
    "torch._dynamo.exc.TorchDynamoException": _COMPILED,
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
    "torch.distributed.distributed_c10d._get_default_store": "tests/runs/test_ranks_end.py",
    "._get_process_group_backend": _STRATEGIES,
    "._device": "tests/models/test_models_sharding.py",
    "._engine_run_backward": "tests/runs/test_watchdog.py",
    "._get_lr_called_within_step": _GOING_ON,
    "._is_initial": _GOING_ON,
    "._last_lr": _GOING_ON,
    "._parameters": _SHIPPING,
    "._step_count": _GOING_ON,
    "._non_persistent_buffers_set": _SHIPPING,
    "._step_supports_amp_scaling": "tests/runs/test_dist_cases.py",
    ".forward": "tests/models/test_models_fused_accumulation.py",
    # Lightning
    "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver": "tests/runs/test_ranks_end.py",
    "lightning.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin": "tests/models/test_models_sharding.py",
    "lightning.pytorch.trainer.call._call_callback_hooks": _FAULTS,
    "lightning.pytorch.trainer.call._call_lightning_module_hook": _FAULTS,
    "lightning.pytorch.utilities.exceptions._TunerExitException": _FAULTS,
    "._accelerator_connector": _FAULTS,
    "._batches_that_stepped": "tests/runs/test_resume_cases.py",
    "._child_processes": "tests/runs/test_ranks_end.py",
    "._data_fetcher": _FAULTS,
    "._ddp_kwargs": "tests/algorithms/test_memory_plan.py",
    "._device_mesh": "tests/runs/test_dist_mesh.py",
    "._find_last_checkpoints": _DOOR,
    "._format_batch_size_and_grad_accum_config": "tests/zero/test_zero.py",
    "._init_config_if_needed": "tests/zero/test_zero.py",
    "._initialize_deepspeed_train": "tests/zero/test_zero.py",
    "._last_global_step_saved": "tests/runs/test_timed_checkpoint.py",
    "._should_remove_checkpoint": "tests/runs/test_timed_checkpoint.py",
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
    "._tensor_parallel_size": _STRATEGIES,
    "._timeout": "tests/runs/test_watchdog.py",
    "._val_check_time_interval": _FAULTS,
    # transformers, PEFT, Liger, the hub
    "transformers.AutoModelForImageTextToText._model_mapping": "tests/vision/test_vision_rewards.py",
    "transformers.AutoModelForSequenceClassification._model_mapping": "tests/vision/test_vision_rewards.py",
    "transformers.AutoModelForSequenceClassification.register": "tests/vision/test_vision_rewards.py",
    "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register": _GROUPED,
    "transformers.masking_utils.find_packed_sequence_indices": "tests/models/test_models_known_masks.py",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register": _GROUPED,
    "._attn_implementation": _GROUPED,
    "._initialize_weights": "tests/pretended_gpu/test_device_choice.py",
    "._is_hf_initialized": "tests/pretended_gpu/test_device_choice.py",
    "._commit_hash": "tests/models/test_models_reference_other.py",
    "._no_split_modules": "tests/runs/test_dist_mesh.py",
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
    "._is_optional": "tests/cli/test_bad_config.py",
    "._value": "tests/cli/test_bad_config.py",
    "._normalize_file_name": "tests/cli/test_configs.py",
    "._tracking_uri": "tests/agents/test_trackers.py",
    "wandb.Table.MAX_ROWS": "tests/agents/test_wandb.py",
    # signatures, by the file that reads them
    "lit_rl/algorithms/optim/schedules.py": "tests/doors/test_torch_schedules.py",
    "lit_rl/cli/trainer_settings.py": "tests/cli/test_bad_config.py",
    "lit_rl/cli/schemas.py": "tests/cli/test_configs.py",
    "lit_rl/reports/config_changes.py": "tests/docs/test_reference_docs.py",
    "lit_rl/core/errors.py": "tests/algorithms/test_trainer_settings.py",
    "lit_rl/models/kernels.py": _COMPILED,
    "lit_rl/core/chat_template.py": "tests/data/test_rendering_cases.py",
    "lit_rl/generation/fast_decoding.py": _LEAN,
    "lit_rl/generation/vllm/engine_generator.py": "tests/generation/test_engine_kwargs.py",
    "lit_rl/models/forward_inputs.py": "tests/generation/test_contract.py",
    "lit_rl/models/scoring.py": "tests/models/test_models_scoring.py",
    "lit_rl/core/task_sets.py": "tests/agents/test_verifiers_rows.py",
}
"""What is used, and the test that would notice a change of it."""

OWN_SIGNATURES = {
    *("lit_rl/algorithms/kto.py", "lit_rl/algorithms/chosen_functions.py"),
    *(
        "lit_rl/algorithms/checks/policy_gradient_checks.py",
        "lit_rl/algorithms/checks/argument_checks.py",
    ),
    *(
        "lit_rl/cli/lightning_app.py",
        "lit_rl/environments/user_environments.py",
        "lit_rl/generation/rollout_function.py",
    ),
    *(
        "lit_rl/algorithms/loop/run_identity.py",
        "lit_rl/environments/tools.py",
    ),
    *("lit_rl/core/declared_settings.py", "lit_rl/core/fingerprints.py", "lit_rl/environments/environment_base.py"),
    *("lit_rl/rewards/token_rewards.py", "lit_rl/rewards/contract.py"),
}
"""Files that read signatures of lit_rl's own functions, or of the user's."""


HOME = "lit_rl/core/upstream.py"
"""The one module for what the command line and the Trainer use."""

INTERNALS = ("lit_rl/models/", "lit_rl/generation/", "lit_rl/ops/", "lit_rl/rewards/classifiers.py")
"""Packages whose ideas are about the internals of a model or of torch, and which may name these where they use them."""

SETTINGS = ("huggingface_hub.constants.HF_HUB_OFFLINE", "wandb.Table.MAX_ROWS")
"""Public settings of other packages, which are variables to be set."""

HOOKS = {
    "lit_rl/algorithms/optim/strategies.py": (
        *("_device_mesh", "_format_batch_size_and_grad_accum_config", "_get_process_group_backend"),
        *("_init_config_if_needed", "_initialize_deepspeed_train", "_process_group_backend"),
    ),
    "lit_rl/callbacks/timed_checkpoint.py": (
        *("_last_global_step_saved", "_remove_checkpoint", "_should_remove_checkpoint"),
    ),
    "lit_rl/cli/lightning_app.py": ("_parse_ckpt_path", "_run_subcommand"),
}
"""Private members of Lightning's classes that one of ours, derived from it, overrides or calls, by file."""

BY_HAND = {
    HOME: (
        *("_engine_run_backward", "_get_lr_called_within_step", "_is_initial", "_last_lr", "_normalize_file_name"),
        *("_step_count", "_tensor_parallel_size"),
    ),
    "lit_rl/callbacks/timed_checkpoint.py": ("_last_global_step_saved", "_should_remove_checkpoint"),
}
"""Private names that syntax trees do not tell from ours, by file."""


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
        """Return dotted paths by local name."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {
                    a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
                }
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return found

    @property
    def name(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def above(self) -> list[str]:
        """Return files with a class above one of this."""
        classes = (node for node in self.nodes if isinstance(node, ast.ClassDef))
        return [self.path(_plain(base)).rpartition(".")[0] for node in classes for base in node.bases]

    def path(self, node: ast.AST) -> str:
        """Return the dotted path of a name or a chain of attributes that begins with an import, or nothing."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return ""
        return ".".join([self.imports[node.id], *reversed(parts)])


def _plain(base: ast.expr) -> ast.expr:
    """Return a class without its parameters: ``A`` of ``A[int]``."""
    return base.value if isinstance(base, ast.Subscript) else base


def _words(node: ast.AST) -> str:
    """Return a name, or a chain of attributes of one, as it is written; of anything else the last attributes."""
    if isinstance(node, ast.Attribute):
        return f"{_words(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """Return whether it begins with one underscore, and is none that Hydra or named tuples document."""
    return name.startswith("_") and not name.startswith("__") and name not in ("_target_", "_partial_", "_replace")


def is_theirs(path: str) -> bool:
    return path.split(".")[0] in OTHERS


def modules(root: Path = ROOT) -> list[Module]:
    files = sorted((root / "lit_rl").rglob("*.py"))
    return [Module(str(file.relative_to(root)), ast.parse(file.read_text())) for file in files]


def uses(found: list[Module]) -> list[Use]:
    """Return every use in these files, in their order."""
    called = _called([node for module in found for node in module.nodes])
    over = _classes_over_theirs(found)
    files, own = {module.name: module for module in found}, {module.name: _defined(module) for module in found}
    by_hand = {Use(*use) for module in found for use in _by_hand(module)}
    by_rule = {use for module in found for use in _of_module(module, _ours(module, own, files), called, over)}
    return sorted(by_hand | by_rule)


def astray(found: Iterable[Use]) -> list[Use]:
    """Return private names and patches that stand neither in `HOME` nor where an exception says."""
    elsewhere = [use for use in found if use.kind != "signature" and use.file != HOME and use.name not in SETTINGS]
    others = (use for use in elsewhere if not use.file.startswith(INTERNALS))
    return [use for use in others if use.name.removeprefix(".") not in HOOKS.get(use.file, ())]


def _by_hand(module: Module) -> Iterator[tuple[str, int, str, str]]:
    for name in BY_HAND.get(module.file, ()):
        named = (node for node in module.nodes if name in (getattr(node, "value", None), getattr(node, "attr", None)))
        if (first := next(named, None)) is not None:
            yield module.file, first.lineno, "private", f".{name}"  # pyright: ignore


def _defined(module: Module) -> set[str]:
    """Return the names that classes of a file define, and those that it gives to objects by name."""
    names = set()
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            values = [part for part in node.body if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            stored = [part for value in values for part in ast.walk(value) if isinstance(part, ast.Name)]
            names |= {*methods, *(part.id for part in stored if isinstance(part.ctx, ast.Store))}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _words(node.value) in ("self", "cls") or node.attr.startswith("_lit_rl"):
                names.add(node.attr)
        elif isinstance(node, ast.Call) and _words(node.func) == "object.__setattr__":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
        elif isinstance(node, ast.Call) and _words(node.func) == "self.__dict__.update":
            names |= {each.arg for each in node.keywords}
    return names


def _ours(module: Module, own: dict[str, set[str]], files: dict[str, Module]) -> tuple[set[str], set[str]]:
    """Return what is lit_rl's own of ``self`` in a file, and of other objects.

    Of others: what classes of the file and of those that it imports from define. Of ``self``: also what is defined
    where the classes above it are.
    """
    near = {path.rpartition(".")[0] for path in module.imports.values()} | set(module.imports.values()) | {module.name}
    above, waiting = set[str](), [module.name]
    while waiting:
        name = waiting.pop()
        if name in files and name not in above:
            above.add(name)
            waiting += files[name].above
    others = set[str]().union(*(own[name] for name in near if name in own))
    return others.union(*(own[name] for name in above)), others


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of attributes that are read of anything but ``super()``."""
    reads = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    return {
        node.attr for node in reads if not (isinstance(node.value, ast.Call) and _words(node.value.func) == "super")
    }


def _classes_over_theirs(found: list[Module]) -> set[str]:
    """Return names of our classes with a class of another package above them."""
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


def _of_module(module: Module, ours: tuple[set[str], set[str]], called: set[str], over: set[str]) -> Iterator[Use]:
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


def _of_attribute(module: Module, node: ast.Attribute, ours: tuple[set[str], set[str]]) -> Iterator[tuple[str, str]]:
    path = module.path(node)
    own = ours[0] if _words(node.value) in ("self", "cls") else ours[1]
    if is_private(node.attr) and (is_theirs(path) or (not path and node.attr not in own)):
        yield "private", path or f".{node.attr}"
    if node.attr in ("__code__", "__globals__") and module.file not in OWN_SIGNATURES:
        yield "signature", module.file
    if isinstance(node.ctx, ast.Store) and (is_theirs(path) or node.attr == "forward"):
        yield "patch", path or ".forward"


def _of_call(module: Module, node: ast.Call, ours: tuple[set[str], set[str]]) -> Iterator[tuple[str, str]]:
    called = _words(node.func)
    named = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
    if called in ("getattr", "hasattr", "setattr", "delattr") and isinstance(named, str):
        if is_private(named) and named not in ours[_words(node.args[0]) not in ("self", "cls")]:
            yield "private", f".{named}"
        if called == "setattr" and is_theirs(module.path(node.args[0])):
            yield "patch", f"{module.path(node.args[0])}.{named}"
    if called in ("inspect.signature", "inspect.unwrap") and module.file not in OWN_SIGNATURES:
        yield "signature", module.file
    if called.endswith(".register") and is_theirs(module.path(node.func)):
        yield "patch", module.path(node.func)


# ------------------------------------------------------------------------------------------------------------ versions


_LOWEST = re.compile(r">=([\d.]+)[^#;]*")


def oldest() -> list[str]:
    """Return a line ``name==lower bound`` for each dependency of lit_rl."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [_LOWEST.sub(r"==\1", line).strip() for line in project["dependencies"]]


def installed() -> dict[str, str]:
    """Return the version of every package that is here but lit_rl, by name."""
    found = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in metadata.distributions()}
    return {name: found[name].partition("+")[0] for name in sorted(found) if name != "lit-rl"}


def listed(file: Path) -> dict[str, str]:
    """Return the versions of a file of lines ``name==version``, by name."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    pairs = (line.partition("==")[::2] for line in lines if line)
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def moved(here: dict[str, str], then: dict[str, str]) -> list[str]:
    """Return a line for each package that is in another version, that came or that went."""
    names = sorted(here.keys() | then.keys())
    pairs = [(name, then.get(name, "absent"), here.get(name, "absent")) for name in names]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("asked", choices=["uses", "oldest", "versions", "all", "moved"], nargs="?", default="uses")
    parser.add_argument("file", type=Path, nargs="?", help="of `moved`")
    given = parser.parse_args()
    here = installed()
    if given.asked == "uses":
        for use in uses(modules()):
            print(f"{use.file}:{use.line}: {use.kind} {use.name}: {TESTS.get(use.name, 'NO TEST')}")
    elif given.asked == "oldest":
        print(*oldest(), sep="\n")
    elif given.asked == "versions":
        print(", ".join(f"{name} {here[name]}" for name in listed(ROOT / "constraints.txt") if name in here))
    elif given.asked == "all":
        print(*(f"{name}=={version}" for name, version in here.items()), sep="\n")
    elif given.file is None:
        parser.error("moved since when? Name a file, such as tests/stack/newest.txt")
    else:
        lines = moved(here, listed(given.file)) or ["none"]
        print(f"Packages that moved since these tests last passed ({given.file}):", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
