"""Lightning modules without an objective: loading, optimizer, validation, rollouts, steps over a data set."""
