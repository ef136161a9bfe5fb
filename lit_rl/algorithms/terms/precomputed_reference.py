"""Log-probs of a reference that stays where it is, computed once: before training, for every row of every set, and for
every further text that a method is going to ask about (`OfflineModule.texts_beside`).

They are kept on disk under a hash of all that they depend on, so that the next run on the same data with the same
reference only reads them; and the reference is let go before the first step, which is what this is for.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from lit_rl.algorithms.ranks import all_tokens
from lit_rl.algorithms.terms import reference_files
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.errors import ConfigError
from lit_rl.examples import ExampleBatch, TokenBatch
from lit_rl.models.reference.base import Reference, ReferenceFree

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.offline import OfflineModule


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

    @classmethod
    def of(cls, reference: Reference, precompute: bool, folder: str | None) -> PrecomputedReference | None:
        """From the two keys of a method; None where nothing is to be computed beforehand.

        Raises:
            ConfigError: as the class, or a folder for log-probs that nothing computes.
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
                f"algo.precompute_reference=true computes the log-probs of the reference once, and those of "
                f"reference={type(reference).__name__} are not there to keep: {why}. Set algo.precompute_reference="
                "false, or take a reference that stays, such as auto."
            )
        self.folder = folder
        self._tables: dict[str, Table] = {}
        self._by_text: dict[bytes, Tensor] = {}
        self._released = False

    def prepare(self, module: OfflineModule) -> None:
        """Read or compute what is missing for the run; then let the reference go.

        A collective. Called where everything is placed, before the first step.
        """
        corpus: Any = module.trainer.datamodule.corpus  # pyright: ignore
        named = {"train": corpus.train, **{f"val/{name}" if name else "val": of for name, of in corpus.val.items()}}
        weights = "" if self._released else reference_files.hash_of_weights(module)
        if not self._released:
            reference_files.check_folder(module, reference_files.folder_of(module, self.folder))
        for name, data in named.items():
            self._know(module, data, weights, name)
        for name, data in module.texts_beside():
            texts = self._know(module, data, weights, name).texts
            for example, (values,) in zip(data.examples, texts, strict=True):
                self._by_text[text_key(example.texts[0].ids, example.texts[0].learned)] = values
        if not self._released:
            module.before_release()
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

    def of_texts(self, tokens: TokenBatch) -> Tensor | None:
        """Float32 ``(b, s - 1)``: those of further texts, 0 where nothing is learned.

        None before the training, where the reference is still there and may be asked.

        Raises:
            ConfigError: the reference is gone, and was not asked about one of these texts.
        """
        found = [self._by_text.get(text_key(ids, learned)) for ids, learned in texts_of(tokens)]
        known = [values for values in found if values is not None]
        if len(known) < len(found):
            if self._released:
                raise _released("texts")
            return None
        logprobs = torch.zeros(tokens.learned.shape)
        logprobs[tokens.learned.cpu()] = torch.cat(known)
        return logprobs.to(tokens.input_ids.device)

    def _know(self, module: OfflineModule, data: ExampleSet, weights: str, name: str) -> Table:
        if data.fingerprint not in self._tables:
            if self._released:
                raise _released(name)
            self._tables[data.fingerprint] = self._table(module, data, weights, name)
        return self._tables[data.fingerprint]

    def _table(self, module: OfflineModule, data: ExampleSet, weights: str, name: str) -> Table:
        path = reference_files.path_of(module, reference_files.folder_of(module, self.folder), data, weights)
        lengths = [sum(text.learned) for example in data.examples for text in example.texts]
        flat = reference_files.read(module, path, sum(lengths))
        if flat is None:
            flat = _score(module, data, f"Reference log-probs of {name}").cpu()
            if module.trainer.is_global_zero and not module.trainer.fast_dev_run:  # pyright: ignore
                reference_files.write(path, flat)
        texts = iter(flat.split(lengths))
        return Table(tuple(tuple(next(texts) for _ in example.texts) for example in data.examples))


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


# ---------------------------------------------------------------------- names


def texts_of(tokens: TokenBatch) -> Iterator[tuple[list[int], list[bool]]]:
    """Ids of every row without its padding, and which of them are learned."""
    counts = tokens.attention_mask.sum(1).tolist()
    for ids, learned, count in zip(tokens.input_ids.tolist(), tokens.loss_mask.tolist(), counts):
        yield ids[:count], learned[:count]


def text_key(ids: Sequence[int], learned: Sequence[bool]) -> bytes:
    """Equal for texts of equal tokens of which the same are learned."""
    return hashlib.blake2b(array("q", ids).tobytes() + bytes(learned), digest_size=16).digest()


def _released(what: str) -> ConfigError:
    return ConfigError(
        f"algo.precompute_reference=true let the reference go before the training, and {what} came afterwards: give "
        "all validation sets to the data module that trains, or set it to false."
    )
