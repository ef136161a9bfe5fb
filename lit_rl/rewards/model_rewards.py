"""Reward models, which score whole completions, and process reward models, which score their steps.

Both are fed with text, so their vocabulary may be any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch.nn.functional as F
from torch import Tensor

from lit_rl.core.chat_template import apply_chat_template, tokenize_parts
from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, RewardError, did_you_mean
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.core.visuals import Visual, shown_in
from lit_rl.ops.ranges import AtLeastOne
from lit_rl.rewards.classifiers import Classifier, ScorerLike, in_lockstep, logits_of
from lit_rl.rewards.contract import Completion, Span, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def label_index(config: PreTrainedConfig, label: int | str | None, name: str) -> int:
    """Return the column of the logits.

    Args:
        config: Of the classifier.
        label: Its number, or its name in `id2label`; None where there is one only.
        name: Of the model, for messages.

    Raises:
        ConfigError: no label is named and there are several, or there is no such label.
    """
    names: dict[int, str] = {int(index): text for index, text in (config.id2label or {}).items()}
    count: int = config.num_labels  # pyright: ignore[reportAssignmentType]  # transformers makes it of id2label
    listed = ", ".join(f"{index} ({names.get(index, index)})" for index in range(count))
    if label is None:
        if count == 1:
            return 0
        raise ConfigError(
            f"name={name!r} is a classifier with num_labels={count}, and a reward is one number. Set label to the one "
            f"that is the reward: {listed}. Or take a model that was trained with num_labels=1."
        )
    if isinstance(label, str):
        found = [index for index, text in names.items() if text == label]
        if len(found) != 1:
            near = did_you_mean(label, list(names.values()))
            raise ConfigError(f"label={label!r} is no label of {name!r}, or several: allowed is {listed}.{near}")
        return found[0]
    if isinstance(label, bool) or not 0 <= label < count:
        raise ConfigError(f"label={label!r} is no label of {name!r}: allowed is {listed}.")
    return label


def scale_of(config: PreTrainedConfig, output: str) -> Callable[[Tensor], Tensor]:
    """Return the function from logits `(b, labels)` to the scale that `output` names, of the same shape.

    One label alone, and each where a text may have several (`problem_type=multi_label_classification`), has the
    probability sigmoid(logit); otherwise labels exclude each other, and it is a softmax.
    """
    if output == "logit":
        return lambda logits: logits
    alone = config.num_labels == 1 or config.problem_type == "multi_label_classification"
    logs: Any = F.logsigmoid if alone else lambda logits: F.log_softmax(logits, dim=-1)
    return logs if output == "log_probability" else lambda logits: logs(logits).exp()


@checked("")
class RewardModel(Classifier):
    """The score of prompt and completion by a sequence classifier: its one logit, or the one that `label` chooses.

    A model over images, as `RewardModeling` exports one, is shown those of the data's columns ``image`` and ``images``.
    Where prompts are messages, the conversation goes through the chat template of the reward model's own tokenizer;
    where they are texts, prompt and completion are put one after the other. Rows are padded on the right and masked, so
    a score does not depend on the batch that its row is in. Each rank loads the model once, on first use or with
    `load`; it runs without gradient and outside the Trainer's autocast.

    Args:
        name: A folder or a hub id; in Python also a classifier that is loaded already, with its tokenizer.
        revision: Branch, tag or commit of the hub repository.
        dtype: Type of the weights: "float32", "bfloat16", "float16", or "auto" (as stored).
        device: Where the model runs, such as "cpu" or "cuda:1". None: on the run's device; outside of a run on a GPU,
            else the CPU.
        batch_size: Rows of one forward pass.
        max_length: Longest row in tokens. None: the limit of the model's config.
        overlong: The treatment of a longer row: `error` ends the run, `truncate_left` keeps its last tokens, `skip`
            gives it no score (None).
        chat_template: A Jinja chat template in place of the tokenizer's.
        append_eos: End a plain text with the EOS token, as reward models are trained on plain text (TRL's too).
            Conversations end as their chat template says. None: as `ends_with_eos` in the model's config, which
            exports of `RewardModeling` have; no if it is absent.
        chat_template_kwargs: Further arguments of the chat template.
        init_kwargs: Further arguments of `from_pretrained`: fields of the model's config, `attn_implementation`.
        label: Of a classifier with several labels: the number of the one that is the reward, or its name in the
            config's `id2label`. None: the only one.
        output: The scale of the reward: the label's `logit`, `probability` or `log_probability`. Labels of one text
            exclude each other (softmax) unless there is one only, or the config says `multi_label_classification`
            (sigmoid).
        tokenizer: In Python: of a model that is loaded already; of one over images its processor.

    Raises:
        ConfigError: a setting is out of range or fixed, or ``name`` is written as a path and is no folder.
    """

    auto = "AutoModelForSequenceClassification"
    labels = 1
    allowed_overlong = ("error", "truncate_left", "skip")

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        name: ScorerLike,
        revision: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto",
        device: str | None = None,
        batch_size: AtLeastOne = 16,
        max_length: AtLeastOne | None = None,
        overlong: Literal["error", "truncate_left", "skip"] = "error",
        chat_template: str | None = None,
        append_eos: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
        label: int | str | None = None,
        output: Literal["logit", "probability", "log_probability"] = "logit",
        tokenizer: Any = None,
    ) -> None:
        self.label, self.output = label, output  # which a model that is loaded already is checked for
        super().__init__(
            name,
            tokenizer=tokenizer,
            revision=revision,
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            max_length=max_length,
            overlong=overlong,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            init_kwargs=init_kwargs,
        )
        self.append_eos = append_eos

    def check_labels(self, config: PreTrainedConfig) -> None:
        """Raise ConfigError unless one label is the reward, by `label` or because it is the only one."""
        label_index(config, self.label, self.name)

    @in_lockstep
    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        image: Sequence[Any] | None = None,
        images: Sequence[Any] | None = None,
        video: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float] | list[float | None]:
        model, tokenizer = self.load()
        if any(shows_images(list(each)) for each in completions if not isinstance(each, str)):
            raise RewardError(
                f"A tool or an environment returned images, and the reward model {self.name!r} is asked with those of "
                "prompts alone. Take a reward function, which finds them in the messages."
            )
        rows = [self._ids(tokenizer, p, c) for p, c in zip(prompts, completions, strict=True)]
        seen: list[PromptVision | None] = []
        if any(map(shows_images, prompts)):
            columns = {"image": image, "images": images, "video": video, "videos": videos}
            shown = [shown_in(columns, row) for row in range(len(prompts))]
            rows, seen = self._with_images(tokenizer, prompts, rows, shown)
        limit = self.longest(rows)
        scored = [i for i, row in enumerate(rows) if len(row) <= limit or self.overlong == "truncate_left"]
        cut = next((i for i in scored if seen and seen[i] is not None and len(rows[i]) > limit), None)
        if cut is not None:
            raise RewardError(
                f"row {cut} has {len(rows[cut])} tokens with its images for the reward model {self.name!r}, and "
                f"overlong=truncate_left to max_length={limit} would cut through them. Raise it, or set overlong to "
                "skip."
            )
        scores: list[float | None] = [None] * len(rows)
        column, scale = label_index(model.config, self.label, self.name), scale_of(model.config, self.output)
        for batch in self.batches(rows, scored):
            ids = [rows[i][-limit:] for i in batch]
            numbers = scale(logits_of(model, ids, [seen[i] for i in batch] if seen else []))[:, column]
            for i, score in zip(batch, numbers.tolist(), strict=True):
                scores[i] = score
        return scores

    def _with_images(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        rows: Sequence[list[int]],
        shown: Sequence[Sequence[Visual]],
    ) -> tuple[list[list[int]], list[PromptVision | None]]:
        """Return rows in which images have as many placeholders as the model has features, and the vision inputs of
        each.

        A prompt is processed once for all of its completions; the rest is tokenised, as in training.
        """
        processor = self.processor()
        if processor is None:
            raise RewardError(
                f"The prompts show images, and the reward model {self.name!r} reads text alone. Take one that was "
                "trained on images (algo=reward_model), or a reward function."
            )
        made: dict[tuple[str, ...], tuple[list[int], PromptVision | None]] = {}
        found, seen = [], []
        for row, (prompt, ids, images) in enumerate(zip(prompts, rows, shown, strict=True)):
            messages: Any = prompt
            how = {"tokenize": False, "add_generation_prompt": True, **self.chat_template_kwargs}
            text: Any = apply_chat_template(tokenizer, messages, **how)
            bare: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
            where = f"row {row} for the reward model {self.name!r}"
            if ids[: len(bare)] != bare:
                raise RewardError(
                    f"{where}: its chat template renders the prompt otherwise when a reply follows, or a token goes "
                    "across where the reply begins. Give another template with chat_template."
                )
            key = (text, *map(str, images))
            if key not in made:
                made[key] = processor.process(text, images, where)
            begin, vision = made[key]
            found.append([*begin, *ids[len(bare) :]])
            seen.append(vision)
        return found, seen

    def _ids(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Completion) -> list[int]:
        if isinstance(prompt, str):
            return self._text_ids(tokenizer, prompt, text_of(completion))
        self.require_chat_template(tokenizer)
        reply = completion if isinstance(completion, list | tuple) else [{"role": "assistant", "content": completion}]
        how = {"tokenize": False, **self.chat_template_kwargs}
        text: Any = apply_chat_template(tokenizer, [*prompt, *reply], **how)
        begin: Any = ""
        if hasattr(self.load()[0].config, "prompt_apart"):  # trained by lit_rl: it splits a token over the border
            begin = apply_chat_template(tokenizer, prompt, add_generation_prompt=True, **how)
        cut = len(begin) if text.startswith(begin) else 0
        return tokenize_parts(tokenizer, [text[:cut], text[cut:]])[0]

    def _text_ids(self, tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> list[int]:
        """Tokenise as one text, with EOS if `append_eos` or the model's config asks for it.

        A token over the border is split in two for a model that was trained by lit_rl.
        """
        config = self.load()[0].config
        has_bos = isinstance(tokenizer.bos_token, str) and prompt.startswith(tokenizer.bos_token)
        texts: Any = (prompt + completion, prompt)
        ids, begin = (list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"]) for text in texts)
        if begin[-1:] == [tokenizer.eos_token_id] and not prompt.endswith(str(tokenizer.eos_token)):
            begin.pop()  # some tokenizers add it by themselves
        if getattr(config, "prompt_apart", False) and ids[: len(begin)] != begin:
            rest: Any = tokenizer(completion, add_special_tokens=False)["input_ids"]
            ids = [*begin, *rest]
        append_eos = getattr(config, "ends_with_eos", False) if self.append_eos is None else self.append_eos
        if not append_eos:
            return ids
        end = tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError(
                f"append_eos=true, but the tokenizer of the reward model {self.name!r} has no EOS token. Set "
                "append_eos=false."
            )
        return ids if ids[-1:] == [end] else [*ids, end]


def shows_images(prompt: Prompt) -> bool:
    """Tell whether a message of it has a part that is an image or a video."""
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(part.get("type") in ("image", "video") for part in parts)


_AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
    "prod": math.prod,
    "last": lambda values: values[-1],
}


@checked("")
class ProcessRewardModel(Classifier):
    """The probability that each step of a completion is right, put together as one number, or each at its place.

    A completion is split at the separator; steps of white space alone are left out. Prompt, steps and separators are
    tokenised apart, as in training, and each step is read at the last token of the separator that follows it (one
    follows the last step too). A completion without a step is worth 0. Settings that are not named here are those of
    `RewardModel`.

    Args:
        name: A folder or a hub id of a token classifier with two labels, "wrong" and "right"; in Python also
            one that is loaded already, with its tokenizer.
        separator: Ends every step, as in training.
        aggregate: `min`, `mean`, `prod` (the product) or `last` of the steps' probabilities; `spans` gives every step's
            own to the characters of that step, and the reward is their sum.
        revision: Branch, tag or commit of the hub repository.
        dtype: Type of the weights: "float32", "bfloat16", "float16", or "auto" (as stored).
        device: Where the model runs. None: on the run's device; outside of a run on a GPU, else the CPU.
        batch_size: Rows of one forward pass.
        max_length: Longest row in tokens. None: the limit of the model's config.
        overlong: The treatment of a longer row: `error` ends the run, `skip` gives it no score (None).
        chat_template: A Jinja chat template in place of the tokenizer's.
        chat_template_kwargs: Further arguments of the chat template.
        init_kwargs: Further arguments of `from_pretrained`: fields of the model's config, `attn_implementation`.
        tokenizer: In Python: of a model that is loaded already.

    Raises:
        ConfigError: a setting is out of range, or ``name`` is written as a path and is no folder.
    """

    auto = "AutoModelForTokenClassification"
    labels = 2
    allowed_overlong = ("error", "skip")

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        name: ScorerLike,
        separator: str = "\n",
        aggregate: Literal["min", "mean", "prod", "last", "spans"] = "min",
        revision: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto",
        device: str | None = None,
        batch_size: AtLeastOne = 16,
        max_length: AtLeastOne | None = None,
        overlong: Literal["error", "skip"] = "error",
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(
            name,
            tokenizer=tokenizer,
            revision=revision,
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            max_length=max_length,
            overlong=overlong,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            init_kwargs=init_kwargs,
        )
        if not separator:
            raise ConfigError(
                "separator is empty, so nothing would end a step. Give the one of training, such as '\\n'."
            )
        self.separator, self.aggregate = separator, aggregate

    def load(self) -> Any:
        """Return the model and tokenizer as `Classifier.load`. Raises ConfigError also for another separator than in
        training."""
        model, tokenizer = super().load()
        trained = getattr(model.config, "step_separator", None)
        if trained is not None and trained != self.separator:
            raise ConfigError(
                f"separator={self.separator!r}, and {self.name!r} was trained with {trained!r}: its numbers mean "
                "nothing at the ends of other steps. Set separator to that one."
            )
        return model, tokenizer

    @in_lockstep
    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], **_: Any
    ) -> list[float | None] | list[list[Span] | None]:
        places = [steps_of(text_of(completion), self.separator) for completion in completions]
        probabilities = self._probabilities(prompts, completions, places)
        if self.aggregate == "spans":
            return [
                None if values is None else [(*place, value) for place, value in zip(found, values, strict=True)]
                for found, values in zip(places, probabilities, strict=True)
            ]
        together = _AGGREGATES[self.aggregate]
        return [None if values is None else together(values) if values else 0.0 for values in probabilities]

    def _probabilities(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], places: Sequence[list[tuple[int, int]]]
    ) -> list[list[float] | None]:
        """Return the probability that each step is right, for each completion; None for a row that is left out for
        its length."""
        model, tokenizer = self.load()
        rows, ends = [], []
        for prompt, completion, found in zip(prompts, completions, places, strict=True):
            text = text_of(completion)
            ids, last = self._ids(tokenizer, prompt, [text[start:end] for start, end in found])
            rows.append(ids)
            ends.append(last)
        limit = self.longest(rows)
        values: list[list[float] | None] = [None if len(row) > limit else [] for row in rows]
        asked = [i for i, row in enumerate(rows) if ends[i] and len(row) <= limit]
        for batch in self.batches(rows, asked):
            right = logits_of(model, [rows[i] for i in batch]).softmax(-1)[..., 1]
            for i, row in zip(batch, right.tolist(), strict=True):
                values[i] = [row[end] for end in ends[i]]
        return values

    def _ids(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, steps: Sequence[str]
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a row, and the position at which each step is read."""
        if isinstance(prompt, str):
            has_bos = isinstance(tokenizer.bos_token, str) and prompt.startswith(tokenizer.bos_token)
            ids: Any = list(tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"])  # pyright: ignore
            if ids[-1:] == [tokenizer.eos_token_id] and not prompt.endswith(str(tokenizer.eos_token)):
                ids.pop()  # some tokenizers add it by themselves
        else:
            self.require_chat_template(tokenizer)
            how = {"tokenize": False, "add_generation_prompt": True, **self.chat_template_kwargs}
            text: Any = apply_chat_template(tokenizer, prompt, **how)
            ids = _token_ids(tokenizer, text)
        end = _token_ids(tokenizer, self.separator)
        if not end:
            raise ConfigError(f"separator={self.separator!r} makes no token; the end of a step needs at least one.")
        places = []
        for step in steps:
            ids = [*ids, *_token_ids(tokenizer, step), *end]
            places.append(len(ids) - 1)
        return ids, places


def steps_of(text: str, separator: str) -> list[tuple[int, int]]:
    """Return the steps of a text, in characters from start to end (exclusive), without those of white space alone."""
    found, start = [], 0
    for step in text.split(separator):
        if step.strip():
            found.append((start, start + len(step)))
        start += len(step) + len(separator)
    return found


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]
