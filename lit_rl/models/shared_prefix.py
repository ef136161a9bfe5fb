"""A training forward pass that computes the prompt of a group once: its keys and values carry gradient.

In a causal model the hidden state of token j is a function of the tokens up to j. Rows i of one prompt therefore
agree on its keys and values in every layer: ``K_i = K``. The pass runs in two calls of the model. The first runs the
n different prompts and keeps their keys and values; the last position of each predicts the first response token of
its rows. The second runs the responses behind the keys and values of their prompts. Their gradient sums over the
rows,

    ∂L/∂K = Σ_i ∂L/∂K_i

as it does where each row runs the prompt for itself and the gradients of the weights are added up. So log-probs and
gradients are the same, and n p + b t tokens run in place of b (p + t).

The second call attends to the keys of a prompt where they lie (`lit_rl.models.shared_attention`) in a model for which
a trial has shown that this is its attention. In others, keys and values are repeated over the rows.

Each row runs its own prompt where that would not hold: with dropout, which is drawn anew for each row; with gradient
checkpointing, which keeps no cache; with images that stand in a response; with caches of other kinds than keys and
values; with rotary embeddings whose angles change once a text is as long as this one.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lit_rl.core.rollout import Completions
from lit_rl.core.transfers import to_device
from lit_rl.models.forward_inputs import (
    Bucket,
    bucket_by_length,
    cache_input,
    cache_name,
    forward_parameters,
    known_masks,
    position_ids,
)
from lit_rl.models.head import Targets, TargetScores, score_targets
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.modes import drops_out, evaluation_mode, recomputes
from lit_rl.models.sharding import device_of
from lit_rl.models.shared_attention import (
    FoldedCache,
    ProvingFoldedCache,
    attending_to,
    caching_layers,
    can_fold,
    has_constant_rotation,
)
from lit_rl.models.trial import EquivalenceTrial
from lit_rl.models.trunk import base_of
from lit_rl.ops.fused_head import Distribution
from lit_rl.ops.sampling_distribution import History

WORTH = 0.15
"""Share of a pass's tokens that must be saved: two calls cost more than one."""


@dataclass(frozen=True)
class PromptGroups:
    """The rows of each prompt; in the host's memory."""

    rows: Tensor
    """Long ``(n,)``: a row of each prompt."""
    of_row: Tensor
    """Long ``(b,)``: the number of each row's prompt."""


def shared_prompts(model: nn.Module, completions: Completions) -> PromptGroups | None:
    """Return the prompts to compute once; None where each row has to run its own, or hardly anything would be saved."""
    host = completions.on_host
    b, p = host.prompt_ids.shape
    t = host.response_ids.shape[1]
    if t < 2:
        return None
    ids, of_row = host.group_id.unique(return_inverse=True)
    n = len(ids)
    if not worth_sharing(model, rows=b, prompts=n, widths=(p, t)):
        return None
    numbers = torch.arange(b)
    rows = numbers.new_full((n,), b).scatter_reduce(0, of_row, numbers, "amin")
    same = host.prompt_ids[rows][of_row] == host.prompt_ids
    same &= host.prompt_mask[rows][of_row] == host.prompt_mask
    if completions.vision is not None:
        if completions.vision.later:  # the second call shows no images
            return None
        shown, first_shown = completions.vision.rows, completions.vision.select(rows[of_row]).rows
        same &= torch.tensor([one is other for one, other in zip(shown, first_shown)])[:, None]
    return PromptGroups(rows, of_row) if bool(same.all()) else None


def worth_sharing(model: nn.Module, *, rows: int, prompts: int, widths: tuple[int, int]) -> bool:
    """Tell whether the prompts of rows are computed once each, where rows of one group have one prompt.

    Args:
        model: As it is trained.
        rows: Rows of a pass.
        prompts: Number of different prompts among them.
        widths: Columns of the prompts, and of the responses.
    """
    p, t = widths
    if t < 2 or (rows - prompts) * p < WORTH * rows * (p + t):
        return False
    return can_share(model) and has_constant_rotation(model, p + t)


def can_share(model: nn.Module) -> bool:
    """Tell whether a cache of keys and values gives this model, in its mode, the same log-probs and gradients."""
    base = base_of(model)
    if not hasattr(base, "forward"):  # a reference that is called on another device
        return False
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return False
    if cache_name(model) is None or "position_ids" not in forward_parameters(model):
        return False
    kinds = {type(layer) for layer in caching_layers(DynamicCache(config=base.config))}
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return False
    if any(isinstance(part, FSDPModule) for part in (model, base)):
        return False  # each rank would gather weights as often as its own rows need
    return not (model.training and (recomputes(base) or drops_out(model)))


def run_shared(
    model: nn.Module,
    completions: Completions,
    prompts: PromptGroups,
    distribution: Distribution,
    options: ForwardOptions,
    history: History | None = None,
    further_ids: Tensor | None = None,
) -> TargetScores:
    """Score the response tokens: the prompts run once, then the responses behind them.

    Args:
        model: One that `can_share`.
        completions: ``b`` rows of ``n`` prompts.
        prompts: The rows of each prompt.
        distribution: Distribution of the log-probs.
        options: Whether the head is fused, whether responses of like length run together, and whether they attend to
            a prompt's keys where they lie, if this model can.
        history: Effect of earlier tokens on the logits of the response tokens ``(b, t)``. None: no effect.
        further_ids: Long ``(b, t, k)``: further tokens to score. None: none.
    """
    folds = options.folded_attention and can_fold(
        model,
        completions.attention_mask[to_device(prompts.rows, completions.prompt_ids.device)],
        completions.prompt_ids.shape[1],
        len(prompts.of_row),
    )
    cache = FoldedCache if folds and _proven(model) else None
    return _run_behind(model, completions, prompts, distribution, options, cache, history, further_ids)


def _run_behind(
    model: nn.Module,
    completions: Completions,
    prompts: PromptGroups,
    distribution: Distribution,
    options: ForwardOptions,
    cache: type[FoldedCache] | None,
    history: History | None = None,
    further_ids: Tensor | None = None,
) -> TargetScores:
    """Compute `run_shared` with responses that run with this cache; None: with their prompts' keys repeated."""
    host, device = completions.on_host, completions.response_ids.device
    attended, mask = host.attention_mask, completions.attention_mask.long()
    positions = position_ids(model, completions, mask)
    p, response_ids, wanted = completions.prompt_ids.shape[1], completions.response_ids, host.response_mask
    images = {} if completions.vision is None else completions.vision.select(prompts.rows).model_inputs(p, 0, device)
    past = DynamicCache(config=base_of(model).config)
    first_rows, of_row = to_device(prompts.rows, device), to_device(prompts.of_row, device)
    with known_masks(attended[prompts.rows, :p]):
        first, _ = score_targets(
            model,
            Targets(
                response_ids[:, :1],
                wanted[:, :1],
                -1,
                of_row,
                history and history.at((slice(None), slice(0, 1))),
                None if further_ids is None else further_ids[:, :1],
            ),
            distribution,
            fused=options.fused_head,
            input_ids=completions.prompt_ids[first_rows],
            attention_mask=mask[first_rows, :p],
            position_ids=positions[..., first_rows, :p],
            logits_to_keep=1,
            use_cache=True,
            **cache_input(model, past),
            **images,
        )

    def score_behind(bucket: Bucket) -> TargetScores:
        """Score the response tokens of some rows, but for the first."""
        rows, t = to_device(bucket.rows, device), bucket.width
        earlier = history and history.mapped(lambda field: field[rows, 1:t])
        row_mask = mask[rows, : p + t - 1]
        if cache is None:
            prompts_cache = nullcontext(
                {"attention_mask": row_mask, **cache_input(model, _repeated(past, of_row[rows]))}
            )
        else:
            prompts_cache = attending_to(model, cache(past, of_row[rows], row_mask.bool()))
        per_token = {}  # images were seen with the prompts
        if completions.vision is not None:
            per_token = completions.vision.select(bucket.rows).per_token(0, t - 1, device)
        with known_masks(attended[bucket.rows, : p + t - 1]), prompts_cache as inputs:
            found, _ = score_targets(
                model,
                Targets(
                    response_ids[rows, 1:t],
                    wanted[bucket.rows, 1:t],
                    history=earlier,
                    further_ids=None if further_ids is None else further_ids[rows, 1:t],
                ),
                distribution,
                fused=options.fused_head,
                input_ids=response_ids[rows, : t - 1],
                position_ids=positions[..., rows, p : p + t - 1],
                logits_to_keep=t - 1,
                use_cache=True,
                **inputs,
                **per_token,
            )
        return found

    columns = torch.arange(1, response_ids.shape[1] + 1)
    lengths = (attended[:, p:].long() * columns).amax(1).clamp(min=2)
    buckets = bucket_by_length(lengths if options.rows_by_length else lengths.amax().expand(len(response_ids)), device)
    if cache is not None:
        # The rows of a prompt beside each other.
        orders = [prompts.of_row[bucket.rows].argsort(stable=True) for bucket in buckets]
        buckets = [Bucket(bucket.rows[order], bucket.width) for bucket, order in zip(buckets, orders, strict=True)]
    return first.beside(
        TargetScores.of_buckets([score_behind(bucket) for bucket in buckets], buckets, response_ids.shape[1] - 1)
    )


def _repeated(past: DynamicCache, prompt_of_row: Tensor) -> DynamicCache:
    """Return keys and values of each row's prompt; the given cache stays as it is."""
    repeated = copy.copy(past)
    layers: list[Any] = [copy.copy(layer) for layer in past.layers]
    for layer in layers:
        layer.keys, layer.values = (part.index_select(0, prompt_of_row) for part in (layer.keys, layer.values))
    repeated.layers = layers
    return repeated


_TRIAL = EquivalenceTrial(
    "model.speedups.folded_attention", "Each row has its prompt's keys and values for itself", most=0.01
)
"""The bound: on deterministic kernels the log-probs of the two ways are equal."""


def _proven(model: nn.Module) -> bool:
    """Tell whether a model attends as `shared_attention` does, by a few rows both ways, without gradient.

    Each attention has to equal, in float64, the one over repeated keys, and the log-probs have to agree.
    """

    def compute_both_ways() -> tuple[Tensor, Tensor]:
        rows, options = _trial(base_of(model)), ForwardOptions(rows_by_length=False)
        prompts = PromptGroups(torch.tensor([0, 2]), torch.tensor([0, 0, 1, 1]))
        with torch.no_grad(), evaluation_mode(model):
            fast, own = (
                _run_behind(model, rows, prompts, Distribution(), options, cache).logprobs[rows.response_mask]
                for cache in (ProvingFoldedCache, None)
            )
        return fast, own

    return _TRIAL.passes(model, compute_both_ways)


def _trial(base: Any) -> Completions:
    """Return two prompts of five and three tokens, with two responses each, of which one is shorter and one has a
    hole."""
    device, size = device_of(base), base.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(36, device=device) * 7 + 1).view(4, 9) % size
    prompt_ids = ids[::2, :5].repeat_interleave(2, 0)
    prompt_mask, attended = torch.ones_like(prompt_ids, dtype=torch.bool), torch.ones_like(ids[:, 5:], dtype=torch.bool)
    prompt_mask[2:, :2], attended[1, 2:], attended[3, 1] = False, False, False
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=ids[:, 5:],
        response_mask=attended,
        sampler_logprobs=torch.zeros(4, 4, device=device),
        ended=torch.ones(4, dtype=torch.bool, device=device),
        group_id=torch.tensor([0, 0, 1, 1], device=device),
    )
