"""The tokens of completions as columns: one list a completion, one entry for each token sampled or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_rl.episodes import TOKENS
from lit_rl.generation.pieces import pieces_of
from lit_rl.rollout import Completions, Rollout


def token_columns(
    completions: Completions, rollout: Rollout | None, tokenizer: Any, more: Mapping[str, Tensor] | None = None
) -> dict[str, list[Any]]:
    """Return the columns of tokens.

    They are `tokens/ids`, `text`, `turn`, `by_policy` (sampled; the others were read), `sampler_logprobs`; for a
    rollout that is learned from also `learned` (in the loss), `advantages`, and `old_logprobs` where the run computed
    them. `more` has further numbers `(b, t)` of sampled tokens, by name.

    Numbers are numpy arrays, so that long rollouts take little memory; they are 0 on tokens that were read.
    """
    written = completions.response_mask
    there = written if completions.attended is None else completions.attended
    turn = torch.zeros_like(completions.response_ids) if completions.turn is None else completions.turn
    columns: dict[str, Tensor] = {
        "ids": completions.response_ids,
        "turn": turn,
        "by_policy": written,
        "sampler_logprobs": completions.sampler_logprobs,
    }
    if rollout is not None:
        columns["learned"] = rollout.loss_mask
        if rollout.advantages is not None:
            columns["advantages"] = _per_token(rollout.advantages, written)
        if rollout.old_logprobs is not None:
            columns["old_logprobs"] = rollout.old_logprobs.masked_fill(~written, 0.0)
    columns |= {name: values.masked_fill(~written, 0.0) for name, values in (more or {}).items()}
    found: dict[str, list[Any]] = {TOKENS + name: _rows(values, there) for name, values in columns.items()}
    return found | {f"{TOKENS}text": pieces_of(found[f"{TOKENS}ids"], tokenizer)}


def _per_token(advantages: Tensor, written: Tensor) -> Tensor:
    per_token = advantages if advantages.ndim == written.ndim else advantages[:, None].expand(written.shape)
    return per_token.masked_fill(~written, 0.0)


def _rows(values: Tensor, there: Tensor) -> list[Any]:
    kept = values.detach()[there].cpu()
    kept = kept.float() if kept.is_floating_point() else kept
    return [part.numpy() for part in kept.split(there.sum(1).tolist())]
