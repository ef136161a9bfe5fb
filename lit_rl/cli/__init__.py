"""The command line. The only package that sees a config; the classes below it take typed keywords.

`train.py` and `lit-rl` both end here. Heavy imports wait until they are needed, so `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_rl.cli import process
from lit_rl.core import signals
from lit_rl.core.machine import is_rank_zero

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
    "report": "report",
    "export": "export",
}
"""Our commands, and the task of each."""
LIGHT = ("compare", "list", "env", "completion")
"""Commands that compose no config."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line and leave with its exit code: 0, or the one of the error (see `lit_rl.core.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is not None:
        sys.argv = [sys.argv[0], *arguments]
    code = run(arguments)
    process.let_go_of_output()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    process.prepare()
    arguments = _with_dashes(arguments)
    commands = (*HYDRA, *LIGHT, *LIGHTNING)
    command = arguments[0] if arguments and arguments[0] in commands else None
    if command in LIGHTNING:
        from lit_rl.cli.messages import report_errors

        return report_errors(lambda: _lightning(command, arguments))
    rest = arguments[1:] if command else arguments
    if text := _help_or_version(command, rest):
        sys.stdout.write(text)
        return 0
    from lit_rl.cli.messages import refuse_late_command, report_errors, usage

    values = {i + 1 for i, word in enumerate(rest) if word.startswith("-") and "=" not in word}  # of options
    late = next((word for i, word in enumerate(rest) if word in LIGHTNING and i not in values), None)
    if late and not command:
        return report_errors(lambda: refuse_late_command(late, rest))
    if command in LIGHT:
        return report_errors(lambda: _light(command, rest, commands))
    if rest and not rest[0].startswith(("-", "~")) and "=" not in rest[0]:
        return report_errors(lambda: usage(rest, () if command else commands))
    return report_errors(lambda: _hydra(command, rest))


def _with_dashes(arguments: list[str]) -> list[str]:
    """Return `help`, `help COMMAND` and `version` as the options that they mean."""
    match arguments:
        case ["help", *rest]:
            return [*rest, "--help"]
        case ["version"]:
            return ["--version"]
    return arguments


def _lightning(command: str, arguments: list[str]) -> int:
    """Run a command of LightningCLI's."""
    if command == "fit":
        signals.requeue_before_training()
    from lit_rl.cli import lightning_words

    lightning_words.check(arguments)
    _say_what_loads(command)
    from lit_rl.cli import lightning_app

    return lightning_app.main(arguments)


def _hydra(command: str | None, rest: list[str]) -> int:
    """Run a command over a composed config."""
    if (command or "train") == "train" and not any(word.startswith("task=") and word != "task=fit" for word in rest):
        signals.requeue_before_training()
    from lit_rl.cli import typed_secrets
    from lit_rl.cli.aliases import expand_aliases, expand_export
    from lit_rl.cli.typed_words import after_settings

    typed_secrets.check_typed_secrets(rest)
    note = ""
    if command == "export":
        rest, note = expand_export(rest)
    rest, read = expand_aliases(rest)
    if note and is_rank_zero():
        sys.stderr.write(f"{note}\n")
    if read and is_rank_zero():
        sys.stderr.write(f"Read as {' '.join(read)}\n")
    _say_what_loads(command or "train", "composing the config")
    rest = after_settings(rest)
    if command and HYDRA[command] != "fit":
        of_command = [f"task={HYDRA[command]}"]
        if command == "serve":
            _say_what_loads(command)
            from lit_rl.cli.model_commands import generator_override

            of_command += generator_override(rest)
        rest = [*of_command, *rest]
    from lit_rl.cli import hydra_start

    sys.argv = [sys.argv[0], *rest]
    return hydra_start.main()


def _say_what_loads(command: str, what: str = "loading torch, lightning and transformers") -> None:
    """Print the first line, before anything that takes a second or more."""
    if "torch" not in sys.modules and is_rank_zero():
        sys.stderr.write(f"lit-rl {command}: {what} ...\n")
        sys.stderr.flush()


def _help_or_version(command: str | None, rest: Sequence[str]) -> str:
    """Return a help page, or the version, where that is asked for; `lit-rl` alone asks for help, `train.py` alone
    trains."""
    if "--version" in rest:
        from lit_rl.cli.surroundings import version

        return f"lit_rl {version()}\n"
    alone = not command and not sys.argv[0].endswith(".py")
    if not {"-h", "--help"} & set(rest) and (rest or not alone):
        return ""
    if not command and rest and rest[0].isidentifier():  # a command that there is not
        return ""
    from lit_rl.cli import help

    if command:
        return help.of(command)
    return help.overview() if alone and len(rest) < 2 else help.page()


def _light(command: str | None, rest: list[str], commands: Sequence[str]) -> int:
    """Run a command that needs file names, versions, or the files of runs."""
    if command == "compare":
        from lit_rl.cli import run_reports

        return run_reports.run_compare(rest)
    if command == "list":
        from lit_rl.cli import listing

        return listing.print_list(rest)
    if command == "completion":
        from lit_rl.cli import listing

        return listing.print_completion(rest, commands)
    from lit_rl.cli import surroundings

    return surroundings.print_environment()
