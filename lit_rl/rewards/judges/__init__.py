"""Judges, which say which of two completions of a prompt is better."""
