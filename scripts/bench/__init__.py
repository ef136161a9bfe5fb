"""The benchmark of whole training steps beside TRL's on a CPU: `make bench`, `make bench-full`. On a GPU: `gpu`.

One idea a file:

    workload     what is computed: model, prompts, lengths, rewards; the files that every contender reads
    suites       who computes it (ours, ours with each technique off, TRL as it comes and tuned), how often, by command
    protocol     how the benchmark talks to a contender, and what a contender says: seconds by phase, its first step
    ours, peer   the two kinds of contender: `train.py`'s door with forced lengths, and TRL's own trainers
    bounds       the gate (same loss, log-probs and gradient, or no figure), and what no step is faster than
    run          the command: rounds, A B C and then C B A
    page         medians, ratios and shares of the limit, and of these docs/benchmarks.md and its pictures

`peer`, and what it imports, runs in an environment without lit_rl.
"""
