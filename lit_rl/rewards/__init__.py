"""Text in, numbers out: reward functions, their weighted sum, and functions named by path in a config."""

from lit_rl.rewards.base import Rewards, Scores, TrainerState
from lit_rl.rewards.math import boxed, final_answer, math_answer
from lit_rl.rewards.paths import FunctionFromPath, from_paths, load_function
from lit_rl.rewards.text import Length, RegexFormat, contains, exact_match, text_of

__all__ = [
    "FunctionFromPath",
    "Length",
    "RegexFormat",
    "Rewards",
    "Scores",
    "TrainerState",
    "boxed",
    "contains",
    "exact_match",
    "final_answer",
    "from_paths",
    "load_function",
    "math_answer",
    "text_of",
]
