"""All that a worker process of a reward function loads: standard library only, no PyTorch."""
