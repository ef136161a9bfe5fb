"""Models that score instead of writing: critics, reward models, process reward models."""
