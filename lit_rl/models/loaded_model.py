"""A model of transformers or PEFT that is loaded already, in the place of a description."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from lit_rl.core.errors import ConfigError, StorageError, did_you_mean
from lit_rl.core.speedups import ModelSpeedups
from lit_rl.models import hub_files, loading
from lit_rl.models.adapters import PeftAdapter
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.merging import check_kind, check_merge, refuse_hidden_adapters
from lit_rl.models.modes import recomputes
from lit_rl.models.trunk import base_of, name_in_base, trained_of_base
from lit_rl.models.vision_parts import sees
from lit_rl.models.vision_processor import checked_processor, copies_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

    from lit_rl.models.vision_processor import VisionProcessor

    ModelLike = LanguageModel | PreTrainedModel | PeftModel | str
    """The type of `model` of every algorithm. Configs that are read from files know the first and the last."""
    TokenizerLike = PreTrainedTokenizerBase | ProcessorMixin | None
    """The type of `tokenizer` of every algorithm, in Python alone."""
else:
    ModelLike = LanguageModel | str
    TokenizerLike = Any

_SETTINGS = (
    "lora",
    "freeze",
    "disable_dropout",
    "gradient_checkpointing",
    "speedups",
    "eos_token",
    "pad_token",
    "allow_changed",
)
_TRAINED: WeakSet[Any] = WeakSet()
"""Objects that a run of this process has trained."""
_COMPARED = 64
"""Rows of a weight that are compared with its file."""


class LoadedModel(LanguageModel):
    """A model of transformers, or of PEFT around one, as an object.

    It is trained in place: after a run it has the trained weights, on the device of the run. Of a model over images,
    the frozen parts stay without gradient, and the placeholders banned. Tokenizer or processor are copied, and stay as
    they are.

    Args:
        model: A causal language model over text, or over text and images; of a reward model, a sequence classifier
            with one label. Its base may be held in few bits by bitsandbytes, under adapters.
        tokenizer: Its tokenizer; of a model over images its processor.
        settings: Of `LanguageModel`, those that are not about files: lora, freeze, disable_dropout,
            gradient_checkpointing, eos_token, pad_token, allow_changed, and how log-probs are computed. With `lora`
            the object gets the adapters. The adapter of a PeftModel says itself which parts are trained.

    Raises:
        ConfigError: the model has several adapters, or one that cannot be merged; it is quantised, and has none, or
            not by bitsandbytes, or is packed for a CPU; tokenizer or processor are none; or a setting is about files.
        StorageError: the weights of a quantised model are not on this machine as they were published.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, tokenizer: TokenizerLike, **settings: Any) -> None:
        from peft import PeftModel
        from transformers import PreTrainedModel

        if not isinstance(model, PreTrainedModel | PeftModel):
            raise ConfigError(f"model is a {type(model).__name__}, and no model of transformers or PEFT.")
        base = base_of(model)
        _check_base(base)
        for name in settings:
            if name not in _SETTINGS:
                hint = f" It is one of the speedups={{{name!r}: ...}}." if name in ModelSpeedups.names() else ""
                raise ConfigError(
                    f"{name} is no setting of a model that is loaded already. Allowed are {', '.join(_SETTINGS)}."
                    f"{hint or did_you_mean(name, _SETTINGS)}"
                )
        if isinstance(model, PeftModel):
            settings["lora"] = _adapter_of(model, settings)
        else:
            refuse_hidden_adapters(base, "model")
        if recomputes(base):
            settings.setdefault("gradient_checkpointing", True)
        if getattr(base, "is_quantized", False):
            # "nf4" for fp4 too: what reads it asks for the bytes of a weight, and whether it can be trained.
            settings["quantization"] = "int8" if getattr(base, "is_loaded_in_8bit", False) else "nf4"
            loading.let_gradients_through(base)
        self.given = model
        self.given_tokenizer = tokenizer
        _check_tokenizer(base, tokenizer)
        self.began_trained = False
        """True where another run of this process had trained the object when this one began."""
        name = str(getattr(base.config, "_name_or_path", "") or type(base).__name__)
        dtype: Any = str(base.dtype).removeprefix("torch.")
        super().__init__(name, dtype=dtype, **settings)
        if isinstance(self.lora, PeftAdapter) and not self.is_local:
            self.revision = self.lora.config.revision  # get_peft_model's; transformers notes no commit in a model
        if self.quantization is not None:
            _check_published(base, self.revision)

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
        tokenizer = self._copies[0]
        tokenizer.padding_side = "left"
        # transformers writes the sides that a tokenizer was loaded with, and not those that were set on it.
        tokenizer.init_kwargs |= {side: getattr(tokenizer, side) for side in ("padding_side", "truncation_side")}
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer

    @cached_property
    def processor(self) -> VisionProcessor | None:
        if not self.sees:
            return None
        return checked_processor("model", self.name, self._copies[1], self.tokenizer, self.config)

    @cached_property
    def _copies(self) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None]:
        return copies_of(self.given_tokenizer)

    def load_base(self) -> PreTrainedModel:
        """Return the object's base itself, in the type of the settings."""
        self.began_trained = self.given in _TRAINED
        base = base_of(self.given)
        if str(base.dtype) != f"torch.{self.dtype}":
            nn.Module.to(base, getattr(torch, self.dtype))  # transformers' own refuses a quantised model
        loading.correct_tied_config(base)
        return base

    def adapted(self, base: PreTrainedModel, task_type: str, head: Sequence[str]) -> PreTrainedModel | PeftModel:
        return self.given if self.given is not base else super().adapted(base, task_type, head)

    def load_named(self) -> PreTrainedModel:
        """Load the model anew from the files that the object's config names, of the revision that its adapter names, if
        they are on this machine: unquantised.

        Raises:
            OSError: they are not.
            StorageError: they lack weights that a quantised object needs for its export.
        """
        base = base_of(self.given)
        if not getattr(base.config, "_name_or_path", ""):
            raise OSError("the model came as an object whose config names no files.")
        how = {"num_labels": base.config.num_labels} if base.get_output_embeddings() is None else {}  # of a classifier
        how |= {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
        loaded: Any = type(base).from_pretrained(self.name, revision=self.revision, dtype=self.dtype, **how)
        named, info = loaded
        if self.quantization is not None:  # this one is exported
            trained = {name_in_base(name) for name, p in base.named_parameters() if p.requires_grad}
            if missing := sorted(info["missing_keys"] - trained):
                raise StorageError(
                    f"The files of {self.name!r} lack {len(missing)} weights ({', '.join(missing[:5])})."
                )
            loading.correct_tied_config(named)
        return named

    def note_training(self) -> None:
        """Note that a run begins to train the object."""
        _TRAINED.add(self.given)


def as_language_model(model: Any, tokenizer: Any = None) -> LanguageModel:
    """Return the description of a model in any form that a user may give.

    Args:
        model: A description, a name, folder or hub id, or a loaded model of transformers or PEFT.
        tokenizer: Tokenizer of a loaded model; of one over images its processor.

    Raises:
        ConfigError: it is anything else; a loaded model comes without its tokenizer, or a tokenizer with a name that
            has its own.
    """
    if isinstance(model, nn.Module):
        from peft import PeftModel
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel | PeftModel):
            return LoadedModel(model, tokenizer)
        raise ConfigError(
            f"model is a {type(model).__name__}, a module of torch that is no language model. Allowed is a name "
            "('tiny'), a folder, a hub id, lit_rl.LanguageModel(name, ...), or a PreTrainedModel of transformers or a "
            "PeftModel with tokenizer= (of a model over images its processor)."
        )
    elif tokenizer is not None:
        raise ConfigError(
            "tokenizer belongs to a model that is loaded already. A name, folder or hub id has its own, which "
            "lit_rl.LanguageModel(name, chat_template=..., eos_token=..., pad_token=...) changes."
        )
    return LanguageModel.of(model)


def _check_tokenizer(base: Any, given: Any) -> None:
    """Raise ConfigError where it is no tokenizer; or the model sees images, and it is no processor of images."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    tokenizer: Any = getattr(given, "tokenizer", None) if isinstance(given, ProcessorMixin) else given
    seeing = sees(base.config)
    if isinstance(tokenizer, PreTrainedTokenizerBase) and (not seeing or hasattr(given, "image_processor")):
        return
    it, auto = ("processor", "AutoProcessor") if seeing else ("tokenizer", "AutoTokenizer")
    no = ", no processor of images" if seeing else ""
    what = f"its {it} did not come" if given is None else f"tokenizer is a {type(given).__name__}{no}"
    raise ConfigError(
        f"model is a {type(base).__name__} that is loaded already, and {what}: pass "
        f"tokenizer={auto}.from_pretrained(name) of transformers, the one that belongs to the model."
    )


def _check_base(base: Any) -> None:
    from peft import PeftModel

    if isinstance(base, PeftModel):
        raise ConfigError(
            f"model is a {type(base).__name__} that stands inside another PeftModel, and one adapter is exported: give "
            "its folder or hub id, such as lit_rl.LanguageModel(name, ...), or merge_and_unload() of it, which is a "
            "plain model."
        )
    method = getattr(base, "quantization_method", None)
    storage = {str(p.dtype) for p in base.parameters() if type(p).__name__ == "Params4bit"} - {"torch.uint8"}
    if getattr(base, "is_quantized", False) and (getattr(method, "value", method) != "bitsandbytes" or storage):
        how = f"with bnb_4bit_quant_storage={storage.pop()}" if storage else f"by {getattr(method, 'value', method)}"
        raise ConfigError(
            f"model is a {type(base).__name__} that is quantised {how}, and no such model was ever trained here. Load "
            "the model as it was published with quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
            "bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16), or load_in_8bit=True."
        )
    states = (getattr(parameter, "quant_state", None) for parameter in base.parameters())
    if any(getattr(state, "packing_format_for_cpu", False) for state in states):
        raise ConfigError(
            f"model is a {type(base).__name__} in 4 bits that was run on the CPU in evaluation mode before. There "
            "bitsandbytes packed its weights for products without a gradient, so nothing below them would be trained. "
            "Load it again, and give it to lit_rl before it runs."
        )


def _check_published(base: Any, revision: str | None) -> None:
    """Raise StorageError where an export would not find the weights of a quantised model as they were published."""
    if problem := why_unpublished(base, str(getattr(base.config, "_name_or_path", "")), revision):
        raise StorageError(
            f"model is a {type(base).__name__} that is quantised, and its adapter is exported merged into the weights "
            f"as they were published, but {problem}. Load it with quantization_config=BitsAndBytesConfig(...) from the "
            "folder or hub id of the whole model, of its main revision or the one that revision of the adapter's "
            "config names, and keep these files."
        )


def why_unpublished(base: Any, name: str, revision: str | None) -> str:
    """Return why a model that was quantised is not that of these files; empty where it is.

    What is not quantised is compared with the weights of the same names there: embeddings and norms tell one revision
    from another.

    Args:
        base: The model, without adapters or under them.
        name: A folder, or a hub id; empty where the model came from none.
        revision: Of a hub id.
    """
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    if not name:
        return "its config names no files (_name_or_path)"
    try:
        found = Path(name).is_dir()
        folder = Path(name if found else snapshot_download(name, revision=revision, local_files_only=True))
        hub_files.refuse_pickle("model", str(folder), "")
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, StorageError) as error:
        return f"those of {name!r} are not on this machine ({' '.join(str(error).split())})"
    if "quantization_config" in config:
        return f"those of {name!r} are quantised themselves"
    whole = {name_in_base(path): p for path, p in base.named_parameters() if "modules_to_save" not in path}
    whole = {path: p.detach() for path, p in whole.items() if p.is_floating_point()}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for path in whole.keys() & set(stored.keys()):
                some, other = whole[path][:_COMPARED].float().cpu(), stored.get_slice(path)
                same = list(whole[path].shape) == other.get_shape()
                if not same or not torch.allclose(some, other[:_COMPARED].float(), rtol=0.01, atol=1e-5):
                    return f"those of {name!r} are others: {path} differs"
    return ""


def _adapter_of(model: PeftModel, settings: Mapping[str, Any]) -> PeftAdapter:
    """Return the adapter that a model of PEFT carries."""
    if settings.get("lora") is not None:
        raise ConfigError("model is a PeftModel, which has an adapter, and lora would make another: leave it out.")
    if settings.get("freeze") is not None:
        raise ConfigError(
            "model is a PeftModel, whose adapter says which parts are trained, and freeze would have no effect: leave "
            "it out (exclude_modules of the adapter's config leaves parts without adapters), or give the plain model "
            "with lora."
        )
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
