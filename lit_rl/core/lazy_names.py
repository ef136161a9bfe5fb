"""Public names of a package that are imported on first use. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


class LazyNames:
    """The implementation of `__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        places: Public names, with blanks between them, by the module below the package that has them.
    """

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        self.package = package
        self.module_of = {name: f"{package}.{module}" for module, names in places.items() for name in names.split()}

    def load(self, name: str) -> Any:
        """Import a public name, and keep it in the package, so that it is imported once."""
        found = getattr(import_module(self.module_of[name]), name)
        setattr(sys.modules[self.package], name, found)
        return found

    def listed(self) -> list[str]:
        """Return the public names, and those that every module has."""
        of_every_module = {name for name in vars(sys.modules[self.package]) if name.startswith("__")}
        return sorted(of_every_module | self.module_of.keys())
