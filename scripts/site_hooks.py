"""Hooks of mkdocs (mkdocs.yml): the site shows the Markdown of the repository as it stands.

README.md, CONTRIBUTING.md, SECURITY.md, CHANGELOG.md and the notebooks become pages, other files that a page links to
are copied below `files/`, and every link is rewritten to where its target went. So a link is written once, for the
repository, and `mkdocs build --strict` says where one leads nowhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md"} | {
    f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")
}
"""Pages that do not stand in docs/: their path in the repository, and on the site."""
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
FORMULA = re.compile(r"(\$\$?)([^$]+)\1")
ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
NAMED_BLOCK = re.compile(r"^<!-- file: (\S+) -->\n```(\w+)$", re.M)


def home(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path.removesuffix(".ipynb") + ".md" if path.endswith(".ipynb") else f"files/{path}"


def source(uri: str) -> str:
    """Return the file of the repository that a page of the site was made from."""
    elsewhere = {home(path): path for path in PAGES} | {
        home(path): path for path in (f"notebooks/{file.name}" for file in (ROOT / "notebooks").glob("*.ipynb"))
    }
    return elsewhere.get(uri, f"docs/{uri}")


def target(page: str, link: str) -> str | None:
    """Return the file of the repository that a page of the repository links to; None if there is none."""
    path = os.path.normpath(os.path.join(os.path.dirname(page), link))
    return path if (ROOT / path).is_file() else None


def linked(page: str, text: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    for link in LINK.findall(text):
        if path := target(page, link):
            yield path


def notebook(path: Path) -> str:
    """Return a notebook as Markdown: its words and its code, without outputs; formulas as MathML, which needs no
    script."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
    return "\n\n".join(
        FORMULA.sub(lambda found: convert(found[2]), text) if kind == "markdown" else f"```python\n{text}\n```"
        for kind, text in cells
    )


def texts() -> dict[str, str]:
    """Return every page by its path in the repository."""
    paths = [*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    return {
        path.relative_to(ROOT).as_posix(): notebook(path) if path.suffix == ".ipynb" else path.read_text()
        for path in sorted(paths)
    }


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not stand in docs/, and what pages link to."""
    pages = texts()
    for path, text in pages.items():
        if not path.startswith("docs/"):
            files.append(File.generated(config, home(path), content=text))
    for path in sorted({path for page, text in pages.items() for path in linked(page, text)} - pages.keys()):
        if not path.startswith("docs/"):
            files.append(File.generated(config, home(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where their targets went, and a block that is a file have its name as a title."""
    uri = page.file.src_uri
    here = source(uri)

    def moved(found: re.Match[str]) -> str:
        path = target(here, found[0])
        return os.path.relpath(home(path), os.path.dirname(uri) or ".") if path else found[0]

    return LINK.sub(moved, NAMED_BLOCK.sub(r'```\2 title="\1"', markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Let long names and commands in tables break after their separators: a cell is as wide as its longest word."""

    def broken(code: re.Match[str]) -> str:
        return re.sub(r"(?<=\S[_./:=,(\[])(?=[\w'\"])", "<wbr>", code[0])

    return re.sub(
        r"<t[dh]\b.*?</t[dh]>", lambda cell: re.sub(r"(?<=<code>)[^<]{17,}", broken, cell[0]), html, flags=re.S
    )


def on_post_build(config: Any) -> None:
    """docs/llms.txt names the pages of the repository: on the site it names those of the site."""
    index = Path(config.site_dir) / "llms.txt"

    def moved(found: re.Match[str]) -> str:
        return re.sub(r"README\.md$", "index.md", home(target("docs/llms.txt", found[0]) or found[0]))[:-2] + "html"

    index.write_text(LINK.sub(moved, index.read_text()))


class PlainRoles(Extension):
    """Docstrings name other objects with Sphinx's roles: the site shows the name alone."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change each module, class and function that griffe has read."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
