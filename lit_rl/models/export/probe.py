"""A short text that the trained policy and what was written of it both read: their logits have to agree.

That every tensor was written as it stood proves nothing of the model that they make: of a merge that moved another
weight too, of a config with other settings. So the folder is loaded as a user loads it, the adapter over its base too,
and each reads the same tokens as the policy. One pass of each over `TOKENS` tokens, one model after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lit_rl.chat_template import apply_chat_template
from lit_rl.errors import StorageError
from lit_rl.images import pillow
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.modes import evaluation_mode
from lit_rl.models.policy.partitions import has_partitions
from lit_rl.models.policy.trunk import base_of, name_in_base
from lit_rl.models.policy.vision_parts import placeholder_ids

TOKENS = 32
"""Tokens of a probe over text."""

LIMITS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
"""The largest distance by the type of the weights that were written, see `Probe.look`. Merging an adapter into narrow
weights rounds it."""

ON_A_GPU = 1e-2
"""The limit at least, where the policy is on a GPU, which may take products of float32 in TF32."""

IMAGE_SIZE = (80, 56)
_SAMPLED = 1024


class Probe:
    """Logits of the policy on a fixed text, and the distance of others from them.

    Args:
        description: What the policy was loaded from.
        policy: The trained policy, on any device.
        state: What is exported: the policy's own weights, or an average of them, whole.
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
        self._trained = {name_in_base(name) for name in _trained(policy)}
        self._inputs = probe_inputs(description, policy)
        writes = base_of(policy).get_output_embeddings() is not None  # a model that scores says no token
        self._ruled_out = list(placeholder_ids(description.config)) if description.sees and writes else []
        on_cpu = next(policy.parameters()).device.type == "cpu"
        self._rounding = 0.0 if on_cpu else ON_A_GPU
        self._against, self._wanted = "the trained policy", self._of_policy(description, policy, state)
        self.seen: dict[str, float] = {}
        """The largest difference of a logit, by a description of the model that was read."""

    def _of_policy(self, description: LanguageModel, policy: nn.Module, state: Mapping[str, Tensor]) -> Tensor | None:
        """Return the policy's logits; None where they cannot be computed: it is spread over ranks, its base is
        quantised and not the one that is exported, or all of its weights are exported as they are not."""
        if description.quantization is not None or _is_spread(policy):
            return None
        others = {name: tensor for name, tensor in _trained(policy).items() if not _same(tensor, state.get(name))}
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
            return self._plain(functional_call(policy, average, kwargs=inputs | {"use_cache": False}).logits)

    def _logits(self, model: Any) -> Tensor:
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in self._inputs.items()}
        with evaluation_mode(model), torch.no_grad():
            return self._plain(model(**inputs, use_cache=False).logits)

    def _plain(self, logits: Tensor) -> Tensor:
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
        under = {name_in_base(name): tensor for name, tensor in self._state.items()}
        table = base.get_input_embeddings().weight
        name = next(name for name, parameter in base.named_parameters() if parameter is table)
        had = len(table)
        rows = len(under[name]) if name in under else had
        if had == rows:
            return 0
        base.resize_token_embeddings(rows, mean_resizing=False)
        tables = {base.get_input_embeddings(), base.get_output_embeddings()}
        for path in (path for path, module in base.named_modules() if module in tables):
            for name, parameter in base.get_submodule(path).named_parameters(prefix=path):
                if name in under:
                    parameter[had:] = under[name][had:]
        return rows

    def changed_in(self, base: nn.Module) -> str:
        """Return the name of a frozen weight of a base that differs from the policy's, under its adapter; empty where
        there is none. Some numbers of each are compared, spread over the tensor; of weights that the adapter's folder
        holds whole, the shape."""
        there = base.state_dict()
        for name, under in ((name_in_base(name), tensor) for name, tensor in self._state.items()):
            if name in there and there[name].shape != under.shape:
                return name
            if name in there and name not in self._trained and not _same(under, there[name]):
                return name
        return ""

    def look(self, what: str, model: nn.Module) -> None:
        """Compare the logits of a model that was loaded from the written files.

        The distance is the root mean square of the differences at one token, as a share of that of the logits there, or
        of 1 where these are smaller: the largest of all tokens in float32, the median in narrower types, where
        rounding may send a token to other experts.

        Args:
            what: What messages call it.
            model: The model.

        Raises:
            StorageError: it says something else than the policy; or, where that could not be asked, than what was asked
                first.
        """
        found = self._logits(model)
        if self._wanted is None:
            self._against, self._wanted = what, found
            return
        if found.shape != self._wanted.shape:
            raise StorageError(
                f"{what} gives logits of shape {tuple(found.shape)}, {self._against} {tuple(self._wanted.shape)}."
            )
        apart, size = (each.flatten(0, -2).pow(2).mean(-1).sqrt() for each in (found - self._wanted, self._wanted))
        distances = apart / size.clamp(min=1)
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
        self.seen[f"{what} from {self._against}"] = float((found - self._wanted).abs().max())


def probe_inputs(description: LanguageModel, policy: nn.Module) -> dict[str, Tensor]:
    """Return one row: tokens from all over the vocabulary, those whose rows alone are trained among them, and no
    padding.

    With an image where the model sees any and its chat template shows one.
    """
    config = base_of(policy).config
    if description.processor is not None and (shown := _shown(description.processor)) is not None:
        return shown
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


def _shown(processor: Any) -> dict[str, Tensor] | None:
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is 17 + 25?"}]}
    text = str(apply_chat_template(processor.tokenizer, [message], tokenize=False, add_generation_prompt=True))
    if processor.places(text) != 1:
        return None
    image = pillow().linear_gradient("L").resize(IMAGE_SIZE).convert("RGB")
    made = processor.processor(text=[text], images=[[image]], add_special_tokens=False, return_tensors="pt")
    return {name: torch.as_tensor(value) for name, value in made.items()}


def _is_spread(policy: nn.Module) -> bool:
    return has_partitions(policy) or any(
        isinstance(each, (FSDPModule, FullyShardedDataParallel)) for each in policy.modules()
    )


def _trained(policy: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def _same(tensor: Tensor, other: Tensor | None) -> bool:
    """Tell whether a sample of their numbers, spread over the tensors, is the same."""
    if other is None or other.shape != tensor.shape:
        return False
    some = slice(None, None, max(1, tensor.numel() // _SAMPLED))
    return torch.equal(tensor.detach().reshape(-1)[some].cpu(), other.detach().reshape(-1)[some].to(tensor.dtype).cpu())
