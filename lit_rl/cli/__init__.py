"""The roof: the command line. The only package that sees a config; below it, constructors take typed keywords.

`train.py` and `lit-rl` both end here. Heavy imports wait until they are needed, so `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_rl.cli import process

LIGHTNING = ("fit", "validate", "test", "predict")
HYDRA = {
    "train": "fit",
    "eval": "eval",
    "plan": "plan",
    "reward-test": "reward_test",
    "data-check": "data_check",
    "env-check": "env_check",
    "best-of-n": "best_of_n",
    "chat": "chat",
    "serve": "serve",
    "doctor": "doctor",
    "replay": "replay",
    "transcripts": "transcripts",
}
"""Our commands, and the task that each stands for."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line and leave with its exit code: 0, or the one of the error (see `lit_rl.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is not None:
        sys.argv = [sys.argv[0], *arguments]
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    process.prepare()
    command = arguments[0] if arguments and arguments[0] in (*LIGHTNING, *HYDRA) else None
    if command in LIGHTNING:
        from lit_rl.cli import lightning_app
        from lit_rl.cli.messages import reported

        return reported(lambda: lightning_app.main(arguments))
    rest = arguments[1:] if command else arguments
    if {"-h", "--help"} & set(rest):
        from lit_rl.cli.help import page

        sys.stdout.write(page())
        return 0
    from lit_rl.cli.messages import reported, usage

    if rest and not rest[0].startswith("-") and "=" not in rest[0] and not rest[0].startswith("~"):
        return reported(lambda: usage(rest[0], (*HYDRA, *LIGHTNING)))
    if command and HYDRA[command] != "fit":
        # argparse takes overrides in one row only, before the options or after them
        first = next((i for i, word in enumerate(rest) if "=" in word and not word.startswith("-")), len(rest))
        rest.insert(first, f"task={HYDRA[command]}")
        if command == "serve":
            from lit_rl.cli.serving import generator_of

            rest[first + 1 : first + 1] = generator_of(rest)
    from lit_rl.cli import hydra_app

    sys.argv = [sys.argv[0], *rest]
    return reported(hydra_app.main)
