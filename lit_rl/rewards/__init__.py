"""Text in, numbers out: reward functions, their weighted sum, and functions named by path in a config."""

from lit_rl.rewards.builtin.code import CodeExecution
from lit_rl.rewards.builtin.environment import environment, environment_turns
from lit_rl.rewards.builtin.format import reasoning_format
from lit_rl.rewards.builtin.lengths import CosineScaledLength, SoftOverlong
from lit_rl.rewards.builtin.math import boxed, final_answer, math_answer
from lit_rl.rewards.builtin.math_verify import MathAccuracy, math_accuracy
from lit_rl.rewards.builtin.reasoning import ReasoningGymExact, ReasoningGymScore
from lit_rl.rewards.builtin.repetition import RepetitionPenalty
from lit_rl.rewards.builtin.text import Length, RegexFormat, contains, exact_match
from lit_rl.rewards.builtin.verifiers import VerifiersScore
from lit_rl.rewards.completion import text_of
from lit_rl.rewards.judges.base import Judge, RewardJudge
from lit_rl.rewards.judges.functions import FunctionJudge, PairwiseJudge
from lit_rl.rewards.judges.language_model import LLMJudge
from lit_rl.rewards.judges.pair_ranker import PairRMJudge
from lit_rl.rewards.scorers.process_reward_model import ProcessRewardModel
from lit_rl.rewards.scorers.remote import RemoteReward
from lit_rl.rewards.scorers.reward_model import RewardModel
from lit_rl.rewards.sums.from_paths import FunctionFromPath, from_paths, load_function
from lit_rl.rewards.sums.joint import JointRewards
from lit_rl.rewards.sums.recipes import RewardRecipes
from lit_rl.rewards.sums.weighted import Rewards, Scores, TrainerState

__all__ = [
    "CodeExecution",
    "CosineScaledLength",
    "FunctionFromPath",
    "FunctionJudge",
    "JointRewards",
    "Judge",
    "LLMJudge",
    "Length",
    "MathAccuracy",
    "PairRMJudge",
    "PairwiseJudge",
    "ProcessRewardModel",
    "ReasoningGymExact",
    "ReasoningGymScore",
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
    "VerifiersScore",
    "boxed",
    "contains",
    "environment",
    "environment_turns",
    "exact_match",
    "final_answer",
    "from_paths",
    "load_function",
    "math_accuracy",
    "math_answer",
    "reasoning_format",
    "text_of",
]
