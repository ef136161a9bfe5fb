"""Process reward models: how likely each step of a solution is right, as a reward (2305.20050)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lit_rl.chat_template import apply_chat_template
from lit_rl.errors import ConfigError, did_you_mean
from lit_rl.rewards.completion import Completion, text_of
from lit_rl.rewards.functions.contract import Span
from lit_rl.rewards.scorers.classifier import Classifier, GivenScorer, logits_of
from lit_rl.rewards.scorers.spread import in_step
from lit_rl.rollout import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
    "prod": math.prod,
    "last": lambda values: values[-1],
}


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
        name: GivenScorer,
        separator: str = "\n",
        aggregate: Literal["min", "mean", "prod", "last", "spans"] = "min",
        revision: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto",
        device: str | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
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
        allowed = (*_AGGREGATES, "spans")
        if aggregate not in allowed:
            near = did_you_mean(str(aggregate), allowed)
            raise ConfigError(f"aggregate={aggregate!r} is unknown: allowed is {', '.join(allowed)}.{near}")
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

    @in_step
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
            begun = isinstance(tokenizer.bos_token, str) and prompt.startswith(tokenizer.bos_token)
            ids: Any = list(tokenizer(prompt, add_special_tokens=not begun)["input_ids"])  # pyright: ignore
            if ids[-1:] == [tokenizer.eos_token_id] and not prompt.endswith(str(tokenizer.eos_token)):
                ids.pop()  # some tokenizers add it by themselves
        else:
            self.require_chat_template(tokenizer)
            how = {"tokenize": False, "add_generation_prompt": True, **self.chat_template_kwargs}
            text: Any = apply_chat_template(tokenizer, prompt, **how)
            ids = _plain(tokenizer, text)
        end = _plain(tokenizer, self.separator)
        if not end:
            raise ConfigError(f"separator={self.separator!r} makes no token; the end of a step needs at least one.")
        places = []
        for step in steps:
            ids = [*ids, *_plain(tokenizer, step), *end]
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


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]
