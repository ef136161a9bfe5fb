"""One reward function: what it may take and must return, and how it is found by its path."""
