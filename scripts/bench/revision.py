"""Which code was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def revision(root: Path = ROOT) -> dict[str, Any]:
    """The commit, None where git does not know one; "changed" says whether tracked files differ from it.

    Files of `docs/` do not count: a benchmark writes there.
    """
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs")
    return {"commit": commit or None, "changed": bool(changes)}


def _git(root: Path, *arguments: str) -> str:
    """What git says; nothing where it has nothing to say, or is not there."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
