"""Reward models: sequence classifiers with one output, fed with text, so that their vocabulary may be any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_rl.errors import ConfigError, RewardError, StorageError, did_you_mean, in_range
from lit_rl.rewards.text import Completion, text_of
from lit_rl.rollout import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = ("float32", "bfloat16", "float16", "auto")
_OVERLONG = ("error", "truncate_left", "skip")


class RewardModel:
    """The score ``logits[:, 0]`` that a sequence classifier gives to prompt and completion.

    Where prompts are messages, the conversation goes through the chat template of the reward model's own tokenizer;
    where they are texts, prompt and completion are put one after the other. Rows are padded on the right and masked, so
    a score does not depend on the batch that its row is in. Each rank loads the model once, on first use or with
    `load`; it runs without gradient and outside the Trainer's autocast.

    Args:
        name: A folder or a hub id.
        revision: Branch, tag or commit of the hub repository.
        dtype: Type of the weights: "float32", "bfloat16", "float16", or "auto" (as stored).
        device: Where the model runs, such as "cpu" or "cuda:1". None: the rank's own GPU, else the CPU.
        batch_size: Rows of one forward pass.
        max_length: Longest row in tokens. None: what the model's config allows.
        overlong: What to do with a longer row: `error` ends the run, `truncate_left` keeps its last tokens, `skip`
            gives it no score (None).
        chat_template: A Jinja chat template in place of the tokenizer's.

    Raises:
        ConfigError: a setting is out of range, or ``name`` is written as a path and is no folder.
    """

    def __init__(
        self,
        name: str,
        revision: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto",
        device: str | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        overlong: Literal["error", "truncate_left", "skip"] = "error",
        chat_template: str | None = None,
    ) -> None:
        from lit_rl.models import hub

        for key, value, allowed in (("dtype", dtype, _DTYPES), ("overlong", overlong, _OVERLONG)):
            if value not in allowed:
                raise ConfigError(
                    f"{key}={value!r} is unknown: allowed is {', '.join(allowed)}.{did_you_mean(str(value), allowed)}"
                )
        in_range("batch_size", batch_size, low=1)
        if max_length is not None:
            in_range("max_length", max_length, low=1)
        self.name = name
        self.path = hub.resolve("name", name)
        self.revision = revision
        self.dtype = dtype
        self.device = device
        self.batch_size = batch_size
        self.max_length = max_length
        self.overlong = overlong
        self.chat_template = chat_template
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def __repr__(self) -> str:
        return f"RewardModel({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}  # a copy in another process loads its own

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model on its device and its tokenizer; loaded at the first call.

        Raises:
            ConfigError: the model does not give exactly one number, or there is no chat template for messages.
            StorageError: weights are missing (a head that was never trained, for one), damaged or pickled.
            BackendError: the model cannot be reached.
        """
        if self._loaded is None:
            self._loaded = _load(self)
        return self._loaded

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], **_: Any
    ) -> list[float] | list[float | None]:
        model, tokenizer = self.load()
        rows = [self._ids(tokenizer, p, c) for p, c in zip(prompts, completions, strict=True)]
        limit = self.max_length or _longest(model) or max(map(len, rows), default=0)
        self._check_lengths(rows, limit)
        scored = [i for i, row in enumerate(rows) if len(row) <= limit or self.overlong == "truncate_left"]
        scores: list[float | None] = [None] * len(rows)
        for batch in self._batches(sorted(scored, key=lambda i: len(rows[i]))):
            for i, score in zip(batch, _forward(model, [rows[i][-limit:] for i in batch]).tolist(), strict=True):
                scores[i] = score
        return scores

    def _ids(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Completion) -> list[int]:
        if isinstance(prompt, str):
            return tokenizer(prompt + text_of(completion))["input_ids"]  # pyright: ignore[reportReturnType]
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"The prompts are messages, and the tokenizer of the reward model {self.name!r} has no chat template. "
                "Set chat_template to the one that the model was trained with."
            )
        reply = completion if isinstance(completion, list | tuple) else [{"role": "assistant", "content": completion}]
        text: Any = tokenizer.apply_chat_template([*prompt, *reply], tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]

    def _check_lengths(self, rows: Sequence[Sequence[int]], limit: int) -> None:
        longest = max(range(len(rows)), key=lambda i: len(rows[i]), default=None)
        if longest is None:
            return
        if any(not row for row in rows):
            raise RewardError(f"row {[len(row) for row in rows].index(0)} has no token for {self.name!r}: it is empty.")
        if self.overlong == "error" and len(rows[longest]) > limit:
            raise RewardError(
                f"row {longest} has {len(rows[longest])} tokens for the reward model {self.name!r}, the longest of "
                f"{sum(len(row) > limit for row in rows)} with more than max_length={limit}. Raise it, or set overlong "
                "to truncate_left or skip."
            )

    def _batches(self, order: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


def _load(description: RewardModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from lit_rl.models import hub

    name, path, revision = description.name, description.path, description.revision
    with hub.reading("name", name, path):
        config = AutoConfig.from_pretrained(path, revision=revision)
    if config.num_labels != 1:
        raise ConfigError(
            f"name={name!r} is no reward model: it has num_labels={config.num_labels}, and a reward is one number. "
            "Take a sequence classifier that was trained with num_labels=1."
        )
    hub.refuse_pickle("name", path, "")
    with hub.reading("name", name, path):
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            revision=revision,
            dtype=description.dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise StorageError(
            f"name={name!r}: its files lack {len(missing)} weights ({', '.join(missing[:5])}), which transformers "
            "filled with random numbers. A language model without a trained score head is no reward model."
        )
    if description.chat_template is not None:
        tokenizer.chat_template = description.chat_template
    return model.to(_device(description.device)).eval().requires_grad_(False), tokenizer


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is no device: allowed is cpu, cuda, cuda:1, ...") from error


def _longest(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@torch.no_grad()
def _forward(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Scores ``(b,)`` in float32 of token ids, padded on the right."""
    text_config = model.config.get_text_config()
    own = text_config.pad_token_id
    # A decoder reads its score at the last token that is not the pad, so a pad of ours may end no row.
    pad = own if own is not None else next(i for i in range(len(rows) + 1) if all(row[-1] != i for row in rows))
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    text_config.pad_token_id = pad
    try:
        with torch.autocast(model.device.type, enabled=False):
            return model(input_ids=ids, attention_mask=mask).logits[:, 0].float()
    finally:
        text_config.pad_token_id = own
