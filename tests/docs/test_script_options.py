"""An option that a page, the Makefile or a script says to give to a file of `scripts/` is one that this file has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [ROOT / "Makefile", *sorted((ROOT / "scripts").rglob("*.py"))]
COMMAND = re.compile(r"(scripts/[\w/]+\.py)([^`#\n]*)")
"""A script, and what is given to it: until its line or its code ends, or a comment begins."""
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def options_of(script: str) -> set[str]:
    """What it tells argparse, or where it tells nothing, what its neighbours do that it imports. Read, not run."""
    tree = ast.parse((ROOT / script).read_text())
    return own_options(tree) or {each for file in neighbours(tree) for each in own_options(ast.parse(file.read_text()))}


def own_options(tree: ast.Module) -> set[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    words = (word for call in calls if getattr(call.func, "attr", "") == "add_argument" for word in call.args)
    return {word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)}


def neighbours(tree: ast.Module) -> Iterator[Path]:
    """Files of `scripts/` that are imported."""
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
        files = ((ROOT / "scripts" / name.replace(".", "/")).with_suffix(".py") for name in names)
        yield from (file for file in files if file.is_file())


def in_commands(text: str) -> Iterator[tuple[frozenset[str], str]]:
    """Options behind a script, with that script."""
    for script, words in COMMAND.findall(text):
        if (ROOT / script).is_file():
            yield from ((frozenset([script]), option) for option in OPTION.findall(words))


def in_prose(page: str) -> Iterator[tuple[frozenset[str], str]]:
    """Options at the beginning of a piece of code, in sections that name scripts: with these, of which one is meant."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", page, flags=re.M | re.S)
    for section in re.split(r"^#+ ", text, flags=re.M):
        scripts = frozenset(script for script, _ in COMMAND.findall(section) if (ROOT / script).is_file())
        for code in re.findall(r"`(--[^`]+)`", section) if scripts else ():
            yield from ((scripts, option) for option in OPTION.findall(code))


def test_every_option_that_is_named_is_there() -> None:
    named = [(path, *each) for path in (*PAGES, *OTHERS) for each in in_commands(path.read_text())]
    named += [(path, *each) for path in PAGES for each in in_prose(path.read_text())]
    asked = {scripts for _, scripts, _ in named}
    there = {scripts: set().union(*map(options_of, scripts)) for scripts in asked}
    assert not [each for each in named if each[2] not in there[each[1]]]
    assert {"--engine", "--ranks", "--server"} <= {option for path, _, option in named if path.stem == "reliability"}


def test_options_are_read_of_the_script_or_of_what_it_imports() -> None:
    assert "--ranks" in options_of("scripts/kill_loop.py") and "--out" not in options_of("scripts/kill_loop.py")
    assert "--seeds" in options_of("scripts/learning_curves.py") and "--only" in options_of("scripts/gpu/prove.py")
    said = "## A\n`scripts/kill_loop.py` and `--rownds 3`\n## B\n`--elsewhere`\n"
    assert list(in_prose(said)) == [(frozenset(["scripts/kill_loop.py"]), "--rownds")]
    assert list(in_commands("python scripts/kill_loop.py --rownds 3  # --no\n")) == list(in_prose(said))
