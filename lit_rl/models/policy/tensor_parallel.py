"""Spread the layers of a model over a tensor-parallel group: heads of attention, and the width of the MLP.

The plan is transformers' own (`base_model_tp_plan` of a config): projections into heads and into the MLP are cut by
columns, those out of them by rows (1909.08053, section 3). Embedding, head and the norms of the residual stream stay
whole on every rank of a group, which so computes the same logits, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_rl.errors import ConfigError

PROVEN = ("llama", "qwen2", "qwen3")
"""Model types that were compared with one process. Others with a plan have weights beside it that heads share."""
_CUT = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_WHOLE_WITH_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_PARTIAL = "_lit_rl_partial_gradient"
_CUT_HERE = "_lit_rl_cut"
_KEY = "trainer.strategy.tp_size"


def check_plan(config: Any, tp_size: int) -> None:
    """Refuse a model that cannot be spread over `tp_size` ranks; nothing is loaded.

    Args:
        config: The model's, of transformers.
        tp_size: Ranks of a tensor-parallel group.

    Raises:
        ConfigError: it is of a type that was never compared, or its sizes do not divide.
    """
    text = config.get_text_config(decoder=True)
    if text is not config or text.model_type not in PROVEN:
        raise ConfigError(
            f"{_KEY}={tp_size} with a {config.model_type}: only text models of the types {', '.join(PROVEN)} were "
            "compared with one process. Take strategy=fsdp."
        )
    plan = _plan_of_layers(text)
    if unknown := sorted(set(plan.values()) - {*_CUT, _WHOLE_WITH_PARTIAL_GRADIENT}):
        raise ConfigError(
            f"{_KEY}={tp_size}: the plan of a {text.model_type} cuts modules as {', '.join(unknown)}, and only "
            f"colwise, rowwise and {_WHOLE_WITH_PARTIAL_GRADIENT} are built. Take strategy=fsdp."
        )
    if getattr(text, "attention_dropout", 0.0):
        raise ConfigError(
            f"{_KEY}={tp_size} with attention_dropout={text.attention_dropout} of the model: the heads of two ranks "
            "would drop the same places. Set model.init_kwargs.attention_dropout=0, or take strategy=fsdp."
        )
    heads = text.num_attention_heads
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "intermediate_size": text.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tp_size:
            fits = ", ".join(str(n) for n in range(1, tp_size) if not any(each % n for each in sizes.values()))
            raise ConfigError(
                f"{_KEY}={tp_size} does not divide {name}={size} of the model. Smaller ones that divide it: {fits}."
            )


def spread_over_group(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the layers of a model in place, before `shard` spreads the rest over the other dimension of the mesh.

    Args:
        model: A causal LM whose config passes `check_plan`, with the same whole weights on every rank.
        mesh: Of one dimension: the tensor-parallel group.
    """
    base: Any = getattr(model, "base_model", model)
    for pattern, style in _plan_of_layers(base.config).items():
        name_of_one = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        for part in [part for name, part in base.named_modules() if name_of_one.fullmatch(name)]:
            if style in _CUT:
                parallelize_module(part, mesh, _CUT[style](), src_data_rank=None)
                setattr(part, _CUT_HERE, True)
            else:
                setattr(part, _PARTIAL, True)


def is_spread(model: nn.Module) -> bool:
    """Tell whether its layers are cut over a tensor-parallel group, so that every forward pass is a collective."""
    return any(getattr(part, _CUT_HERE, False) for part in model.modules())


def sum_partial_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum, over a tensor-parallel group, the gradients of weights that every rank applies to heads of its own.

    Once a step, when all micro-batches were added. A collective.

    Args:
        model: What `spread_over_group` was given.
        mesh: As there.
    """
    for part in model.modules():
        for weight in part.parameters(recurse=False) if getattr(part, _PARTIAL, False) else ():
            if weight.grad is not None:
                mine = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
                torch.distributed.all_reduce(mine, group=mesh.get_group())


def clip_over_meshes(model: nn.Module, mesh: DeviceMesh, weights: Sequence[Tensor], limit: float) -> Tensor:
    """Apply `torch.nn.utils.clip_grad_norm_` to weights that lie on several meshes. A collective, once a step.

    Args:
        model: What `spread_over_group` was given.
        mesh: As there.
        weights: Those that are trained.
        limit: The norm that gradients have at most; infinite for none.

    Returns:
        0-dim: the norm before.
    """
    sum_partial_gradients(model, mesh)
    norm = norm_over_meshes([weight.grad for weight in weights if weight.grad is not None])
    for weight in weights:  # one by one: torch takes those of one mesh together
        nn.utils.clip_grads_with_norm_([weight], limit, norm)
    return norm


def norm_over_meshes(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of gradients that lie on several meshes: weights that are cut on two dimensions, others on one.

    0 without any gradient, as of a rollout without a score.
    """
    if not gradients:
        return torch.zeros(())
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [nn.utils.get_total_norm(each) for each in by_mesh.values()]
    return torch.linalg.vector_norm(torch.stack([_full(norm) for norm in norms]))


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _plan_of_layers(config: Any) -> dict[str, str]:
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if pattern.startswith("layers.")}
