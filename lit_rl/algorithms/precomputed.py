"""Log-probs of a reference that stays where it is, computed once: before training, for every row of every set.

They are kept on disk under a hash of all that they depend on, so that the next run on the same data with the same
reference only reads them; and the reference is let go before the first step, which is what this is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from lit_rl.algorithms.over_ranks import all_tokens
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.errors import ConfigError, StorageError
from lit_rl.examples import ExampleBatch
from lit_rl.models.reference import OnCPU, Reference, ReferenceFree
from lit_rl.models.trunk import base_of

if TYPE_CHECKING:
    from lit_rl.algorithms.offline import OfflineModule

FORMAT = 1
"""Part of the hash: raise it when the same settings would give other numbers, or another layout."""


@dataclass(frozen=True)
class Table:
    """Log-probs of the learned tokens of one set, on the CPU."""

    texts: tuple[tuple[Tensor, ...], ...]
    """Of each row, the float32 log-probs of each of its texts (of a pair: the chosen one, the rejected one)."""

    def of(self, batch: ExampleBatch) -> Tensor:
        """Float32 ``(b, s - 1)``, for pairs ``(2 b, s - 1)``: those of a micro-batch, 0 where nothing is learned."""
        mask = batch.tokens.learned
        sides = range(len(batch.tokens) // len(batch.rows))
        found = torch.zeros(mask.shape)
        found[mask.cpu()] = torch.cat([self.texts[row][side] for side in sides for row in batch.rows])
        return found.to(mask.device)


class PrecomputedReference:
    """The tables of a run, and their files.

    Args:
        reference: Whose log-probs. One that follows the policy is refused, and so is none at all.
        folder: Where files are kept. None: ``cache`` in the Trainer's `default_root_dir`, the run directory.

    Raises:
        ConfigError: this reference has no log-probs that stay.
    """

    def __init__(self, reference: Reference, folder: str | None = None) -> None:
        if reference.moves or isinstance(reference, ReferenceFree):
            why = "it follows the policy" if reference.moves else "it has none"
            raise ConfigError(
                f"algo.precompute_reference=true computes the log-probs of the reference once, and those of "
                f"reference={type(reference).__name__} are not there to keep: {why}. Set algo.precompute_reference="
                "false, or take a reference that stays, such as auto."
            )
        self.folder = folder
        self._tables: dict[str, Table] = {}
        self._released = False

    def prepare(self, module: OfflineModule) -> None:
        """Read or compute what is missing for the sets of the Trainer's data module; then let the reference go.

        A collective. Called where everything is placed, before the first step.
        """
        corpus: Any = module.trainer.datamodule.corpus  # pyright: ignore
        named = {"train": corpus.train, **{f"val/{name}" if name else "val": of for name, of in corpus.val.items()}}
        missing = {name: data for name, data in named.items() if data.fingerprint not in self._tables}
        if missing and self._released:
            raise _released(", ".join(missing))
        weights = _weights(module) if missing else ""
        for name, data in missing.items():
            self._tables[data.fingerprint] = self._table(module, data, weights, name)
        if not self._released:
            _release(module)
            self._released = True

    def fill(self, module: OfflineModule, batch: Any, dataloader_idx: int) -> None:
        """Put their log-probs into a batch and into all micro-batches that it carries; prompts have none.

        In place: Lightning gives the batch itself to the step.
        """
        if not isinstance(batch, ExampleBatch) or not (self._tables or self._released):
            return
        table = self._tables.get(_set_of(module, dataloader_idx).fingerprint)
        if table is not None:
            for micro in (batch, *batch.whole):
                micro.ref_logprobs = table.of(micro)
        elif self._released:
            raise _released("these rows")
        # Else it is measured before the training, and the reference is still there.

    def _table(self, module: OfflineModule, data: ExampleSet, weights: str, name: str) -> Table:
        path = self._path(module, data, weights)
        lengths = [sum(text.learned) for example in data.examples for text in example.texts]
        flat = _read(module, path, sum(lengths))
        if flat is None:
            flat = _score(module, data, f"Reference log-probs of {name}").cpu()
            if module.trainer.is_global_zero and not module.trainer.fast_dev_run:  # pyright: ignore
                _write(path, flat)
        texts = iter(flat.split(lengths))
        return Table(tuple(tuple(next(texts) for _ in example.texts) for example in data.examples))

    def _path(self, module: OfflineModule, data: ExampleSet, weights: str) -> Path:
        folder = Path(module.trainer.default_root_dir) / "cache" if self.folder is None else Path(self.folder)
        key = json.dumps([FORMAT, data.fingerprint, weights, str(module.trainer.precision)])
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return folder.expanduser() / f"reference_logprobs_{name}.safetensors"


def _set_of(module: OfflineModule, dataloader_idx: int) -> ExampleSet:
    """The set that a batch comes from; loaders of prompts stand before those of examples."""
    data: Any = module.trainer.datamodule  # pyright: ignore
    if module.trainer.training:
        return data.corpus.train
    return data.corpus.val[data.loss_names[dataloader_idx - len(data.val_names)]]


# ---------------------------------------------------------------------- computing


@torch.no_grad()
def _score(module: OfflineModule, data: ExampleSet, title: str) -> Tensor:
    """`(n,)`: the log-probs of all learned tokens of all texts of all rows, in their order. Ranks share the rows."""
    mine: list[Tensor] = []
    parts = list(_parts(module, data))
    shown = tqdm(parts, desc=title, unit="batch", disable=not module.trainer.is_global_zero)
    with module.rollout_context():
        for everyones in shown:
            # Ranks call the model equally often, also one that has no row left: a sharded one needs all of them.
            ours = everyones[module.global_rank]
            rows = ours or everyones[0]
            batch = data.batch(rows, rows, data.totals(rows), step=0, slot=0).to(module.device)
            values = module.ref_logprobs(batch)[batch.tokens.learned]
            mine.append(values[: len(values) if ours else 0].float())
    flat = all_tokens(module, torch.cat(mine))
    return flat[_back(module, data, parts)]


def _parts(module: OfflineModule, data: ExampleSet) -> Iterator[list[list[int]]]:
    """Rows of each batch, by rank: the longest first, so that they fit or fail at once, and those alike together."""
    world, size = module.trainer.world_size, module.trainer.datamodule.val_batch_size  # pyright: ignore
    order = sorted(range(len(data)), key=lambda row: -max(map(len, data.examples[row].texts)))
    for start in range(0, len(order), size * world):
        rows = order[start : start + size * world]
        yield [rows[rank::world] for rank in range(world)]


def _back(module: OfflineModule, data: ExampleSet, parts: Sequence[list[list[int]]]) -> Tensor:
    """`(n,)`: where the tokens of all texts stand in the order in which the ranks scored them."""
    places: dict[tuple[int, int], Tensor] = {}
    seen = 0
    for rank in range(module.trainer.world_size):
        for everyones in parts:
            rows = everyones[rank]
            sides = len(data.examples[rows[0]].texts) if rows else 0
            for side in range(sides):
                for row in rows:
                    count = sum(data.examples[row].texts[side].learned)
                    places[row, side] = torch.arange(seen, seen + count)
                    seen += count
    return torch.cat([places[key] for key in sorted(places)]).to(module.device)


def _release(module: OfflineModule) -> None:
    """Give back the memory of the reference's own weights: those that it does not share with the policy."""
    held, module.reference_policy = module.reference_policy, None
    if not isinstance(held, nn.Module) or isinstance(module.trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        return  # those strategies flatten the weights of all modules into one: nothing of it can be given back
    shared = {id(parameter) for parameter in module.policy.parameters()}
    for parameter in held.parameters():
        # DDP still lists the parameters, so dropping the module alone would free nothing.
        if id(parameter) not in shared and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.new_empty(0)


# ---------------------------------------------------------------------- files and their names


def _weights(module: OfflineModule) -> str:
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


def _read(module: OfflineModule, path: Path, count: int) -> Tensor | None:
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


def _write(path: Path, flat: Tensor) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"logprobs": flat}, partial)
        partial.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error}): set algo.reference_cache to a folder with room."
        ) from error


def _released(what: str) -> ConfigError:
    return ConfigError(
        f"algo.precompute_reference=true let the reference go before the training, and {what} came afterwards: give "
        "all validation sets to the data module that trains, or set it to false."
    )
