"""Things that all packages share; each module is imported by its name."""
