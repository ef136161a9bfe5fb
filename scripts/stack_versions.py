"""Versions of the packages that lit_rl stands on: the oldest that it allows, those that are here, those that moved.

python scripts/stack_versions.py oldest       requirement lines: the lower bound of each range in pyproject.toml
python scripts/stack_versions.py versions     what is installed of constraints.txt, on one line
python scripts/stack_versions.py all          every package that is installed, as lines `name==version`
python scripts/stack_versions.py moved FILE   those whose version is another than in FILE, that came or that went

`all` in an environment whose tests passed is kept in tests/stack: newest.txt of `make test-newest`, and oldest.txt.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LOWEST = re.compile(r">=([\d.]+)[^#;]*")


def oldest() -> list[str]:
    """Return a line ``name==lower bound`` for each dependency of lit_rl."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [_LOWEST.sub(r"==\1", line).strip() for line in project["dependencies"]]


def installed() -> dict[str, str]:
    """Return the version of every package that is here but lit_rl, by name."""
    found = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in metadata.distributions()}
    return {name: found[name].partition("+")[0] for name in sorted(found) if name != "lit-rl"}


def listed(file: Path) -> dict[str, str]:
    """Return the versions of a file of lines ``name==version``, by name."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    pairs = (line.partition("==")[::2] for line in lines if line)
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def moved(here: dict[str, str], then: dict[str, str]) -> list[str]:
    """Return a line for each package that is in another version, that came or that went."""
    names = sorted(here.keys() | then.keys())
    pairs = [(name, then.get(name, "absent"), here.get(name, "absent")) for name in names]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("asked", choices=["oldest", "versions", "all", "moved"])
    parser.add_argument("file", type=Path, nargs="?", help="of `moved`")
    given = parser.parse_args()
    here = installed()
    if given.asked == "oldest":
        print(*oldest(), sep="\n")
    elif given.asked == "versions":
        print(", ".join(f"{name} {here[name]}" for name in listed(ROOT / "constraints.txt") if name in here))
    elif given.asked == "all":
        print(*(f"{name}=={version}" for name, version in here.items()), sep="\n")
    elif given.file is None:
        parser.error("moved since when? Name a file, such as tests/stack/newest.txt")
    else:
        lines = moved(here, listed(given.file)) or ["none"]
        print(f"Packages that moved since these tests last passed ({given.file}):", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
