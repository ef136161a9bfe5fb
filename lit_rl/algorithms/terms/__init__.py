"""The terms of objectives: each checks itself, owns its state, and returns a value with its metrics."""
