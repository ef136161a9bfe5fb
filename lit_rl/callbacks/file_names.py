"""Names of files in a run's folder, for writers, and for readers without torch."""

ALARMS = "alarms.jsonl"
"""The file with a line for each ring of an alarm."""

PROFILE = "profile"
"""The folder of `callbacks.Profile`, in a run's folder."""
