"""The steps of `LanguageModel.load`: weights from files, new embeddings, dropout, the head, adapters."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_rl.core.errors import BackendError, ConfigError, StorageError
from lit_rl.models import hub_files
from lit_rl.models.merging import check_kind, check_merge, check_start, refuse_hidden_adapters
from lit_rl.models.vision_parts import placeholder_ids, sees

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel


class Float32Head(nn.Linear):
    """A language-model head that computes in float32, whatever the type of its weight and of autocast.

    It keeps the weight's own type, so an embedding tied to it is untouched, as are the names in the state dict.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


class BanningHead(nn.Linear):
    """A language-model head that gives no probability to tokens that no policy may sample: placeholders of images.

    A placeholder in a response would be taken for an image that is not there, and the pass over its whole micro-batch
    would fail. Banned here, it is banned in every generator and in every score, so ratios stay 1. A soft cap
    after the head lifts these logits to -cap, so `ban_placeholders` lets the model end with `ban_again`.

    Args:
        head: The head whose weights are used, and kept as they are.
        banned: Token ids.
    """

    def __init__(self, head: nn.Linear, banned: Sequence[int]) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight, self.bias = head.weight, head.bias
        self.exact = isinstance(head, Float32Head)
        """True where products are taken in float32."""
        self.banned = tuple(banned)
        self._made: Tensor | None = None

    @property
    def bias_with_bans(self) -> Tensor:
        """``(v,)`` in the type of the weight: the bias that is added to the logits. Finite, as 0 times infinity is no
        number."""
        whole = self.weight.new_zeros(self.out_features) if self.bias is None else self.bias.detach().clone()
        whole[list(self.banned)] = RULED_OUT
        return whole

    def forward(self, input: Tensor) -> Tensor:
        product = Float32Head.forward if self.exact else nn.Linear.forward
        self._made = self._fill(product(self, input))  # pyright: ignore
        return self._made

    def forget(self) -> None:
        """Forget logits that were computed by a call of the head alone, before a pass of the model."""
        self._made = None

    def ban_again(self, logits: Tensor) -> Tensor:
        """Return the logits of a model that ran this head: filled again if they are no longer those the head returned.

        They come back as they are where the head did not compute (another `forward` stood in its place).
        """
        made, self._made = self._made, None
        return logits if made is None or logits is made else self._fill(logits)

    def _fill(self, logits: Tensor) -> Tensor:
        places = torch.tensor(self.banned, device=logits.device)
        return logits.index_fill(-1, places, RULED_OUT)


RULED_OUT = -1e4
"""A logit so far below all others that its probability is 0, also in float16."""


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes a language model of this config, over images too where it says so."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def load_weights(name: str, path: str, config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """Load a causal language model, over images too where its config says so, every weight checked to be from files.

    Args:
        name: Name of the model in messages.
        path: Folder or hub id of the model.
        config: Config of the model.
        settings: Further arguments of `from_pretrained`.

    Raises:
        StorageError: weights are missing or damaged.
        BackendError: the model cannot be reached.
    """
    from lightning.pytorch.utilities import rank_zero_info

    if path != name and path == str(hub_files.copy_without_hub(name)):
        rank_zero_info(f"model.name={name}: read from {path}, whose weights are not the hub's (see its README.md).")
    with hub_files.reading("model.name", name, path):
        loaded: Any = auto_class(config).from_pretrained(
            path, config=config, use_safetensors=True, output_loading_info=True, **settings
        )
    base, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise StorageError(
            f"model.name={name!r}: its files lack {len(missing)} weights ({', '.join(missing[:5])}), which "
            "transformers filled with random numbers. Fetch the model again, or check that config.json and "
            "model.init_kwargs belong to it."
        )
    refuse_hidden_adapters(base, f"model.name={name!r}")
    correct_tied_config(base)
    return base


def correct_tied_config(base: PreTrainedModel) -> None:
    """Correct a config that calls embedding and head one weight where the model holds two.

    Transformers keeps both, and other readers of the config (vLLM, older versions, a model that is made empty) would
    lose the head.
    """
    from lightning.pytorch.utilities import rank_zero_info

    configs = (base.config, base.config.get_text_config())
    claiming = [config for config in configs if getattr(config, "tie_word_embeddings", False)]
    head: Any = base.get_output_embeddings()
    if not claiming or head is None:
        return
    ties = base.all_tied_weights_keys
    named = {f"{name}.weight" for name, module in base.named_modules() if module is head}
    tables = [module._parameters.get("weight") for module in (head, base.get_input_embeddings())]
    # An adapter around either of them hides its weight; transformers has noted what it did not tie.
    tied = tables[0] is tables[1] if None not in tables else bool(named & {*ties, *ties.values()})
    if tied:
        return
    for config in claiming:
        config.tie_word_embeddings = False
    for name in named & ties.keys():
        del ties[name]
    rank_zero_info(
        "The model's config has tie_word_embeddings=true, and embedding and head are two weights of different values: "
        "both are trained and exported, with tie_word_embeddings=false."
    )


@torch.no_grad()
def add_embeddings(base: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Give new tokens the mean of the rows below them, in the embedding and in the head.

    Nothing is drawn, so a resumed run has the same rows. Rows are added only where the model has none to spare.
    """
    if not tokens:
        return
    if max(tokens) >= base.config.get_text_config().vocab_size:
        base.resize_token_embeddings(max(tokens) + 1, mean_resizing=False)
    head: Any = base.get_output_embeddings()
    tables: list[Any] = [base.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)]
    for table in {id(table): table for table in tables if table is not None}.values():  # tied ones are one
        table[list(tokens)] = table[: min(tokens)].float().mean(0).to(table.dtype)


def check_causal(name: str, config: PreTrainedConfig) -> None:
    """Refuse what is no decoder-only language model over text, or over text and images.

    Raises:
        ConfigError: an encoder-decoder, a classifier, a model over sound, or anything else without a causal head.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    found = ", ".join(config.architectures or []) or config.model_type
    wanted = f"model.name={name!r} is {found}; a causal (decoder-only) language model over text is needed"
    if config.is_encoder_decoder:
        raise ConfigError(f"{wanted}, not an encoder-decoder.")
    if getattr(config, "audio_config", None) is not None:
        raise ConfigError(f"{wanted}, not one over sound.")
    if sees(config):
        wanted += ", or one that transformers knows as AutoModelForImageTextToText"
        if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise ConfigError(f"{wanted}.")
        seeing: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        if config.architectures and seeing.__name__ not in config.architectures:
            raise ConfigError(f"{wanted}: one saved as {seeing.__name__}.")
        return
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{wanted}.")
    known = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    causal = {kind.__name__ for kind in (known if isinstance(known, tuple) else (known,)) if kind is not None}
    if config.architectures and not causal & set(config.architectures):
        raise ConfigError(f"{wanted}: one saved as {' or '.join(sorted(causal))}.")


def ban_placeholders(base: PreTrainedModel) -> None:
    """Let a model over images give its placeholders no probability, whatever it does to logits after its head.

    Raises:
        ConfigError: the head is not plain and linear.
    """
    head: Any = base.get_output_embeddings()
    if isinstance(head, BanningHead):  # of an object that was trained before
        return
    if type(head) not in (nn.Linear, Float32Head):
        around = (
            " Where an adapter stands around it, give the plain model, with the adapter's config: "
            "lit_rl.LoadedModel(model, processor, lora=config)."
            if hasattr(head, "base_layer") or hasattr(head, "original_module")
            else ""
        )
        raise ConfigError(
            f"A model over images needs a plain linear head; this one's is {type(head).__name__}.{around}"
        )
    base.set_output_embeddings(BanningHead(head, placeholder_ids(base.config)))
    # In place of `forward`, as PEFT 0.18 runs no hooks of the model; a partial, as a copy of the model gets its own.
    base.forward = functools.update_wrapper(functools.partial(_forward_with_bans, base, base.forward), base.forward)


def _forward_with_bans(base: PreTrainedModel, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    head: Any = base.get_output_embeddings()
    # Adapters may have wrapped the head, or copied it.
    heads = [part for part in head.modules() if isinstance(part, BanningHead)]
    for part in heads:
        part.forget()
    output = forward(*args, **kwargs)
    for part in heads:
        output.logits = part.ban_again(output.logits)
    return output


def use_float32_head(base: PreTrainedModel) -> None:
    """Let the head of a model compute in float32. Raises ConfigError for a head that is not plain and linear."""
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(f"model.lm_head_fp32 needs a plain linear head; this model's is {type(head).__name__}.")
    exact = Float32Head(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    exact.weight, exact.bias = head.weight, head.bias
    base.set_output_embeddings(exact)


def quantization_config(kind: str) -> Any:
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise BackendError(f"model.quantization={kind} needs bitsandbytes: pip install 'lit-rl[quant]'.")
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    # Products of 4-bit weights are taken in bfloat16, whose range float16 lacks; nf4 as in QLoRA (2305.14314).
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def let_gradients_through(base: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for the bfloat16 products of a CPU.

    It packs a layer for good when it first runs in evaluation mode, which a rollout does, and a packed layer has no
    backward pass: what lies below would be trained by no gradient, or a wrong one, without a word (bitsandbytes 0.50).
    """
    for module in base.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # pyright: ignore


def continue_adapter(base: PreTrainedModel, adapter: str) -> PeftModel:
    """Return the model with a trained adapter, a folder or a hub id, that goes on being trained.

    Raises:
        ConfigError: it is of a kind that cannot be merged, or splits a tied weight.
        StorageError: it does not fit the model.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    path = hub_files.resolve("model.adapter", adapter)
    hub_files.refuse_pickle("model.adapter", path, "adapter_model")
    with hub_files.reading("model.adapter", adapter, path):
        config = PeftConfig.from_pretrained(path)
        check_kind(f"model.adapter={adapter!r}", config)
        check_start(f"model.adapter={adapter!r}", config, trained=True)
        stored = load_peft_weights(path, device="cpu")
        policy = PeftModel.from_pretrained(base, path, is_trainable=True)
    wanted = get_peft_model_state_dict(policy, save_embedding_layers=False).keys()
    wrong = sorted(wanted ^ stored.keys())
    if wrong:
        raise StorageError(
            f"model.adapter={adapter!r} does not fit this model: {len(wrong)} weights are on one side only "
            f"({', '.join(wrong[:5])}). Was it trained on another base model?"
        )
    assert isinstance(policy, PeftModel)
    check_merge(policy, f"model.adapter={adapter!r}")
    return policy
