"""Log-probs of a fixed reference, computed once before training and kept on disk.

They cover every row of every set, and every further text that a method will ask about
(`OfflinePolicyModule.extra_reference_texts`). Files are named by a hash of all that the numbers depend on, so the next
run on the same data with the same reference only reads them. The reference is released before the first step, which
saves its memory.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.core.durable_files import replacing
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.examples import ExampleBatch, TokenBatch
from lit_rl.data.example_set import ExampleSet
from lit_rl.models.references import OnCPU, Reference, ReferenceFree, Scorer
from lit_rl.models.trunk import base_of

FORMAT = 1
"""Format version, a part of the hash: raise it when the same settings would give other numbers, or another layout."""


# ------------------------------------------------------------------ files


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
                f"{self.folder} cannot be written ({problem}). Set algo.reference_cache to a folder that can be."
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
            raise StorageError(f"{path} cannot be used ({problem}). Remove it: it is then computed again.")
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
                f"{path} cannot be written ({error}). Free disk space, or set algo.reference_cache to another folder."
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
            on_host = local.detach().cpu().contiguous()
            digest.update(f"{name} {on_host.dtype} {tuple(on_host.shape)}".encode())
            digest.update(on_host.flatten().view(torch.uint8).numpy().tobytes())
    own_digest = torch.tensor(list(digest.digest()), dtype=torch.int64)
    digests = ranks.gather(own_digest.unsqueeze(0)).tolist()
    # Unsharded copies have equal hashes, and then the name does not depend on the number of ranks.
    return bytes(digests[0]).hex() if all(rank == digests[0] for rank in digests) else json.dumps(digests)


# ------------------------------------------------------------------ log-probs of sets


@dataclass(frozen=True)
class ReferenceTable:
    """Log-probs of the learned tokens of one set, on the CPU."""

    texts: tuple[tuple[Tensor, ...], ...]
    """The float32 log-probs of each text of each row (of a pair: the chosen one, the rejected one)."""

    def of(self, batch: ExampleBatch) -> Tensor:
        """Return reference log-probs of a micro-batch, float32 ``(b, s - 1)``, for pairs ``(2 b, s - 1)``; 0 at
        unlearned tokens."""
        mask = batch.tokens.learned
        sides = range(len(batch.tokens) // len(batch.rows))
        found = torch.zeros(mask.shape)
        found[mask.cpu()] = torch.cat([self.texts[row][side] for side in sides for row in batch.rows])
        return found.to(mask.device)


@dataclass(frozen=True)
class ReferenceSource:
    """A source of log-probs of whole sets: a file of an earlier run, or the reference itself."""

    logprobs: Callable[[ExampleBatch], Tensor]
    """A function from a batch of texts to ``(b, s - 1)`` (``2 b`` for pairs) under the reference."""
    batch_size: int
    """Rows that a rank scores at a time."""
    context: Callable[[], AbstractContextManager[None]]
    """The context of the forward pass: no gradient, the run's precision."""
    files: ReferenceFiles
    ranks: Ranks

    def table(self, data: ExampleSet, name: str) -> ReferenceTable:
        """Return the log-probs of all texts of a set, read or computed. A collective."""
        lengths = [sum(text.learned) for example in data.examples for text in example.texts]
        flat = self.files.read(data, sum(lengths))
        if flat is None:
            flat = self.compute(data, f"Reference log-probs of {name}").cpu()
            self.files.write(data, flat)
        texts = iter(flat.split(lengths))
        return ReferenceTable(tuple(tuple(next(texts) for _ in example.texts) for example in data.examples))

    @torch.no_grad()
    def compute(self, data: ExampleSet, title: str) -> Tensor:
        """Compute the log-probs `(n,)` of all learned tokens, in the order of rows, which the ranks share."""
        logprobs: list[Tensor] = []
        parts = list(self._parts(data))
        with self.context():
            for rows_by_rank in tqdm(parts, desc=title, unit="batch", disable=self.ranks.rank != 0):
                # Ranks call the model equally often, even without rows left: a sharded model needs all of them.
                own_rows = rows_by_rank[self.ranks.rank]
                rows = own_rows or rows_by_rank[0]
                batch = data.batch(rows, rows, data.totals(rows), step=0, slot=0).to(self.ranks.device)
                values = self.logprobs(batch)[batch.tokens.learned]
                logprobs.append(values[: len(values) if own_rows else 0].float())
        flat = self.ranks.gather_tokens(torch.cat(logprobs))
        return flat[self._order_of_rows(data, parts)]

    def _parts(self, data: ExampleSet) -> Iterator[list[list[int]]]:
        """Yield the rows of each batch, by rank, sorted by length: the longest first, which fail at once if they do."""
        world, size = self.ranks.world_size, self.batch_size
        order = sorted(range(len(data)), key=lambda row: -max(map(len, data.examples[row].texts)))
        for start in range(0, len(order), size * world):
            rows = order[start : start + size * world]
            yield [rows[rank::world] for rank in range(world)]

    def _order_of_rows(self, data: ExampleSet, parts: Sequence[list[list[int]]]) -> Tensor:
        """Return the permutation `(n,)` from the order in which the ranks scored tokens to the order of rows."""
        places: dict[tuple[int, int], Tensor] = {}
        offset = 0
        for rank in range(self.ranks.world_size):
            for rows_by_rank in parts:
                rows = rows_by_rank[rank]
                sides = len(data.examples[rows[0]].texts) if rows else 0
                for side in range(sides):
                    for row in rows:
                        count = sum(data.examples[row].texts[side].learned)
                        places[row, side] = torch.arange(offset, offset + count)
                        offset += count
        return torch.cat([places[key] for key in sorted(places)]).to(self.ranks.device)


class PrecomputedReference:
    """The precomputed reference log-probs of a run.

    Args:
        reference: The reference, which must exist and must not follow the policy.
        folder: Folder of the files. None: ``cache`` in the Trainer's `default_root_dir`, the run directory.

    Raises:
        ConfigError: this reference has no fixed log-probs.
    """

    @classmethod
    def of(cls, reference: Reference, precompute: bool, folder: str | None) -> PrecomputedReference | None:
        """Return an instance for the two keys of a method; None without `precompute`.

        Raises:
            ConfigError: as the class, or a folder without `precompute`.
        """
        if precompute:
            return cls(reference, folder)
        if folder is not None:
            raise ConfigError(
                f"algo.reference_cache={folder!r} is for precomputed log-probs of the reference, and "
                "algo.precompute_reference is false: set it to true, or leave the folder out."
            )
        return None

    def __init__(self, reference: Reference, folder: str | None = None) -> None:
        if reference.moves or isinstance(reference, ReferenceFree):
            why = "it follows the policy" if reference.moves else "it has none"
            raise ConfigError(
                "algo.precompute_reference=true computes the log-probs of the reference once, but "
                f"reference={type(reference).__name__} has no fixed ones: {why}. Set algo.precompute_reference=false, "
                "or a reference that does not change, such as auto."
            )
        self.folder = folder
        self.released = False
        """True if the reference is released, so that nothing further can be computed."""
        self._tables: dict[str, ReferenceTable] = {}
        self._by_text: dict[bytes, Tensor] = {}

    def prepare(
        self,
        sets: Mapping[str, ExampleSet],
        texts: Iterable[tuple[str, ExampleSet]],
        source: ReferenceSource | None,
    ) -> None:
        """Read or compute the log-probs that the run still lacks. A collective.

        Args:
            sets: Sets of the run's rows, by name.
            texts: Named sets of further texts, for `of_texts`.
            source: Source of missing log-probs. None: the reference is released.

        Raises:
            ConfigError: log-probs are missing, and the reference is released.
            StorageError: a file cannot be read or written.
        """
        for name, data in sets.items():
            self._table(data, name, source)
        for name, data in texts:
            table = self._table(data, name, source)
            for example, (values,) in zip(data.examples, table.texts, strict=True):
                self._by_text[text_key(example.texts[0].ids, example.texts[0].learned)] = values

    def fill(self, batch: ExampleBatch, data: ExampleSet) -> None:
        """Put their log-probs into a batch of this set and into all micro-batches that it carries.

        In place: Lightning passes the batch itself to the step. Before the training this does nothing, and the
        reference can still be used.

        Raises:
            ConfigError: the reference is released, and the set was not precomputed.
        """
        table = self._tables.get(data.fingerprint)
        if table is not None:
            for micro in (batch, *batch.whole):
                micro.ref_logprobs = table.of(micro)
        elif self.released:
            raise _reference_is_released("these rows")

    def of_texts(self, tokens: TokenBatch) -> Tensor | None:
        """Return reference log-probs of extra texts, float32 ``(b, s - 1)``; 0 at unlearned tokens.

        None before the training, while the reference can still be used.

        Raises:
            ConfigError: the reference is released, and one of these texts was not precomputed.
        """
        found = [self._by_text.get(text_key(ids, learned)) for ids, learned in unpadded_rows(tokens)]
        known = [values for values in found if values is not None]
        if len(known) < len(found):
            if self.released:
                raise _reference_is_released("texts")
            return None
        logprobs = torch.zeros(tokens.learned.shape)
        logprobs[tokens.learned.cpu()] = torch.cat(known)
        return logprobs.to(tokens.input_ids.device)

    def _table(self, data: ExampleSet, name: str, source: ReferenceSource | None) -> ReferenceTable:
        if data.fingerprint not in self._tables:
            if source is None:
                raise _reference_is_released(name)
            self._tables[data.fingerprint] = source.table(data, name)
        return self._tables[data.fingerprint]


def free_own_weights(reference: object, policy: nn.Module) -> None:
    """Free the memory of a module's own weights: those that it does not share with the policy.

    DDP still lists the parameters, so dropping the module alone would free nothing.
    """
    if not isinstance(reference, nn.Module):
        return
    shared = {id(parameter) for parameter in policy.parameters()}
    for parameter in reference.parameters():
        if id(parameter) not in shared and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.new_empty(0)


# ------------------------------------------------------------------ keys of texts


def unpadded_rows(tokens: TokenBatch) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the ids of every row without padding, and its mask of learned tokens."""
    counts = tokens.attention_mask.sum(1).tolist()
    for ids, learned, count in zip(tokens.input_ids.tolist(), tokens.loss_mask.tolist(), counts):
        yield ids[:count], learned[:count]


def text_key(ids: Sequence[int], learned: Sequence[bool]) -> bytes:
    """Return a key that is equal for equal tokens with equal learned masks."""
    return hashlib.blake2b(array("q", ids).tobytes() + bytes(learned), digest_size=16).digest()


def _reference_is_released(what: str) -> ConfigError:
    return ConfigError(
        f"algo.precompute_reference=true released the reference before the training, and the log-probs of {what} were "
        "not computed before. Give all validation sets to the data module that trains, or set it to false."
    )
