"""Text in, numbers out: reward functions, their weighted sum, and functions named by path in a config."""

from lit_rl.rewards.base import Rewards, Scores, TrainerState
from lit_rl.rewards.code import CodeExecution
from lit_rl.rewards.format import reasoning_format
from lit_rl.rewards.judge_api import LLMJudge
from lit_rl.rewards.judge_functions import FunctionJudge, PairwiseJudge
from lit_rl.rewards.judges import Judge, RewardJudge
from lit_rl.rewards.lengths import CosineScaledLength, SoftOverlong
from lit_rl.rewards.math import boxed, final_answer, math_answer
from lit_rl.rewards.math_verify import MathAccuracy, math_accuracy
from lit_rl.rewards.models import RewardModel
from lit_rl.rewards.paths import FunctionFromPath, from_paths, load_function
from lit_rl.rewards.process import ProcessRewardModel
from lit_rl.rewards.recipes import RewardRecipes
from lit_rl.rewards.remote import RemoteReward
from lit_rl.rewards.repetition import RepetitionPenalty
from lit_rl.rewards.text import Length, RegexFormat, contains, exact_match, text_of

__all__ = [
    "CodeExecution",
    "CosineScaledLength",
    "FunctionFromPath",
    "FunctionJudge",
    "Judge",
    "LLMJudge",
    "Length",
    "MathAccuracy",
    "PairwiseJudge",
    "ProcessRewardModel",
    "RegexFormat",
    "RemoteReward",
    "RepetitionPenalty",
    "RewardJudge",
    "RewardModel",
    "RewardRecipes",
    "Rewards",
    "Scores",
    "SoftOverlong",
    "TrainerState",
    "boxed",
    "contains",
    "exact_match",
    "final_answer",
    "from_paths",
    "load_function",
    "math_accuracy",
    "math_answer",
    "reasoning_format",
    "text_of",
]
