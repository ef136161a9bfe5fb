"""Rollouts: from a batch of prompts to the micro-batches that are learned from."""
