"""What is refused before any weight is loaded: functions of values, never of a module."""
