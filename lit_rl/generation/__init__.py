"""Prompts to completions: the generators, and what a generator of your own subclasses."""

from lit_rl.generation.base import Generator

__all__ = ["Generator"]
