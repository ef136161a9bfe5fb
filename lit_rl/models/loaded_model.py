"""A model of transformers or PEFT that is loaded already, in the place of a description."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from lit_rl.core.errors import ConfigError, did_you_mean
from lit_rl.core.speedups import ModelSpeedups
from lit_rl.models import loading
from lit_rl.models.adapters import PeftAdapter
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.merging import check_kind, check_merge, refuse_hidden_adapters
from lit_rl.models.modes import disable_dropout, recomputes, set_checkpointing
from lit_rl.models.trunk import base_of, trained_of_base
from lit_rl.models.vision_parts import sees

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    ModelLike = LanguageModel | PreTrainedModel | PeftModel | str
    """The type of `model` of every algorithm. Configs that are read from files know the first and the last."""
    TokenizerLike = PreTrainedTokenizerBase | None
    """The type of `tokenizer` of every algorithm, in Python alone."""
else:
    ModelLike = LanguageModel | str
    TokenizerLike = Any

_SETTINGS = (
    "lora",
    "disable_dropout",
    "gradient_checkpointing",
    "speedups",
    "eos_token",
    "pad_token",
    "allow_changed",
)
_TRAINED: WeakSet[Any] = WeakSet()
"""Objects that a run of this process has trained."""


class LoadedModel(LanguageModel):
    """A model of transformers, or of PEFT around one, as an object.

    It is trained in place: after a run it has the trained weights, on the device of the run. Its tokenizer is copied,
    and stays as it is.

    Args:
        model: A causal language model over text; of a reward model, a sequence classifier with one label.
        tokenizer: Its tokenizer.
        settings: Of `LanguageModel`, those that are not about files: lora, disable_dropout, gradient_checkpointing,
            eos_token, pad_token, allow_changed, and how log-probs are computed. With `lora` the object gets the
            adapters.

    Raises:
        ConfigError: the model sees images, is quantised, or has several adapters or one that cannot be merged; the
            tokenizer is none; or a setting is about files.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> None:
        from peft import PeftModel
        from transformers import PreTrainedModel

        if not isinstance(model, PreTrainedModel | PeftModel):
            raise ConfigError(f"model is a {type(model).__name__}, and no model of transformers or PEFT.")
        _check_tokenizer(model, tokenizer)
        for name in settings:
            if name not in _SETTINGS:
                hint = f" It is one of the speedups={{{name!r}: ...}}." if name in ModelSpeedups.names() else ""
                raise ConfigError(
                    f"{name} is no setting of a model that is loaded already. Allowed are {', '.join(_SETTINGS)}."
                    f"{hint or did_you_mean(name, _SETTINGS)}"
                )
        base = base_of(model)
        _check_base(base)
        if isinstance(model, PeftModel):
            settings["lora"] = _adapter_of(model, settings.get("lora"))
        else:
            refuse_hidden_adapters(base, "model")
        if recomputes(base):
            settings.setdefault("gradient_checkpointing", True)
        self.given = model
        self.given_tokenizer = tokenizer
        self.began_trained = False
        """True where another run of this process had trained the object when this one began."""
        name = str(getattr(base.config, "_name_or_path", "") or type(base).__name__)
        dtype: Any = str(base.dtype).removeprefix("torch.")
        super().__init__(name, dtype=dtype, **settings)
        if isinstance(self.lora, PeftAdapter) and not self.is_local:
            self.revision = self.lora.config.revision  # get_peft_model's; transformers notes no commit in a model

    def find(self) -> str:
        return self.name

    @property
    def config_and_kwargs(self) -> tuple[PreTrainedConfig, dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        base = base_of(self.given)
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__]
        return config, {}

    @property
    def generation_config(self) -> GenerationConfig | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(base_of(self.given), "generation_config", None)

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = copy.deepcopy(self.given_tokenizer)
        tokenizer.padding_side = "left"
        # transformers writes the sides that a tokenizer was loaded with, and not those that were set on it.
        tokenizer.init_kwargs |= {side: getattr(tokenizer, side) for side in ("padding_side", "truncation_side")}
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer

    def load(self) -> PreTrainedModel | PeftModel:
        """Return the object itself, in train mode, with adapters where `lora` is set.

        Raises:
            ConfigError: no causal language model over text, or an adapter that fits no module.
        """
        loading.check_causal(self.name, self.config)
        assert self.tokenizer.eos_token is not None  # it checks itself
        return self.prepared("CAUSAL_LM")

    def prepared(self, task_type: str, *, head: tuple[str, ...] = ()) -> PreTrainedModel | PeftModel:
        """Return the object in train mode, as the settings say.

        Args:
            task_type: PEFT's word for what the model does.
            head: Names of a classifier's head.
        """
        from peft import PeftModel

        model: Any = self.given
        self.began_trained = model in _TRAINED
        base = base_of(model)
        if str(base.dtype) != f"torch.{self.dtype}":
            base.to(getattr(torch, self.dtype))
        loading.correct_tied_config(base)
        if self.disable_dropout:
            disable_dropout(base)
        if self.lora is not None and not isinstance(model, PeftModel):
            model = self.lora.apply(base, task_type, head=head)
        set_checkpointing(base, self.checkpointing)
        return model.train()

    def load_base(self) -> PreTrainedModel:
        raise ConfigError(
            "The policy came as an object, which is trained in place: there is no second copy of what it was before. "
            "Give the folder or hub id that it came from as model."
        )

    def load_named(self) -> PreTrainedModel:
        """Load the model anew from the files that the object's config names, of the revision that its adapter names, if
        they are on this machine.

        Raises:
            OSError: they are not.
        """
        base = base_of(self.given)
        if not getattr(base.config, "_name_or_path", ""):
            raise OSError("the model came as an object whose config names no files.")
        how = {"num_labels": base.config.num_labels} if base.get_output_embeddings() is None else {}  # of a classifier
        files_alone = {"use_safetensors": True, "local_files_only": True}
        return type(base).from_pretrained(self.name, revision=self.revision, dtype=self.dtype, **files_alone, **how)

    def note_training(self) -> None:
        """Note that a run begins to train the object."""
        _TRAINED.add(self.given)


def as_language_model(model: Any, tokenizer: Any = None) -> LanguageModel:
    """Return the description of a model in any form that a user may give.

    Args:
        model: A description, a name, folder or hub id, or a loaded model of transformers or PEFT.
        tokenizer: Tokenizer of a loaded model.

    Raises:
        ConfigError: it is anything else; a loaded model comes without its tokenizer, or a tokenizer with a name that
            has its own.
    """
    from torch import nn

    if isinstance(model, nn.Module):
        from peft import PeftModel
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel | PeftModel):
            return LoadedModel(model, tokenizer)
        raise ConfigError(
            f"model is a {type(model).__name__}, a module of torch that is no language model. Allowed is a name "
            "('tiny'), a folder, a hub id, lit_rl.LanguageModel(name, ...), or a PreTrainedModel of transformers or a "
            "PeftModel with tokenizer=."
        )
    elif tokenizer is not None:
        raise ConfigError(
            "tokenizer belongs to a model that is loaded already. A name, folder or hub id has its own, which "
            "lit_rl.LanguageModel(name, chat_template=..., eos_token=..., pad_token=...) changes."
        )
    return LanguageModel.of(model)


def _check_tokenizer(model: Any, tokenizer: Any) -> None:
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    kind = type(base_of(model)).__name__
    what = f"tokenizer is a {type(tokenizer).__name__}" if tokenizer is not None else "its tokenizer did not come"
    raise ConfigError(
        f"model is a {kind} that is loaded already, and {what}: pass tokenizer=AutoTokenizer.from_pretrained(name) of "
        "transformers, the one that belongs to the model."
    )


def _check_base(base: Any) -> None:
    from peft import PeftModel

    why = ""
    if isinstance(base, PeftModel):
        why = "stands inside another PeftModel, and one adapter is exported (merge_and_unload() of it is a plain model)"
    elif sees(base.config):
        why = "sees images, and needs its processor"
    elif getattr(base, "is_quantized", False):
        why = "is quantised, and an export needs the weights as they were published"
    if why:
        raise ConfigError(
            f"model is a {type(base).__name__} that {why}: give its folder or hub id, such as "
            "lit_rl.LanguageModel(name, ...)."
        )


def _adapter_of(model: PeftModel, lora: Any) -> PeftAdapter:
    """Return the adapter that a model of PEFT carries."""
    if lora is not None:
        raise ConfigError("model is a PeftModel, which has an adapter, and lora would make another: leave it out.")
    if len(model.peft_config) != 1:
        raise ConfigError(
            f"model is a PeftModel with {len(model.peft_config)} adapters ({', '.join(model.peft_config)}), and one is "
            "trained and exported: delete the others (delete_adapter)."
        )
    (config,) = model.peft_config.values()
    check_kind("The adapter of model", config)
    _check_layers(model, config)
    check_merge(model, "The adapter of model")
    if getattr(config, "bias", "none") == "none" and (beside := trained_of_base(model)):
        raise ConfigError(
            f"model is a PeftModel of which {len(beside)} weights of the base have gradients too "
            f"({', '.join(beside[:3])}): the folder of its adapter would not hold them. Name their modules in "
            "modules_to_save of its config, or freeze them (requires_grad_(False))."
        )
    return PeftAdapter(config)


def _check_layers(model: PeftModel, config: Any) -> None:
    """Raise ConfigError where the layers of an adapter were set by hand: only its config goes into an export."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        why = "is switched off: call enable_adapter_layers() on it" if layer.disable_adapters else ""
        for name, scale in (getattr(layer, "scaling", None) or {}).items() if config.peft_type == "LORA" else ():
            alpha, rank = (getattr(layer, each)[name] for each in ("lora_alpha", "r"))
            stated = alpha / (rank**0.5 if config.use_rslora else rank)
            if abs(scale - stated) > 1e-6 * abs(stated):
                why = (
                    f"is scaled by {scale:g}, and by its config, which is all that an export has, by {stated:g}: set "
                    "lora_alpha, or alpha_pattern, and make it anew"
                )
        if why:
            raise ConfigError(f"The adapter of model in {path} {why}.")
