"""The policy as its own teacher: the tokens that it wrote, scored behind a prompt that says more than it was told.

What the teacher sees beside the prompt is a `PrivilegedContext`: a column of the data, such as a demonstration (SDFT,
2601.19897), or what became of the rollout, a successful answer of the same group or feedback on the own one (SDPO,
2601.20802). The weights are the policy's of that moment, or those of the run's `reference`: the initial policy, an
average. The response is the same tokens, those that tools or an environment wrote among them; only the prompt before
them is another.
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_rl.algorithms.rollouts.scored import Scored, check_reward_name, deciding_rewards
from lit_rl.algorithms.terms.teachers import RolloutTeacher, StudentFacts, TeacherRequest
from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Episode, Prompt, message_text
from lit_rl.core.errors import ConfigError, DataError, did_you_mean
from lit_rl.core.rollout import Completions
from lit_rl.core.transfers import left_pad
from lit_rl.core.vision_inputs import PromptVision, Vision
from lit_rl.data.encode import Encoder
from lit_rl.data.message_forms import tools_argument
from lit_rl.data.rendering import row_template_kwargs
from lit_rl.data.visual_prompts import shown_again
from lit_rl.environments.environment_base import EpisodeSource
from lit_rl.environments.observations import without_payload
from lit_rl.generation.collect import texts_of
from lit_rl.ops.distillation import TeacherScores
from lit_rl.ops.ranges import AtLeastOne, Real
from lit_rl.ops.reductions import Metrics

TEMPLATE = "$prompt\n\n$context"


class PrivilegedContext(ABC):
    """Abstract base of what a self-teacher is shown beside the prompt.

    Args:
        template: The prompt with it, with `$context` and mostly `$prompt`; of chat messages the last one of the user.
    """

    reads_siblings = False
    """True if it shows other completions of the same prompt."""

    def __init__(self, template: str) -> None:
        check_template("algo.teacher.context.template", template, "context", "prompt")
        self.template = template

    def check(self, student: StudentFacts) -> None:  # noqa: B027 (most show what any run has)
        """Refuse a run in which there is nothing to show, before anything is loaded.

        Raises:
            ConfigError: names the setting.
        """

    def check_columns(self, columns: Sequence[str]) -> None:  # noqa: B027 (most need none)
        """Refuse data without a column that is needed.

        Raises:
            ConfigError: names the setting, and the columns.
        """

    @property
    def columns(self) -> set[str]:
        """Names of columns of the data that it may read."""
        return set()

    @abstractmethod
    def texts(self, scored: Scored, tokenizer: Any) -> list[str | None]:
        """Return the context of each completion; None where there is none, and the teacher has no opinion."""

    def prompt(self, prompt: Prompt, context: str, where: str) -> Prompt:
        """Return a prompt with its context.

        Of a message of texts and images it is put into the last text, or behind the images where there is none.

        Raises:
            DataError: it has no message of a user.
        """
        if isinstance(prompt, str):
            return _filled(self.template, {"prompt": prompt, "context": context})
        last = max((i for i, message in enumerate(prompt) if message.get("role") == "user"), default=None)
        if last is None:
            raise DataError(
                f"{where}: a self-teacher (algo/teacher=self) puts its context into the last message of the user, and "
                "this prompt has none. Leave such rows out, or take algo/teacher=model."
            )
        content: Any = prompt[last].get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if not any("text" in part for part in parts):
            parts.append({"type": "text", "text": ""})
        place = max(i for i, part in enumerate(parts) if "text" in part)
        text = _filled(self.template, {"prompt": parts[place]["text"], "context": context})
        parts[place] = {**parts[place], "text": text}
        told = {**prompt[last], "content": text if isinstance(content, str) else parts}
        return [*prompt[:last], told, *prompt[last + 1 :]]


def check_template(key: str, template: str, needed: str, *more: str) -> None:
    """Refuse a template without the part that it needs, or with a name that stands for nothing.

    Raises:
        ConfigError: names the key, the value and the names.
    """
    found = string.Template(template).get_identifiers() if isinstance(template, str) else []
    if needed not in found or {*found} - {needed, *more}:
        further = "".join(f", may name ${name}" for name in more)
        raise ConfigError(f"{key}={template!r} needs ${needed}{further}, and no other name behind a $ ($$ is a $).")


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Return the template with its parts put in, in one pass: a text that holds `$prompt` keeps it."""
    return string.Template(template).safe_substitute(parts)


@checked("algo.teacher.context")
class ColumnContext(PrivilegedContext):
    """A column of the data, such as a demonstration (SDFT, 2601.19897). Rows where it is empty have no teacher.

    Args:
        column: The column, of texts.
        template: The prompt with it, with `$context` and mostly `$prompt`; of chat messages the last one of the user.
    """

    def __init__(self, column: str, template: str = TEMPLATE) -> None:
        super().__init__(template)
        self.column = column

    @property
    def columns(self) -> set[str]:
        return {self.column}

    def check_columns(self, columns: Sequence[str]) -> None:
        if self.column not in columns:
            raise ConfigError(
                f"algo.teacher.context.column={self.column!r} is no column of the data. There are: "
                f"{', '.join(columns) or 'none'}.{did_you_mean(self.column, columns)}"
            )

    def texts(self, scored: Scored, tokenizer: Any) -> list[str | None]:
        values = scored.batch.columns[self.column]
        return [_text(values[i], f"the column {self.column!r}") for i in _prompt_of_rows(scored)]


@checked("algo.teacher.context")
class OutcomeContext(PrivilegedContext):
    """The outcome of the rollout (SDPO, 2601.20802): a successful answer of the same group, feedback on the own one.

    A completion is a success if its reward is at least the threshold. The teacher of a completion is shown the first
    success among the others of its group, as text without special tokens; of an episode its whole conversation behind
    the prompt. Where there is neither one nor feedback, the completion has no teacher.

    Args:
        threshold: Least reward of a success.
        metric: The reward function whose value decides, before its weight. null: the sum of all.
        feedback: A column of the data, a name under which a reward function logs texts (`log_extra`), or `episodes`:
            with `env`, what tools or the environment answered last. Shown too where it is not empty. null: none.
        feedback_shown: When feedback is shown: `always`, or `without_solution`, where no sibling is.
        siblings: Which successful completion is shown: the `first`, or `none`, for feedback alone.
        template: The prompt with it, with `$context` and mostly `$prompt`; of chat messages the last one of the user.
        solution_template: The part of a sibling, with `$solution`.
        feedback_template: The part of the feedback, with `$feedback`.
    """

    def __init__(
        self,
        threshold: Real = 1.0,
        metric: str | None = None,
        feedback: str | None = None,
        siblings: Literal["first", "none"] = "first",
        template: str = TEMPLATE,
        solution_template: str = "A correct answer to it:\n\n$solution",
        feedback_template: str = "Feedback on an attempt at it:\n\n$feedback",
        feedback_shown: Literal["always", "without_solution"] = "always",
    ) -> None:
        super().__init__(template)
        check_template("algo.teacher.context.solution_template", solution_template, "solution")
        check_template("algo.teacher.context.feedback_template", feedback_template, "feedback")
        if siblings == "none" and feedback is None:
            raise ConfigError(
                "algo.teacher.context.siblings=none shows feedback alone, and algo.teacher.context.feedback=null names "
                "none. Set one of them."
            )
        self.threshold, self.metric, self.feedback, self.siblings = threshold, metric, feedback, siblings
        self.solution_template, self.feedback_template = solution_template, feedback_template
        self.feedback_shown = feedback_shown

    @property
    def reads_siblings(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.siblings == "first"

    @property
    def columns(self) -> set[str]:
        return set() if self.feedback is None else {self.feedback}

    def check(self, student: StudentFacts) -> None:
        if self.siblings == "none":
            return
        if student.group_size < 2:
            raise ConfigError(
                f"algo.group_size={student.group_size}: the teacher is shown another completion of the same prompt, "
                "and there is none. Set it to 2 or more (8 is usual), or algo.teacher.context.siblings=none with a "
                "feedback."
            )
        if not student.reward_names:
            raise ConfigError(
                "algo.teacher.context: a sibling is successful by its reward, and there is no reward function. Set "
                "reward, such as exact_match."
            )
        if self.metric is not None:
            check_reward_name("algo.teacher.context.metric", self.metric, student.reward_names)

    def texts(self, scored: Scored, tokenizer: Any) -> list[str | None]:
        found: list[list[str]] = [[] for _ in range(len(scored.completions))]
        if self.siblings == "first":
            answers, episodes = texts_of(scored.completions, tokenizer), scored.completions.episodes
            success = deciding_rewards(scored.scores, self.metric) >= self.threshold  # not where it is NaN
            chosen = first_siblings(success, scored.completions.on_host.group_id)
            for parts, sibling in zip(found, chosen):
                if sibling is not None and answers[sibling].strip():
                    told = answers[sibling] if episodes is None else episodes[sibling].transcript()
                    parts.append(_filled(self.solution_template, {"solution": told}))
        if self.feedback is not None:
            for parts, text in zip(found, self._feedback(scored)):
                if text is not None and (self.feedback_shown == "always" or not parts):
                    parts.append(_filled(self.feedback_template, {"feedback": text}))
        return ["\n\n".join(parts) or None for parts in found]

    def _feedback(self, scored: Scored) -> list[str | None]:
        name = self.feedback
        assert name is not None
        extras, columns, episodes = scored.scores.extras, scored.batch.columns, scored.completions.episodes or ()
        if name in extras:
            return [_text(value, f"log_extra {name!r}") for value in extras[name]]
        if name in columns:
            return [_text(columns[name][i], f"the column {name!r}") for i in _prompt_of_rows(scored)]
        if name == "episodes" and episodes:
            return [last_answer(episode) for episode in episodes]
        known = [*columns, *extras, *(["episodes"] if episodes else [])]
        raise ConfigError(
            f"algo.teacher.context.feedback={name!r} is no column of the data, no reward function has logged texts "
            f"under that name, and env= gives none. There are: {', '.join(known) or 'none'}."
            f"{did_you_mean(name, known)}"
        )


def last_answer(episode: Episode) -> str | None:
    """Return what tools or the environment said last in an episode, whether or not the policy read it; None where they
    said nothing."""
    answers = [list(run) for by_policy, run in groupby(episode.messages, _is_policys) if not by_policy]
    return _text("\n".join(map(message_text, answers[-1])), "the last answer") if answers else None


def _is_policys(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant"


def first_siblings(success: Tensor, group_id: Tensor) -> list[int | None]:
    """Return for each completion the first successful one of its group but itself; None where there is none.

    Args:
        success: Bool `(b,)`.
        group_id: Long `(b,)`.
    """
    of_group: dict[int, list[int]] = {}
    groups = group_id.tolist()
    for row in success.nonzero().flatten().tolist():
        of_group.setdefault(groups[row], []).append(row)
    return [next((i for i in of_group.get(group, ())[:2] if i != row), None) for row, group in enumerate(groups)]


def _prompt_of_rows(scored: Scored) -> list[int]:
    return [row // scored.group_size for row in range(len(scored.completions))]


def _text(value: Any, what: str) -> str | None:
    """Return a context as text; None where it is empty.

    Raises:
        DataError: it is no text.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise DataError(f"algo.teacher.context: {what} holds a {type(value).__name__}, and a text is needed.")
    return value if value.strip() else None


# ------------------------------------------------------------------ the teacher


@checked("algo.teacher")
class SelfTeacher(RolloutTeacher):
    """The policy itself, or the run's reference, behind a prompt with privileged context.

    The prompt is encoded like those of the run, by its chat template and the arguments of the row, with its images.
    That of an episode is the one with which it began: with the tools, and what the environment said first. A completion
    whose prompt with context is too long, or holds the text of a control token, has no teacher, and is counted.

    Args:
        context: What the teacher is shown beside the prompt.
        weights: Of the teacher: the run's `reference` (`frozen_copy` is the initial policy, `ema` an average), or
            `live`, those of the policy when the rollout is taken.
        max_prompt_tokens: Longest prompt with context, in tokens. null: as the model's context allows.
    """

    def __init__(
        self,
        context: PrivilegedContext,
        weights: Literal["reference", "live"] = "reference",
        max_prompt_tokens: AtLeastOne | None = None,
    ) -> None:
        self.context, self.weights, self.max_prompt_tokens = context, weights, max_prompt_tokens
        self._context_length: int | None = None

    @property
    def reads_reference(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.weights == "reference"

    @property
    def reads_siblings(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.context.reads_siblings

    def check(self, student: StudentFacts) -> None:
        self._context_length = student.model.context_length
        if student.env is not None and not student.env.converses:
            raise ConfigError(
                f"env={type(student.env).__name__}: a function of yours writes the prompts of its episodes, and "
                "algo/teacher=self cannot put a context into them. Take env=tools, mcp or environment, or "
                "algo/teacher=model."
            )
        self.context.check(student)

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        return self.context.columns & {*columns}

    def check_data(self, data: Any) -> None:
        self.context.check_columns(data.columns)

    def _longest(self, response: int) -> int:
        """Return the most tokens of a prompt before a response of so many tokens."""
        left = 1 << 62 if self._context_length is None else self._context_length - response
        return left if self.max_prompt_tokens is None else min(left, self.max_prompt_tokens)

    def score(self, request: TeacherRequest) -> tuple[TeacherScores, Metrics]:
        completions = request.completions
        encoder = request.encoder()
        contexts = self.context.texts(request.scored, encoder.tokenizer)
        prompts = self._prompts(request.scored, contexts, encoder, request.source)
        has_context = torch.tensor([prompt is not None for prompt in prompts], device=completions.device)
        behind = with_prompts(completions, prompts)
        mask = completions.response_mask & has_context[:, None]
        live = self.weights == "live"
        with nullcontext(request.policy) if live else request.reference() as model:
            scores = request.scores_by(model, behind, mask)
        given = sum(context is not None for context in contexts)
        left_out = torch.full((), float(given - sum(prompt is not None for prompt in prompts)), device=mask.device)
        return scores, {"teacher/left_out": (left_out, torch.full_like(left_out, float(len(prompts))))}

    def _prompts(
        self, scored: Scored, contexts: Sequence[str | None], encoder: Encoder, source: EpisodeSource | None
    ) -> list[EncodedPrompt | None]:
        """Return each completion's prompt with its context; None without one, and where it is left out.

        Raises:
            DataError: a prompt of messages has none of the user.
        """
        batch, completions = scored.batch, scored.completions
        lengths, episodes = completions.on_host.read_lengths.tolist(), completions.episodes
        seen = completions.vision.rows if completions.vision is not None else [None] * len(completions)
        known: dict[tuple[int, str], EncodedPrompt | None] = {}
        found: list[EncodedPrompt | None] = []
        for row, (i, context, length) in enumerate(zip(_prompt_of_rows(scored), contexts, lengths)):
            if context is None:
                found.append(None)
                continue
            if (i, context) not in known:
                where = f"row {batch.rows[i]}"
                own = {"prompt": batch.prompts[i], **{name: values[i] for name, values in batch.columns.items()}}
                if source is None:
                    kwargs = row_template_kwargs(own, where) | tools_argument(own.get("tools"))
                else:
                    kwargs = source.template_kwargs(own)
                begun = batch.prompts[i] if episodes is None else episodes[row].prompt
                prompt = self.context.prompt(begun, context, where)
                try:
                    known[i, context] = _encoded(prompt, seen[row], where, encoder.with_kwargs(kwargs))
                except DataError:  # the policy wrote the text of a control token
                    known[i, context] = None
            told = known[i, context]
            found.append(None if told is None or len(told.ids) > self._longest(length) else told)
        return found


class EncodedPrompt(NamedTuple):
    """A prompt as a model reads it."""

    ids: Sequence[int]
    seen: PromptVision | None = None
    """Vision inputs. None: it shows no image."""


def _encoded(prompt: Prompt, seen: PromptVision | None, where: str, encoder: Encoder) -> EncodedPrompt:
    if isinstance(prompt, str) or seen is None:
        return EncodedPrompt(encoder.prompt_ids(prompt, where))
    bare = [{**message, "content": without_payload(message["content"])} for message in prompt]
    return EncodedPrompt(*shown_again(encoder.processor, encoder.render_prompt(bare, where), seen, where))


def with_prompts(completions: Completions, prompts: Sequence[EncodedPrompt | None]) -> Completions:
    """Return the same responses behind other prompts, padded on the left; None keeps a row's own."""
    host, vision = completions.on_host, completions.vision
    own = [ids[mask].tolist() for ids, mask in zip(host.prompt_ids, host.prompt_mask)]
    rows = [mine if other is None else list(other.ids) for mine, other in zip(own, prompts, strict=True)]
    ids, mask = left_pad(rows, 0)
    moved = {"prompt_ids": ids.to(completions.device), "prompt_mask": mask.to(completions.device)}
    if vision is not None:
        seen = [mine if other is None else other.seen for mine, other in zip(vision.rows, prompts)]
        vision = Vision(seen, torch.arange(len(seen)), vision.later)
    return replace(completions, **moved, vision=vision, episodes=None, host=None)
