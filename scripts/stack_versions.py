"""Versions of the packages that lit_rl stands on: the oldest that it allows, those that are here, those that moved.

python scripts/stack_versions.py oldest     requirement lines: the lower bound of each range in pyproject.toml
python scripts/stack_versions.py versions   what is installed of constraints.txt
python scripts/stack_versions.py moved      of these, what is there in another version than the tests are written for
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


def installed() -> dict[str, tuple[str, str]]:
    """Return the version that is here, and the one of constraints.txt, by name of package."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    found = {}
    for name, _, wanted in (line.partition("==") for line in lines if line):
        try:
            found[name] = metadata.version(name).partition("+")[0], wanted
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_argument("asked", choices=["oldest", "versions", "moved"]).dest
    asked = getattr(parser.parse_args(), asked)
    if asked == "oldest":
        print("\n".join(oldest()))
    elif asked == "versions":
        print(", ".join(f"{name} {here}" for name, (here, _) in installed().items()))
    else:
        moved = [
            f"  {name} {here}, in constraints.txt {wanted}"
            for name, (here, wanted) in installed().items()
            if here != wanted
        ]
        print("Packages whose version is another here than the tests are written for:", *moved, sep="\n")


if __name__ == "__main__":
    main()
