"""What distillation needs beside its loss: a teacher, and completions that are written for the step at hand."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_rl.algorithms import checks
from lit_rl.algorithms.batching import mix
from lit_rl.errors import ConfigError, DataError, GenerationError, LitRLError
from lit_rl.examples import ExampleBatch, TokenBatch, Totals
from lit_rl.generation.collect import Vocabulary, collect
from lit_rl.generation.native import for_another_policy
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.reference import Held, OnCPU, Scorer
from lit_rl.models.sharding import unsharded
from lit_rl.rollout import Completions, PromptBatch

if TYPE_CHECKING:
    from lit_rl.algorithms.gkd import GKD

Writer = Literal["data", "student", "teacher"]
"""Who wrote the completions of an optimizer step."""


class Teacher(Held):
    """A frozen model whose distributions a student learns: a description, and where its weights are held.

    Args:
        model: The teacher. A name stands for that model in the student's type and with its attention.
        student: The policy's description.
        device: "cpu" keeps it on the CPU; None places it like the policy.

    Raises:
        ConfigError: a setting that would train it, or an unknown device.
    """

    def __init__(self, model: LanguageModel | str, student: LanguageModel, device: Literal["cpu"] | None) -> None:
        with _keys_of_the_teacher():
            super().__init__(device)
            like_student = {"dtype": student.dtype, "attn_implementation": student.attn_implementation}
            model = LanguageModel.of(model, "algo.teacher", **like_student)
        if model.lora is not None:
            raise ConfigError(
                "algo.teacher.lora makes an adapter to be trained, and a teacher is frozen: leave it out."
            )
        self.model, self.student = model, student
        self.shared_tokens: int | None = None
        """Rows of logits that the two have in common, where their embeddings are padded to different lengths. None
        compares all rows."""

    def module(self) -> Scorer:
        """Load it. Raises ConfigError for another vocabulary than the student's, and what loading a model raises."""
        self.check_vocabulary()
        with _keys_of_the_teacher():
            model = self.model.load()
        held = self.hold(model)
        if isinstance(held, OnCPU):
            held.config = model.config  # pyright: ignore  (packed rows ask which attention a model has)
        return held

    def check_vocabulary(self) -> None:
        """Raises ConfigError: not the same tokens under the same ids. Rows may follow them that no token has."""
        with _keys_of_the_teacher():
            theirs, rows = self.model.tokenizer.get_vocab(), self.model.config.get_text_config().vocab_size
        ours, needed = self.student.tokenizer.get_vocab(), self.student.config.get_text_config().vocab_size
        different = sorted(t for t in theirs.keys() | ours.keys() if theirs.get(t, -1) != ours.get(t, -1))
        if different:
            how = (
                f"{len(different)} tokens are not the same token under the same id "
                f"({', '.join(map(repr, different[:3]))})"
            )
            raise ConfigError(
                f"algo.teacher.name={self.model.name!r} has another vocabulary than the policy {self.student.name!r}: "
                f"{how}. Distributions are compared token by token, so the teacher must be of the policy's own family. "
                "From any other model, learn its texts: algo=sft."
            )
        self.shared_tokens = None if rows == needed else max(ours.values()) + 1  # no embedding has fewer rows

    def check_written(self, completions: Completions, writer: str) -> None:
        """Raises GenerationError: a token was written that the tokenizer does not have, so the other cannot read it."""
        if self.shared_tokens is None or (highest := int(completions.response_ids.max())) < self.shared_tokens:
            return
        raise GenerationError(
            f"The {writer} wrote the token id {highest}, and the tokenizer has {self.shared_tokens} tokens: the rows "
            "after them pad an embedding, by another length in the student than in the teacher. A trained model does "
            "not write them. For a student with random weights set algo.on_policy_fraction=0, or give it an embedding "
            "as long as the teacher's."
        )

    def check_differs(self) -> None:
        """Raises ConfigError: it has the weights that the policy begins with, so that every gradient would be 0."""
        if _weights(self.model) == _weights(self.student) and self.student.quantization == self.model.quantization:
            raise ConfigError(
                f"algo.teacher.name={self.model.name!r} has the very weights that the policy begins with: there is "
                "nothing to learn from it. Name a better model of the same family, such as the run_dir/hf of another "
                "run. The additions have an example: experiment=gkd_addition."
            )


def _weights(model: LanguageModel) -> tuple[Any, ...]:
    return model.path, model.revision, model.adapter, model.init_kwargs


@contextmanager
def _keys_of_the_teacher() -> Iterator[None]:
    """The loader's errors name the policy's keys, and those of a held module the reference's."""
    try:
        yield
    except LitRLError as error:
        message = re.sub(r"\bmodel\.(?=[a-z])", "algo.teacher.", str(error))
        raise type(error)(message.replace("reference.device", "algo.teacher_device")) from error


def writer_of(step: int, *, seed: int, on_policy_fraction: float, teacher_completions: bool) -> Writer:
    """Who writes the completions of an optimizer step: drawn from its number, so every rank and a resumed run agree."""
    if random.Random(mix(seed, step)).random() < on_policy_fraction:
        return "student"
    return "teacher" if teacher_completions else "data"


def learned_columns(tokens: TokenBatch) -> Tensor:
    """Columns that predict a learned token in some row; one where there are none, so that a loss has a graph."""
    columns = tokens.learned.any(0).nonzero().flatten()
    return columns if len(columns) else columns.new_zeros(1)


# ---------------------------------------------------------------- completions that are written for the step


def rewritten(module: GKD, batch: ExampleBatch, writer: Writer) -> tuple[ExampleBatch, ...]:
    """All micro-batches of this rank's step, their completions replaced by those of the student or the teacher.

    They count what the fresh step counts over all ranks. A collective: every rank calls it.

    Args:
        module: Asked for samples.
        batch: The step's first micro-batch.
        writer: The student or the teacher.
    """
    micro = batch.whole or (batch,)
    prompts = prompts_of(module, micro)
    with module.rollout_context():
        completions = module.generate(prompts) if writer == "student" else _by_teacher(module, prompts)
    module.teacher.check_written(completions, writer)
    fresh = as_tokens(completions, module.device)
    rows = [len(part) for part in micro]
    parts = [_trimmed(*part) for part in zip(*(field.split(rows) for field in fresh))]
    _, attended, learned = fresh
    mine = torch.stack([learned.sum(), attended.sum()])[None]
    everyone = (module.everyones(mine) if module.trainer_or_none else mine).sum(0).tolist()
    totals = Totals(rows=batch.totals.rows, tokens=everyone[0], attended=everyone[1], shares=batch.totals.shares)
    return tuple(
        replace(part, tokens=tokens, totals=totals, whole=()) for part, tokens in zip(micro, parts, strict=True)
    )


def prompts_of(module: GKD, micro: Sequence[ExampleBatch]) -> PromptBatch:
    """The prompts of texts: their tokens before the first that is learned."""
    prompt_ids = []
    for part in micro:
        first = torch.where(part.tokens.loss_mask.any(1), part.tokens.loss_mask.int().argmax(1), 1)
        rows = part.tokens.input_ids.tolist()
        prompt_ids += [row[:length] for row, length in zip(rows, first.tolist())]
    mine = [row for part in micro for row in part.rows]
    return PromptBatch(
        prompts=[""] * len(mine),
        prompt_ids=prompt_ids,
        columns={},
        rows=mine,
        occurrences=_occurrences(module, mine),
        rollout=micro[0].step,
    )


def _occurrences(module: GKD, mine: Sequence[int]) -> list[int]:
    """How many times each of our rows stood earlier in the step, which is dealt out to the ranks in its order."""
    rows = torch.tensor(mine)
    everyone = (module.everyones(rows) if module.trainer_or_none else rows).tolist()
    start = module.global_rank * len(mine)
    seen: Counter[int] = Counter(everyone[:start])
    counts = []
    for row in mine:
        counts.append(seen[row])
        seen[row] += 1
    return counts


def _by_teacher(module: GKD, prompts: PromptBatch) -> Completions:
    held = module.teacher_policy
    model: nn.Module = held.model if isinstance(held, OnCPU) else held  # pyright: ignore
    with unsharded(model):
        return collect(
            for_another_policy(module.generator),
            model,
            prompts,
            sampling=module.sampling,
            group_size=1,
            vocabulary=Vocabulary.of(module.model),
            version=module.step,
            seed=module.seed,
        )


def as_tokens(completions: Completions, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`input_ids`, `attention_mask` and `loss_mask` `(b, s)` of prompts with completions, padded on the right."""
    ids = torch.cat([completions.prompt_ids, completions.response_ids], 1)
    attended = completions.attention_mask
    learned = F.pad(completions.response_mask, (completions.prompt_ids.shape[1], 0))
    order = (~attended).int().argsort(dim=1, stable=True)
    return tuple(field.gather(1, order).to(device) for field in (ids, attended, learned))  # pyright: ignore


def _trimmed(ids: Tensor, attended: Tensor, learned: Tensor) -> TokenBatch:
    """Without the columns that are padding in every row: they would cost and say nothing."""
    width = max(2, int(attended.any(0).sum()))
    return TokenBatch(ids[:, :width], attended[:, :width], learned[:, :width])


def check_prompts(module: GKD, data: Any) -> None:
    """Refuse texts from which nobody could go on writing.

    Raises:
        ConfigError: rows are packed, something else than completions is learned, or the context is too short.
        DataError: a row has no prompt.
    """
    why = "The completions of a step are written anew (algo.on_policy_fraction, algo.teacher_completions)"
    options = data.options
    for key, needed in (("learn", "completion"), ("packing", "none")):
        if (came := getattr(options, key)) != needed:
            raise ConfigError(f"data.{key}={came}: {why}, which needs a prompt a row: set data.{key}={needed}.")
    longest = 0
    for example in data.corpus.train.examples:
        length = example.texts[0].prompt_tokens
        if not length:
            raise DataError(
                f"{example.where}: the text has no prompt. {why}, so every row needs a prompt and a completion; for "
                "texts alone set algo.on_policy_fraction=0 and algo.teacher_completions=false."
            )
        longest = max(longest, length)
    checks.context(module, "sampling", longest, module.sampling.max_new_tokens, "data.max_length")
