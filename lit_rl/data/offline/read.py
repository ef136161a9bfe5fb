"""Rows of one source, recognised, tokenised, cut, filtered and counted."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

from lit_rl.data.corpus import list_counts
from lit_rl.data.offline.encode import Encoder
from lit_rl.data.offline.example import Example, Kind
from lit_rl.data.offline.options import ExampleOptions
from lit_rl.data.offline.reader import Reader, nothing_in
from lit_rl.data.sources import Rows
from lit_rl.errors import DataError
from lit_rl.long_waits import counted

DROPPED = ("empty", "equal", "promptless")
"""Counts of rows that hold nothing to learn from; `max_dropped` bounds their share."""


def read_examples(
    rows: Rows,
    encoder: Encoder,
    kind: Kind,
    options: ExampleOptions,
) -> tuple[list[Example], Counter[str], str]:
    """Return every row that passes the filters, the number of rows that each filter took, and the name of the format.

    A row is an example, but for pairs that serve verdicts: each gives two, the chosen one first. Of pairs that serve
    texts the chosen one is taken.

    The counts are of rows: `rows` (met), `bad` (cannot be read), `empty` (a prompt, a text or one side of a pair says
    nothing), `equal` (both sides say the same, also once cut), `promptless` (an implicit prompt, and nothing in
    common), `overlong` (left out, also where a cut leaves nothing to learn), `truncated` (kept, cut), `kept`; and
    `longest` (tokens of the longest text met, before any cut).
    `rows = bad + empty + equal + promptless + overlong + kept`.

    Raises:
        DataError: a bad row where `on_bad_row` is `error`; where it is `skip`, the first of them if all are bad; rows
            of several formats, or margins in some rows only; an overlong row where `overlong` is `error`; more than
            `max_dropped` of the rows dropped; `rename` of a column that no row has.
        ConfigError: an option that this kind has no use for, or that the chat template does not allow.
    """
    options.check_kind(kind)
    reader = Reader(encoder, kind, options, rows.folder)
    kept, counts = read_on(rows, reader, {})
    if reader.rows.mixed:
        reader = Reader(encoder, kind, options, rows.folder, chat=True)
        kept, counts = read_on(rows, reader, {})
    return kept, counts, next(iter(reader.formats), "")


def read_on(rows: Rows, reader: Reader, met: Mapping[str, int]) -> tuple[list[Example], Counter[str]]:
    """Read the next rows of a source that is read bit by bit, as `read_examples` does.

    What only all rows together can prove wrong is asked of all that were met up to here.

    Args:
        rows: The next rows.
        reader: Reader of all rows of the source.
        met: The counts of the rows before.

    Returns:
        The examples, and the counts with those before.
    """
    options, known = reader.options, bool(reader.formats)
    counts = Counter(rows=len(rows) + rows.skipped, bad=rows.skipped)
    counts.update(dict.fromkeys((*DROPPED, "overlong", "truncated", "kept", "longest"), 0))
    kept: list[Example] = []
    first_error = None
    for i in counted(range(len(rows)), "tokenising", "row"):
        where = rows.where(i)
        try:
            record = reader.record(rows[i], where)
            fate = nothing_in(record)
            texts = () if fate else reader.texts(record, where)
        except DataError as error:
            if options.on_bad_row == "error":
                raise
            counts["bad"] += 1
            first_error = first_error or error
            continue
        if not fate:
            counts["longest"] = max(counts["longest"], *map(len, texts))
            fate, examples = reader.examples(record, texts, where)
            kept += examples
        counts.update(fate.split())
    if first_error and not known and counts["bad"] - rows.skipped == len(rows):
        raise first_error
    if len(rows) and not reader.rows.mixed:
        reader.check_whole()
    counts = add_counts(met, counts)
    _check_dropped(rows.name, counts, options.max_dropped)
    return kept, counts


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> Counter[str]:
    """Return the counts of both together: sums, but for `longest` the maximum."""
    names = {**one, **other}
    return Counter(
        {
            name: (max if name.startswith("longest") else operator.add)(one.get(name, 0), other.get(name, 0))
            for name in names
        }
    )


def _check_dropped(name: str, counts: Counter[str], share: float) -> None:
    dropped = sum(counts[reason] for reason in DROPPED)
    if dropped > share * counts["rows"]:
        raise DataError(
            f"{name}: {dropped} of {counts['rows']} rows hold nothing to learn from, more than data.max_dropped="
            f"{share}: {list_counts(counts)}. Look at the columns, or raise data.max_dropped."
        )
