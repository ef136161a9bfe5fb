"""The code blocks of a Markdown file: files to write, commands to run, Python to execute."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"(?:^<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block; `file` is the name that a comment above it gives it."""

    language: str
    text: str
    file: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The lines of a shell block as words, comments left out."""
        if self.language != "bash":
            return []
        joined = self.text.replace("\\\n", " ")  # a line that a backslash continues
        lines = (shlex.split(line, comments=True) for line in joined.splitlines())
        return [words for words in lines if words]


def blocks(document: Path) -> list[Block]:
    return [Block(found["language"], found["text"], found["file"]) for found in BLOCK.finditer(document.read_text())]


def table_rows(document: Path, heading: str | None = None) -> list[list[str]]:
    """The cells of every table line below a heading (or of the whole file), header and rule left out."""
    text = document.read_text()
    if heading is not None:
        found = re.search(rf"^(##+) {re.escape(heading)}\n", text, flags=re.M)
        assert found is not None, f"{document.name} has no heading {heading}"
        text = re.split(rf"^#{{2,{len(found[1])}}} ", text[found.end() :], flags=re.M)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    kept = [line for i, line in enumerate(lines) if "|---" not in line and "|---" not in "".join(lines[i + 1 : i + 2])]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in kept]
