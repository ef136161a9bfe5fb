"""Models that score: classifiers that are loaded here, and rewards from a server."""
