"""What a data module of examples does where its rows are a stream: where that begins, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import lightning as L

from lit_rl.data.corpus import list_counts
from lit_rl.data.offline.corpus import ExampleCorpus, streamed_corpus
from lit_rl.data.offline.encode import Encoder
from lit_rl.data.offline.options import ExampleOptions
from lit_rl.data.offline.stream import Windows
from lit_rl.data.sourced import SourcedDataModule
from lit_rl.data.sources import Rows
from lit_rl.errors import ConfigError, DataError


def corpus_beside(
    windows: Windows, val: Mapping[str, Rows], encoder: Encoder, options: ExampleOptions
) -> ExampleCorpus:
    """Return the validation sets of a run whose training rows are a stream, and the stream's report, without training
    rows.

    The first window is read, so that bad data shows at once.

    Args:
        windows: The windows of the stream.
        val: The rows of the validation sets, by name.
        encoder: Encoder of the policy.
        options: Options for reading rows.

    Raises:
        DataError: a set cannot be used.
        ConfigError: a source cannot be read bit by bit.
        BackendError: the hub cannot be reached.
    """
    first = windows.at(windows.start)
    corpus = streamed_corpus(first.data, first.sizes, windows.formats, val, encoder, options)
    return replace(corpus, train=replace(first.data, examples=(), packs=None))


def check_settings(data: SourcedDataModule, size: int, *, batch_size: int, max_length: int | None) -> None:
    """Check the settings of the data against `data.stream_buffer`.

    Args:
        data: The data module.
        size: `data.stream_buffer`, the rows of a window.
        batch_size: Rows of one optimizer step.
        max_length: Longest text, in tokens; None is no limit.

    Raises:
        ConfigError: a setting of the data does not fit `stream_buffer`.
    """
    if size < batch_size:
        raise ConfigError(
            f"data.stream_buffer={size} is below data.batch_size={batch_size}, the rows of one step: raise it; "
            "some thousands are usual."
        )
    if not data.streamable:
        key = "data.rows" if data.rows is not None else "data.task"
        raise ConfigError(
            f"data.stream_buffer={size} is for files, the hub and data sets of `datasets`; {key} is in "
            "memory whole: leave "
            "data.stream_buffer out, or write the rows to a .jsonl file and set data.path."
        )
    if max_length is None:
        raise ConfigError(
            f"data.max_length=null with data.stream_buffer={size}: the longest row is not known before it is read, so "
            "whether it fits into the model is not either. Set data.max_length."
        )
    if data.val_fraction > 0 and not data.val_sources and data.val is None:
        raise ConfigError(
            f"data.val_fraction={data.val_fraction} with data.stream_buffer={size}: prompts cannot be held out of rows "
            "that are never there all at once. Set data.val_fraction=0, or name a validation set (data.val_path, or "
            "data.val_split; in Python val)."
        )


def check_trainer(trainer: L.Trainer) -> None:
    """Check that the Trainer says how long the run is.

    Raises:
        ConfigError: nothing says how long the run is, or loaders are rebuilt within it.
    """
    if trainer.max_steps in (None, -1):
        raise ConfigError(
            f"trainer.max_steps={trainer.max_steps} with data.stream_buffer: a stream has no end, so there is no epoch "
            f"that trainer.max_epochs={trainer.max_epochs} could count. Set trainer.max_steps, the optimizer steps of "
            "the run."
        )
    if every := trainer.reload_dataloaders_every_n_epochs:  # pyright: ignore
        raise ConfigError(
            f"trainer.reload_dataloaders_every_n_epochs={every} with data.stream_buffer: a new loader would begin with "
            "the first row again. Set it to 0."
        )


def check_first(sizes: tuple[int, ...], batch_size: int, counts: Mapping[str, int]) -> None:
    """Refuse a first window that cannot be learned from.

    Args:
        sizes: Rows of each source that are left.
        batch_size: Rows of a step.
        counts: Counts of every filter, for the message.

    Raises:
        DataError: its rows do not fill one step, or a source has none left.
    """
    if sum(sizes) < batch_size:
        raise DataError(
            f"data.batch_size={batch_size}, and {sum(sizes)} rows are left of the first window of the stream: "
            f"{list_counts(counts)}. Raise data.stream_buffer, loosen a filter or lower data.batch_size."
        )
    if 0 in sizes:
        raise DataError(
            f"data.sources[{sizes.index(0)}]: the filters left no row of it in the first window of the stream; raise "
            "data.stream_buffer."
        )
