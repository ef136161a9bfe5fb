"""`lit-rl completion bash`: what bash loads so that TAB knows commands, groups and their choices.

Read from file names alone: a TAB must not wait until torch has loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_rl.cli.listing import conf_folder, groups
from lit_rl.errors import ConfigError

BASH = """\
_lit_rl() {
    local line="${COMP_LINE:0:$COMP_POINT}"
    local word="${line##* }"
    local before="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("${found#"$before"}")
    done < <(lit-rl completion words "$word" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 0 ]] && compopt -o default
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -F _lit_rl lit-rl
"""


def run(words: Sequence[str], commands: Sequence[str]) -> int:
    """Print the script, or, for that script, the words that begin like the one that is typed.

    Args:
        words: `bash`; or `words` and the beginning.
        commands: What may stand first.

    Raises:
        ConfigError: a shell that is not known.
    """
    if words and words[0] == "words":
        begun = words[1] if len(words) > 1 else ""
        sys.stdout.write("".join(f"{word}\n" for word in candidates(begun, commands)))
        return 0
    if list(words) != ["bash"]:
        raise ConfigError(
            f"lit-rl completion knows bash, and got {' '.join(words) or 'no shell'}. Type: "
            'eval "$(lit-rl completion bash)"'
        )
    sys.stdout.write(BASH)
    return 0


def candidates(begun: str, commands: Sequence[str]) -> list[str]:
    """What the word may become: commands and groups; behind `group=` its choices."""
    found = groups([conf_folder()])
    group, equals, _ = begun.partition("=")
    if equals:
        words = [f"{group}={choice}" for choice in found.get(group, ())]
    else:
        words = [*commands, *(f"{name}=" for name in found)]
    return sorted(word for word in words if word.startswith(begun))
