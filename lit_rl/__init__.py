"""PyTorch Lightning modules for RL post-training of language models."""
