"""The work of a step, and the files that every contender reads, so that all of them compute the same.

A model with random weights from a fixed seed, prompts, the length that each completion is forced to, rewards of the
sampled token ids, and completions for the first step, which all contenders are given: `bounds` compares what they make
of them. What is imported here is the standard library alone: rewards run in a worker, which loads this file.

    folder/model/         the checkpoint, with its tokenizer
    folder/rows.jsonl     prompts, or pairs, or texts, in the order in which they are taken
    folder/lengths.json   tokens of each completion of each rollout, EOS included
    folder/given.json     token ids of the completions of the first rollout
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


EOS = "!"
"""What ends a response: the first token of the vocabulary. A random policy draws it as rarely as any other."""

ROLLOUTS = 64
"""Rollouts, or batches, until the same rows come again."""

SHORTEST = 4
"""Tokens of the shortest forced completion, so that no two that are given are the same."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    "7m": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
    },
    "0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
    "1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32_768,
    },
}
"""Settings of a config, `Qwen2Config` where no type is named; embeddings tied. "0.5b" is Qwen2.5-0.5B, "0.6b"
Qwen3-0.6B, "1b" Gemma-3-1B."""


@dataclass(frozen=True)
class Workload:
    """One optimizer step: what is generated, and what is learned from it."""

    name: str
    method: Literal["grpo", "dpo", "sft"] = "grpo"
    shape: str = "7m"
    prompts: int = 4
    """Prompts of a rollout; pairs or texts of a step where nothing is generated."""
    group: int = 8
    """Completions of a prompt: 2 for pairs, 1 for texts."""
    prompt_tokens: int = 64
    completion_tokens: int = 64
    """Longest completion. With fixed lengths all have it, and none ends by EOS."""
    lengths: Literal["fixed", "variable"] = "fixed"
    """"variable": lognormal with mean 0.4 times the longest, capped at the longest."""
    dead: bool = False
    """Every second prompt has equal rewards in all its group, so that it teaches nothing."""
    places: int | None = None
    """Rows that ours decodes at a time; None: all that fit."""
    micro_batches: int | None = None
    """Of a step of ours; None: as few as fit."""
    slow_rewards: bool = False
    """Ours asks `slow`, which takes its time for each completion."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def generates(self) -> bool:
        return self.method == "grpo"

    def lengths_of(self, rollout: int) -> list[int]:
        """Return forced tokens of every completion of a rollout, rows of a prompt being neighbours."""
        if self.lengths == "fixed":
            return [self.completion_tokens] * self.rows
        draw, sigma = random.Random(rollout % ROLLOUTS), 0.6
        mu = math.log(0.4 * self.completion_tokens) - sigma**2 / 2
        drawn = (round(draw.lognormvariate(mu, sigma)) for _ in range(self.rows))
        return [min(max(length, SHORTEST), self.completion_tokens) for length in drawn]

    def is_dead(self, row: int) -> bool:
        """Return whether the group of this row of a rollout has equal rewards."""
        return self.dead and row // self.group % 2 == 1

    def ends(self, length: int) -> bool:
        """Return whether a completion of this length ends by EOS: the longest are cut."""
        return length < self.completion_tokens


@dataclass(frozen=True)
class Spec:
    """The order to the process of one contender, as a JSON file."""

    workload: Workload
    folder: Path
    """The workload's files."""
    work: Path
    """Its own folder."""
    device: str
    settings: Mapping[str, Any]
    """`overrides` of ours, `algo` where it is another than the method, and `learns_alone`, which gives the completions
    of every rollout, so that none are drawn; `config` of the peer's, and `lora` where it trains an adapter (with
    `rows_together`, if the frozen head is to be fast). `unrecorded` of both: no first step is written down."""

    def write(self) -> Path:
        """Return the file, in its own folder."""
        self.work.mkdir(parents=True, exist_ok=True)
        path = self.work / "spec.json"
        text = asdict(self) | {"folder": str(self.folder), "work": str(self.work)}
        path.write_text(json.dumps(text))
        return path

    @classmethod
    def read(cls, path: str | Path) -> Spec:
        """Return the counterpart of `write`."""
        told = json.loads(Path(path).read_text())
        workload = Workload(**told.pop("workload"))
        return cls(workload, Path(told.pop("folder")), Path(told.pop("work")), **told)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    def lengths(self) -> list[list[int]]:
        """Return forced lengths `[rollout][row]`."""
        return json.loads((self.folder / "lengths.json").read_text())

    def given(self) -> list[list[int]]:
        """Return completions of the first rollout."""
        return json.loads((self.folder / "given.json").read_text())


def write(
    workload: Workload, folder: Path, seed: int = 0, *, device: str = "cpu", dtype: torch.dtype | None = None
) -> None:
    """Write all files of a workload; the model's too, unless a workload of the same shape has written it there.

    Args:
        workload: Which one.
        folder: Where to.
        seed: Of rows, completions and weights.
        device: Where weights are drawn: other ones on a GPU.
        dtype: Of the weights; float32 if nothing is said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").is_file():
        write_model(workload.shape, folder / "model", seed, device=device, dtype=dtype)
    draw = random.Random(seed)
    rows = [_row(workload, draw, i) for i in range(workload.prompts * ROLLOUTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lengths.json").write_text(json.dumps([workload.lengths_of(k) for k in range(ROLLOUTS)]))
    (folder / "given.json").write_text(json.dumps(_given(workload, draw)))


def _letters(draw: random.Random, count: int) -> str:
    """Return a text of so many tokens: the tokenizer has one for each letter."""
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=count))


def _row(workload: Workload, draw: random.Random, index: int) -> dict[str, Any]:
    prompt = _letters(draw, workload.prompt_tokens)
    lengths = [workload.completion_tokens] * 2  # of rollouts nobody reads the answers
    if not workload.generates:
        first = index % workload.prompts * workload.group
        lengths = (workload.lengths_of(index // workload.prompts)[first : first + workload.group] * 2)[:2]
    answers = [_letters(draw, length - 1) for length in lengths]  # and EOS, which both sides add
    if workload.method == "dpo":
        return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    if workload.method == "sft":
        return {"prompt": prompt, "completion": answers[0]}
    return {"prompt": prompt, "dead": int(workload.is_dead(index % workload.prompts * workload.group))}


def _given(workload: Workload, draw: random.Random) -> list[list[int]]:
    """Return random tokens of the forced lengths: EOS last where the length is not the longest, and nowhere else."""
    vocabulary = SHAPES[workload.shape]["vocab_size"]
    rows = []
    for length in workload.lengths_of(0) if workload.generates else ():
        tokens = [draw.randrange(1, vocabulary) for _ in range(length)]
        rows.append([*tokens[:-1], 0] if workload.ends(length) else tokens)
    return rows


def write_model(
    shape: str, folder: Path, seed: int = 0, *, device: str = "cpu", dtype: torch.dtype | None = None
) -> None:
    """Write a model of this shape with random weights, and a tokenizer with one token a byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    assert vocabulary[EOS] == 0
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=EOS, clean_up_tokenization_spaces=False
    )
    ids = {"eos_token_id": 0, "pad_token_id": fast.pad_token_id, "bos_token_id": None}
    settings = {"model_type": "qwen2"} | SHAPES[shape]
    if settings["model_type"] != "gemma3_text":  # which has two, and its own defaults
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**settings, **ids, tie_word_embeddings=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


# ------------------------------------------------------------------------------------------------------------- rewards


SLOW_SECONDS = 0.01
"""That `slow` takes for a completion: a short program that runs, or a quick answer of a server."""


def score(completion_ids: Sequence[Sequence[int]], dead: Sequence[int], **columns: Any) -> list[float]:
    """Return the share of odd tokens; 0 for every completion of a prompt that is `dead`.

    Args:
        completion_ids: Token ids of each completion.
        dead: The prompt's column of that name, one value a completion.
        columns: What else both sides hand over.
    """
    return [float(exact(ids, bool(off))) for ids, off in zip(completion_ids, dead)]


def slow(completion_ids: Sequence[Sequence[int]], dead: Sequence[int], **columns: Any) -> list[float]:
    """Return `score`, `SLOW_SECONDS` later for each completion."""
    time.sleep(SLOW_SECONDS * len(completion_ids))
    return score(completion_ids, dead)


slow.independent_rows = True  # pyright: ignore[reportFunctionMemberAccess]


def exact(ids: Sequence[int], dead: bool) -> Fraction:
    """Return the reward of one completion."""
    return Fraction(0 if dead else sum(i & 1 for i in ids), len(ids))
