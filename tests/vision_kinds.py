"""The kinds of toys that tests run: those without torchvision, or those with it where it is there."""

from __future__ import annotations

import torchvision_beside
from vision_more_toys import MORE_TOYS
from vision_toys import TOYS

KINDS = tuple(MORE_TOYS if torchvision_beside.FOLDER else TOYS)


def kinds(*names: str) -> tuple[str, ...]:
    """Of these, the ones that are run. None: the test is skipped."""
    unknown = set(names) - {*TOYS, *MORE_TOYS}
    assert not unknown, unknown
    return tuple(name for name in names if name in KINDS)
