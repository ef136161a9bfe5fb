"""A policy that is described, loaded, sharded, and asked for log-probs."""
