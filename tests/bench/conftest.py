"""The benchmark is a package of scripts/: its tests import it as its commands do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
