"""PyTorch Lightning modules for RL post-training of language models.

The names that scripts and notebooks need are here, and are imported on first use: `import lit_rl` alone loads no
PyTorch.

    from lit_rl import GRPO, RolloutDataModule
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_rl.core.lazy_names import LazyNames

if TYPE_CHECKING:  # for type checkers and editors; `_PLACES` is the same for Python, and a test compares the two
    from lit_rl.algorithms import BCO as BCO
    from lit_rl.algorithms import CPO as CPO
    from lit_rl.algorithms import DPO as DPO
    from lit_rl.algorithms import GKD as GKD
    from lit_rl.algorithms import GRPO as GRPO
    from lit_rl.algorithms import KTO as KTO
    from lit_rl.algorithms import ORPO as ORPO
    from lit_rl.algorithms import PPO as PPO
    from lit_rl.algorithms import RLOO as RLOO
    from lit_rl.algorithms import SFT as SFT
    from lit_rl.algorithms import TPO as TPO
    from lit_rl.algorithms import XPO as XPO
    from lit_rl.algorithms import AdamW as AdamW
    from lit_rl.algorithms import Constant as Constant
    from lit_rl.algorithms import Cosine as Cosine
    from lit_rl.algorithms import Evaluation as Evaluation
    from lit_rl.algorithms import Linear as Linear
    from lit_rl.algorithms import NashMD as NashMD
    from lit_rl.algorithms import OnlineDPO as OnlineDPO
    from lit_rl.algorithms import ProcessRewardModeling as ProcessRewardModeling
    from lit_rl.algorithms import Reinforce as Reinforce
    from lit_rl.algorithms import RewardModeling as RewardModeling
    from lit_rl.algorithms.rollouts.scored import Scored as Scored
    from lit_rl.callbacks import ClippedShare as ClippedShare
    from lit_rl.callbacks import DeadGroups as DeadGroups
    from lit_rl.callbacks import EntropyCollapse as EntropyCollapse
    from lit_rl.callbacks import HeldOutFlat as HeldOutFlat
    from lit_rl.callbacks import JsonlLogger as JsonlLogger
    from lit_rl.callbacks import KLBlowUp as KLBlowUp
    from lit_rl.callbacks import LengthDrift as LengthDrift
    from lit_rl.callbacks import RepetitionDrift as RepetitionDrift
    from lit_rl.callbacks.display import html_table as html_table
    from lit_rl.core.rollout import Sampling as Sampling
    from lit_rl.data.example_module import PreferenceDataModule as PreferenceDataModule
    from lit_rl.data.example_module import StepwiseDataModule as StepwiseDataModule
    from lit_rl.data.example_module import SupervisedDataModule as SupervisedDataModule
    from lit_rl.data.prompt_module import RolloutDataModule as RolloutDataModule
    from lit_rl.data.tasks import Addition as Addition
    from lit_rl.environments import CustomEnvironment as CustomEnvironment
    from lit_rl.environments import FunctionTools as FunctionTools
    from lit_rl.generation import RolloutFunction as RolloutFunction
    from lit_rl.models import LanguageModel as LanguageModel
    from lit_rl.models import Lora as Lora
    from lit_rl.models.loaded_model import LoadedModel as LoadedModel
    from lit_rl.ops.advantages import centered as centered
    from lit_rl.ops.advantages import group_normalized as group_normalized
    from lit_rl.ops.advantages import leave_one_out as leave_one_out
    from lit_rl.ops.policy_losses import cispo_loss as cispo_loss
    from lit_rl.ops.policy_losses import clipped_policy_loss as clipped_policy_loss
    from lit_rl.ops.policy_losses import reinforce_loss as reinforce_loss
    from lit_rl.ops.reductions import StepTotals as StepTotals
    from lit_rl.ops.reductions import sequence_mean as sequence_mean
    from lit_rl.ops.reductions import token_mean as token_mean
    from lit_rl.ops.returns import gae as gae
    from lit_rl.reports.run_page import show as show
    from lit_rl.rewards import RewardModel as RewardModel
    from lit_rl.rewards import Rewards as Rewards
    from lit_rl.rewards import exact_match as exact_match
    from lit_rl.rewards import math_accuracy as math_accuracy
    from lit_rl.settings.algorithms import BCOConfig as BCOConfig
    from lit_rl.settings.algorithms import CPOConfig as CPOConfig
    from lit_rl.settings.algorithms import DPOConfig as DPOConfig
    from lit_rl.settings.algorithms import GKDConfig as GKDConfig
    from lit_rl.settings.algorithms import GRPOConfig as GRPOConfig
    from lit_rl.settings.algorithms import KTOConfig as KTOConfig
    from lit_rl.settings.algorithms import NashMDConfig as NashMDConfig
    from lit_rl.settings.algorithms import OnlineDPOConfig as OnlineDPOConfig
    from lit_rl.settings.algorithms import ORPOConfig as ORPOConfig
    from lit_rl.settings.algorithms import PPOConfig as PPOConfig
    from lit_rl.settings.algorithms import ProcessRewardModelingConfig as ProcessRewardModelingConfig
    from lit_rl.settings.algorithms import ReinforceConfig as ReinforceConfig
    from lit_rl.settings.algorithms import RewardModelingConfig as RewardModelingConfig
    from lit_rl.settings.algorithms import RLOOConfig as RLOOConfig
    from lit_rl.settings.algorithms import SFTConfig as SFTConfig
    from lit_rl.settings.algorithms import TPOConfig as TPOConfig
    from lit_rl.settings.algorithms import XPOConfig as XPOConfig

_PLACES = {
    "algorithms": (
        "AdamW BCO CPO Constant Cosine DPO Evaluation GKD GRPO KTO Linear NashMD ORPO OnlineDPO PPO "
        "ProcessRewardModeling RLOO Reinforce RewardModeling SFT TPO XPO"
    ),
    "algorithms.rollouts.scored": "Scored",
    "callbacks": (
        "ClippedShare DeadGroups EntropyCollapse HeldOutFlat JsonlLogger KLBlowUp LengthDrift RepetitionDrift"
    ),
    "callbacks.display": "html_table",
    "reports.run_page": "show",
    "data.prompt_module": "RolloutDataModule",
    "data.example_module": "PreferenceDataModule StepwiseDataModule SupervisedDataModule",
    "data.tasks": "Addition",
    "environments": "CustomEnvironment FunctionTools",
    "generation": "RolloutFunction",
    "models": "LanguageModel Lora",
    "models.loaded_model": "LoadedModel",
    "ops.advantages": "centered group_normalized leave_one_out",
    "ops.policy_losses": "cispo_loss clipped_policy_loss reinforce_loss",
    "ops.reductions": "StepTotals sequence_mean token_mean",
    "ops.returns": "gae",
    "rewards": "RewardModel Rewards exact_match math_accuracy",
    "core.rollout": "Sampling",
    "settings.algorithms": (
        "BCOConfig CPOConfig DPOConfig GKDConfig GRPOConfig KTOConfig NashMDConfig ORPOConfig OnlineDPOConfig "
        "PPOConfig ProcessRewardModelingConfig RLOOConfig ReinforceConfig RewardModelingConfig SFTConfig TPOConfig "
        "XPOConfig"
    ),
}
"""Public names, by the module under `lit_rl` that has them."""

_NAMES = LazyNames(__name__, _PLACES)

__all__ = list(_NAMES.module_of)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _NAMES.module_of:
        raise AttributeError(_unknown(name), name=name)
    return _NAMES.load(name)


def _unknown(name: str) -> str:
    if name.startswith("_"):  # Python and its tools ask for such names, and catch the error
        return f"module 'lit_rl' has no attribute {name!r}"
    from lit_rl.core.errors import did_you_mean

    return (
        f"lit_rl has no {name!r} of its own.{did_you_mean(name, _NAMES.module_of)} Its modules, which docs/modules.md "
        "lists, are imported by name: import lit_rl.rewards."
    )


def __dir__() -> list[str]:
    return _NAMES.listed()
