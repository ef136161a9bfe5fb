"""Prompts to completions: the generators, and what a generator of your own subclasses."""

from lit_rl.generation.base import Generator
from lit_rl.generation.rollout_function import RolloutFunction

__all__ = ["Generator", "RolloutFunction"]
