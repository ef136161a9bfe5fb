"""The documentation as a site (mkdocs.yml): every page is in it, links lead somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

PUBLIC = ("algorithms", "rewards", "models", "generation", "environments", "callbacks")
"""Packages whose `__init__` names what they offer."""


class _NoTags(yaml.SafeLoader):
    """mkdocs.yml may name Python objects of its extensions."""


_NoTags.add_multi_constructor("", lambda loader, suffix, node: None)


def pages_of(nav: object) -> Iterator[str]:
    match nav:
        case str():
            yield nav
        case list() | dict():
            for entry in nav.values() if isinstance(nav, dict) else nav:
                yield from pages_of(entry)


def documents(root: Path) -> list[Path]:
    """What the site is made of."""
    top = [root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    return [*top, *sorted((root / "docs").rglob("*.md")), *sorted((root / "notebooks").glob("*.ipynb"))]


def on_the_site(root: Path, document: Path) -> str:
    """The name that the navigation has for it."""
    path = document.relative_to(root)
    if path.parts[0] == "docs":
        return path.relative_to("docs").as_posix()
    if path.suffix == ".ipynb":
        return path.with_suffix(".md").as_posix()
    return {"readme.md": "index.md"}.get(path.name.lower(), path.name.lower())


def test_the_navigation_has_every_page_once(root: Path) -> None:
    named = list(pages_of(yaml.load((root / "mkdocs.yml").read_text(), _NoTags)["nav"]))
    assert sorted(named) == sorted(on_the_site(root, document) for document in documents(root))


class _Fetched(HTMLParser):
    """Addresses that a browser fetches by itself, and the names of anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.add(found.get("id", ""))
        if tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(found["href"])
        self.addresses += [found[name] for name in ("src", "srcset", "poster", "data") if name in found]


def read(page: Path) -> _Fetched:
    parser = _Fetched()
    parser.feed(page.read_text())
    return parser


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make site` builds it; a warning, such as a link that leads nowhere, is an error."""
    program = root / ".venv-site" / "bin" / "mkdocs"
    if not program.exists():
        pytest.skip("no .venv-site: make site")
    folder = tmp_path_factory.mktemp("site")
    told = subprocess.run(
        [program, "build", "--strict", "-d", folder],
        cwd=root, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert told.returncode == 0 and "WARNING" not in told.stderr, told.stdout + told.stderr
    return folder


@pytest.mark.all
@pytest.mark.xdist_group("site")
def test_no_page_fetches_anything_from_elsewhere(root: Path, site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(documents(root))  # and 404.html
    for page in pages:
        away = [address for address in read(page).addresses if re.match(r"(\w+:)?//", address)]
        assert not away, page
    styles = [*site.rglob("*.css")]
    assert styles and not [path for path in styles if re.search(r"url\(\W?(https?:)?//|@import", path.read_text())]


@pytest.mark.all
@pytest.mark.xdist_group("site")
def test_what_a_page_fetches_is_there(site: Path) -> None:
    for page in (site / "index.html", site / "algorithms" / "grpo.html", site / "api" / "algorithms.html"):
        found = [address.split("?")[0] for address in read(page).addresses if not address.startswith("data:")]
        assert found and not [address for address in found if not (page.parent / address).exists()], page


def offered(root: Path, package: str) -> Iterator[str]:
    """What a package names in its `__init__`, each by its full name; but for what answers with these names."""
    tree = ast.parse((root / "lit_rl" / package.replace(".", "/") / "__init__.py").read_text())
    for node in ast.walk(tree):
        module = str(node.module) if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("lit_rl.") and module != "lit_rl.core.lazy_names":
            yield from (f"{module}.{name.name}" for name in node.names)


@pytest.mark.all
@pytest.mark.xdist_group("site")
def test_the_reference_shows_what_packages_offer(root: Path, site: Path) -> None:
    there = {anchor for page in (site / "api").glob("*.html") for anchor in read(page).anchors}
    missing = {name for package in PUBLIC for name in offered(root, package)} - there
    # A package below offers it again.
    missing = {name for name in missing if not any(a.endswith(f".{name.rpartition('.')[2]}") for a in there)}
    assert not missing
    grpo = (site / "api" / "algorithms.html").read_text()
    assert "group-relative policy optimisation" in grpo.lower() and ":func:" not in grpo
