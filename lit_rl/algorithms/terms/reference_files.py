"""Files of precomputed log-probs, named by a hash of all that they depend on."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.durable import replacing
from lit_rl.errors import StorageError
from lit_rl.models.policy.trunk import base_of
from lit_rl.models.reference.base import OnCPU, Scorer

FORMAT = 1
"""Format version, a part of the hash: raise it when the same settings would give other numbers, or another layout."""


@dataclass(frozen=True)
class ReferenceFiles:
    """The files of one reference in one folder. Rank 0 reads and writes them."""

    folder: Path
    weights: str
    """The `hash_of_weights` of the reference."""
    precision: str
    """The Trainer's precision, on which the numbers depend."""
    ranks: Ranks
    writes: bool = True
    """True if new files are written; a dry run writes none."""

    def check(self) -> None:
        """Refuse a folder that cannot be written, before anything is computed for it. A collective.

        Raises:
            StorageError: no file can be made there.
        """
        problem = ""
        if self.ranks.rank == 0 and self.writes:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder):
                    pass
            except OSError as error:
                problem = error.strerror or str(error)
        if problem := self.ranks.broadcast(problem):
            raise StorageError(
                f"{self.folder} cannot be written ({problem}): set algo.reference_cache to a folder that can."
            )

    def path(self, data: ExampleSet) -> Path:
        """Return the file of a set's log-probs."""
        key = json.dumps([FORMAT, data.fingerprint, self.weights, self.precision])
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self.folder / f"reference_logprobs_{name}.safetensors"

    def read(self, data: ExampleSet, count: int) -> Tensor | None:
        """Return the log-probs `(count,)` of a set, as rank 0 reads them; None without a file. A collective.

        Raises:
            StorageError: the file is damaged.
        """
        path, found, problem = self.path(data), None, ""
        if self.ranks.rank == 0 and path.is_file():
            try:
                found = load_file(path)["logprobs"]
                problem = "" if len(found) == count else f"it holds {len(found)} numbers for {count} tokens"
            except (SafetensorError, KeyError, OSError) as error:
                problem = str(error)
        found, problem = self.ranks.broadcast((found, problem))
        if problem:
            raise StorageError(f"{path} cannot be used ({problem}): remove it, and it is computed anew.")
        return found

    def write(self, data: ExampleSet, flat: Tensor) -> None:
        """Write the log-probs of a set, atomically."""
        if self.ranks.rank != 0 or not self.writes:
            return
        path = self.path(data)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                save_file({"logprobs": flat}, partial)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written ({error}): is there room? algo.reference_cache names another folder."
            ) from error


def hash_of_weights(reference: Scorer | None, policy: nn.Module, ranks: Ranks) -> str:
    """Return a hash of the reference's architecture and weights, equal on all ranks. A collective.

    Args:
        reference: The reference's module. None: it is the policy without its trained weights.
        policy: The policy.
        ranks: The ranks that may each hold a part of the weights.
    """
    scorer: Any = policy if reference is None else reference.model if isinstance(reference, OnCPU) else reference
    digest = hashlib.blake2b(str(base_of(scorer).config.to_json_string()).encode(), digest_size=16)
    for name, tensor in sorted(scorer.state_dict(keep_vars=True).items()):
        if isinstance(tensor, Tensor) and (reference is not None or not tensor.requires_grad):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            plain = local.detach().cpu().contiguous()
            digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
            digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.int64)
    of_ranks = ranks.gather(mine.unsqueeze(0)).tolist()
    # Unsharded copies have equal hashes, and then the name does not depend on the number of ranks.
    return bytes(of_ranks[0]).hex() if all(rank == of_ranks[0] for rank in of_ranks) else json.dumps(of_ranks)
