"""Optimizers, schedules and strategies as values; steps whose gradient is not finite."""
