"""Text in, numbers out: reward functions, their weighted sum, and functions named by path in a config."""

from lit_rl.rewards.code_rewards import CodeExecution
from lit_rl.rewards.combinations import JointRewards, RewardRecipes
from lit_rl.rewards.contract import FunctionFromPath, load_function, text_of
from lit_rl.rewards.jobs import TrainerState
from lit_rl.rewards.judge_rewards import GroupJudge, JudgeReward
from lit_rl.rewards.judges import FunctionJudge, Judge, PairwiseJudge, RewardJudge
from lit_rl.rewards.llm_judge import LLMJudge
from lit_rl.rewards.math_rewards import MathAccuracy, boxed, final_answer, math_accuracy, math_answer
from lit_rl.rewards.model_rewards import ProcessRewardModel, RewardModel
from lit_rl.rewards.pair_ranker import PairRMJudge
from lit_rl.rewards.remote_reward import RemoteReward
from lit_rl.rewards.task_rewards import (
    ReasoningGymExact,
    ReasoningGymScore,
    VerifiersScore,
    environment,
    environment_turns,
)
from lit_rl.rewards.text_rewards import Length, RegexFormat, contains, exact_match, reasoning_format
from lit_rl.rewards.token_rewards import CosineScaledLength, RepetitionPenalty, SoftOverlong
from lit_rl.rewards.weighted_rewards import Rewards, Scores, from_paths

__all__ = [
    "CodeExecution",
    "CosineScaledLength",
    "FunctionFromPath",
    "FunctionJudge",
    "GroupJudge",
    "JointRewards",
    "Judge",
    "JudgeReward",
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
