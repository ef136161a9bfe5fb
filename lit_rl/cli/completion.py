"""`lit-rl completion SHELL`: what bash, zsh or fish loads so that TAB knows commands, groups and their choices.

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

ZSH = """\
_lit_rl() {
    local -a found begun whole
    found=(${(f)"$(lit-rl completion words "$PREFIX" 2>/dev/null)"})
    (( $#found )) || { _files; return }
    begun=(${(M)found:#*=}) whole=(${found:#*=})
    compadd -S '' -a begun
    compadd -a whole
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _lit_rl lit-rl
"""
FISH = """\
complete -c lit-rl -a '(lit-rl completion words (commandline -ct) 2>/dev/null)'
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def run(words: Sequence[str], commands: Sequence[str]) -> int:
    """Print the script, or, for that script, the completions of the typed word.

    Args:
        words: The shell; or `words` and the beginning.
        commands: Words that may stand first.

    Raises:
        ConfigError: a shell that is not known.
    """
    if words and words[0] == "words":
        begun = words[1] if len(words) > 1 else ""
        sys.stdout.write("".join(f"{word}\n" for word in candidates(begun, commands)))
        return 0
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(
            f"lit-rl completion knows {', '.join(SHELLS)}, and got {' '.join(words) or 'no shell'}. Type: "
            'eval "$(lit-rl completion bash)", the same with zsh, or: lit-rl completion fish | source'
        )
    sys.stdout.write(SHELLS[words[0]])
    return 0


def candidates(begun: str, commands: Sequence[str]) -> list[str]:
    """Return completions of the word: commands and groups; behind `group=` its choices."""
    found = groups([conf_folder()])
    group, equals, _ = begun.partition("=")
    if equals:
        words = [f"{group}={choice}" for choice in found.get(group, ())]
    else:
        words = [*commands, *(f"{name}=" for name in found)]
    return sorted(word for word in words if word.startswith(begun))
