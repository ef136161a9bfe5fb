"""Distillation: a frozen teacher, and its divergence from the student without the logits of either in memory.

Distillation needs whole distributions of student and teacher. Each model runs up to the input of its head; then both
heads work on a block of tokens at a time, `LOGITS_PER_BLOCK` numbers of each model, and what is kept of a block is
one number a token. The backward pass computes the student's and the teacher's logits of a block anew, and sums the
gradient of the student's head in float32 (`lit_rl.ops.fused_head`). If all logits fit into one block they are kept, as
there is nothing to save.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.core.transfers import to_device
from lit_rl.models import hub_files
from lit_rl.models.forward import text_logits
from lit_rl.models.forward_inputs import known_masks, trunk_inputs
from lit_rl.models.head import factors, has_separable_head, linear_head, without_head
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.references import Held, OnCPU, Scorer
from lit_rl.models.tokenizer import different_tokens
from lit_rl.ops.fused_head import measure_rows
from lit_rl.ops.logprobs import logprobs_and_entropy, token_stats


class Teacher(Held):
    """The description of a frozen teacher whose distributions a student learns, and where its weights are held.

    Args:
        model: The teacher. A name stands for that model in the student's type and with its attention.
        student: The policy's description.
        device: "cpu" keeps it on the CPU; None places it like the policy.
        key: Setting of the teacher, for messages.
        device_key: Setting of its device.

    Raises:
        ConfigError: a setting that would train it, or an unknown device.
    """

    def __init__(
        self,
        model: LanguageModel | str,
        student: LanguageModel,
        device: Literal["cpu"] | None,
        key: str = "algo.teacher",
        device_key: str = "algo.teacher_device",
    ) -> None:
        self.key = key
        self._renamed = (r"\bmodel\.(?=[a-z])", f"{key}."), (r"reference\.device", device_key)
        with hub_files.rename_keys(*self._renamed):
            super().__init__(device)
            like_student = {"dtype": student.dtype, "attn_implementation": student.attn_implementation}
            model = LanguageModel.of(model, key, **like_student)
        if model.lora is not None:
            raise ConfigError(f"{key}.lora makes an adapter to be trained, and a teacher is frozen: leave it out.")
        self.model, self.student = model, student
        self.shared_tokens: int | None = None
        """Rows of logits that the two have in common, where their embeddings are padded to different lengths. None
        compares all rows."""

    def module(self) -> Scorer:
        """Load the teacher.

        Raises:
            ConfigError: it has another vocabulary than the student, or its settings are wrong.
        """
        self.check_vocabulary()
        with hub_files.rename_keys(*self._renamed):
            model = self.model.load()
        held = self.hold(model)
        if isinstance(held, OnCPU):
            held.config = model.config  # pyright: ignore  (packed rows ask which attention a model has)
        return held

    def check_vocabulary(self) -> None:
        """Refuse another vocabulary. Logits may have more rows than the tokenizer has tokens, of another number in each
        model.

        Raises:
            ConfigError: the two do not have the same tokens under the same ids.
        """
        with hub_files.rename_keys(*self._renamed):
            teacher_tokens, rows = self.model.tokenizer.get_vocab(), self.model.config.get_text_config().vocab_size
        student_tokens, needed = self.student.tokenizer.get_vocab(), self.student.config.get_text_config().vocab_size
        different = different_tokens(teacher_tokens, student_tokens)
        if different:
            difference = (
                f"{len(different)} tokens are not the same token under the same id "
                f"({', '.join(map(repr, different[:3]))})"
            )
            raise ConfigError(
                f"{self.key}.name={self.model.name!r} has another vocabulary than the policy {self.student.name!r}: "
                f"{difference}. Distributions are compared token by token, so the teacher must be of the policy's own "
                "family. From any other model, learn its texts: algo=sft."
            )
        self.shared_tokens = None if rows == needed else max(student_tokens.values()) + 1  # no embedding has fewer rows

    def check_written(self, token_ids: Tensor, writer: str) -> None:
        """Refuse tokens that one of the two tokenizers does not have.

        Args:
            token_ids: Written by one of the two.
            writer: Name of the writer in the message, "student" or "teacher".

        Raises:
            GenerationError: a token was written that the tokenizer does not have, so the other cannot read it.
        """
        if self.shared_tokens is None or (highest := int(token_ids.max())) < self.shared_tokens:
            return
        raise GenerationError(
            f"The {writer} wrote the token id {highest}, and the tokenizer has only {self.shared_tokens} tokens. The "
            "embedding rows above them are padding, of which student and teacher have different numbers, and a trained "
            "model never writes them. If the student has random weights, set algo.on_policy_fraction=0, or give it as "
            "many embedding rows as the teacher has."
        )

    def check_differs(self) -> None:
        """Refuse a teacher that is the student.

        Raises:
            ConfigError: it has the weights that the policy begins with, so that every gradient would be 0.
        """
        if _weights(self.model) == _weights(self.student) and self.student.quantization == self.model.quantization:
            raise ConfigError(
                f"{self.key}.name={self.model.name!r} has the very weights that the policy begins with: there is "
                "nothing to learn from it. Name a better model of the same family, such as the run_dir/hf of another "
                "run. With the shipped policy there are experiment=opd_addition (algo=opd) and gkd_addition (algo=gkd)."
            )


def _weights(model: LanguageModel) -> tuple[Any, ...]:
    return model.path, model.revision, model.adapter, model.init_kwargs


LOGITS_PER_BLOCK = 1 << 24

Divergence = Callable[[Tensor, Tensor], Tensor]
"""`(1, n, v), (1, n, v) -> (1, n)`: the divergence of the student's logits from the teacher's."""


@dataclass(frozen=True)
class DistillationScores:
    """Divergence and statistics, float32 `(n,)` each: one number for each learned token, row by row."""

    divergence: Tensor
    """The divergence, with gradient."""
    correct: Tensor
    """True where the token is the student's likeliest."""
    entropy: Tensor | None = None
    """Entropy of the student's next-token distribution, in nats. None unless requested."""
    teacher_entropy: Tensor | None = None
    """Entropy of the teacher's."""
    aux_loss: Tensor | None = None
    """The student's router loss; None unless requested."""


def distillation_scores(
    student: nn.Module,
    teacher: nn.Module,
    tokens: TokenBatch,
    divergence: Divergence,
    *,
    shared_tokens: int | None,
    entropies: bool = False,
    router_aux: bool = False,
    fused: bool = True,
) -> DistillationScores:
    """Compare student and teacher on the `n` learned tokens of texts; `n` may be 0.

    Args:
        student: Gets the gradient.
        teacher: Gets none.
        tokens: `b` rows.
        divergence: Function of the student's and the teacher's logits that gives the divergence at each token.
        shared_tokens: Number of tokens, the first of both vocabularies, that are compared. None: all.
        entropies: Whether to compute those of both.
        router_aux: Whether to compute the student's load-balancing loss.
        fused: Whether to work in blocks, where both models allow it.

    Raises:
        ConfigError: the student has no router whose load could be balanced.
    """
    columns = tokens.learned.any(0).nonzero().flatten()
    columns = columns if len(columns) else columns.new_zeros(1)  # one where none is learned, so that a loss has a graph
    at = tokens.learned[:, columns].flatten().nonzero().flatten()
    ids = tokens.input_ids[:, 1:][:, columns].flatten()[at]
    in_blocks = fused and has_separable_head(student) and has_separable_head(teacher)
    # Of each model its logits `(b, c, v)`, or where blocks are taken the inputs `(b, c, d)` of its head.
    with torch.no_grad(), without_head(teacher) if in_blocks else nullcontext():
        teacher_outputs, _ = text_logits(teacher, tokens, columns, False)
    with without_head(student) if in_blocks else nullcontext():
        student_outputs, aux_loss = text_logits(student, tokens, columns, router_aux)
    student_rows, teacher_rows = (
        outputs.flatten(0, 1).index_select(0, at) for outputs in (student_outputs, teacher_outputs)
    )
    student_head = linear_head(student) if in_blocks else None
    teacher_head = linear_head(teacher) if in_blocks else None

    def compare(rows: slice, logits: Tensor) -> tuple[Tensor, ...]:
        logits = logits[None, :, :shared_tokens]
        with torch.no_grad():
            teacher_logits = teacher_rows[rows] if teacher_head is None else teacher_head(teacher_rows[rows])
            teacher_logits, plain = teacher_logits[None, :, :shared_tokens], logits.detach()
            both = (plain, teacher_logits) if entropies else ()
            found = [logprobs_and_entropy(each, ids[rows][None])[1][0] for each in both]
            correct = token_stats(plain, ids[rows][None]).correct[0].float()
        return divergence(logits, teacher_logits)[0], correct, *found

    if student_head is None or teacher_head is None:
        return DistillationScores(*compare(slice(None), student_rows), aux_loss=aux_loss)
    size = max(1, LOGITS_PER_BLOCK // max(head.weight.shape[0] for head in (student_head, teacher_head)))
    if len(at) <= size:
        return DistillationScores(*compare(slice(None), student_head(student_rows)), aux_loss=aux_loss)
    return DistillationScores(
        *measure_rows(*factors(student_rows, student_head), compare, size=size),  # pyright: ignore
        aux_loss=aux_loss,
    )


@torch.no_grad()
def top_tokens(
    model: nn.Module, completions: Completions, k: int, sampling: Sampling, *, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens at each position of the responses: log-probs, float32, and ids, `(b, t, k)` each.

    0 at padding and at tokens that the policy did not sample.

    Args:
        model: Called like the policy.
        completions: `b` rows, in one call of the model.
        k: Number of tokens, at most the vocabulary.
        sampling: Settings whose temperature divides the logits; the others are not read.
        tokens: Tokens, the first of the vocabulary, that may be among them. None: all.
    """
    completions = completions.with_host()
    ids, host, in_blocks = completions.response_ids, completions.on_host, has_separable_head(model)
    inputs = {**trunk_inputs(model, completions), "logits_to_keep": ids.shape[1] + 1, "use_cache": False}
    with known_masks(host.attention_mask), without_head(model) if in_blocks else nullcontext():
        outputs = model(**inputs).logits[:, -(ids.shape[1] + 1) : -1]
    at = to_device(host.response_mask.flatten().nonzero().flatten(), ids.device)
    rows = outputs.flatten(0, 1).index_select(0, at)
    head = linear_head(model) if in_blocks else None
    width = rows.shape[1] if head is None else head.weight.shape[0]
    values = torch.zeros(*ids.shape, k, device=ids.device)
    found = torch.zeros(*ids.shape, k, device=ids.device, dtype=torch.long)
    for block in at.split(max(1, LOGITS_PER_BLOCK // width)):
        logits, rows = rows[: len(block)], rows[len(block) :]
        logits = logits if head is None else head(logits)
        best = (logits.float() / sampling.temperature).log_softmax(-1)[:, :tokens].topk(k)
        values.view(-1, k)[block], found.view(-1, k)[block] = best.values, best.indices
    return values, found
