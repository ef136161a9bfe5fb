"""Checks before any weight is loaded: functions of values, not of a module."""
