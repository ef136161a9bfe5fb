"""Hydra's options on a command line. argparse takes settings in one row only, so here they are put before the options:
the order in which both are typed says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_rl.errors import ConfigError

ELSEWHERE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
"""Options that add groups of the user's; the next word is their value."""
WITH_A_VALUE = (*ELSEWHERE, "--cfg", "-c", "--package", "-p", "--experimental-rerun")
"""Options whose value is the next word."""
_WITH_OR_WITHOUT = ("--info", "-i")
_ALONE = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", "-s"),
)
_ASKED = {"--run": "r", "-r": "r", "--multirun": "m", "-m": "m", "--cfg": "c", "-c": "c", "--info": "i", "-i": "i"}
"""Options of which Hydra takes one."""
_OF_CFG = ("job", "hydra", "all")
ALL = (*WITH_A_VALUE, *_WITH_OR_WITHOUT, *_ALONE)


def after_settings(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, settings first and options behind, each in the order in which they were
    typed.

    The word that follows an option which takes a value goes with it, also where it looks like a setting: a folder's
    name may. After `--info`, which may stand alone, a setting is one.

    Raises:
        ConfigError: an option has no value, `--cfg` has one that it does not know, or two options ask for two things.
    """
    _check_values(words)
    names = [word.partition("=")[0] for word in words]
    asked = {_ASKED[name]: name for name in names if name in _ASKED}
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked.values())} ask for different things: leave one of them out.")
    settings: list[str] = []
    options: list[str] = []
    before = ""
    for word in words:
        is_value = before in WITH_A_VALUE or (before in _WITH_OR_WITHOUT and "=" not in word)
        of_an_option = word.startswith("-") or is_value
        (options if of_an_option else settings).append(word)
        before = word if word.startswith("-") else ""
    return [*settings, *options]


def _check_values(words: Sequence[str]) -> None:
    for word, after in zip(words, [*words[1:], ""]):
        if word in ("--cfg", "-c") and after not in _OF_CFG:
            came = f", and {after!r} came" if after else ""
            raise ConfigError(
                f"{word} takes one of {', '.join(_OF_CFG)}{came}: type {word} job for the config of a run."
            )
        if word in WITH_A_VALUE and (not after or after in ALL):
            raise ConfigError(f"{word} needs a value behind it: {word} VALUE.")
