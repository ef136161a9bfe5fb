"""A frozen model whose distributions a student learns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from lit_rl.errors import ConfigError, GenerationError, LitRLError
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.reference.base import Held, OnCPU, Scorer


class Teacher(Held):
    """The description of a frozen teacher whose distributions a student learns, and where its weights are held.

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
        """Load the teacher.

        Raises:
            ConfigError: it has another vocabulary than the student, or its settings are wrong.
        """
        self.check_vocabulary()
        with _keys_of_the_teacher():
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

    def check_written(self, token_ids: Tensor, writer: str) -> None:
        """Refuse tokens that one of the two tokenizers does not have.

        Args:
            token_ids: Written by one of the two.
            writer: Which, for the message.

        Raises:
            GenerationError: a token was written that the tokenizer does not have, so the other cannot read it.
        """
        if self.shared_tokens is None or (highest := int(token_ids.max())) < self.shared_tokens:
            return
        raise GenerationError(
            f"The {writer} wrote the token id {highest}, and the tokenizer has {self.shared_tokens} tokens: the rows "
            "after them pad an embedding, by another length in the student than in the teacher. A trained model does "
            "not write them. For a student with random weights set algo.on_policy_fraction=0, or give it an embedding "
            "as long as the teacher's."
        )

    def check_differs(self) -> None:
        """Refuse a teacher that is the student.

        Raises:
            ConfigError: it has the weights that the policy begins with, so that every gradient would be 0.
        """
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
    """Rewrite the policy's keys in the loader's errors, and the reference's of a held module, as the teacher's."""
    try:
        yield
    except LitRLError as error:
        message = re.sub(r"\bmodel\.(?=[a-z])", "algo.teacher.", str(error))
        raise type(error)(message.replace("reference.device", "algo.teacher_device")) from error
