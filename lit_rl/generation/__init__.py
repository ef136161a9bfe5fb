"""Prompts to completions: the generators, and what a generator of your own subclasses."""

from lit_rl.generation.chat_endpoint import ChatEndpoint
from lit_rl.generation.generator import Generator
from lit_rl.generation.rollout_function import RolloutFunction
from lit_rl.generation.verifiers_harness import VerifiersHarness

__all__ = ["ChatEndpoint", "Generator", "RolloutFunction", "VerifiersHarness"]
