"""Reward functions that need no model: of text, of mathematics, of length, of code that is run."""
