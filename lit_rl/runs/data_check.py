"""`lit-rl data-check`: rows, texts, lengths and images that a data set becomes before anything is learned from it.
Reads no weights, writes nothing."""

from __future__ import annotations

import json
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.text import Text

from lit_rl.callbacks.display import Pictures, printable
from lit_rl.core.errors import DataError, in_range
from lit_rl.core.visuals import ImageRef, VideoRef, Visual, shown_in
from lit_rl.data.corpus import set_key
from lit_rl.data.example_module import ExampleDataModule
from lit_rl.data.example_set import Encoded, Example
from lit_rl.data.kinds import Kind, kind_of
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.row_visuals import ImageReader
from lit_rl.data.rows import read_row
from lit_rl.data.splits import first_row
from lit_rl.data.visual_prompts import Processor, count_placeholders
from lit_rl.environments.environment_base import Interactive
from lit_rl.models.language_model import LanguageModel
from lit_rl.rewards.weighted_rewards import Rewards

# ---------------------------------------------------------------------- the command


@dataclass(frozen=True)
class DataLook:
    """The shown parts of a data set, of prompts or of examples."""

    title: str
    rows: Sequence[Sequence[tuple[str, list[int], list[bool]]]]
    """Texts of the first rows: name, token ids, and which tokens are learned."""
    lengths: Mapping[str, Sequence[int]]
    """Lengths in tokens, by part."""
    columns: Mapping[str, Any]
    """Columns beside the text, each with its first value."""
    keys: Sequence[str]
    """Keys of the rows: equal for equal prompts."""
    wholes: Sequence[str]
    """Keys of the rows: equal for equal rows."""


def data_check(
    data: RolloutDataModule | ExampleDataModule,
    model: LanguageModel,
    *,
    kind: Kind | None = None,
    scores: bool = False,
    reward: Rewards | None = None,
    rows: int = 3,
) -> int:
    """Print the format, the first rows as the model reads them, lengths, images, the rows that each filter dropped,
    and repeats.

    Args:
        data: The data module.
        model: Model whose tokenizer and context it is read with.
        scores: The method trains a model that scores, so that no reply needs an end of generation.
        kind: Kind of example that the method learns from; None: inferred from the first row's columns.
        reward: Checks the columns of prompts; None: no check.
        rows: Rows that are shown.

    Raises:
        RewardError: the reward cannot score the rows.
        ConfigError: `rows` is below 1, or a setting of the data.
        DataError: as in training. That the rows do not fill one step is only said.
        BackendError: the hub cannot be reached.
    """
    in_range("data_check.rows", rows, low=1)
    tokenizer, console = model.tokenizer, Console(highlight=False)
    seen: dict[str, Any] = {"processor": model.processor, "eos_ids": () if scores else model.eos_ids}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=".*have a training prompt.*")  # the report says so too
        if isinstance(data, RolloutDataModule):
            data.prepare(tokenizer, stage="predict", **seen)
            look = _prompts(data, rows)
            if reward is not None:
                _check_reward(reward, data)
        else:
            kind = kind or _kind_of_first_row(data)
            data.prepare(tokenizer, kind, stage="predict", **seen)
            look = _examples(data, kind, rows)
    console.print(Text(look.title))
    if (size := getattr(data, "stream_buffer", None)) is not None:
        console.print(Text(f"Of the first {size} rows only (data.stream_buffer).", style="yellow"))
    console.print(Text(f"{_OPEN}...{_CLOSE} is learned.", style="dim"))
    for number, texts in enumerate(look.rows):
        for name, ids, learned in texts:
            console.print(Text(f"\nrow {number}, {name}: {len(ids)} tokens", style="bold"))
            console.print(bracketed(tokenizer, ids, learned))
    for line in dict.fromkeys(str(warning.message) for warning in caught):  # what a template leaves out, before all
        console.print(Text(f"\n{printable(line)}", style="yellow"))
    for part, lengths in look.lengths.items():
        _histogram(console, part, lengths, model.context_length)
    if model.processor is not None:
        print_images(console, image_sets(data, model.processor))
    _print_columns(console, look.columns)
    _print_counts(console, data.report)
    if model.processor is not None:
        print_bad_images(console, data)
    _print_repeats(console, look, data.report)
    try:
        data.prepare(tokenizer, *((kind,) if kind else ()), stage="fit", **seen)
    except DataError as error:  # a few rows are enough to look at, none are not
        if not data.report["train"]["kept"]:
            raise
        console.print(Text(f"\nToo few rows to train on as it stands: {error}", style="yellow"))
    return 0


def _kind_of_first_row(data: ExampleDataModule) -> Kind:
    """Return the kind of the first row, one that the data module makes; the first kind where the columns do not
    decide."""
    if len(data.serves) == 1:
        return data.serves[0]
    reading = {"rename": data.options.rename, "map_row": data.options.map_row}
    if data.sources:  # one row of it: the file is parsed once, by `prepare`
        source = data.sources[0]
        options = {"split": source.split, "name": source.name, "on_bad_row": data.on_bad_row, "own": source.own}
        row, _ = first_row(source.path, **options, **reading)
    else:
        rows = data.train_rows()[0]
        row = read_row(rows[0], rows.where(0), **reading).row
    kind = kind_of(row)
    return kind if kind is not None and kind in data.serves else data.serves[0]


def _check_reward(reward: Rewards, data: RolloutDataModule) -> None:
    """Let a reward report columns that it lacks; an environment may give it more than the data do."""
    reward.bind([*data.columns, *Interactive.columns])
    for columns in data.columns_of_sets():
        reward.check(columns)


# ---------------------------------------------------------------------- prompts, and examples


def _prompts(data: RolloutDataModule, rows: int) -> DataLook:
    all_rows = data.peek(data.report["train"]["kept"])
    shown = [[("prompt, which the policy answers", ids, [False] * len(ids))] for ids in all_rows.prompt_ids[:rows]]
    keys = data.prompt_keys
    columns = {name: next((v for v in values if v is not None), None) for name, values in all_rows.columns.items()}
    wholes = [
        json.dumps([key, {name: values[i] for name, values in all_rows.columns.items()}], default=str)
        for i, key in enumerate(keys)
    ]
    lengths = {"prompts": list(map(len, all_rows.prompt_ids))}
    return DataLook("Prompts for rollouts", shown, lengths, columns, keys, wholes)


def _examples(data: ExampleDataModule, kind: Kind, rows: int) -> DataLook:
    examples = data.corpus.train.examples
    columns: dict[str, Any] = {}
    for example in examples:
        for name, value in example.columns.items():
            if columns.setdefault(name) is None:
                columns[name] = value
    lengths = {
        "prompts": [example.texts[0].prompt_tokens for example in examples],
        "completions": [len(text) - text.prompt_tokens for example in examples for text in example.texts],
    }
    replies = [_replies(text) for example in examples for text in example.texts]
    within_prompts = any(any(text.learned[: text.prompt_tokens]) for each in examples for text in each.texts)
    if kind == "texts" and (within_prompts or any(len(each) > 1 for each in replies)):  # neither prompt nor completion
        lengths = {
            "texts": [len(text) for example in examples for text in example.texts],
            "all replies of a text": list(map(sum, replies)),
            "replies": [length for each in replies for length in each],
        }
    elif not any(lengths["prompts"]):
        lengths = {"texts": lengths["completions"]}
    by_row = [list(row) for _, row in groupby(examples, key=lambda example: example.where)]
    keys = [row[0].key for row in by_row]
    wholes = [json.dumps([[text.ids for text in each.texts] + [each.desirable] for each in row]) for row in by_row]
    title = f"Examples for methods that learn from {kind}; format: {', '.join(dict.fromkeys(data.corpus.formats))}"
    if forked := [[len(example.texts[0]) for example in row] for row in by_row if len(row) > 1]:
        title += (
            f"; {len(by_row)} conversations, {len(examples)} training examples: {len(forked)} conversations became "
            f"several, with {sum(sum(row) - max(row) for row in forked)} tokens beside the longest of each"
        )
    return DataLook(title, [_texts(example) for example in examples[:rows]], lengths, columns, keys, wholes)


def _replies(text: Encoded) -> list[int]:
    """Return the number of tokens of each run of learned tokens."""
    return [len(list(run)) for learned, run in groupby(text.learned) if learned]


def _texts(example: Example) -> list[tuple[str, list[int], list[bool]]]:
    names = ["chosen", "rejected", "reference"] if len(example.texts) > 1 else ["text"]
    if example.desirable is not None:
        names = ["desirable" if example.desirable else "undesirable"]
    if example.labels:
        names = [f"steps labelled {', '.join('right' if label else 'wrong' for label in example.labels)}"]
    where = printable(example.where)
    return [(f"{name} ({where})", text.ids, text.learned) for name, text in zip(names, example.texts)]


# ---------------------------------------------------------------------- the console


_LONGEST, _RUNS, _BINS, _BAR = 400, 40, 8, 40

_OPEN, _CLOSE = "⟦", "⟧"


def bracketed(tokenizer: Any, ids: Sequence[int], learned: Sequence[bool]) -> Text:
    """Return the text of tokens, special ones included, without control characters; learned tokens in brackets and
    green."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    text, inside = Text(), False
    runs = [
        (flag, is_special, [token for token, _ in group])
        for (flag, is_special), group in groupby(zip(ids, learned), key=lambda pair: (pair[1], pair[0] in special))
    ]
    for flag, is_special, tokens in runs[:_RUNS]:
        if flag != inside:
            text.append(_OPEN if flag else _CLOSE, style="bold green")
            inside = flag
        shown = printable(tokenizer.decode(tokens, skip_special_tokens=False), _LONGEST).replace("\n", "↵\n")
        text.append(shown, style="magenta" if is_special else "green" if flag else "")
    text.append(_CLOSE if inside else "", style="bold green")
    text.append(" ..." if len(runs) > _RUNS else "")
    return text


def _histogram(console: Console, part: str, lengths: Sequence[int], context: int | None) -> None:
    if not lengths:
        console.print(Text(f"\nNo {part}: no training row is left.", style="bold"))
        return
    low, high = min(lengths), max(lengths)
    line = f"\nTokens of {part}: {low} to {high}, median {statistics.median(lengths):g}"
    holds = f"; the context of the model holds {context}" if context is not None else ""
    console.print(Text(f"{line}{holds}", style="bold"))
    width = -(-(high - low + 1) // _BINS)
    counts = Counter((length - low) // width for length in lengths)
    edges = [(low + i * width, min(high, low + (i + 1) * width - 1)) for i in range((high - low) // width + 1)]
    labels = [str(first) if first == last else f"{first}-{last}" for first, last in edges]
    longest = max(map(len, labels))
    room = max(1, min(_BAR, console.width - longest - len(str(len(lengths))) - 2))
    for i, label in enumerate(labels):
        bar = "#" * -(-counts[i] * room // max(counts.values()))
        console.print(Text(f"{label:>{longest}} {bar}{' ' * bool(bar)}{counts[i]}"))


def _print_columns(console: Console, columns: Mapping[str, Any]) -> None:
    console.print(Text("\nColumns that a reward sees beside prompts and completions", style="bold"))
    for name, value in columns.items():
        text = str(value) if isinstance(value, str | ImageRef | VideoRef) else repr(value)
        shown = printable(text, 60).replace("\n", " ")
        console.print(Text(f"{printable(name)} ({type(value).__name__}): {shown}"))
    if not columns:
        console.print(Text("none"))


def _print_counts(console: Console, report: Mapping[str, Mapping[str, int]]) -> None:
    console.print(Text("\nRows, and what every filter took", style="bold"))
    for name, counts in report.items():
        shown = {key: value for key, value in counts.items() if value or key in ("rows", "kept")}
        longest = shown.pop("longest", 0)
        beside = f" (the longest had {longest} tokens)" if longest else ""
        beside += (
            "; kept and held_out are training examples, the others rows"
            if "forked" in shown and "held_out" in shown
            else ""
        )
        console.print(Text(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items())}{beside}"))


def _print_repeats(console: Console, look: DataLook, report: Mapping[str, Mapping[str, int]]) -> None:
    console.print(Text("\nWhat comes twice", style="bold"))
    count = len(look.keys)
    for equal, what in ((look.wholes, "are equal to an earlier one"), (look.keys, "have the prompt of an earlier one")):
        console.print(Text(f"train: {count - len(set(equal))} of {count} rows {what}"))
    for name, counts in report.items():
        if "overlap" in counts:
            console.print(Text(f"{name}: {counts['overlap']} of {counts['kept']} rows have a training prompt"))


# ---------------------------------------------------------------------- images


_NAMES, _BAD = 4, 10
"""Most names of a set, and most bad images, that are shown."""


@dataclass(frozen=True)
class ImageSet:
    """Images of one set."""

    name: str
    rows: Sequence[Sequence[Visual]]
    """Images and videos of each row, in the order in which they are shown."""
    tokens: Sequence[int]
    """Tokens of each row's prompt that stand for images; empty where that is not known."""

    @property
    def refs(self) -> list[Visual]:
        """References of all rows, each once."""
        return list(dict.fromkeys(ref for row in self.rows for ref in row))


def image_sets(data: RolloutDataModule | ExampleDataModule, processor: Processor) -> list[ImageSet]:
    """Return the images of the training rows, and of each validation set. Prompts of rollouts that validate have no
    tokens."""
    tokens_of_images = partial(count_placeholders, processor.placeholders)
    if isinstance(data, RolloutDataModule):
        names = ["train", *map(set_key, data.val_names)]
        sets = zip(data.columns_of_sets(), (data.report[name]["kept"] for name in names))
        rows = [[shown_in(columns, row) for row in range(count)] for columns, count in sets]
        tokens = [list(map(tokens_of_images, data.peek(len(rows[0])).prompt_ids)), *((),) * len(data.val_names)]
        return [ImageSet(*each) for each in zip(names, rows, tokens)]
    sets = {"train": data.corpus.train} | {set_key(name): part for name, part in data.corpus.val.items()}
    return [
        ImageSet(
            name,
            [each.shown.visuals if each.shown else () for each in part.examples],
            [tokens_of_images(each.texts[0].ids) for each in part.examples],
        )
        for name, part in sets.items()
    ]


def print_images(console: Console, sets: Sequence[ImageSet]) -> None:
    """Print the images of each set."""
    console.print(Text("\nImages", style="bold"))
    for images in sets:
        refs, counts = images.refs, [len(row) for row in images.rows if row]
        line = f"{images.name}: {len(counts)} of {len(images.rows)} rows show images"
        if not counts:
            console.print(Text(line))
            continue
        sizes = sorted(((ref.width, ref.height) for ref in refs), key=lambda size: (size[0] * size[1], size))
        low, middle, high = (f"{size[0]} x {size[1]}" for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]))
        line += f", {_spread(counts)} each; pixels {low}" + (f" to {high}, median {middle}" if low != high else "")
        if frames := [len(ref.frames) for ref in refs if isinstance(ref, VideoRef)]:
            line += f"; {len(frames)} of them videos, of {_spread(frames)} frames"
        if tokens := [count for count, row in zip(images.tokens, images.rows) if row]:
            line += f"; image tokens of a prompt {_spread(tokens)}"
        console.print(Text(line))
        names = str(Pictures(tuple(refs[:_NAMES]))).split("\n")
        more = f" and {len(refs) - len(names)} more" if len(refs) > len(names) else ""
        console.print(Text(f"  {', '.join(printable(name, 60) for name in names)}{more}", style="dim"))


def _spread(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}, median {statistics.median(counts):g}"


def print_bad_images(console: Console, data: RolloutDataModule | ExampleDataModule) -> None:
    """Print the rows that `data.on_bad_row=skip` left out because of their images: everything is read once more for
    that."""
    bad = sum(counts.get("bad", 0) for counts in data.report.values())
    if not bad or getattr(data, "stream_buffer", None) is not None:  # of a stream only its beginning is read
        return
    found = list(islice(_bad_images(data), min(bad, _BAD)))
    if found:
        more = f", the first {_BAD}" if len(found) == _BAD < bad else ""
        console.print(Text(f"\nRows that are left out because of their images{more}", style="bold"))
    for line in found:
        console.print(Text(printable(line, 400)), soft_wrap=True)


def _bad_images(data: RolloutDataModule | ExampleDataModule) -> Iterator[str]:
    options: Any = data.options
    keys = (options.prompt_key,) if isinstance(data, RolloutDataModule) else ("prompt", "messages")
    for rows in (*data.train_rows(), *data.val_rows().values()):
        reader = ImageReader(rows.folder, options.max_image_pixels)
        for i in range(len(rows)):
            try:
                row = read_row(rows[i], rows.where(i), rename=options.rename, map_row=options.map_row).row
            except DataError:  # not because of its images
                continue
            try:
                for ref in reader.read(row, rows.where(i), *keys)[1] if row else ():
                    ref.open()
            except DataError as error:
                message = str(error)
                yield message if message.startswith(rows.where(i)) else f"{rows.where(i)}: {message}"
