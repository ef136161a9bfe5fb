"""Text classifiers behind reward models: loaded once, sharded over ranks on request, asked in batches.

Rows are padded on the right and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lit_rl.core.errors import ConfigError, RewardError, StorageError
from lit_rl.core.examples import TokenBatch
from lit_rl.core.other_names import column
from lit_rl.core.transfers import right_pad
from lit_rl.core.vision_inputs import PromptVision, Vision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lit_rl.models.vision_processor import VisionProcessor

    ScorerLike = str | PreTrainedModel
    """A folder or hub id, or a model that is loaded already. Configs that are read from files know the first."""
else:
    ScorerLike = str

EXTRA_INIT_KWARGS = ("attn_implementation",)
"""Arguments of `from_pretrained` that are no field of a config."""

_RENDERED = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "padding", "return_dict"),
    *("return_tensors", "tokenize", "truncation", "max_length"),
)
"""Arguments of `apply_chat_template` that the rendering of a row fixes."""


class OnRunDevice:
    """A model that scores on the device of the run, unless `device` names another."""

    device: str | None = None
    run_device: torch.device | None = None
    """The device of the run, which the training module sets. None outside of a run."""

    @property
    def load_device(self) -> torch.device:
        """The device to load the model on; without a name and outside of a run the process's GPU, else the CPU.

        Raises:
            ConfigError: `device` is the name of none.
        """
        if self.device is not None:
            try:
                return torch.device(self.device)
            except RuntimeError as error:
                raise ConfigError(
                    f"device={self.device!r} is not a device: allowed are cpu, cuda, cuda:1, ..."
                ) from error
        if self.run_device is not None:
            return self.run_device
        gpu = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if gpu is None else torch.device(gpu.type, torch.accelerator.current_device_index())


_GAVE_UP = -1


class Lockstep:
    """The number of calls that all ranks make of a model that is sharded over them.

    Args:
        mesh: Of one dimension: the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._device = mesh.get_group(), mesh.device_type
        self.agreed = False
        """True if this rank has reported its number of calls in this round."""

    def most(self, calls: int) -> int:
        """Return the largest number of calls that any rank makes; this rank makes `calls`. A collective, once a
        round.

        Raises:
            RewardError: another rank aborted its round.
        """
        self.agreed = True
        extremes = torch.tensor([calls, -calls], device=self._device)
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group=self._group)
        most, least = int(extremes[0]), -int(extremes[1])
        if least == _GAVE_UP and calls != _GAVE_UP:
            raise RewardError(
                "A reward model could not score the completions of another rank. The error of that rank says why."
            )
        return most


def in_lockstep(score: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a scoring method so that a failure on one rank, before its calls of the model, ends the round on all."""

    @wraps(score)
    def scored(self: Any, *args: Any, **columns: Any) -> Any:
        if self.lockstep is None:
            return score(self, *args, **columns)
        self.lockstep.agreed = False
        try:
            return score(self, *args, **columns)
        except BaseException:
            if not self.lockstep.agreed:  # the others wait for this rank's number of calls
                self.lockstep.most(_GAVE_UP)
            raise

    return scored


class Classifier(OnRunDevice):
    """The base of reward models: where the model is, how long its rows are, and that it is loaded once.

    Args:
        name: A folder or a hub id; in Python also a model that is loaded already.
        tokenizer: Of a model that is loaded already; of one over images its processor.
        revision: Branch, tag or commit of the hub repository.
        dtype: Type of the weights: "float32", "bfloat16", "float16", or "auto" (as stored).
        device: Where the model runs. None: on the run's device; outside of a run on a GPU, else the CPU.
        batch_size: Rows of one forward pass.
        max_length: Longest row in tokens. None: the limit of the model's config.
        overlong: The treatment of a longer row; one of `allowed_overlong`.
        chat_template: A Jinja chat template in place of the tokenizer's.
        chat_template_kwargs: Further arguments of the chat template.
        init_kwargs: Further arguments of `from_pretrained`: fields of the model's config, `attn_implementation`.

    Raises:
        ConfigError: a setting is out of range or fixed, or ``name`` is written as a path and is no folder.
    """

    auto: ClassVar[str]
    """The class of transformers that loads the model."""
    labels: ClassVar[int]
    """The number of outputs that it must have."""
    allowed_overlong: ClassVar[tuple[str, ...]]

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        name: ScorerLike,
        *,
        tokenizer: Any,
        revision: str | None,
        dtype: str,
        device: str | None,
        batch_size: int,
        max_length: int | None,
        overlong: str,
        chat_template: str | None,
        chat_template_kwargs: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        from lit_rl.models import hub_files

        self._user_model = None if isinstance(name, str) and tokenizer is None else (name, tokenizer)
        config = getattr(name, "config", None)
        self.name = name if isinstance(name, str) else str(getattr(config, "_name_or_path", "") or type(name).__name__)
        self.init_kwargs = dict(init_kwargs or {})
        if self._user_model is not None:
            _check_loaded_model(self, *self._user_model, revision=revision, dtype=dtype)
        self.path = self.name if self._user_model is not None else hub_files.resolve("name", self.name)
        self.revision = revision
        self.dtype = dtype
        self.device = device
        self.batch_size = batch_size
        self.max_length = max_length
        self.overlong = overlong
        self.chat_template = chat_template
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        if taken := sorted(self.chat_template_kwargs.keys() & set(_RENDERED)):
            raise ConfigError(
                f"chat_template_kwargs: {', '.join(taken)} cannot be set, since every row is rendered alike: remove "
                "it. A template of your own is chat_template."
            )
        for key in self.init_kwargs:
            if elsewhere := column("reward_model").get(key):
                raise ConfigError(f"init_kwargs.{key} is not taken: use {elsewhere}.")
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
        self._processor: VisionProcessor | None = None
        self.lockstep: Lockstep | None = None
        """The agreement of the ranks where the weights are spread over them; None where they are whole."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process loads its own.
        return self.__dict__ | {"_loaded": None, "_processor": None, "lockstep": None}

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return the model on its device and its tokenizer; loaded at the first call.

        Raises:
            ConfigError: the model does not give as many numbers as it must, or there is no chat template for messages.
            StorageError: weights are missing (a head that was never trained, for one), damaged or pickled.
            BackendError: the model cannot be reached.
        """
        if self._loaded is None:
            if self._user_model is None:
                self._loaded = _load_classifier(self, self.load_device)
                return self._loaded
            from lit_rl.models.vision_parts import sees
            from lit_rl.models.vision_processor import checked_processor, copies_of

            model: Any = self._user_model[0]  # its weights are not changed, nor is what came with it
            tokenizer, processor = copies_of(self._user_model[1])
            if self.chat_template is not None:
                tokenizer.chat_template = self.chat_template
            if processor is not None and sees(model.config):
                self._processor = checked_processor("name", self.name, processor, tokenizer, model.config)
            self._loaded = model.to(self.load_device).eval(), tokenizer
        return self._loaded

    def load_spread(self, mesh: DeviceMesh) -> None:
        """Load it, and shard its weights over the ranks. A collective; from now on each call of it is one too.

        It stays whole where, on any rank, it is an object of the user's, was loaded before, has a device of its own,
        reads images, or cannot be sharded by FSDP2.

        Args:
            mesh: Of one dimension: the ranks.

        Raises:
            ConfigError, StorageError, BackendError: see `load`.
        """
        from lit_rl.models.sharding import decoder_layers
        from lit_rl.models.vision_parts import sees

        if self.lockstep is not None:
            return
        fresh = self._loaded is None and self._user_model is None and self.device is None
        if fresh:
            self._loaded = _load_classifier(self, torch.device("cpu"))  # the mesh's device never holds all of it
        model, tokenizer = self.load()
        layers = decoder_layers(model) if fresh else []
        dtypes = {weight.dtype for weight in model.parameters()}  # FSDP2 requires one
        can_shard = bool(layers) and len(dtypes) == 1 and not sees(model.config)
        everywhere = torch.tensor(int(can_shard), device=mesh.device_type)
        torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN, group=mesh.get_group())
        if everywhere:
            for module in (*layers, model):  # each layer is gathered when it runs, and freed afterwards
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
            self.lockstep = Lockstep(mesh)
        elif fresh:
            self._loaded = model.to(self.load_device), tokenizer  # pyright: ignore[reportArgumentType]

    def processor(self) -> VisionProcessor | None:
        """Return the processor of prompts with images, loaded on first use. None for a model over text.

        Raises:
            BackendError: its files or a package that it needs are missing.
        """
        from lit_rl.models.vision_parts import sees
        from lit_rl.models.vision_processor import load_processor

        model, tokenizer = self.load()
        if self._processor is None and sees(model.config):
            how = {"key": "name", "revision": self.revision}
            self._processor = load_processor(self.name, self.path, tokenizer, model.config, **how)
        return self._processor

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights on the run's device; 0 before it is loaded."""
        if self._loaded is None or self.device == "cpu":
            return 0
        weights = self._loaded[0].parameters()
        return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in weights)

    def longest(self, rows: Sequence[Sequence[int]]) -> int:
        """Return the token limit of the rows.

        Raises:
            RewardError: a row is longer and `overlong` is `error`, or has no token.
        """
        config: Any = self.load()[0].config.get_text_config()
        lengths = [len(row) for row in rows]
        limit = self.max_length or getattr(config, "max_position_embeddings", None) or max(lengths, default=0)
        if 0 in lengths:
            raise RewardError(
                f"row {lengths.index(0)} is empty: the reward model {self.name!r} would have no token to read."
            )
        if self.overlong == "error" and max(lengths, default=0) > limit:
            ways = " or ".join(way for way in self.allowed_overlong if way != "error")
            raise RewardError(
                f"row {lengths.index(max(lengths))} has {max(lengths)} tokens for the reward model {self.name!r}, the "
                f"longest of {sum(length > limit for length in lengths)} with more than max_length={limit}. Raise it, "
                f"or set overlong to {ways}."
            )
        return limit

    def batches(self, rows: Sequence[Sequence[int]], order: Iterable[int]) -> Iterator[Sequence[int]]:
        """Yield these rows in batches, by length. If the weights are sharded, the model is then called on dummy rows
        until every rank has called it as often as the one with most batches."""
        by_length = sorted(order, key=lambda i: len(rows[i]))
        starts = range(0, len(by_length), self.batch_size)
        idle = 0 if self.lockstep is None else self.lockstep.most(len(starts)) - len(starts)
        for start in starts:
            yield by_length[start : start + self.batch_size]
        if self.lockstep is not None:
            model, _ = self.load()
            for _ in range(idle):
                logits_of(model, [[0]])
            if isinstance(model, FSDPModule):  # gathered weights would wait for a backward pass that never happens
                model.reshard()

    def require_chat_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ConfigError if the tokenizer has none."""
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"The prompts are messages, and the tokenizer of the reward model {self.name!r} has no chat template. "
                "Set chat_template to the one that the model was trained with."
            )

    def check_labels(self, config: PreTrainedConfig) -> None:
        """Raise ConfigError if the model does not return the expected number of labels."""
        if config.num_labels != self.labels:
            what, kind = ("one number", "sequence") if self.labels == 1 else ("two: wrong and right", "token")
            raise ConfigError(
                f"name={self.name!r} is no reward model of this kind: it has num_labels={config.num_labels}, and "
                f"{'a reward' if self.labels == 1 else 'a step'} is {what}. "
                f"Take a {kind} classifier that was trained with num_labels={self.labels}."
            )


def _check_loaded_model(description: Classifier, model: Any, tokenizer: Any, *, revision: Any, dtype: str) -> None:
    """Refuse an object that is no model of this kind, and settings that are about files.

    Raises:
        ConfigError: names it, and the argument to pass.
    """
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    if isinstance(model, str):
        raise ConfigError(
            f"tokenizer belongs to a model that is loaded already, and name={model!r} has its own: leave it out, "
            "or set chat_template."
        )
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or "For" + description.auto.partition("For")[2] not in kind:
        raise ConfigError(
            f"{type(description).__name__} got a {kind}. It takes a folder, a hub id, or a model that transformers' "
            f"{description.auto} has loaded, with its tokenizer."
        )
    description.check_labels(model.config)
    held = getattr(tokenizer, "tokenizer", None) if isinstance(tokenizer, ProcessorMixin) else tokenizer
    if not isinstance(held, PreTrainedTokenizerBase):
        raise ConfigError(
            f"{type(description).__name__} got a {kind} that is loaded already, and no tokenizer: pass "
            "tokenizer=AutoTokenizer.from_pretrained(name) of transformers, the one that belongs to the model."
        )
    if revision is not None or dtype != "auto" or description.init_kwargs:
        raise ConfigError(
            "revision, dtype and init_kwargs apply to loading a model, and this reward model is loaded already. Leave "
            "them out."
        )


def _load_classifier(description: Classifier, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from lit_rl.models import hub_files
    from lit_rl.models.language_model import check_overrides
    from lit_rl.models.scoring import register_classifier

    name, path, revision = description.name, description.path, description.revision
    with hub_files.reading("name", name, path):
        config = AutoConfig.from_pretrained(path, revision=revision)
        if description.init_kwargs:
            overrides = description.init_kwargs
            taken = column("reward_model")
            check_overrides("init_kwargs", overrides, config, name, beside=EXTRA_INIT_KWARGS, elsewhere=taken)
            config = AutoConfig.from_pretrained(path, revision=revision, **overrides)
    description.check_labels(config)
    hub_files.refuse_pickle("name", path, "")
    register_classifier(config)
    with hub_files.reading("name", name, path):
        loaded: Any = getattr(transformers, description.auto).from_pretrained(
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
    return model.to(device).eval().requires_grad_(False), tokenizer


@torch.no_grad()
def logits_of(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], seen: Sequence[PromptVision | None] = ()
) -> Tensor:
    """Return a classifier's logits for token ids, padded on the right, in float32: ``(b, labels)`` or ``(b, s,
    labels)``.

    Args:
        model: The classifier.
        rows: Token ids of each text.
        seen: Vision inputs of the prompt with which a text begins, one per row; empty if none has any.
    """
    text_config = model.config.get_text_config()
    own = text_config.pad_token_id
    # A decoder reads its score at the last token that is not the pad, so a pad of ours may end no row.
    pad = own if own is not None else next(i for i in range(len(rows) + 1) if all(row[-1] != i for row in rows))
    ids, mask = right_pad(rows, pad)
    ids, mask = ids.to(model.device), mask.long().to(model.device)
    text_config.pad_token_id = pad
    try:
        with torch.autocast(model.device.type, enabled=False):
            return model(input_ids=ids, attention_mask=mask, **_seen(model, ids, mask, seen)).logits.float()
    finally:
        text_config.pad_token_id = own


def _seen(model: PreTrainedModel, ids: Tensor, mask: Tensor, seen: Sequence[PromptVision | None]) -> dict[str, Tensor]:
    """Return the further inputs of a model over images."""
    if not any(seen):
        return {}
    from lit_rl.models.forward_inputs import text_inputs

    vision = Vision(seen, torch.arange(len(seen)))
    return text_inputs(model, TokenBatch(ids, mask.bool(), mask.bool(), vision=vision))
