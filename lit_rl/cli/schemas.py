"""Typed Hydra schemas, made from constructor signatures: no default stands twice, and every key is checked.

A group's file takes one up by name (`defaults: [/schemas/GRPO@_here_]`). An unknown key, a wrong type or an unknown
choice is then refused with the key's name before anything runs. `scripts/config_reference.py` writes what was made to
`schema_keys.yaml`, so that Hydra composes and checks types before torch loads; for another version of Lightning than
the file was written with, schemas are made anew.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from lit_rl.cli.listing import schema_keys
from lit_rl.core.errors import constructors_of
from lit_rl.reports.config_changes import lightning_version

# ---------------------------------------------------------------------- schemas from constructors


TARGETS = {
    "LanguageModel": "lit_rl.models.LanguageModel",
    "Lora": "lit_rl.models.Lora",
    "FrozenCopy": "lit_rl.models.references.FrozenCopy",
    "AdapterBase": "lit_rl.models.references.AdapterBase",
    "AutoReference": "lit_rl.models.references.Auto",
    "ReferenceFree": "lit_rl.models.references.ReferenceFree",
    "InitialAdapter": "lit_rl.models.references.InitialAdapter",
    "OtherModel": "lit_rl.models.references.OtherModel",
    "EMAReference": "lit_rl.models.references.EMA",
    "BEMAReference": "lit_rl.models.references.BEMA",
    "MixingReference": "lit_rl.models.references.Mixing",
    "GRPO": "lit_rl.algorithms.GRPO",
    "RLOO": "lit_rl.algorithms.RLOO",
    "Reinforce": "lit_rl.algorithms.Reinforce",
    "PPO": "lit_rl.algorithms.PPO",
    "SFT": "lit_rl.algorithms.SFT",
    "GKD": "lit_rl.algorithms.GKD",
    "DPO": "lit_rl.algorithms.DPO",
    "OnlineDPO": "lit_rl.algorithms.OnlineDPO",
    "NashMD": "lit_rl.algorithms.NashMD",
    "XPO": "lit_rl.algorithms.XPO",
    "RewardModeling": "lit_rl.algorithms.RewardModeling",
    "ProcessRewardModeling": "lit_rl.algorithms.ProcessRewardModeling",
    "KTO": "lit_rl.algorithms.KTO",
    "BCO": "lit_rl.algorithms.BCO",
    "DensityRatio": "lit_rl.algorithms.terms.verdict_terms.DensityRatio",
    "CPO": "lit_rl.algorithms.CPO",
    "TPO": "lit_rl.algorithms.TPO",
    "ORPO": "lit_rl.algorithms.ORPO",
    "DynamicSampling": "lit_rl.algorithms.terms.groups.DynamicSampling",
    "BestOfGroup": "lit_rl.algorithms.terms.groups.BestOfGroup",
    "TopOfGroup": "lit_rl.algorithms.terms.groups.TopOfGroup",
    "GroupReplay": "lit_rl.algorithms.terms.groups.GroupReplay",
    "RunningNorm": "lit_rl.algorithms.terms.credit.RunningNorm",
    "RoleBaseline": "lit_rl.algorithms.terms.credit.RoleBaseline",
    "OptimalValue": "lit_rl.algorithms.terms.optimal_value.OptimalValue",
    "Evaluation": "lit_rl.algorithms.Evaluation",
    "AdamW": "lit_rl.algorithms.optim.optimizers.AdamW",
    "AdamW8bit": "lit_rl.algorithms.optim.optimizers.AdamW8bit",
    "AdamWSplit": "lit_rl.algorithms.optim.optimizers.AdamWSplit",
    "ByPath": "lit_rl.algorithms.optim.optimizers.ByPath",
    "Constant": "lit_rl.algorithms.optim.schedules.Constant",
    "Linear": "lit_rl.algorithms.optim.schedules.Linear",
    "Cosine": "lit_rl.algorithms.optim.schedules.Cosine",
    "ScheduleByPath": "lit_rl.algorithms.optim.schedules.ScheduleByPath",
    "SeparateCritic": "lit_rl.models.critics.SeparateCritic",
    "SharedTrunk": "lit_rl.models.critics.SharedTrunk",
    "AdapterCritic": "lit_rl.models.critics.AdapterCritic",
    "FixedKL": "lit_rl.algorithms.terms.regularizers.FixedKL",
    "AdaptiveKL": "lit_rl.algorithms.terms.regularizers.AdaptiveKL",
    "FixedEntropy": "lit_rl.algorithms.terms.regularizers.FixedEntropy",
    "AdaptiveEntropy": "lit_rl.algorithms.terms.regularizers.AdaptiveEntropy",
    "ModelTeacher": "lit_rl.algorithms.terms.teachers.ModelTeacher",
    "ServerTeacher": "lit_rl.algorithms.terms.served_teachers.ServerTeacher",
    "ColumnTeachers": "lit_rl.algorithms.terms.served_teachers.ColumnTeachers",
    "SelfTeacher": "lit_rl.algorithms.terms.self_teacher.SelfTeacher",
    "ColumnContext": "lit_rl.algorithms.terms.self_teacher.ColumnContext",
    "OutcomeContext": "lit_rl.algorithms.terms.self_teacher.OutcomeContext",
    "TeacherAdvantage": "lit_rl.algorithms.terms.teachers.TeacherAdvantage",
    "SampledKL": "lit_rl.algorithms.terms.teachers.SampledKL",
    "PrefixWeightedAdvantage": "lit_rl.algorithms.terms.teachers.PrefixWeightedAdvantage",
    "TopForwardKL": "lit_rl.algorithms.terms.teachers.TopForwardKL",
    "TopDivergence": "lit_rl.algorithms.terms.teachers.TopDivergence",
    "SupervisedText": "lit_rl.data.supervised_text.SupervisedText",
    "Sampling": "lit_rl.core.rollout.Sampling",
    "NativeGenerator": "lit_rl.generation.native.NativeGenerator",
    "HFGenerator": "lit_rl.generation.hf.HFGenerator",
    "VLLMGenerator": "lit_rl.generation.vllm.in_process.VLLMGenerator",
    "VLLMServerGenerator": "lit_rl.generation.vllm.server.VLLMServerGenerator",
    "HFContinuousGenerator": "lit_rl.generation.hf.HFContinuousGenerator",
    "FunctionTools": "lit_rl.environments.FunctionTools",
    "CustomEnvironment": "lit_rl.environments.CustomEnvironment",
    "RolloutFunction": "lit_rl.generation.rollout_function.RolloutFunction",
    "MCPTools": "lit_rl.environments.MCPTools",
    "GymnasiumEnvironment": "lit_rl.environments.GymnasiumEnvironment",
    "Curriculum": "lit_rl.data.curriculum.Curriculum",
    "RolloutDataModule": "lit_rl.data.prompt_module.RolloutDataModule",
    "SupervisedDataModule": "lit_rl.data.example_module.SupervisedDataModule",
    "PreferenceDataModule": "lit_rl.data.example_module.PreferenceDataModule",
    "StepwiseDataModule": "lit_rl.data.example_module.StepwiseDataModule",
    "Addition": "lit_rl.data.tasks.Addition",
    "AdditionText": "lit_rl.data.tasks.AdditionText",
    "AdditionPairs": "lit_rl.data.tasks.AdditionPairs",
    "AdditionTriples": "lit_rl.data.tasks.AdditionTriples",
    "LargestText": "lit_rl.data.tasks.LargestText",
    "ReasoningGymPlain": "lit_rl.data.tasks.ReasoningGymPlain",
    "ReasoningGymText": "lit_rl.data.tasks.ReasoningGymText",
    "LargestPairs": "lit_rl.data.tasks.LargestPairs",
    "AdditionSteps": "lit_rl.data.tasks.AdditionSteps",
    "Digits": "lit_rl.data.tasks.Digits",
    "DigitTexts": "lit_rl.data.tasks.DigitTexts",
    "GuessDemonstrations": "lit_rl.environments.games.GuessDemonstrations",
    "CalculatorDemonstrations": "lit_rl.environments.games.CalculatorDemonstrations",
    "ProductQuestions": "lit_rl.environments.games.ProductQuestions",
    "QuestionDemonstrations": "lit_rl.environments.games.QuestionDemonstrations",
    "Products": "lit_rl.environments.games.Products",
    "RandomPlay": "lit_rl.environments.gymnasium_environment.RandomPlay",
    "Repeated": "lit_rl.data.tasks.Repeated",
    "Largest": "lit_rl.data.tasks.Largest",
    "ReasoningGym": "lit_rl.data.tasks.ReasoningGym",
    "VerifiersTasks": "lit_rl.data.tasks.VerifiersTasks",
    "Rewards": "lit_rl.rewards.Rewards",
    "RewardRecipes": "lit_rl.rewards.RewardRecipes",
    "JointRewards": "lit_rl.rewards.JointRewards",
    "from_paths": "lit_rl.rewards.from_paths",
    "MathAccuracy": "lit_rl.rewards.MathAccuracy",
    "SoftOverlong": "lit_rl.rewards.SoftOverlong",
    "CosineScaledLength": "lit_rl.rewards.CosineScaledLength",
    "RepetitionPenalty": "lit_rl.rewards.RepetitionPenalty",
    "CodeExecution": "lit_rl.rewards.CodeExecution",
    "ReasoningGymExact": "lit_rl.rewards.ReasoningGymExact",
    "ReasoningGymScore": "lit_rl.rewards.ReasoningGymScore",
    "VerifiersScore": "lit_rl.rewards.VerifiersScore",
    "RewardModel": "lit_rl.rewards.RewardModel",
    "ProcessRewardModel": "lit_rl.rewards.ProcessRewardModel",
    "RemoteReward": "lit_rl.rewards.RemoteReward",
    "JudgeReward": "lit_rl.rewards.JudgeReward",
    "GroupJudge": "lit_rl.rewards.GroupJudge",
    "RewardJudge": "lit_rl.rewards.judges.RewardJudge",
    "FunctionJudge": "lit_rl.rewards.judges.FunctionJudge",
    "PairwiseJudge": "lit_rl.rewards.judges.PairwiseJudge",
    "LLMJudge": "lit_rl.rewards.llm_judge.LLMJudge",
    "PairRMJudge": "lit_rl.rewards.pair_ranker.PairRMJudge",
    "Samples": "lit_rl.callbacks.Samples",
    "TokenSamples": "lit_rl.callbacks.TokenSamples",
    "HubSamples": "lit_rl.callbacks.HubSamples",
    "Rollouts": "lit_rl.callbacks.Rollouts",
    "Profile": "lit_rl.callbacks.Profile",
    "Progress": "lit_rl.callbacks.Progress",
    "GracefulStop": "lit_rl.callbacks.GracefulStop",
    "Histograms": "lit_rl.callbacks.Histograms",
    "Export": "lit_rl.callbacks.Export",
    "BEMAWeights": "lit_rl.callbacks.BEMAWeights",
    "MergedWeights": "lit_rl.callbacks.MergedWeights",
    "EMAWeights": "lit_rl.callbacks.EMAWeights",
    "PreferenceSets": "lit_rl.callbacks.PreferenceSets",
    "EntropyCollapse": "lit_rl.callbacks.EntropyCollapse",
    "LengthDrift": "lit_rl.callbacks.LengthDrift",
    "RepetitionDrift": "lit_rl.callbacks.RepetitionDrift",
    "DeadGroups": "lit_rl.callbacks.DeadGroups",
    "KLBlowUp": "lit_rl.callbacks.KLBlowUp",
    "ClippedShare": "lit_rl.callbacks.ClippedShare",
    "HeldOutFlat": "lit_rl.callbacks.HeldOutFlat",
    "TimedCheckpoint": "lit_rl.callbacks.TimedCheckpoint",
    "Watchdog": "lit_rl.callbacks.Watchdog",
    "ModelCheckpoint": "lightning.pytorch.callbacks.ModelCheckpoint",
    "EarlyStopping": "lightning.pytorch.callbacks.EarlyStopping",
    "Trainer": "lightning.Trainer",
}
"""Classes and functions that build something, by the name of their schema."""

OPS = (
    "lit_rl.ops.policy_losses",
    "lit_rl.ops.advantages",
    "lit_rl.ops.returns",
    "lit_rl.ops.kl",
    "lit_rl.ops.reductions",
    "lit_rl.ops.engine_mismatch",
    "lit_rl.ops.selection",
    "lit_rl.ops.distillation",
    "lit_rl.ops.imitation",
    "lit_rl.ops.preference_losses",
)
"""Modules with functions of tensors whose keywords are the setting: built as `functools.partial`."""

WIDER: dict[tuple[str, str], Any] = {("lightning.Trainer", "accumulate_grad_batches"): Any}
"""Types of keys that allow more than the parameter they end in: `auto`, see `lit_rl.cli.trainer_settings`."""

PYTHON_ONLY = frozenset({"tokenizer", "config"})
"""Parameters for objects that no config can name."""

_PLAIN = (int, float, bool, str)


@functools.cache
def register_schemas() -> None:
    """Put every schema into Hydra's store, in the group `schemas`, once a process. Imports the classes."""
    store = ConfigStore.instance()
    for name, node in all_schemas().items():
        store.store(group="schemas", name=name, node=node)


def all_schemas() -> dict[str, type]:
    """Return each schema by its name. Imports the classes and the functions."""
    found = {name: schema(name, path, _load(path)) for name, path in TARGETS.items()}
    return found | {
        name: schema(name, path, _load(path), keywords_only=True) for name, path in public_functions().items()
    }


def public_functions() -> dict[str, str]:
    """Return every public function of these modules, by its name."""
    found = {}
    for module in OPS:
        loaded = importlib.import_module(module)
        for name, value in vars(loaded).items():
            home = getattr(value, "__module__", "")
            public = name in getattr(loaded, "__all__", [name]) and not name.startswith("_")
            if inspect.isfunction(value) and public and f"{home}.".startswith(f"{module}."):
                found[name] = f"{module}.{name}"
    return found


def schema(name: str, path: str, target: Any, *, keywords_only: bool = False) -> type:
    """Return a dataclass with a field for each parameter of `target`, typed where OmegaConf knows the type, and
    `_target_`.

    With `keywords_only` the positional parameters (tensors) are left out and `_partial_` is set.
    """
    fields: list[Any] = [("_target_", str, dataclasses.field(default=path))]
    if keywords_only:
        fields.append(("_partial_", bool, dataclasses.field(default=True)))
    for parameter, hint in parameters(target):
        if keywords_only and parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        fields.append((parameter.name, *_field(parameter, WIDER.get((path, parameter.name), hint))))
    return dataclasses.make_dataclass(name, fields)


def parameters(target: Any) -> list[tuple[inspect.Parameter, Any]]:
    """Return the parameters of a function or a constructor, with their types.

    Where a constructor hands `**keywords` on to its parent, the parent's are its own too, less those it names itself.
    Of a parent of ours only the keyword-only ones: what can be given by position, our constructors give.
    """
    found: dict[str, tuple[inspect.Parameter, Any]] = {}
    for number, function in enumerate(constructors_of(target) if isinstance(target, type) else [target]):
        hints, ours = _hints(function), getattr(function, "__module__", "").startswith("lit_rl.")
        for parameter in inspect.signature(function).parameters.values():
            by_position = number and ours and parameter.kind is not parameter.KEYWORD_ONLY
            if parameter.name in ("self", *PYTHON_ONLY) or by_position:
                continue
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                found.setdefault(parameter.name, (parameter, hints.get(parameter.name, Any)))
    return list(found.values())


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:  # a name that only a type checker imports
        return {}


def _field(parameter: inspect.Parameter, hint: Any) -> tuple[Any, Any]:
    default = parameter.default
    if (optional := _optional_dataclass(hint)) is not None:
        return optional, dataclasses.field(default_factory=optional)
    if _optional_mapping(hint) or type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":  # that of a dataclass's dict
        return dict[Any, Any], dataclasses.field(default_factory=open_dict)  # a key may be a number
    if default is inspect.Parameter.empty or callable(default) or dataclasses.is_dataclass(default):
        return Any, dataclasses.field(default=MISSING)  # an object: the YAML fills its slot
    if isinstance(default, (tuple, list, dict)):
        return Any, dataclasses.field(default_factory=lambda: default if isinstance(default, dict) else list(default))
    return _type(hint), dataclasses.field(default=default)


def _optional_dataclass(hint: Any) -> type | None:
    """Return the fields of `Lora` for `Lora | None`, every one null. None of them set means None; see `build.prune`."""
    options = [option for option in typing.get_args(hint) if dataclasses.is_dataclass(option)]
    if len(options) != 1 or type(None) not in typing.get_args(hint):
        return None
    only: Any = options[0]
    hints, path = _hints(only.__init__), f"{only.__module__}.{only.__qualname__}"
    fields: list[Any] = [("_target_", str, dataclasses.field(default=path))]
    for f in dataclasses.fields(only):
        kind = hints[f.name] if hints[f.name] in _PLAIN else Any
        fields.append((f.name, Any if kind is Any else typing.Optional[kind], None))  # noqa: UP045
    return dataclasses.make_dataclass(f"Optional{only.__name__}", fields)


def _optional_mapping(hint: Any) -> bool:
    """Return a mapping for `dict[...] | None`, where an empty one means None."""
    options = typing.get_args(hint)
    return len(options) == 2 and type(None) in options and any(typing.get_origin(o) is dict for o in options)


def _type(hint: Any) -> Any:
    """Return the hint where OmegaConf can check it, else Any."""
    if hint in _PLAIN:
        return hint
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    given = [option for option in options if option is not type(None)]
    if len(given) == 1 and len(options) == 2:
        (only,) = given
        if only in _PLAIN:
            return typing.Optional[only]  # noqa: UP045 (built from a value)
        if typing.get_origin(only) is typing.Literal:
            return typing.Optional[str]  # noqa: UP045
    if typing.get_origin(hint) is typing.Literal:
        return str
    return Any


# ---------------------------------------------------------------------- schemas from the file


_TYPES: dict[str, Any] = {"any": Any, "int": int, "float": float, "bool": bool, "str": str}

_OPTIONAL = {f"{name}?": typing.Optional[kind] for name, kind in _TYPES.items() if kind is not Any}  # noqa: UP045

FOREIGN = "lightning"
"""The other package with constructors among them."""


@functools.cache
def register_stored() -> bool:
    """Put every schema into Hydra's store, in the group `schemas`, once a process.

    Returns:
        Whether they are those of the installed packages; if not, none was put there.
    """
    if schema_keys()["_versions_"] != schema_versions():
        return False
    store = ConfigStore.instance()
    for name, fields in schema_keys().items():
        if not name.startswith("_"):
            store.store(group="schemas", name=name, node=restore_schema(name, fields))
    return True


def schema_versions() -> dict[str, str]:
    """Return the first two numbers of the versions of these packages."""
    return {FOREIGN: lightning_version()}


def stored_fields(node: type) -> dict[str, Any]:
    """Return the file's form of a dataclass: a field's default where it names the target, else its type and default."""
    return {field.name: _stored_field(field) for field in dataclasses.fields(node)}


def _stored_field(field: dataclasses.Field) -> Any:
    if field.name in ("_target_", "_partial_"):
        return field.default
    kind: Any = field.type
    if dataclasses.is_dataclass(kind):
        return [kind.__name__, stored_fields(kind)]  # pyright: ignore
    if field.default is not dataclasses.MISSING:
        return [_name(kind), field.default]
    if kind == dict[Any, Any]:
        return ["dict"]
    return [_name(kind), field.default_factory()]  # pyright: ignore


def _name(kind: Any) -> str:
    return next(name for name, each in {**_TYPES, **_OPTIONAL}.items() if each == kind)


def restore_schema(name: str, fields: Mapping[str, Any]) -> type:
    """Return the dataclass of that form."""
    return dataclasses.make_dataclass(name, [(key, *_restored_field(key, said)) for key, said in fields.items()])


def _restored_field(key: str, said: Any) -> tuple[Any, Any]:
    if key in ("_target_", "_partial_"):
        return type(said), dataclasses.field(default=said)
    kind, *default = said
    if kind == "dict":
        return dict[Any, Any], dataclasses.field(default_factory=open_dict)
    if (known := {**_TYPES, **_OPTIONAL}.get(kind)) is None:
        made = restore_schema(kind, default[0])
        return made, dataclasses.field(default_factory=made)
    if isinstance(default[0], (list, dict)):
        return known, dataclasses.field(default_factory=functools.partial(_copy, default[0]))
    return known, dataclasses.field(default=default[0])


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def open_dict() -> Any:
    """Return a dict whose keys are the user's: `key={name: value}` and `key.name=value` both work."""
    return OmegaConf.create({}, flags={"struct": False})
