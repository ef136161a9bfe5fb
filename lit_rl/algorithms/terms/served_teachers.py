"""Teachers that are servers, and several teachers of which a column of the data names each row's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_rl.algorithms.optim.strategies import shards_weights
from lit_rl.algorithms.terms.teachers import RolloutTeacher, StudentFacts, TeacherRequest
from lit_rl.core import ranks
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, DataError, GenerationError, LitRLError, did_you_mean
from lit_rl.core.rollout import Completions
from lit_rl.generation.teacher_server import TeacherServer
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.references import Scorer
from lit_rl.ops.distillation import TeacherScores
from lit_rl.ops.reductions import Metric, Metrics, mean_of


class ServerTeacher(TeacherServer, RolloutTeacher):
    """A teacher behind vLLM's OpenAI-compatible API; its settings are those of `TeacherServer`.

    Every rank asks for its own rows. A lost server ends the run with exit code 5 and a checkpoint, on all ranks.
    """

    def check(self, student: StudentFacts) -> None:
        if student.top_of == "student":
            raise ConfigError(
                "algo.distillation.top_k_of=student: a server of this kind gives log-probs of its own likeliest tokens "
                "and of the sampled ones, and of no others. Set algo.distillation.top_k_of=teacher, or take "
                "algo/teacher=model."
            )
        self.refuse_other_sampling(student.sampling)
        self.student = student.model

    def check_data(self, data: Any) -> None:
        if any(data.train_prompts.shown or ()):
            raise ConfigError(
                "algo/teacher=server: the data have images or videos, and a server of this kind reads token ids alone. "
                "Take algo/teacher=model."
            )

    def start(self, top: int) -> None:
        self.connect(self.student.tokenizer, top)

    def score(self, request: TeacherRequest) -> tuple[TeacherScores, Metrics]:
        completions = request.completions
        if completions.vision is not None:
            raise GenerationError("A teacher that is a server does not see the images of prompts.")
        before = self._requests, self._waited
        try:
            scores = ranks.run_on_all_ranks(lambda: self._scores(completions, request.top))
        except GenerationError as error:
            error.on_every_rank = True  # so a checkpoint can be saved together
            raise
        spoken = completions.response_mask
        asked, waited, rows = spoken.new_tensor(
            [self._requests - before[0], self._waited - before[1], len(completions)], dtype=torch.float32
        )
        return scores, {
            "teacher/requests": (asked, rows),
            "teacher/rate_limit_seconds": (waited, rows),
            "teacher/silent": mean_of(~scores.mask, spoken),
        }

    def _scores(self, completions: Completions, k: int) -> TeacherScores:
        attended = completions.response_mask if completions.attended is None else completions.attended
        prompts, responses = completions.prompt_ids.cpu(), completions.response_ids.cpu()
        prompt_mask, attended = completions.prompt_mask.cpu(), attended.cpu()
        starts = prompt_mask.sum(1).tolist()
        rows = [
            torch.cat([prompts[i][prompt_mask[i]], responses[i][attended[i]]]).tolist() for i in range(len(responses))
        ]
        answered = self.score_rows(rows, starts, k)
        log_probs = torch.zeros(responses.shape)
        top_ids = torch.zeros(*responses.shape, k, dtype=torch.long)
        top = torch.zeros(*responses.shape, k)
        known = torch.zeros(responses.shape, dtype=torch.bool)
        for i, row in enumerate(answered):
            finite = row.log_probs.isfinite() & row.top_log_probs.isfinite().all(-1)
            known[i, attended[i]] = finite
            log_probs[i, attended[i]] = row.log_probs.where(finite, 0)
            top_ids[i, attended[i]] = row.top_ids.where(finite[:, None], 0)
            top[i, attended[i]] = row.top_log_probs.where(finite[:, None], 0)
        device = completions.device
        return TeacherScores(
            log_probs.to(device),
            known.to(device) & completions.response_mask,
            top_ids.to(device) if k else None,
            top.to(device) if k else None,
        )


@checked("algo.teacher")
class ColumnTeachers(RolloutTeacher):
    """Several teachers: a column of the data names the one of each row.

    Args:
        column: The column.
        teachers: The teacher of each of its values, which are compared as texts.

    Raises:
        ConfigError: there is no teacher, or one of them routes rows itself.
    """

    def __init__(self, column: str, teachers: Mapping[str, RolloutTeacher]) -> None:
        self.column, self.teachers = column, {str(value): teacher for value, teacher in teachers.items()}
        if not self.teachers:
            raise ConfigError(
                "algo.teacher.teachers is empty: name a teacher for each value of the column, such as "
                "+algo/teacher@algo.teacher.teachers.math=server algo.teacher.teachers.math.base_url=URL."
            )
        for value, teacher in self.teachers.items():
            if not isinstance(teacher, RolloutTeacher) or isinstance(teacher, ColumnTeachers):
                raise ConfigError(
                    f"algo.teacher.teachers.{value} is a {type(teacher).__name__}: it takes a teacher that scores "
                    "all of its rows, such as server or model."
                )
        self._held: dict[str, Scorer] = {}

    @property
    def reads_reference(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(teacher.reads_reference for teacher in self.teachers.values())

    @property
    def reads_siblings(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(teacher.reads_siblings for teacher in self.teachers.values())

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        return {self.column}.union(*(teacher.columns_read(columns) for teacher in self.teachers.values()))

    def check(self, student: StudentFacts) -> None:
        self._each("check", student)

    def check_data(self, data: Any) -> None:
        self._each("check_data", data)
        strategy = data.trainer.strategy
        if shards_weights(strategy) and not all(isinstance(each, ServerTeacher) for each in self.teachers.values()):
            raise ConfigError(
                f"algo/teacher=by_column with {type(strategy).__name__}, which shards weights: ranks have different "
                "numbers of rows for each teacher, and would wait for one another. Take servers (algo/teacher=server "
                "for each) or strategy=ddp."
            )
        columns = data.columns_of_sets()[0]
        if self.column not in columns:
            raise ConfigError(
                f"algo.teacher.column={self.column!r} is no column of the training rows. They have "
                f"{', '.join(columns) or 'none'}.{did_you_mean(self.column, columns)}"
            )
        rows = Counter(self._named(value) for value in columns[self.column])
        counts = ", ".join(f"{value} {rows[value]}" for value in self.teachers)
        rank_zero_info(f"Training rows of each teacher ({self.column}): {counts}.")
        if unused := [value for value in self.teachers if not rows[value]]:
            rank_zero_info(f"No row has a teacher of algo.teacher.teachers.{', '.join(unused)}: it teaches nothing.")

    def _named(self, value: object) -> str:
        if str(value) in self.teachers:
            return str(value)
        raise DataError(
            f"algo.teacher.teachers has no teacher for the rows with {self.column}={value!r}. It has "
            f"{', '.join(self.teachers)}.{did_you_mean(str(value), self.teachers)} Add one "
            f"(+algo/teacher@algo.teacher.teachers.{value}=server), or leave these rows out of the data."
        )

    def start(self, top: int) -> None:
        self._each("start", top)

    def _each(self, method: str, *arguments: Any) -> None:
        for value, teacher in self.teachers.items():
            try:
                getattr(teacher, method)(*arguments)
            except LitRLError as error:
                raise type(error)(f"The teacher of {self.column}={value}: {error}") from error

    @property
    def frozen_models(self) -> dict[str, LanguageModel]:
        return {
            f"{name} of {value}": model
            for value, teacher in self.teachers.items()
            for name, model in teacher.frozen_models.items()
        }

    def companions(self, policy: nn.Module) -> dict[str, Scorer]:
        held = {value: teacher.module(policy) for value, teacher in self.teachers.items()}
        self._held = {value: module for value, module in held.items() if module is not None}
        # What Lightning moves and shards is set as an attribute of the algorithm, and so needs a name of its own.
        return {f"teacher_policy_{number}": module for number, module in enumerate(self._held.values())}

    def score(self, request: TeacherRequest) -> tuple[TeacherScores, Metrics]:
        batch, size = request.scored.batch, request.scored.group_size
        names = [self._named(value) for value in batch.columns[self.column]]
        response_mask, top = request.completions.response_mask, request.top
        shape = response_mask.shape
        log_probs, mask = torch.zeros(shape, device=response_mask.device), torch.zeros_like(response_mask)
        top_ids = torch.zeros(*shape, top, dtype=torch.long, device=response_mask.device)
        top_log_probs = torch.zeros(*shape, top, device=response_mask.device)
        metrics: Metrics = {}
        for value, teacher in self.teachers.items():
            prompts = [number for number, name in enumerate(names) if name == value]
            # Each teacher is asked on every rank, of one prompt in vain where none is its own: others may wait for it.
            scored = request.scored.prompts(prompts or [0])
            scores, more = teacher.score(replace(request, scored=scored, held=self._held.get(value)))
            rows = _rows_of(prompts, size, response_mask.device)
            count = len(rows)
            log_probs[rows], mask[rows] = scores.log_probs[:count], scores.mask[:count]
            if scores.top_ids is not None and scores.top_log_probs is not None:
                top_ids[rows], top_log_probs[rows] = scores.top_ids[:count], scores.top_log_probs[:count]
            if not prompts:  # each rank has the same metrics
                more = {name: _nothing(metric) for name, metric in more.items()}
            share = log_probs.new_tensor([count, shape[0]])
            metrics |= {f"{name}/{value}": metric for name, metric in more.items()}
            metrics |= {
                f"teacher/rows/{value}": (share[0], share[1]),
                f"teacher/log_prob/{value}": mean_of(scores.log_probs[:count], scores.mask[:count]),
            }
        if not top:
            return TeacherScores(log_probs, mask), metrics
        return TeacherScores(log_probs, mask, top_ids, top_log_probs), metrics


def _nothing(metric: Metric) -> Metric:
    """Return a mean of no rows; an extreme stays."""
    return (torch.zeros_like(metric[0]), torch.zeros_like(metric[1])) if isinstance(metric, tuple) else metric


def _rows_of(prompts: Sequence[int], size: int, device: torch.device) -> Tensor:
    first = torch.tensor(prompts, dtype=torch.long, device=device)[:, None] * size
    return (first + torch.arange(size, device=device)).flatten()
