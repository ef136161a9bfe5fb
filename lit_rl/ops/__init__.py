"""The lowest layer: tensors in, tensors out. No I/O, no config, no Lightning, no logging.

One legend of dimensions for the whole project:

    b   completions (rows of a rollout)        n   all rows of a batch over every rank
    p   prompt tokens                          k   reward functions
    t   response tokens (scored tokens)        v   vocabulary
    s   p + t

A *metric* that a loss returns is a pair ``(numerator, denominator)`` of detached scalars, so that averages over
micro-batches, steps and ranks are sums over sums.
"""
