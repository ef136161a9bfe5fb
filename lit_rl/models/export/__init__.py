"""Weights that leave the process: a Hugging Face folder with its proof, or tensors for an engine."""
