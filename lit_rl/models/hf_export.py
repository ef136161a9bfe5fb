"""Export of policies and scoring models as Hugging Face folders, proven to be what was trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rl.core.errors import StorageError
from lit_rl.core.rollout import PromptForm
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.models.loading import auto_class
from lit_rl.models.model_card import model_card
from lit_rl.models.scoring import Scoring, load_scoring_base
from lit_rl.models.trunk import base_of
from lit_rl.models.verified_folder import (
    ExportReport,
    LogitProbe,
    compare_folder,
    verify,
    verify_processor,
    verify_tokenizer,
    write_checked,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel


def export_policy(
    description: LanguageModel,
    policy_state: Mapping[str, Tensor],
    policy: nn.Module,
    folder: str | Path,
    *,
    card: str,
    prompts: PromptForm | None = None,
) -> ExportReport:
    """Write model, tokenizer, generation config and card to ``folder``, which appears whole and checked, or not at all.

    With a model over images its processor is written. An adapter is merged into its base, and stands by
    itself in ``folder/adapter``. One process calls this. The weights are ``policy_state``'s: ``policy`` gives configs
    only, so it may be sharded and on any device.

    Args:
        description: The `LanguageModel` that the policy was loaded from.
        policy_state: Every tensor of the policy, whole, under the policy's own names (see `full_state_dict`).
        policy: The policy.
        folder: A new folder, or an earlier export, which is replaced.
        card: Text of README.md, see `model_card`.
        prompts: Form of the prompts that it was trained on, for config.json; None keeps the base's.

    Raises:
        StorageError: the state is partial or of other shapes, the folder cannot be written or holds something else,
            or what was written does not reload as it was, or says something else than the policy.
    """
    rebuild = partial(_rebuild, description, policy, policy_state, prompts)
    probe = LogitProbe(
        description, policy, policy_state, base_in_files(description, unquantized(description).load_base)
    )
    return write_checked(folder, description, rebuild, verify_policy, card, probe)


def base_in_files(description: LanguageModel, load: Callable[[], Any]) -> Callable[[], Any]:
    """Return the function that loads the base of an adapter anew: ``load``, or for an object the files that its config
    names."""
    return description.load_named if isinstance(description, LoadedModel) else load


def verify_policy(staged: Path, state: Mapping[str, Tensor], description: LanguageModel, probe: LogitProbe) -> float:
    """Return the largest difference between the tensors that were written and their reload."""
    remote = {"trust_remote_code": description.trust_remote_code}
    if description.processor is not None:
        verify_processor(staged, description.processor, **remote)
    loaded_by = auto_class(description.config).__name__
    return verify(staged, state, description.tokenizer, loaded_by=loaded_by, probe=probe, **remote)


def _rebuild(
    description: LanguageModel, policy: nn.Module, state: Mapping[str, Tensor], prompts: PromptForm | None
) -> PreTrainedModel | PeftModel:
    """Return a model on the CPU like ``policy``, whose parameters are the tensors of ``state``.

    Its configs agree with the tokenizer about the ids of EOS and padding.
    """
    from lightning.pytorch.utilities import rank_zero_warn
    from transformers import GenerationConfig

    base = base_of(policy)
    first, *others = description.eos_ids
    ids = {
        "eos_token_id": [first, *others] if others else first,
        "pad_token_id": description.pad_id,
        "bos_token_id": description.tokenizer.bos_token_id,
    }
    extra = {"lit_rl_prompts": prompts} if prompts is not None else {}
    config, generation_config = copy.deepcopy(base.config), copy.deepcopy(base.generation_config)
    config.get_text_config().update(ids)
    config.update({**ids, **extra})
    generation_config.update(**ids)
    try:
        generation_config.validate(strict=True)
    except ValueError as error:
        rank_zero_warn(
            f"The model's generation_config.json contradicts itself, so only its token ids are kept: {error}"
        )
        generation_config = GenerationConfig(**ids)
    if description.quantization is not None:
        # Merging into 4-bit weights would round the adapter away, so the adapter joins the base as it was published.
        rebuilt: Any = base_in_files(description, unquantized(description).load_base)()
        rebuilt.config.update({"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id, **extra})
    else:
        with torch.device("meta"):
            rebuilt = made_by(auto_class(config), config, description)
    rebuilt.generation_config = generation_config
    return refilled(rebuilt, policy, state, description)


def refilled(
    plain: PreTrainedModel, model: nn.Module, state: Mapping[str, Tensor], description: LanguageModel
) -> PreTrainedModel | PeftModel:
    """Return ``plain`` with adapters like ``model``'s, if any, and the tensors of ``state``: nothing is copied."""
    from peft import PeftModel, PeftType, get_peft_model

    rebuilt: Any = plain
    if isinstance(model, PeftModel):
        name = str(model.active_adapter)
        config = copy.deepcopy(model.peft_config[name])
        if plain.device.type == "meta" and config.peft_type != PeftType.LORA:
            _give_storage(plain)
        with torch.device(plain.device):
            rebuilt = get_peft_model(plain, config, adapter_name=name)
    needed = dict(rebuilt.named_parameters())
    if description.quantization is not None:
        needed = {name: parameter for name, parameter in needed.items() if parameter.requires_grad}
        state = {name: tensor for name, tensor in state.items() if name in needed}
    tensors = {name: tensor.detach().cpu() for name, tensor in state.items()}
    try:
        unexpected = rebuilt.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise StorageError(f"The policy's weights do not fit its own config: {error}") from error
    _tie(rebuilt, plain, model)
    missing = [name for name, parameter in rebuilt.named_parameters() if parameter is needed.get(name)]
    for problem, names in (("lacks", missing), ("also holds", unexpected)):
        if names:
            raise StorageError(
                f"The state to export {problem} {len(names)} weights of the policy: {', '.join(sorted(names)[:5])}. "
                "Was it gathered from every rank, under the policy's own names?"
            )
    return rebuilt


@torch.no_grad()
def _give_storage(plain: PreTrainedModel) -> None:
    """Put zeros on the CPU in place of tensors without storage.

    Adapters other than LoRA compute tensors that no state holds when they are made, such as the indices by which OFT
    merges: made without storage, these would be arbitrary, and the merged model another one than was trained, without
    an error.
    """
    plain.to_empty(device="cpu")
    for tensor in (*plain.parameters(), *plain.buffers()):
        tensor.zero_()


def made_by(auto: Any, config: PreTrainedConfig, description: LanguageModel) -> Any:
    """Make a model of the config, by a class of transformers. Code that comes with the model is known since it was
    loaded, and a class that is known takes no revision."""
    remote: dict[str, Any] = {}
    if description.trust_remote_code:
        known = type(config) in auto._model_mapping
        remote = {"trust_remote_code": True} | ({} if known else {"code_revision": description.revision})
    return auto.from_config(config, **remote)


def unquantized(description: LanguageModel) -> LanguageModel:
    """Return the description of the same model as it was published."""
    whole = copy.copy(description)
    whole.quantization = None
    return whole


def _tie(rebuilt: nn.Module, plain: Any, model: nn.Module) -> None:
    """Make tied weights one tensor again: as they are in ``model``, whose adapters may have moved them to names under
    which transformers does not find them."""
    if rebuilt is plain:
        plain.tie_weights()
        return
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(rebuilt.get_submodule(path), last, rebuilt.get_parameter(first))


def export_scoring(
    description: LanguageModel,
    scoring: Scoring,
    scorer_state: Mapping[str, Tensor],
    scorer: nn.Module,
    folder: str | Path,
    *,
    card: str,
    reads: Mapping[str, Any],
) -> ExportReport:
    """Write classifier, tokenizer and card to ``folder``, which appears whole and checked, or not at all.

    A LoRA model is merged into its base, and its adapter, with the head, stands by itself in ``folder/adapter``.

    Args:
        description: The `LanguageModel` that the model was loaded from.
        scoring: Kind of the scoring model.
        scorer_state: Every tensor, whole, under the model's own names (see `full_state_dict`).
        scorer: The model: it gives configs, and the scores that the reloaded model has to give.
        folder: A new folder, or an earlier export, which is replaced.
        card: Text of README.md, see `model_card`.
        reads: How a text must be prepared to be read as in training; these go into config.json.

    Raises:
        StorageError: as `export_policy`.
    """

    def check(staged: Path, state: Mapping[str, Tensor], description: LanguageModel, probe: LogitProbe) -> float:
        remote = description.trust_remote_code
        difference = compare_folder(staged, state, scoring.auto, trust_remote_code=remote, probe=probe)
        verify_tokenizer(staged, description.tokenizer, trust_remote_code=description.trust_remote_code)
        if description.processor is not None:
            verify_processor(staged, description.processor, trust_remote_code=description.trust_remote_code)
        return difference

    load_base = base_in_files(description, partial(load_scoring_base, unquantized(description), scoring))
    probe = LogitProbe(description, scorer, scorer_state, load_base)
    rebuild = partial(_rebuild_scorer, description, scoring, scorer, scorer_state, reads)
    return write_checked(folder, description, rebuild, check, card, probe)


def _rebuild_scorer(
    description: LanguageModel,
    scoring: Scoring,
    scorer: nn.Module,
    state: Mapping[str, Tensor],
    reads: Mapping[str, Any],
) -> Any:
    """Return a model on the CPU like ``scorer`` with the tensors of ``state``."""
    import transformers

    if description.quantization is not None:
        # As for a policy: the adapter joins the base as it was published, since 4-bit weights would round it away.
        plain: Any = base_in_files(description, partial(load_scoring_base, unquantized(description), scoring))()
    else:
        with torch.device("meta"):
            plain = made_by(getattr(transformers, scoring.auto), copy.deepcopy(base_of(scorer).config), description)
    plain.config.update(dict(reads))
    return refilled(plain, scorer, state, description)


# ---------------------------------------------------------------------- folder and card, by kind of model


# transformers has no classifiers over images for most model families, so the card shows how lit_rl calls the model.
_VISION_USAGE = """from pathlib import Path

from lit_rl.data.row_visuals import image_of
from lit_rl.rewards import RewardModel

score = RewardModel("path/to/this/folder")
photo = image_of(Path("photo.png").resolve(), "photo")
asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is shown?"}]}]
score([asked], [[{"role": "assistant", "content": "a reply"}]], images=[[photo]])"""


@dataclass(frozen=True)
class ExportForm:
    """The form of a trained model's export: what kind of model the folder holds, and its card for the hub.

    Args:
        tags: The hub's tags for the way of training a policy.
        scoring: Kind of a model that scores; None for a policy.
        reads: How it must prepare a text to read it as in training; these go into config.json.
    """

    tags: tuple[str, ...] = ()
    scoring: Scoring | None = None
    reads: Mapping[str, Any] = field(default_factory=dict)

    def loaded_by(self, model: LanguageModel) -> str:
        """Return the class of transformers that loads the folder."""
        if self.scoring is not None:
            return self.scoring.auto
        return "AutoModelForImageTextToText" if model.sees else "AutoModelForCausalLM"

    def write(
        self,
        model: LanguageModel,
        policy: nn.Module,
        weights: Mapping[str, Tensor],
        folder: str | Path,
        facts: Mapping[str, Any],
    ) -> ExportReport:
        """Write and verify the folder, with a card of these facts: see `export_policy` and `export_scoring`."""
        from peft import PeftModel

        auto, scoring = self.loaded_by(model), self.scoring
        if scoring is not None:
            how = _VISION_USAGE if model.sees else None
            card = model_card(facts, loaded_by=auto, pipeline=scoring.pipeline, how_to_load=how)
            return export_scoring(model, scoring, weights, policy, folder, card=card, reads=self.reads)
        pipeline = "image-text-to-text" if model.sees else "text-generation"
        adapter = isinstance(policy, PeftModel) and not model.sees
        card = model_card(facts, loaded_by=auto, pipeline=pipeline, adapter=adapter, tags=self.tags)
        return export_policy(model, weights, policy, folder, card=card, prompts=facts.get("prompts"))
