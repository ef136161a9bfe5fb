"""What Lightning calls: loading and optimizer, validation by generating, the rollout clock, the steps of a data set."""
