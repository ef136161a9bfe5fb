"""Checks before any weight is loaded: refused settings, memory plans, micro-batches. Functions of values, not of
modules."""

from __future__ import annotations
