"""Prove that an exported folder holds what it should: read it anew, and compare every tensor and every token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rl.chat_template import apply_chat_template
from lit_rl.errors import StorageError
from lit_rl.images import pillow
from lit_rl.models.policy.hub import reading

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from lit_rl.models.export.probe import Probe
    from lit_rl.models.policy.processor import VisionProcessor

_PROBE_SIZE = (80, 56)
_PROBES = ("Hello, world!", "2 + 2 = 4\n\t x", " two  spaces ", "naïve 日本語 🙂 \u202e")


def verify(
    folder: str | Path,
    state: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    loaded_by: str = "AutoModelForCausalLM",
    trust_remote_code: bool = False,
    probe: Probe | None = None,
) -> float:
    """Load ``folder`` as a user would and compare it with what it should hold. Return the largest difference of a
    tensor, 0.

    Args:
        folder: An exported model.
        state: The state dict that it should have, tied weights included.
        tokenizer: The tokenizer that it should have.
        loaded_by: The class of transformers that loads it.
        trust_remote_code: The model comes with code of its own.
        probe: What the trained policy says, which the loaded model has to say too.

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
    probe: Probe | None = None,
) -> float:
    """Compare weights and logits alone, loaded by this class of transformers; see `verify`."""
    import transformers

    with reading("export", str(folder), str(folder)):
        loaded: Any = getattr(transformers, loaded_by).from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    model, info = loaded
    _same_keys(folder, "weights", set(state), set(model.state_dict()) - set(info["missing_keys"]))
    difference = _compare(folder, state, model.state_dict())
    if probe is not None:
        probe.look("The model", model)
    return difference


def verify_adapter(folder: str | Path, policy: PeftModel) -> float:
    """Compare the folder of a LoRA adapter with the weights that it should hold; see `verify`."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    wanted = get_peft_model_state_dict(policy, adapter_name=str(policy.active_adapter), save_embedding_layers=False)
    with reading("export", str(folder), str(folder)):
        found = load_file(Path(folder) / "adapter_model.safetensors")
    _same_keys(folder, "adapter weights", set(wanted), set(found))
    return _compare(folder, wanted, found)


def verify_tokenizer(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> None:
    """Raise StorageError where the tokenizer in ``folder`` behaves otherwise than ``tokenizer``."""
    from transformers import AutoTokenizer

    with reading("export", str(folder), str(folder)):
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    probes = [*_PROBES, f"a{tokenizer.eos_token}b", *(token for token in tokenizer.all_special_tokens if token)]
    for text in probes:
        ids = tokenizer.encode(text)
        if found.encode(text) != ids or found.decode(ids) != tokenizer.decode(ids):
            raise StorageError(f"{folder}: the tokenizer that was written treats {text!r} otherwise than the original.")
    for what in ("chat_template", "eos_token_id", "pad_token_id", "bos_token_id", "padding_side"):
        if getattr(found, what) != getattr(tokenizer, what):
            raise StorageError(f"{folder}: the {what} of the tokenizer was not written as it is.")


def verify_processor(folder: str | Path, processor: VisionProcessor, *, trust_remote_code: bool = False) -> None:
    """Raise StorageError where the processor in ``folder`` makes other pixels or tokens of an image than
    ``processor``."""
    from transformers import AutoProcessor

    with reading("export", str(folder), str(folder)):
        found: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    original = processor.processor
    if type(found) is not type(original) or found.chat_template != original.chat_template:
        raise StorageError(f"{folder}: the processor or its chat template was not written as it is.")
    image = pillow().linear_gradient("L").resize(_PROBE_SIZE).convert("RGB")
    wanted, read = (dict(each.image_processor([image], return_tensors="pt")) for each in (original, found))
    if wanted.keys() != read.keys() or any(not _equal(wanted[name], read[name]) for name in wanted):
        raise StorageError(f"{folder}: the processor that was written makes other pixels than the original.")
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    text = str(apply_chat_template(processor.tokenizer, [message], tokenize=False, add_generation_prompt=True))
    if processor.places(text) == 1:
        ids, again = (each(text=[text], images=[[image]])["input_ids"] for each in (original, found))
        if list(map(list, ids)) != list(map(list, again)):
            raise StorageError(f"{folder}: the processor that was written makes other tokens of an image.")


def _equal(value: Any, other: Any) -> bool:
    return torch.equal(value, other) if isinstance(value, Tensor) else value == other


def _same_keys(folder: str | Path, what: str, wanted: set[str], found: set[str]) -> None:
    for problem, names in (("lacks", wanted - found), ("also holds", found - wanted)):
        if names:
            raise StorageError(f"{folder} {problem} {len(names)} {what}: {', '.join(sorted(names)[:5])}.")


def _compare(folder: str | Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    differences: dict[str, float] = {}
    for name, tensor in wanted.items():
        other = found[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise StorageError(
                f"{folder}: {name} is {other.dtype} {tuple(other.shape)} when read, and was {tensor.dtype} "
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
