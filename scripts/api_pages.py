"""Write docs/modules.md and the tables of docs/api/*.md from docstrings.

    python scripts/api_pages.py            # --check names the pages that are not as they would be written

docs/modules.md has the first sentence of every module. A page of docs/api has a table for each of its `:::` lines:
every public class and function of the module with the first sentence of its docstring. The site shows the whole
docstrings; in the repository the table is what one reads. Where a `:::` line has `members` below it, the table and the
site have these names of the module and no others.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "api"
MODULES = ROOT / "docs" / "modules.md"
HEAD = """# Every module in a line

Written from the docstrings, not by hand. How the packages stand on each other, and how a step walks through them, is in
[architecture.md](architecture.md).
"""
BEGIN, END = "<!-- names: `python scripts/api_pages.py`; not by hand -->", "<!-- end -->"
MODULE = re.compile(r"^::: (\S+)$(?:\n    options:\n      members: \[(.+)\]$)?", re.M)
"""A module, and those of its names that a user asks for, where it has others."""


def public(module: str) -> Iterator[tuple[str, str]]:
    """Names and first sentences of the classes and functions that are written in a module."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name, first_sentence(ast.get_docstring(node) or "")


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def offered(module: str, members: str) -> list[tuple[str, str]]:
    """Of a module's names those that the page asks for.

    Args:
        members: With a comma and a space between them; empty for all.
    """
    found = dict(public(module))
    names = members.split(", ") if members else list(found)
    if lacking := [name for name in names if name not in found]:
        sys.exit(f"{module} has no public {', '.join(lacking)}: correct `members` below its `:::` line.")
    return [(name, found[name]) for name in names]


def table(modules: list[tuple[str, str]]) -> str:
    rows = [
        f"| [`{name}`](../../{module.replace('.', '/')}.py) | {sentence} |"
        for module, members in modules
        for name, sentence in offered(module, members)
    ]
    return "\n".join([BEGIN, "", "| name | |", "|---|---|", *rows, "", END])


def written(text: str) -> str:
    """The page, with its table made anew: before the first module that it names."""
    modules = MODULE.findall(text)
    bare = re.sub(rf"{re.escape(BEGIN)}.*?{re.escape(END)}\n\n", "", text, flags=re.S)
    at = bare.index(f"::: {modules[0][0]}\n")
    return f"{bare[:at]}{table(modules)}\n\n{bare[at:]}"


def modules_page() -> str:
    """Return the page of every module, a table for each folder."""
    package = ROOT / "lit_rl"
    folders = [package, *(path for path in sorted(package.rglob("*")) if path.is_dir() and path.name != "conf")]
    tables = []
    for folder in folders:
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        docs = [(path.stem, ast.get_docstring(ast.parse(path.read_text())) or "") for path in files]
        rows = [f"| `{name}` | {first_sentence(doc).removesuffix('.')} |" for name, doc in docs]
        name = folder.relative_to(package).as_posix()
        tables += ["\n".join([f"\n| `{name}/` | |", "|---|---|", *rows])] if rows else []
    return "\n".join([HEAD.rstrip(), *tables]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, []
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text()
        if MODULE.search(text) and (new := written(text)) != text:
            stale.append(path.name)
            if not check:
                path.write_text(new)
    if (page := modules_page()) != MODULES.read_text():
        stale.append(MODULES.name)
        if not check:
            MODULES.write_text(page)
    print(f"{'not as they would be written' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
