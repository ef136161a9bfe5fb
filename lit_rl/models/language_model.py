"""A language model described by plain values, that can be loaded: its files, adapters, and how passes are computed.

Nothing heavy is imported before `LanguageModel.load`.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, did_you_mean
from lit_rl.core.model_paths import SHIPPED
from lit_rl.core.other_names import column, reject_unknown_keywords
from lit_rl.core.speedups import ModelSpeedups, SpeedupsSetting
from lit_rl.models import hub_files
from lit_rl.models import tokenizer as tokenizers
from lit_rl.models.adapters import Adapter, as_adapter
from lit_rl.models.vision_parts import freeze, sees

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lit_rl.core.rollout import PromptForm
    from lit_rl.models.vision_processor import VisionProcessor


WeightType = Literal["float32", "bfloat16", "float16", "auto"]
"""The type of a model's weights; "auto" is the one that they are stored in."""


@dataclass(frozen=True)
class ForwardOptions(ModelSpeedups):
    """Choices for computing a forward pass. Every choice gives the same numbers, but for rounding.

    Args:
        most_rows: Texts of a call without gradient, at most; None: all.
    """

    most_rows: int | None = None

    @property
    def in_one_call(self) -> ForwardOptions:
        """The options with rows that are learned from in one call of the model, whole and beside each other."""
        return replace(self, shared_prompts=False, rows_by_length=False)


DEFAULT = ForwardOptions()


def check_overrides(
    key: str,
    names: Iterable[str],
    config: PreTrainedConfig,
    model: str,
    *,
    beside: Sequence[str],
    elsewhere: Iterable[str] = (),
) -> None:
    """Refuse what no model of this kind knows, and transformers would give its constructor.

    Args:
        key: Key of the names, such as "init_kwargs".
        names: Names that the user set.
        config: Config of the model, from its files.
        model: Name of the model.
        beside: Arguments of `from_pretrained` that are taken too.
        elsewhere: Fields that are set by other keys, and are not hinted at.

    Raises:
        ConfigError: a name is no field of the config and not in ``beside``.
    """
    hidden = set(elsewhere)
    fields = sorted(field for field in config.to_dict() if not field.startswith("_") and field not in hidden)
    for name in names:
        if name not in fields and name not in beside:
            raise ConfigError(
                f"{key}.{name} is no field of the config of {model!r} (a {config.model_type}), nor one of "
                f"{', '.join(beside)}.{did_you_mean(name, (*fields, *beside))}"
            )


_LOADING = (
    *("device_map", "max_memory", "offload_folder", "offload_buffers", "variant", "key_mapping", "generation_config"),
    *("adapter_kwargs", "adapter_name", "distributed_config", "device_mesh", "tp_plan", "tp_size", "use_kernels"),
    *("kernel_config", "fusion_config", "experts_implementation", "disable_mmap", "force_download", "proxies"),
    *("tqdm_class", "low_cpu_mem_usage"),
)
"""Other arguments of from_pretrained, which are no fields of a config."""


@checked("model")
@reject_unknown_keywords("speedups")
class LanguageModel:
    """A Hugging Face causal language model by name, and how to hold it. Nothing heavy happens before `load`.

    Args:
        name: "tiny" or "digits" (the policies that come with the package, over text and over images), a folder, or a
            hub id.
        dtype: Type of the weights: "float32", "bfloat16", "float16", or "auto" (as stored). Weights in bfloat16 are
            trained by float32 masters in the optimizer; adapters are always float32. None is float32, where
            `trainer.precision` does not make it bfloat16.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ... None lets transformers choose.
        revision: Branch, tag or commit of the hub repository.
        trust_remote_code: Run Python code that comes with the model. From the hub only with ``revision`` a commit.
        lora: Train fresh low-rank adapters instead of the weights. In Python also a config of PEFT, of any kind that
            can be merged: `peft.LoraConfig`, `OFTConfig`, `IA3Config`, `VeraConfig`, ...
        adapter: Continue training this PEFT adapter: a folder or a hub id.
        quantization: Hold the frozen base in 4 bits ("nf4") or 8 ("int8"). Needs ``lora`` or ``adapter``.
        freeze: Parts of a model over images that are not trained: "vision", the encoder, and "projector", which maps
            its features to the width of the text. Not for a model over text.
        disable_dropout: Set every dropout probability of the model to 0.
        lm_head_fp32: Compute the logits in float32, whatever the type of the weights and of autocast.
        speedups: Faster ways to compute the same numbers: "auto" (all of them, each where it fits), "off", or a mapping
            such as {"fused_head": False}, for benchmarks. See `lit_rl.core.speedups.ModelSpeedups` for the names.
        use_liger_kernel: Compute norms, rotary embedding and MLP by Liger's kernels, on a CUDA device (extra `liger`).
            The same numbers.
        compile: Compute, where the model is trained, norms, rotary embedding, the MLP's product and the softmax behind
            the head by code that `torch.compile` makes. The same numbers, but for rounding.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
            "offload" also keeps the inputs of layers in the host's memory, for long texts on a GPU. "auto" does
            either where not even the smallest micro-batch would fit otherwise, if a memory plan cuts the step.
        init_kwargs: Further arguments of `from_pretrained`, config overrides included.
        chat_template: A Jinja chat template, inline or as a file, in place of the tokenizer's; or a model (a folder or
            a hub id) whose template, EOS token and added tokens are taken: the embeddings get rows for them.
        eos_token: The token that ends a response, in place of the tokenizer's.
        pad_token: The token to pad with, in place of the tokenizer's.
        allow_changed: Go on from a checkpoint whose weights were trained on another base, with other settings of the
            adapter or with another tokenizer.

    Raises:
        ConfigError: settings that cannot be, or do not fit together.
    """

    def __init__(
        self,
        name: str = "tiny",
        dtype: WeightType | None = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        lora: Adapter | None = None,
        adapter: str | None = None,
        quantization: Literal["nf4", "int8"] | None = None,
        freeze: Sequence[str] | None = None,
        disable_dropout: bool = False,
        lm_head_fp32: bool = False,
        gradient_checkpointing: bool | Literal["auto", "offload"] = "auto",
        speedups: SpeedupsSetting = "auto",
        use_liger_kernel: bool = False,
        compile: bool = False,
        init_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        allow_changed: bool = False,
    ) -> None:
        self.name = name
        self.dtype: WeightType = "float32" if dtype is None else dtype
        self.dtype_was_set = dtype is not None
        self.attn_implementation = attn_implementation
        self.revision = revision
        self.trust_remote_code = trust_remote_code
        self.lora = as_adapter(lora)
        self.adapter = adapter
        self.quantization = quantization
        self.freeze = None if freeze is None else tuple(freeze)
        self.disable_dropout = disable_dropout
        self.lm_head_fp32 = lm_head_fp32
        self.gradient_checkpointing = gradient_checkpointing
        self.forward_options = ForwardOptions(**vars(ModelSpeedups.read("model.speedups", speedups)))
        self.use_liger_kernel = use_liger_kernel
        self.compile = compile
        self.init_kwargs = dict(init_kwargs or {})
        self.chat_template = chat_template
        self.eos_token = eos_token
        self.pad_token = pad_token
        self.allow_changed = allow_changed
        self._new_tokens: tuple[int, ...] = ()
        self.path = self.find()
        self._check()

    def find(self) -> str:
        """Return the folder or hub id that the name stands for."""
        name = self.name
        return str(SHIPPED[name]) if name in SHIPPED else hub_files.resolve("model.name", name, self.revision)

    @classmethod
    def of(cls, model: Any, key: str = "model", **settings: Any) -> LanguageModel:
        """Return a description as it is; for a name, folder or hub id, one with these settings.

        Args:
            model: The user's value.
            key: Name of the value in errors.
            settings: Settings of `LanguageModel`, for a name, folder or hub id.

        Raises:
            ConfigError: it is anything else, such as a model that is loaded already; or the settings cannot be.
        """
        if isinstance(model, LanguageModel):
            return model
        if isinstance(model, str | os.PathLike):
            return cls(os.fspath(model), **settings)
        from torch import nn  # here, as describing a model imports no library

        found, hint = f"a {type(model).__name__}", ""
        if isinstance(model, type):
            found = f"the class {model.__name__}"
        elif isinstance(model, nn.Module):
            found += ", which is loaded already"
            hint = " Call save_pretrained(folder) on it and on its tokenizer, and give the folder."
        raise ConfigError(
            f"{key} is {found}. Allowed is a name ('tiny', 'digits'), a folder, a hub id, or "
            f"lit_rl.models.LanguageModel(name, ...).{hint}"
        )

    def _check(self) -> None:
        if self.gradient_checkpointing not in (True, False, "auto", "offload"):
            raise ConfigError(
                f"model.gradient_checkpointing={self.gradient_checkpointing!r} is unknown: allowed is true, false, "
                "auto, offload."
            )
        for key in sorted(self.init_kwargs.keys() & column("model").keys()):
            raise ConfigError(f"model.init_kwargs.{key} is not taken: use {column('model')[key]}.")
        if self.compile and self.use_liger_kernel:
            raise ConfigError(
                "model.compile=true and model.use_liger_kernel=true are two ways to compute the same operations: set "
                "one of them."
            )
        if self.lora is not None and self.adapter is not None:
            raise ConfigError("model.lora makes a fresh adapter and model.adapter continues one: set one of them.")
        if self.quantization is not None and self.lora is None and self.adapter is None:
            raise ConfigError(
                f"model.quantization={self.quantization}: quantised weights cannot be trained. Add model.lora or "
                "model.adapter, or drop the quantisation."
            )
        if self.is_local and self.revision is not None:
            raise ConfigError(
                f"model.revision={self.revision!r} means a hub repository, but {self.name!r} is a folder."
            )
        pinned = re.fullmatch(r"[0-9a-f]{40}", self.revision or "")
        if self.trust_remote_code and not self.is_local and not pinned:
            raise ConfigError(
                f"model.trust_remote_code=true runs Python code from the hub, which can do anything that you can, and "
                f"model.revision={self.revision!r} may point to other code tomorrow. Read the code, and set "
                "model.revision to the 40 hexadecimal digits of the commit that you read."
            )

    @property
    def checkpointing(self) -> bool | Literal["offload"]:
        """Gradient checkpointing as the description has it; off where it is left to a memory plan."""
        how = self.gradient_checkpointing
        return False if how == "auto" else how  # pyright: ignore

    @property
    def is_local(self) -> bool:
        """True for a folder of this machine."""
        return Path(self.path).is_dir() or self.name in SHIPPED

    @property
    def label(self) -> str:
        """A short name, safe in a file name: ``tiny``, ``Qwen2.5-0.5B-Instruct``."""
        return re.sub(r"[^\w.-]+", "-", Path(self.path).name).strip("-.") or "model"

    @property
    def _hub(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @cached_property
    def config_and_kwargs(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        """The config with the overrides of ``init_kwargs``, and those of ``init_kwargs`` that are no overrides.

        Raises:
            ConfigError: ``init_kwargs`` has a key that is neither.
        """
        from transformers import AutoConfig

        with hub_files.reading("model.name", self.name, self.path), hub_files.quiet_about_defaults():
            found: Any = AutoConfig.from_pretrained(
                self.path, return_unused_kwargs=True, **self._hub, **copy.deepcopy(self.init_kwargs)
            )
        config, unused = found
        unused = {key: value for key, value in unused.items() if key in self.init_kwargs}
        if not self.trust_remote_code:  # code of the user's choice may take anything
            check_overrides("model.init_kwargs", unused, config, self.name, beside=_LOADING, elsewhere=column("model"))
        return config, unused

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config, with the overrides of ``init_kwargs``."""
        return self.config_and_kwargs[0]

    @cached_property
    def generation_config(self) -> GenerationConfig | None:
        """The model's own generation config: only its EOS ids are ever used. None where it has none."""
        from huggingface_hub.errors import EntryNotFoundError
        from transformers import GenerationConfig

        if self.is_local and not (Path(self.path) / "generation_config.json").is_file():
            return None
        with hub_files.reading("model.name", self.name, self.path):
            try:
                return GenerationConfig.from_pretrained(self.path, revision=self.revision or "main")
            except OSError as error:
                # The config was there a moment ago, so "no entry" means that the repository has no such file.
                if self.config and isinstance(error.__cause__ or error.__context__ or error, EntryNotFoundError):
                    return None
                raise

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer: pads on the left, and has an EOS and a pad token.

        Raises:
            ConfigError: it has no EOS token, so that no response could end, or ids that the embedding lacks.
        """
        tokenizer = self.read_tokenizer()
        self._check_vocabulary(tokenizer)
        if self.chat_template is not None:
            self._new_tokens = tuple(tokenizers.set_chat_template(tokenizer, self.chat_template))
        if self.eos_token is not None:
            tokenizers.set_token(tokenizer, "eos", self.eos_token)
        if tokenizer.eos_token_id is None:
            tokens = tokenizers.added_tokens(tokenizer)[:10]
            typed = f": {shlex.quote(f'model.eos_token={tokens[0]}')}, with its quotes" if tokens else ""
            raise ConfigError(
                f"The tokenizer of {self.name!r} has no EOS token, so no response could end. Set model.eos_token to "
                f"one of its tokens, such as {', '.join(tokens)}{typed}."
            )
        if self.pad_token is not None:
            tokenizers.set_token(tokenizer, "pad", self.pad_token)
        tokenizers.choose_pad(tokenizer, self._eos_ids(tokenizer))
        return tokenizer

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer as it comes with the model, padding on the left."""
        return tokenizers.load_tokenizer(self.name, self.path, **self._hub)

    @cached_property
    def sees(self) -> bool:
        """True for a model over images too."""
        return sees(self.config)

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """Parts of a model over images that are not trained: the vision encoder, unless `freeze` is set."""
        return ("vision",) if self.freeze is None else self.freeze

    @cached_property
    def processor(self) -> VisionProcessor | None:
        """The processor that makes tokens and pixels of prompts with images; None for a model over text.

        Raises:
            BackendError: its files or a package that it needs are missing.
        """
        if not self.sees:
            return None
        from lit_rl.models.vision_processor import load_processor

        return load_processor(self.name, self.path, self.tokenizer, self.config, **self._hub)

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that ``chat_template`` added to the vocabulary. Their embeddings are the mean one."""
        return self._new_tokens if self.tokenizer else ()

    def _eos_ids(self, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        text = self.config.get_text_config()
        fields = [tokenizer.eos_token_id, getattr(text, "eos_token_id", None)]
        fields.append(getattr(self.generation_config, "eos_token_id", None))
        return set().union(*map(tokenizers.as_ids, fields))

    def _check_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        rows, highest = self.config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
        if highest >= rows:
            raise ConfigError(
                f"The tokenizer of {self.name!r} has ids up to {highest}, but the embedding has {rows} rows. Were "
                "tokens added without resizing the model? Call resize_token_embeddings on it and save both again."
            )

    def load(self) -> PreTrainedModel | PeftModel:
        """Load the policy, on the CPU, in train mode. With ``lora`` or ``adapter`` only the adapter has gradients.

        Raises:
            ConfigError: not a causal language model over text, an adapter that fits no module, or no kernels for it.
            StorageError: weights are missing, damaged, of other shapes, or pickled.
            BackendError: the model cannot be reached, or a package is missing.
        """
        from lit_rl.models import kernels, loading

        loading.check_causal(self.name, self.config)
        if self.freeze is not None and not self.sees:
            raise ConfigError(
                f"model.freeze={list(self.freeze)} freezes parts of a model over images, and {self.name!r} is one over "
                "text. Leave it out."
            )
        if self.use_liger_kernel:
            kernels.check_liger(self.name, self.config)
        assert self.tokenizer.eos_token is not None  # it checks itself, and fails before any weight is read
        return self.prepared(self.load_base())

    def prepared(
        self, base: PreTrainedModel, task_type: str = "CAUSAL_LM", *, head: Sequence[str] = ()
    ) -> PreTrainedModel | PeftModel:
        """Return a loaded base in train mode, changed as the settings say, with its adapters or its frozen parts.

        Args:
            base: A language model, or a classifier.
            task_type: PEFT's word for what the model does.
            head: Names of a classifier's head; empty for a language model.
        """
        from lit_rl.models import kernels, loading
        from lit_rl.models.modes import disable_dropout, set_checkpointing

        if self.disable_dropout:
            disable_dropout(base)
        if self.lm_head_fp32:
            loading.use_float32_head(base)
        if self.use_liger_kernel:
            kernels.use_liger_kernels(base)
        if self.compile:
            kernels.compile_pieces(base)
        if self.sees and not head:
            loading.ban_placeholders(base)
        policy = self.adapted(base, task_type, head)
        set_checkpointing(base, self.checkpointing)
        return policy.train()

    def adapted(self, base: PreTrainedModel, task_type: str, head: Sequence[str]) -> PreTrainedModel | PeftModel:
        """Return a base with the adapters that are trained; one that is trained itself, with its parts frozen."""
        from lit_rl.models.loading import continue_adapter

        if self.lora is not None:
            new = () if head else self.new_tokens
            return self.lora.apply(base, task_type, head=head, new_tokens=new, frozen=self.frozen_parts)
        if self.adapter is not None:
            return continue_adapter(base, self.adapter)
        if self.sees:
            freeze(base, self.frozen_parts)
        return base

    def load_base(self) -> PreTrainedModel:
        """Load the model without adapters, every weight checked to have come from the files.

        Raises:
            StorageError: weights are missing, damaged, of other shapes, or pickled.
            BackendError: the model cannot be reached, or a package is missing.
        """
        from lit_rl.models import loading

        config, kwargs = self.config_and_kwargs
        hub_files.refuse_pickle("model.name", self.path, "")
        if self.attn_implementation is not None:
            kwargs = {**kwargs, "attn_implementation": self.attn_implementation}
        if self.quantization is not None:
            kwargs = {**kwargs, "quantization_config": loading.quantization_config(self.quantization)}
        base = loading.load_weights(self.name, self.path, config, dtype=self.dtype, **self._hub, **kwargs)
        if self.quantization is not None:
            loading.let_gradients_through(base)
        if self.chat_template is not None:
            loading.add_embeddings(base, self.new_tokens)
        return base

    def held_in(self, dtype: WeightType) -> LanguageModel:
        """Return the description of the same model with weights of this type."""
        other = copy.copy(self)
        other.dtype = dtype
        return other

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a response: the sorted union over tokenizer, config and generation config."""
        return tuple(sorted(self._eos_ids(self.tokenizer)))

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id  # pyright: ignore[reportReturnType]  # an int once `tokenizer` returned

    @property
    def reads(self) -> PromptForm | None:
        """The form of prompts that it was trained to answer, by its export (`lit_rl_prompts` of config.json); None if
        unknown."""
        return getattr(self.config, "lit_rl_prompts", None)

    @property
    def context_length(self) -> int | None:
        """Longest prompt and response together, in tokens. None where the config gives no limit."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)
