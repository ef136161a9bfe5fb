"""Evaluation of a policy: validation by generating, win rates, statistics, tables of samples."""
