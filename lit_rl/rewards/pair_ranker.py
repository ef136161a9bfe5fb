"""PairRM, a model that reads both completions of a prompt together, as the judge (2306.02561)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor, nn

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.transfers import right_pad
from lit_rl.ops.ranges import AtLeastOne, PositiveFinite, Range
from lit_rl.rewards.classifiers import OnRunDevice
from lit_rl.rewards.contract import Completion, blind, content_of, refuse_images, text_of
from lit_rl.rewards.jobs import TrainerState
from lit_rl.rewards.judges import LogMetric, Verdict, average_orders, check_judge_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SOURCE, FIRST, SECOND = "<|source|>", "<|candidate1|>", "<|candidate2|>"
"""Markers before a prompt and before each completion: special tokens of the tokenizer."""


@checked("judge")
class PairRMJudge(OnRunDevice):
    """A local model of PairRM's kind: DeBERTa reads prompt and both completions, and the difference of two scores
    compares them.

    The input is three texts, each with the special tokens of the tokenizer around it, behind ``<|source|>``,
    ``<|candidate1|>`` and ``<|candidate2|>``. With ``s``, ``a`` and ``b`` the last hidden states at these three tokens,

        logit = head([s; a]) - head([s; b])        P(first is better) = sigmoid(logit / temperature)

    A completion in the first place may be liked for its place, so each pair is read in both orders, and the mean of the
    two probabilities is the verdict.

    Args:
        name: A folder or a hub id whose config is that of ``llm-blender/PairRM-hf``.
        both_orders: Read each pair in both orders; half as fast, and no place is liked.
        temperature: Divides the logit, above 0. Only methods that read a probability (Nash-MD) see a difference.
        revision: Branch, tag or commit of the hub repository.
        dtype: Type of the weights: "float32", "bfloat16", "float16", or "auto" (as stored).
        device: Where the model runs. None: on the run's device; outside of a run on a GPU, else the CPU.
        batch_size: Pairs of one forward pass.
        max_prompt_tokens: Tokens of a prompt; a longer one loses its begin.
        max_completion_tokens: Tokens of a completion; a longer one loses its end. Tokens that a
            prompt does not use go to the completions.

    Raises:
        ConfigError: a setting is out of range, or ``name`` is written as a path and is no folder.
    """

    reads_rewards = False

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        name: str,
        *,
        both_orders: bool = True,
        temperature: PositiveFinite = 1.0,
        revision: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto",
        device: str | None = None,
        batch_size: AtLeastOne = 8,
        max_prompt_tokens: Annotated[int, Range(4, whole=True)] = 1224,
        max_completion_tokens: Annotated[int, Range(4, whole=True)] = 412,
    ) -> None:
        from lit_rl.models import hub_files

        self.name, self.path, self.revision = name, hub_files.resolve("judge.name", name), revision
        self.both_orders, self.temperature, self.dtype, self.device = both_orders, temperature, dtype, device
        self.batch_size = batch_size
        self.max_prompt_tokens, self.max_completion_tokens = max_prompt_tokens, max_completion_tokens
        self._loaded: tuple[Any, PreTrainedTokenizerBase] | None = None

    def __repr__(self) -> str:
        return f"PairRMJudge({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    def bind(self, columns: Sequence[str]) -> None:
        """Accept any columns but those with a reserved name."""
        check_judge_columns(columns)

    def check_columns(self, columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
        """Refuse rows that show images, before a run begins."""
        refuse_images(columns, "judge=pairrm")

    def __call__(
        self,
        prompts: Sequence[Prompt],
        firsts: Sequence[Completion],
        seconds: Sequence[Completion],
        *,
        log_metric: LogMetric | None = None,
        trainer_state: TrainerState | None = None,
        **columns: Sequence[Any],
    ) -> list[Verdict]:
        sources = [_prompt_text(prompt) for prompt in prompts]
        one, two = ([text_of(each) for each in of] for of in (firsts, seconds))
        forth = self._probabilities(sources, one, two)
        return average_orders(forth, self._probabilities(sources, two, one)) if self.both_orders else forth

    def load(self) -> tuple[Any, PreTrainedTokenizerBase]:
        """Return the model on its device and its tokenizer; loaded at the first call.

        Raises:
            ConfigError: the model is of another kind.
            StorageError: weights are missing, damaged or pickled.
            BackendError: the model cannot be reached.
        """
        if self._loaded is None:
            self._loaded = _load(self)
        return self._loaded

    def _probabilities(
        self, sources: Sequence[str], firsts: Sequence[str], seconds: Sequence[str]
    ) -> list[float | None]:
        model, tokenizer = self.load()
        rows = [self._ids(tokenizer, *texts) for texts in zip(sources, firsts, seconds, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        found: list[float | None] = [None] * len(rows)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            logits = _logits(model, [rows[i] for i in batch]) / self.temperature
            for i, value in zip(batch, logits.sigmoid().tolist(), strict=True):
                found[i] = value
        return found

    def _ids(self, tokenizer: Any, source: str, first: str, second: str) -> list[int]:
        """Return the tokens of a pair. A prompt that is cut keeps its mark and its end: the newest message."""
        source, first, second = (_as_words(tokenizer, text) for text in (source, first, second))
        asked = tokenizer(SOURCE + source)["input_ids"]
        if (over := len(asked) - self.max_prompt_tokens) > 0:
            mark = asked.index(tokenizer.convert_tokens_to_ids(SOURCE)) + 1
            asked = [*asked[:mark], *asked[mark + over :]]
        room = (self.max_prompt_tokens + 2 * self.max_completion_tokens - len(asked)) // 2
        answers = [
            tokenizer(mark + text, truncation=True, max_length=room)["input_ids"]
            for mark, text in ((FIRST, first), (SECOND, second))
        ]
        return [*asked, *answers[0], *answers[1]]


def _as_words(tokenizer: Any, text: str) -> str:
    """Return the text with a blank in each special token that it spells: a policy that writes a mark must not move
    it."""
    for token in {SOURCE, FIRST, SECOND, *tokenizer.all_special_tokens}:
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def _prompt_text(prompt: Prompt) -> str:
    """Return a text as it is; of messages the only one, or all of them with their roles.

    Raises:
        RewardError: the prompt shows images, which the judge would not see.
    """
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    if any(part.get("type") != "text" for each in contents if isinstance(each, list) for part in each):
        raise blind("judge=pairrm")
    if len(prompt) == 1:
        return content_of(prompt[0])
    return "\n".join(f"{str(message.get('role', '')).upper()}: {content_of(message)}" for message in prompt)


@torch.no_grad()
def _logits(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return float32 ``(b,)``: by how much the first completion of each row is better."""
    pad = model.config.pad_token_id or 0
    ids, mask = right_pad(rows, pad)
    ids, mask = ids.to(model.device), mask.long().to(model.device)
    with torch.autocast(model.device.type, enabled=False):
        return model(ids, mask).float()


def network(config: Any) -> Any:
    """Return PairRM without trained weights: DeBERTa, and a head over two of its hidden states. Names are those of its
    files.

    Args:
        config: Of DeBERTa v2, with ``source_prefix_id``, ``cand1_prefix_id``, ``cand2_prefix_id``, ``n_tasks`` and
            ``drop_out``.
    """
    return _network_class()(config)


def _network_class() -> Any:
    from transformers import DebertaV2Config, DebertaV2Model, DebertaV2PreTrainedModel

    class PairRM(DebertaV2PreTrainedModel):
        config_class = DebertaV2Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            size, drop = config.hidden_size, float(getattr(config, "drop_out", 0.0))
            self.pretrained_model = DebertaV2Model(config)
            first, last = nn.Linear(2 * size, size), nn.Linear(size, int(getattr(config, "n_tasks", 1)))
            self.head_layer = nn.Sequential(nn.Dropout(drop), first, nn.Tanh(), nn.Dropout(drop), last)
            self.post_init()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            """Return logits ``(b,)``: the mean over tasks of the first completion's score less the second's."""
            hidden = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            marks = self.config.source_prefix_id, self.config.cand1_prefix_id, self.config.cand2_prefix_id
            rows = torch.arange(len(input_ids), device=input_ids.device)
            source, first, second = (hidden[rows, (input_ids == mark).int().argmax(1)] for mark in marks)
            scores = [self.head_layer(torch.cat([source, each], -1)) for each in (first, second)]
            return (scores[0] - scores[1]).mean(-1)

    return PairRM


def _load(judge: PairRMJudge) -> tuple[Any, PreTrainedTokenizerBase]:
    from transformers import AutoConfig, AutoTokenizer

    from lit_rl.models import hub_files

    name, path, revision = judge.name, judge.path, judge.revision
    with hub_files.reading("judge.name", name, path):
        config: Any = AutoConfig.from_pretrained(path, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    marks = {"source_prefix_id": SOURCE, "cand1_prefix_id": FIRST, "cand2_prefix_id": SECOND}
    known = {key: getattr(config, key, None) for key in marks}
    wanted = {key: tokenizer.convert_tokens_to_ids(mark) for key, mark in marks.items()}
    if config.model_type != "deberta-v2" or known != wanted:
        raise ConfigError(
            f"judge.name={name!r} is a {config.model_type} model with the marks {known}, and its tokenizer has "
            f"{wanted}. judge=pairrm takes a deberta-v2 model of PairRM's kind, as llm-blender/PairRM-hf. A classifier "
            "of one completion is a reward model: judge=reward reward=reward_model."
        )
    hub_files.refuse_pickle("judge.name", path, "")
    with hub_files.reading("judge.name", name, path):
        model, info = _network_class().from_pretrained(
            path,
            config=config,
            revision=revision,
            dtype=judge.dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise StorageError(
            f"judge.name={name!r}: its files lack {len(missing)} weights ({', '.join(missing[:5])}), which would be "
            "random numbers."
        )
    return model.to(judge.load_device).eval().requires_grad_(False), tokenizer
