"""Whole rollouts of a policy that says what a test wants: real environments, real tokens, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lit_rl.core.rollout import Completions, PromptBatch, Prompts, Sampling
from lit_rl.environments.environment_base import EpisodeSource
from lit_rl.generation.collect import RolloutRequest, Vocabulary
from lit_rl.generation.generator import DecodeBatch, Decoded, Generator, assemble
from lit_rl.generation.hf import TurnByTurn


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """A turn as tokens, which an EOS token ends."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


class Says(Generator):
    """An engine without a model: what is tested is what becomes of its words.

    Args:
        tokenizer: Of the policy.
        said: What each row says, turn by turn.
    """

    converses = True

    def __init__(self, tokenizer: Any, said: Sequence[Sequence[str]]) -> None:
        self._tokenizer, self._said, self._turns = tokenizer, said, [0] * len(said)

    def sync(self, policy: nn.Module, version: int) -> None: ...

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        decoded = TurnByTurn(self._decode, prompts, sampling, None, torch.device("cpu")).run()
        rows = torch.arange(len(self._said))
        return assemble(prompts, [(rows, decoded)], version=0, device=torch.device("cpu"))

    def _decode(self, batch: DecodeBatch, prompts: Prompts, sampling: Sampling) -> Decoded:
        rows = batch.rows.tolist()
        said = [ids_of(self._tokenizer, self._said[row][self._turns[row]]) for row in rows]
        for row in rows:
            self._turns[row] += 1
        width = max(map(len, said))
        mask = torch.arange(width) < torch.tensor([len(ids) for ids in said])[:, None]
        ids = torch.tensor([ids + [prompts.pad_id] * (width - len(ids)) for ids in said])
        return Decoded(ids, mask, torch.zeros(mask.shape), torch.ones(len(said), dtype=torch.bool), None)


def drawn(
    interaction: EpisodeSource, tokenizer: Any, batch: PromptBatch, said: Sequence[Sequence[str]], longest: int
) -> Completions:
    """The completions of the prompts, as a run collects them: each row says its turns."""
    vocabulary = Vocabulary((tokenizer.eos_token_id,), tokenizer.pad_token_id, tokenizer.decode, tokenizer.encode)
    return RolloutRequest(
        batch,
        nn.Module(),
        sampling=Sampling(max_new_tokens=longest),
        group_size=len(said) // len(batch),
        vocabulary=vocabulary,
        version=0,
        seed=0,
        interaction=interaction,
    ).send_to(Says(tokenizer, said))()
