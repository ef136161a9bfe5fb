"""The global random generators, seeded for one call of a user's code.

Standard library only: worker processes load this file, and NumPy and PyTorch are seeded where somebody imported them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def mixed(*parts: object) -> int:
    """Return a seed in [0, 2^32) that is another one for other parts, and the same in every process."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def seed_generators(seed: int) -> None:
    """Seed Python's generator, NumPy's and PyTorch's; a CUDA device's where one is in use.

    Args:
        seed: In [0, 2^32).
    """
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the same generators back behind the block as they were before it, whatever it drew or raised."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    python = random.getstate()
    array = None if numpy is None else numpy.random.get_state()
    tensor = None if torch is None else torch.get_rng_state()
    on_gpu = torch is not None and torch.cuda.is_initialized()
    device = torch.cuda.get_rng_state() if on_gpu and torch is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
        if torch is not None:
            torch.set_rng_state(tensor)
            if device is not None:
                torch.cuda.set_rng_state(device)
