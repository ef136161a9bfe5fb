"""Names of files in a run's folder, for who writes them and for who reads them without torch."""

ALARMS = "alarms.jsonl"
"""One line for each time that an alarm rang."""

PROFILE = "profile"
"""The folder of `callbacks.Profile` in a run's folder."""
