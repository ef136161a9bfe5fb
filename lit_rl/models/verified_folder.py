"""A Hugging Face folder that appears whole and verified, or not at all.

`write_checked` writes to a staged folder, reads it anew as a user does, and compares every tensor, every token of the
tokenizer, and logits. That every tensor was written as it stood proves nothing of the model that they make: of a
merge that moved another weight too, of a config with other settings. So a `LogitProbe` gives the policy, the written
model, and the adapter over its base the same `TOKENS` tokens, one model after the other: their logits have to agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lit_rl.core.chat_template import apply_chat_template
from lit_rl.core.durable_files import flush_tree, is_full, retry_on_full_disk
from lit_rl.core.errors import LitRLError, StorageError
from lit_rl.core.model_paths import SHIPPED
from lit_rl.core.visuals import pillow
from lit_rl.models.engine_weights import sort_names
from lit_rl.models.hub_files import reading
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.model_card import without_folders
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.sharding import has_partitions
from lit_rl.models.trunk import base_of, name_in_base
from lit_rl.models.vision_parts import placeholder_ids

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_rl.models.vision_processor import VisionProcessor


_STAGED, _REPLACED = ".tmp-", ".old-"
"""Marks between the name of a folder and the number of the process: a folder that is not whole yet, and one that is
about to be replaced."""


@dataclass(frozen=True)
class ExportReport:
    """An export that was written, and the proof of it."""

    folder: Path
    adapter: Path | None
    """The LoRA adapter by itself; None where the policy has none."""
    tensors: int
    """Tensors of the state dict, all of them compared after a reload."""
    parameters: int
    """Numbers in them, tied weights counted once."""
    dtype: str
    max_abs_diff: float
    """Largest difference between a weight and its reload: 0, or the export fails."""
    logits: Mapping[str, float]
    """Largest difference of a logit on a short text, by what was compared with what: the model and, by itself, the
    adapter over its base, each from the trained policy."""
    note: str = ""
    """A warning about the adapter by itself; empty where there is none."""

    def __str__(self) -> str:
        details = "".join(
            f"; logits of {what[0].lower()}{what[1:]}: {difference:.1e}" for what, difference in self.logits.items()
        )
        details += f"; {self.note}" if self.note else ""
        return f"verified: {self.tensors} tensors reloaded, largest difference {self.max_abs_diff:g}{details}"


def write_checked(
    folder: str | Path,
    description: LanguageModel,
    rebuild: Callable[[], Any],
    check: Callable[[Path, Mapping[str, Tensor], LanguageModel, LogitProbe], float],
    card: str,
    probe: LogitProbe,
) -> ExportReport:
    """Write a model as a folder that appears whole and checked, or not at all.

    Args:
        folder: A new folder, or an earlier export, which is replaced.
        description: The `LanguageModel` that the model was loaded from.
        rebuild: Makes the model on the CPU, once the folder is known to be free, and again for each further try on a
            full disk; with adapters they are merged, and stand by themselves in ``folder/adapter``.
        check: Reads what was written and gives the largest difference from the state.
        card: Text of README.md.
        probe: Logits of the trained model, for the check, and for the adapter by itself.

    Raises:
        StorageError: as `export_policy`.
    """
    target = Path(folder).expanduser().resolve()
    if description.is_local and target == Path(description.path).resolve():
        raise StorageError(f"The export would overwrite the model that training started from, {target}.")
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not (target / "config.json").is_file():
        raise StorageError(f"{target} exists and is not an earlier export. Choose a new folder.")
    try:
        return retry_on_full_disk(
            lambda: _write_once(target, description, rebuild, check, card, probe), f"The export to {target}"
        )
    except Exception as error:
        if not isinstance(error, (OSError, SafetensorError)) and not is_full(error):
            raise
        left = "Nothing of it is left, and what was there before is as it was"
        way_out = (
            ": free some space, and run the command again (of a run: with ckpt_path=last)" if is_full(error) else ""
        )
        raise StorageError(f"The export to {target} failed: {error}. {left}{way_out}.") from error


def _write_once(
    target: Path,
    description: LanguageModel,
    rebuild: Callable[[], Any],
    check: Callable[[Path, Mapping[str, Tensor], LanguageModel, LogitProbe], float],
    card: str,
    probe: LogitProbe,
) -> ExportReport:
    """Write once. The model is rebuilt for it, as writing merges its adapters."""
    rebuilt = rebuild()
    staged = target.with_name(f".{target.name}{_STAGED}{os.getpid()}")
    try:
        staged.mkdir(parents=True)
        model = _write_files(staged, rebuilt, description)
        state = model.state_dict()
        difference = check(staged, state, description, probe)
        note = "" if rebuilt is model else _prove_adapter(staged / "adapter", description, probe)
        readme = f"{card}\nNote: {without_folders(note)}.\n" if note else card
        (staged / "README.md").write_text(readme, encoding="utf-8")
        adapter = target / "adapter" if (staged / "adapter").is_dir() else None
        _publish(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return ExportReport(
        folder=target,
        adapter=adapter,
        tensors=len(state),
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        max_abs_diff=difference,
        logits=dict(probe.differences),
        note=note,
    )


def _prove_adapter(folder: Path, description: LanguageModel, probe: LogitProbe) -> str:
    """Load the adapter as a user does, over its base, and compare its logits. The merged model is proven by itself: a
    base that is gone, or was changed since, costs its comparison, or the adapter's folder, and nothing else.

    Returns:
        What has to be known of the adapter, in words; empty where it stands on the files of its base.

    Raises:
        StorageError: over the base that it was trained on the adapter says something else than the policy.
    """
    from peft import PeftModel

    name = description.name
    try:
        base = probe.load_base()
        loaded_with = _settings_beside_files(base.config, description)
        rows = 0 if description.quantization is not None else probe.give_rows(base)  # 4-bit weights have other shapes
    except (LitRLError, OSError) as error:
        return f"adapter/ was not compared over its base, which cannot be loaded: {' '.join(str(error).split())}"
    changed = probe.changed_in(base)
    try:
        probe.compare("The adapter over its base", PeftModel.from_pretrained(base, str(folder)))
    except (StorageError, RuntimeError, ValueError, IndexError):
        if not changed or description.quantization is not None:
            raise
        shutil.rmtree(folder)
        return (
            f"adapter/ is left out, as {name} is not the base that the adapter was trained on ({changed} differs): the "
            "merged model here is what was trained"
        )
    only = [f"as it was loaded here, with {loaded_with}"] if loaded_with else []
    only += [f"after resize_token_embeddings({rows})"] if rows else []
    untrained = ": new rows that it did not train are in the merged model alone" if rows else ""
    return f"adapter/ stands on {name} only {', and '.join(only)}{untrained}" if only else ""


def _settings_beside_files(config: Any, description: LanguageModel) -> str:
    """Return the settings of a loaded base that its files do not have: those of the user, and the size of its
    vocabulary."""
    from transformers import AutoConfig

    files = AutoConfig.from_pretrained(
        description.path,
        revision=description.revision,
        trust_remote_code=description.trust_remote_code,
        local_files_only=True,
    )
    missing, differing = object(), []
    for key in (*description.init_kwargs, "tie_word_embeddings", "vocab_size"):
        loaded, stored = (getattr(each.get_text_config(), key, getattr(each, key, missing)) for each in (config, files))
        if loaded is not missing and loaded != stored:
            differing.append(f"{key}={loaded!r}")
    return ", ".join(differing)


def unpublished_folders(target: Path) -> list[Path]:
    """Return the folders that killed processes left beside a folder. An earlier export that had been moved aside is put
    back.

    Args:
        target: The folder of the export; it need not be there.
    """
    for earlier in sorted(target.parent.glob(f".{target.name}{_REPLACED}[0-9]*")):
        if not target.exists():
            os.rename(earlier, target)
    return [path for kind in (_STAGED, _REPLACED) for path in target.parent.glob(f".{target.name}{kind}[0-9]*")]


def _write_files(staged: Path, rebuilt: Any, description: LanguageModel) -> PreTrainedModel:
    """Write everything but the card. Returns the plain model that was written, adapters merged."""
    from peft import PeftModel

    model = rebuilt
    if isinstance(rebuilt, PeftModel):
        adapter = rebuilt.peft_config[str(rebuilt.active_adapter)]
        local = description.name in SHIPPED or Path(description.name).is_dir()
        adapter.base_model_name_or_path = str(Path(description.path).resolve()) if local else description.name
        sort_names(adapter)
        # "auto", the default, would ask the hub whether the vocabulary was resized.
        rebuilt.save_pretrained(str(staged / "adapter"), save_embedding_layers=False)
        if (named := staged / "adapter" / str(rebuilt.active_adapter)).is_dir():  # of any name but "default"
            for file in named.iterdir():
                file.replace(staged / "adapter" / file.name)
            named.rmdir()
        verify_adapter(staged / "adapter", rebuilt)
        try:
            # Safe: it checks for NaN, and replaces the base's tensors, which the caller's state still points to.
            model = rebuilt.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise StorageError(f"The adapter cannot be merged: {error}") from error
    model.save_pretrained(staged)
    description.tokenizer.save_pretrained(staged)
    if description.processor is not None:
        description.processor.processor.save_pretrained(staged)
    _name_tokenizer_as_the_base(staged / "tokenizer_config.json", description)
    return model


def _name_tokenizer_as_the_base(file: Path, description: LanguageModel) -> None:
    """Write the tokenizer class that the base names: transformers writes the one that it took for it, which other
    versions, and engines, may not know. Its notes of how the base was loaded are left out."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    config = json.loads(file.read_text(encoding="utf-8"))
    home = description.tokenizer.name_or_path
    with contextlib.suppress(OSError, ValueError):  # of an object that has no files
        base = get_tokenizer_config(home, revision=description.revision, local_files_only=True) if home else {}
        config = {name: value for name, value in config.items() if name in base or name not in _LOADING_NOTES}
        config |= {"tokenizer_class": base["tokenizer_class"]} if base.get("tokenizer_class") else {}
    file.write_text(f"{json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)}\n", encoding="utf-8")


_LOADING_NOTES = ("is_local", "local_files_only")


def _publish(staged: Path, target: Path) -> None:
    """Make the staged folder durable, and put it in place of an earlier export."""
    flush_tree(staged)
    earlier = staged.with_name(staged.name.replace(_STAGED, _REPLACED))
    replaces = target.exists()
    if replaces:
        os.rename(target, earlier)
    try:
        os.rename(staged, target)
    except OSError:
        if replaces:
            os.rename(earlier, target)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


_TOKENIZER_TEXTS = ("Hello, world!", "2 + 2 = 4\n\t x", " two  spaces ", "naïve 日本語 🙂 \u202e")


def verify(
    folder: str | Path,
    state: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    loaded_by: str = "AutoModelForCausalLM",
    trust_remote_code: bool = False,
    probe: LogitProbe | None = None,
) -> float:
    """Load ``folder`` as a user would and compare it with what it should hold. Return the largest difference of a
    tensor, 0.

    Args:
        folder: An exported model.
        state: The state dict that it should have, tied weights included.
        tokenizer: The tokenizer that it should have.
        loaded_by: The class of transformers that loads it.
        trust_remote_code: The model comes with code of its own.
        probe: Logits of the trained policy, which the loaded model has to give too.

    Raises:
        StorageError: a tensor is missing, unexpected or differs in shape or in any bit, a weight is NaN, the model
            says something else than the policy, or the tokenizer encodes, decodes or renders otherwise.
    """
    difference = compare_folder(folder, state, loaded_by, trust_remote_code=trust_remote_code, probe=probe)
    verify_tokenizer(folder, tokenizer, trust_remote_code=trust_remote_code)
    return difference


def compare_folder(
    folder: str | Path,
    state: Mapping[str, Tensor],
    loaded_by: str,
    *,
    trust_remote_code: bool = False,
    probe: LogitProbe | None = None,
) -> float:
    """Compare weights and logits alone, loaded by this class of transformers; see `verify`."""
    import transformers

    with reading("export", str(folder), str(folder)):
        loaded: Any = getattr(transformers, loaded_by).from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    model, info = loaded
    _compare_names(folder, "weights", set(state), set(model.state_dict()) - set(info["missing_keys"]))
    difference = _compare_tensors(folder, state, model.state_dict())
    if probe is not None:
        probe.compare("The model", model)
    return difference


def verify_adapter(folder: str | Path, policy: PeftModel) -> float:
    """Compare the folder of a LoRA adapter with the weights that it should hold; see `verify`."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    wanted = get_peft_model_state_dict(policy, adapter_name=str(policy.active_adapter), save_embedding_layers=False)
    with reading("export", str(folder), str(folder)):
        found = load_file(Path(folder) / "adapter_model.safetensors")
    _compare_names(folder, "adapter weights", set(wanted), set(found))
    return _compare_tensors(folder, wanted, found)


def verify_tokenizer(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> None:
    """Raise StorageError where the tokenizer in ``folder`` behaves otherwise than ``tokenizer``."""
    from transformers import AutoTokenizer

    with reading("export", str(folder), str(folder)):
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    probes = [
        *_TOKENIZER_TEXTS,
        f"a{tokenizer.eos_token}b",
        *(token for token in tokenizer.all_special_tokens if token),
    ]
    for text in probes:
        ids = tokenizer.encode(text)
        if found.encode(text) != ids or found.decode(ids) != tokenizer.decode(ids):
            raise StorageError(f"{folder}: the exported tokenizer encodes {text!r} differently than the original.")
    for what in ("chat_template", "eos_token_id", "pad_token_id", "bos_token_id", "padding_side"):
        if getattr(found, what) != getattr(tokenizer, what):
            raise StorageError(f"{folder}: the exported tokenizer has another {what} than the original.")


def verify_processor(folder: str | Path, processor: VisionProcessor, *, trust_remote_code: bool = False) -> None:
    """Raise StorageError where the processor in ``folder`` makes other pixels or tokens of an image than
    ``processor``."""
    from transformers import AutoProcessor

    with reading("export", str(folder), str(folder)):
        found: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    original = processor.processor
    if type(found) is not type(original) or found.chat_template != original.chat_template:
        raise StorageError(f"{folder}: the exported processor has another class or chat template than the original.")
    image = _test_image()
    wanted, read = (dict(each.image_processor([image], return_tensors="pt")) for each in (original, found))
    if wanted.keys() != read.keys() or any(
        not (torch.equal(value, read[name]) if isinstance(value, Tensor) else value == read[name])
        for name, value in wanted.items()
    ):
        raise StorageError(f"{folder}: the exported processor makes other pixels than the original.")
    text = _text_with_image(processor, "?")
    if processor.places(text) == 1:
        ids, again = (each(text=[text], images=[[image]])["input_ids"] for each in (original, found))
        if list(map(list, ids)) != list(map(list, again)):
            raise StorageError(f"{folder}: the exported processor makes other tokens of an image than the original.")


def _compare_names(folder: str | Path, what: str, wanted: set[str], found: set[str]) -> None:
    for problem, names in (("lacks", wanted - found), ("also holds", found - wanted)):
        if names:
            raise StorageError(f"{folder} {problem} {len(names)} {what}: {', '.join(sorted(names)[:5])}.")


def _compare_tensors(folder: str | Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    differences: dict[str, float] = {}
    for name, tensor in wanted.items():
        other = found[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise StorageError(
                f"{folder}: {name} is {other.dtype} {tuple(other.shape)} when it is read back, and was {tensor.dtype} "
                f"{tuple(tensor.shape)}."
            )
        # NaN compares unequal to itself, so it counts as infinitely wrong.
        equal = torch.equal(tensor, other)
        gap = 0.0 if equal else float((tensor.float() - other.float()).abs().max().nan_to_num(nan=float("inf")))
        differences[name] = gap
    worst = max(differences, key=lambda name: differences[name])
    if differences[worst] > 0:
        raise StorageError(f"{folder}: {worst} differs by {differences[worst]:.3g} from what was written.")
    return differences[worst]


TOKENS = 32
"""Tokens of a probe over text."""

LIMITS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
"""The largest distance by the type of the weights that were written, see `LogitProbe.compare`. Merging an adapter into
narrow weights rounds it."""

ON_A_GPU = 1e-2
"""The limit at least, where the policy is on a GPU, which may take products of float32 in TF32."""

IMAGE_SIZE = (80, 56)
_SAMPLED = 1024


class LogitProbe:
    """Logits of the policy on a fixed text, and the distance of others from them.

    Args:
        description: The `LanguageModel` that the policy was loaded from.
        policy: The trained policy, on any device.
        state: Exported tensors: the policy's own weights, or an average of them, whole.
        load_base: Loads the base that an adapter stands on, anew.
    """

    def __init__(
        self,
        description: LanguageModel,
        policy: nn.Module,
        state: Mapping[str, Tensor],
        load_base: Callable[[], Any],
    ) -> None:
        self.load_base = load_base
        self._state = state
        self._trained = {name_in_base(name) for name in _trained_parameters(policy)}
        self._inputs = probe_inputs(description, policy)
        writes = base_of(policy).get_output_embeddings() is not None  # a model that scores says no token
        self._ruled_out = list(placeholder_ids(description.config)) if description.sees and writes else []
        on_cpu = next(policy.parameters()).device.type == "cpu"
        self._rounding = 0.0 if on_cpu else ON_A_GPU
        self._against, self._wanted = "the trained policy", self._policy_logits(description, policy, state)
        self.differences: dict[str, float] = {}
        """The largest difference of a logit, by a description of the model that was read."""

    def _policy_logits(
        self, description: LanguageModel, policy: nn.Module, state: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return the policy's logits; None where they cannot be computed: it is spread over ranks, its base is
        quantised and not the one that is exported, or all of its weights are exported as they are not."""
        if description.quantization is not None or _is_spread(policy):
            return None
        others = {
            name: tensor
            for name, tensor in _trained_parameters(policy).items()
            if not _sample_equals(tensor, state.get(name))
        }
        if not others:
            return self._logits(policy)
        from peft import PeftModel
        from torch.func import functional_call

        if not isinstance(policy, PeftModel):
            return None

        device = next(policy.parameters()).device
        average = {name: state[name].to(device) for name in others if name in state}
        with evaluation_mode(policy), torch.no_grad():
            inputs = {name: value.to(device) for name, value in self._inputs.items()}
            return self._comparable(functional_call(policy, average, kwargs=inputs | {"use_cache": False}).logits)

    def _logits(self, model: Any) -> Tensor:
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in self._inputs.items()}
        with evaluation_mode(model), torch.no_grad():
            return self._comparable(model(**inputs, use_cache=False).logits)

    def _comparable(self, logits: Tensor) -> Tensor:
        """Return logits in float32 on the CPU, without the tokens that stand for images: no policy may sample them."""
        logits = logits.detach().float().cpu()
        return logits.index_fill(-1, torch.tensor(self._ruled_out), 0.0) if self._ruled_out else logits

    @torch.no_grad()
    def give_rows(self, base: Any) -> int:
        """Resize the embedding and the head of a base to the policy's rows, as `resize_token_embeddings` of an object
        had done before it got its adapter. New rows are the policy's: no file of the base has them.

        Returns:
            The number of rows; 0 where the base has as many.
        """
        exported = {name_in_base(name): tensor for name, tensor in self._state.items()}
        table = base.get_input_embeddings().weight
        name = next(name for name, parameter in base.named_parameters() if parameter is table)
        rows_before = len(table)
        rows = len(exported[name]) if name in exported else rows_before
        if rows_before == rows:
            return 0
        base.resize_token_embeddings(rows, mean_resizing=False)
        tables = {base.get_input_embeddings(), base.get_output_embeddings()}
        for path in (path for path, module in base.named_modules() if module in tables):
            for name, parameter in base.get_submodule(path).named_parameters(prefix=path):
                if name in exported:
                    parameter[rows_before:] = exported[name][rows_before:]
        return rows

    def changed_in(self, base: nn.Module) -> str:
        """Return the name of a frozen weight of a base that differs from the policy's, under its adapter; empty where
        there is none. Some numbers of each are compared, spread over the tensor; of weights that the adapter's folder
        holds whole, the shape."""
        stored = base.state_dict()
        for name, exported in ((name_in_base(name), tensor) for name, tensor in self._state.items()):
            if name in stored and stored[name].shape != exported.shape:
                return name
            if name in stored and name not in self._trained and not _sample_equals(exported, stored[name]):
                return name
        return ""

    def compare(self, what: str, model: nn.Module) -> None:
        """Compare the logits of a model that was loaded from the written files.

        The distance is the root mean square of the differences at one token, as a share of that of the logits there, or
        of 1 where these are smaller: the largest of all tokens in float32, the median in narrower types, where
        rounding may send a token to other experts.

        Args:
            what: Name of the model in messages.
            model: The model.

        Raises:
            StorageError: its outputs differ from the policy's, or from those of the first checked model if the policy's
                are not known.
        """
        found = self._logits(model)
        if self._wanted is None:
            self._against, self._wanted = what, found
            return
        if found.shape != self._wanted.shape:
            raise StorageError(
                f"{what} gives logits of shape {tuple(found.shape)}, {self._against} {tuple(self._wanted.shape)}."
            )
        differences, size = (
            each.flatten(0, -2).pow(2).mean(-1).sqrt() for each in (found - self._wanted, self._wanted)
        )
        distances = differences / size.clamp(min=1)
        kind = str(next(model.parameters()).dtype).removeprefix("torch.")
        distance = float(
            (distances.max() if kind in ("float32", "float64") else distances.median()).nan_to_num(nan=float("inf"))
        )
        limit = max(LIMITS.get(kind, LIMITS["float32"]), self._rounding)
        if distance > limit:
            tokens = self._inputs["input_ids"].shape[1]
            raise StorageError(
                f"{what} that was written is not what was trained: its logits on {tokens} tokens are off from those of "
                f"{self._against} by {distance:.2g} of their size, and rounding explains {limit:g} ({kind}). It is "
                "not published, and checkpoints stay as they are. Adapters of this kind, or on these layers, cannot be "
                "exported: please report it, with the settings of model and adapter."
            )
        self.differences[f"{what} from {self._against}"] = float((found - self._wanted).abs().max())


def probe_inputs(description: LanguageModel, policy: nn.Module) -> dict[str, Tensor]:
    """Return one row: tokens from all over the vocabulary, those whose rows alone are trained among them, and no
    padding.

    With an image where the model sees any and its chat template shows one.
    """
    config = base_of(policy).config
    if description.processor is not None:
        processor, text = description.processor.processor, _text_with_image(description.processor, "What is 17 + 25?")
        if description.processor.places(text) == 1:
            made = processor(text=[text], images=[[_test_image()]], add_special_tokens=False, return_tensors="pt")
            return {name: torch.as_tensor(value) for name, value in made.items()}
    rows = config.get_text_config().vocab_size
    never = {description.pad_id, *(placeholder_ids(config) if description.sees else ())}
    first = [*description.new_tokens, *_trained_rows(policy), *range(0, rows, max(1, rows // TOKENS))]
    ids = [each for each in dict.fromkeys(first) if each not in never and each < rows]
    most = min(TOKENS, description.context_length or TOKENS)
    return {"input_ids": (whole := torch.tensor([ids[:most]])), "attention_mask": torch.ones_like(whole)}


def _trained_rows(policy: nn.Module) -> list[int]:
    from peft import PeftModel

    rows = (
        []
        if not isinstance(policy, PeftModel)
        else [getattr(config, "trainable_token_indices", None) or [] for config in policy.peft_config.values()]
    )
    return [
        row for each in rows for row in (each if isinstance(each, list) else [i for of in each.values() for i in of])
    ]


def _test_image() -> Any:
    return pillow().linear_gradient("L").resize(IMAGE_SIZE).convert("RGB")


def _text_with_image(processor: VisionProcessor, question: str) -> str:
    """Return a rendered prompt that shows one image, where the chat template shows any."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    return str(apply_chat_template(processor.tokenizer, [message], tokenize=False, add_generation_prompt=True))


def _is_spread(policy: nn.Module) -> bool:
    return has_partitions(policy) or any(
        isinstance(each, (FSDPModule, FullyShardedDataParallel)) for each in policy.modules()
    )


def _trained_parameters(policy: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def _sample_equals(tensor: Tensor, other: Tensor | None) -> bool:
    """Tell whether a sample of their numbers, spread over the tensors, is the same."""
    if other is None or other.shape != tensor.shape:
        return False
    some = slice(None, None, max(1, tensor.numel() // _SAMPLED))
    return torch.equal(tensor.detach().reshape(-1)[some].cpu(), other.detach().reshape(-1)[some].to(tensor.dtype).cpu())
