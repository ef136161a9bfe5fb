"""Write lit_rl/cli/other_names.yaml, what a name of TRL or verl is here, from the tables of docs/from-trl.md and
docs/from-verl.md.

    python scripts/other_names.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lit_rl.cli.aliases import OTHER_NAMES

DOCS = Path(__file__).resolve().parents[1] / "docs"
_HEAD = "# What names of other tools are here. `python scripts/other_names.py` writes this file: do not edit by hand.\n"
_ACTOR = ("actor", "rollout", "ref", "model")
"""What the page on verl writes without the `actor_rollout_ref` in which it stands."""


def tables(page: str) -> Iterator[tuple[str, list[str]]]:
    """`(heading, cells)` of every line of every table."""
    heading = ""
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith(("|---", "| TRL |", "| verl |")):
            yield heading, [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def typed(here: str) -> str:
    """What to type."""
    words = re.findall(r"`([^`]+)`", here)
    return " ".join(word if "=" in word else f"{word}=..." for word in words) or here


def note(differs: str) -> str:
    """The first sentence of what differs, in brackets; without what only the page can show."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", differs).replace("`", "").replace("\\|", "|")
    text = re.sub(r"(^|, )see (the .*|above)", "", re.split(r"(?<=\w)\. ", text)[0].rstrip("."))
    return f" ({text})" if text else ""


def names_of_trl() -> dict[str, str]:
    """Of every field of its configs; where it is several things here, of which config it is what."""
    found: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for heading, cells in tables("from-trl.md"):
        if not heading.startswith("Fields "):
            continue
        configs = re.findall(r"\w+Config", heading) or ["GRPOConfig", "RLOOConfig"]
        for name in re.findall(r"`([^`]+)`", cells[0]):
            if heading.startswith("Fields inherited"):
                configs = ["the others"]
            answers = found.setdefault(name, {})
            said, of = answers.get(typed(cells[2]), ("", []))
            answers[typed(cells[2])] = (said or note(cells[4]), [*of, *configs])
    return {name: _joined(answers) for name, answers in found.items()}


def _joined(answers: dict[str, tuple[str, list[str]]]) -> str:
    if len(answers) == 1:
        return "".join(f"{words}{said}" for words, (said, _) in answers.items())
    return "; ".join(f"of {', '.join(configs)}: {words}{said}" for words, (said, configs) in answers.items())


def keys_of_verl() -> dict[str, str]:
    """Of every key, whole; of one whose values are told, each value."""
    found: dict[str, dict[str, str]] = {}
    for _, cells in tables("from-verl.md"):
        before = ""
        for word in re.findall(r"`([^`]+)`", cells[0]):
            key, _, value = word.partition("=")
            key = before + key if key.startswith(".") else key
            before = key.rpartition(".")[0]
            whole = f"actor_rollout_ref.{key}" if key.partition(".")[0] in _ACTOR else key
            found.setdefault(whole, {}).setdefault(value, typed(cells[1]) + note(cells[2]))
    return {key: "; ".join(f"{v}: {text}" if v else text for v, text in said.items()) for key, said in found.items()}


def content() -> str:
    """The file."""
    lines = [_HEAD]
    for library, names in (("TRL", names_of_trl()), ("verl", keys_of_verl())):
        lines.append(f"{library}:\n")
        # a JSON string is a YAML string
        lines += [f"  {name}: {json.dumps(text, ensure_ascii=False)}\n" for name, text in sorted(names.items())]
    return "".join(lines)


if __name__ == "__main__":
    OTHER_NAMES.write_text(content(), encoding="utf-8")
