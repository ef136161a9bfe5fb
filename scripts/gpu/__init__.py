"""The proof on one real GPU, in under nine minutes: `bash scripts/gpu/prove.sh OUT`, or `make bench-gpu`.

One idea a file:

    wheels.sh    gathers what a bare machine lacks, where there is an index
    prove.sh     installs that without an index and starts `prove`
    prove        runs each stage in a process and a time box of its own, and prints the table of their rows (a figure,
                 a check with its bound, the reason why something was not run)
    training     one training in this process, ours or TRL's, step by step with the clock running
    checks       the stages that ask whether training on the card is sound: `sound`, `kernels`
    speed        those that say how fast it is: `machine`, `main_command`, `trl`, `figures`, `step_trace`

Every bound stands in the stage's file, and stood there before a card was seen. PROOF_SMALL=1 shrinks every shape: the
rehearsal on a CPU, or on the pretended GPU. Figures of it mean nothing.
"""
