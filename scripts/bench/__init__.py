"""The benchmark of whole training steps beside TRL's on a CPU: `make bench`, `make bench-full`. On a GPU: `gpu`.

One idea a file:

    workload     what is computed: model, prompts, lengths, rewards; the files that every contender reads
    contenders   who computes it: ours, ours with each technique off, TRL as it comes and TRL tuned
    suites       which workloads and contenders a command runs, and how often
    protocol     how the benchmark talks to a contender, a process that trains one step when it is asked to
    phases       where the seconds of a step went
    ours, peer   the two kinds of contender: `train.py`'s door with forced lengths, and TRL's own trainers
    reward       the reward function of both
    machine      what the processor or GPU can do at most, measured first
    bounds       what a step cannot be faster than on such a machine
    gate         same loss, log-probs and gradient, or no figure
    measure      rounds: A B C, then C B A
    waiting      processes that wait for their next turn, as many as fit
    revision     the commit that is measured
    summary      medians, ratios, shares of the limit: arithmetic on the results
    page, plots  docs/benchmarks.md and its pictures, made of the results
    run          the command

`peer`, and what it imports, runs in an environment without lit_rl.
"""
