"""Files of precomputed log-probs, named by a hash of all that the numbers depend on."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.errors import StorageError
from lit_rl.models.policy.trunk import base_of
from lit_rl.models.reference.base import OnCPU

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.offline import OfflineModule

FORMAT = 1
"""Part of the hash: raise it when the same settings would give other numbers, or another layout."""


def folder_of(module: OfflineModule, folder: str | None) -> Path:
    """Where files are kept: `folder`, or `cache` in the run directory where it is None."""
    return Path(module.trainer.default_root_dir) / "cache" if folder is None else Path(folder).expanduser()


def path_of(module: OfflineModule, folder: Path, data: ExampleSet, weights: str) -> Path:
    """Where the log-probs of a set are kept.

    Args:
        module: Whose Trainer says the precision.
        folder: Of the files.
        data: The set.
        weights: What `hash_of_weights` said of the reference.
    """
    key = json.dumps([FORMAT, data.fingerprint, weights, str(module.trainer.precision)])
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return folder / f"reference_logprobs_{name}.safetensors"


def hash_of_weights(module: OfflineModule) -> str:
    """A hash of the reference: its architecture and its weights, wherever they are, equal on all ranks."""
    held = module.reference_policy
    own = held is not None
    scorer = (held.model if isinstance(held, OnCPU) else held) if own else module.policy
    digest = hashlib.blake2b(str(base_of(scorer).config.to_json_string()).encode(), digest_size=16)
    for name, tensor in sorted(scorer.state_dict(keep_vars=True).items()):
        # Without a module of its own the reference is the policy less what is trained.
        if isinstance(tensor, Tensor) and (own or not tensor.requires_grad):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            plain = local.detach().cpu().contiguous()
            digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
            digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.int64)
    ranks = module.everyones(mine.unsqueeze(0)).tolist()
    # Whole copies are the same everywhere, and then the number of ranks is no part of the name.
    return bytes(ranks[0]).hex() if all(rank == ranks[0] for rank in ranks) else json.dumps(ranks)


def check_folder(module: OfflineModule, folder: Path) -> None:
    """Refuse a folder that cannot be written, before anything is computed for it. A collective.

    Raises:
        StorageError: no file can be made there.
    """
    problem = ""
    if module.trainer.is_global_zero and not module.trainer.fast_dev_run:  # pyright: ignore
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            problem = error.strerror or str(error)
    if problem := module.trainer.strategy.broadcast(problem):
        raise StorageError(f"{folder} cannot be written ({problem}): set algo.reference_cache to a folder that can.")


def read(module: OfflineModule, path: Path, count: int) -> Tensor | None:
    """The file's numbers, as rank 0 reads them; None where there is no file."""
    found: Tensor | None = None
    problem = ""
    if module.trainer.is_global_zero and path.is_file():
        try:
            found = load_file(path)["logprobs"]
            problem = "" if len(found) == count else f"it holds {len(found)} numbers for {count} tokens"
        except (SafetensorError, KeyError, OSError) as error:
            problem = str(error)
    found, problem = module.trainer.strategy.broadcast((found, problem))
    if problem:
        raise StorageError(f"{path} cannot be used ({problem}): remove it, and it is computed anew.")
    return found


def write(path: Path, flat: Tensor) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"logprobs": flat}, partial)
        partial.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error}): is there room? algo.reference_cache names another folder."
        ) from error
