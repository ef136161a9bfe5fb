"""The terms of objectives: each checks its settings, owns its state, and returns a value with its metrics."""
