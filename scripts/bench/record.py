"""What a contender made of the first step: its loss, the log-probs of its tokens and its gradient, for the gate."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class FirstStep:
    """Collects while the first step runs, then writes to a folder and collects no more."""

    def __init__(self) -> None:
        self.open = True
        self.loss = 0.0
        self.logprobs: dict[str, list[float]] = {}

    def add_loss(self, share: Tensor) -> None:
        """A micro-batch's share of the step's loss."""
        if self.open:
            self.loss += float(share)

    def add_logprobs(self, ids: Tensor, logprobs: Tensor, mask: Tensor) -> None:
        """Of each row: `ids`, `logprobs` and bool `mask`, all `(b, t)`. A row is known by its tokens."""
        if self.open:
            for row, values, there in zip(ids, logprobs.detach().float(), mask.bool()):
                self.logprobs[key_of(row[there].tolist())] = values[there].tolist()

    def add_gradient(self, named: Iterable[tuple[str, Tensor]], folder: Path, *, whole: bool = True) -> None:
        """The gradient as it is before clipping; what was collected is written, and the step is over.

        Args:
            named: Gradients by parameter.
            folder: Where to.
            whole: Whether this process took the loss of all rows. Of a part there is no loss to compare.
        """
        if not self.open:
            return
        from safetensors.torch import save_file

        self.open = False
        gradient = {name: grad.detach().float().cpu().contiguous() for name, grad in named}
        save_file(gradient, folder / "gradient.safetensors")
        (folder / "first_step.json").write_text(
            json.dumps({"loss": self.loss if whole else None, "logprobs": self.logprobs})
        )


def key_of(ids: Sequence[int]) -> str:
    """The name of a completion."""
    return " ".join(map(str, ids))


def read(folder: Path) -> dict[str, Any]:
    """Loss and log-probs of `FirstStep`, and under "gradient" the file, to be read tensor by tensor."""
    from safetensors import safe_open

    return json.loads((folder / "first_step.json").read_text()) | {
        "gradient": safe_open(folder / "gradient.safetensors", framework="pt")
    }


def cosine_and_ratio(one: Any, other: Any) -> tuple[float, float]:
    """Of two gradients: their cosine, and the norm of the second over that of the first.

    Raises:
        KeyError: a tensor of one has no counterpart, which says which.
    """
    names = set(one.keys()) ^ set(other.keys())
    if names:
        raise KeyError(f"only one side has a gradient of {', '.join(sorted(names)[:5])}")
    dot = torch.zeros(3, dtype=torch.float64)
    for name in one.keys():  # noqa: SIM118 (a file, no dict)
        a, b = one.get_tensor(name).double().flatten(), other.get_tensor(name).double().flatten()
        dot += torch.stack([a @ b, a @ a, b @ b])
    return float(dot[0] / (dot[1] * dot[2]).sqrt()), float((dot[2] / dot[1]).sqrt())
