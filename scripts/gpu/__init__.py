"""The proof on one real GPU, in under nine minutes: `bash scripts/gpu/prove.sh OUT`, or `make bench-gpu`.

One idea a file:

    wheels.sh    gathers what a bare machine lacks, where there is an index
    prove.sh     installs that without an index and starts `prove`
    prove        runs each stage in a process and a time box of its own, and prints the table
    result       rows of a stage: a figure, a check with its bound, or the reason why something was not run
    table        the table, and the section of docs/benchmarks.md, made of the stages' files
    training     one training in this process, ours or TRL's, step by step with the clock running

and a file a stage: `machine` (what the card is and can do), `sound` (does training on it hold together), `kernels` (is
each way to compute equal to the CPU's float32), `main_command` and `trl` (seconds of one step, ours and TRL's),
`figures` (those that others publish), `step_trace` (where the time of a step goes).

Every bound stands in the stage's file, and stood there before a card was seen. PROOF_SMALL=1 shrinks every shape: the
rehearsal on a CPU, or on the pretended GPU. Figures of it mean nothing.
"""
