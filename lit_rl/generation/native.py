"""Our own decode loop over any Hugging Face causal LM: a prompt is computed once a group, finished rows are dropped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_rl.generation.base import Generator, InProcessGenerator
from lit_rl.generation.batches import DecodeBatch, Decoded
from lit_rl.generation.decoding import DecodingSteps
from lit_rl.generation.transforms import Drawn, EndDetector, TokenSampler
from lit_rl.rollout import Prompts, Sampling

_COMPACT_BELOW = 0.75
"""Drop finished rows once this share of the rows still runs. A step rewrites the key-value cache anyway, so dropping a
quarter pays back within a few steps, and happens only a few times a batch."""


class NativeGenerator(InProcessGenerator):
    """Decodes in this process with the weights of the live policy: no copy, no server, nothing to install.

    The prompts are run once a group, and one token a row a step follows; rows that ended leave the batch. Works with
    bf16 weights, autocast and PEFT: logits are sampled in float32.

    Args:
        batch_size: Sequences per decode batch; None decodes all at once. Bounds memory: samples do not depend on it.
        grouped_cache: Hold the keys and values of a prompt once a group, with an attention of our own that reads them
            for all its rows together: less memory, and faster. Only where a model is proven to attend so. Switched off,
            and for any other model, transformers' own attention and cache decode, in which a prompt is repeated for
            each sample.
    """

    def __init__(self, batch_size: int | None = None, grouped_cache: bool = True) -> None:
        super().__init__(batch_size)
        self.grouped_cache = grouped_cache
        self._proven: bool | None = None

    def sync(self, policy: nn.Module, version: int) -> None:
        if policy is not self._policy:
            self._proven = None
        super().sync(policy, version)

    def _decode(self, policy: nn.Module, batch: DecodeBatch, prompts: Prompts, sampling: Sampling) -> Decoded:
        device = batch.keys.device
        steps = self._steps(policy, batch, sampling.max_new_tokens)
        sampler = TokenSampler.of(batch, prompts, sampling)
        ends = EndDetector(prompts, sampling, device)
        out = _Responses(len(batch.keys), sampling, device)
        alive = torch.ones_like(batch.keys, dtype=torch.bool)
        position = 0
        while True:
            drawn = sampler(steps.logits, position)
            out.write(position, drawn, alive)
            alive = alive & ~ends(out.tail(position, ends.window), position, alive)
            tokens, running = drawn.tokens, int(alive.sum())
            if running == 0 or position + 1 == sampling.max_new_tokens:
                break
            if running <= _COMPACT_BELOW * len(alive):
                kept = alive.nonzero().squeeze(-1)
                steps.keep(kept)
                sampler.keep(kept)
                out.keep(kept)
                tokens, alive = tokens[kept], alive[kept]
            steps.advance(tokens)
            position += 1
        return out.decoded(position + 1, alive)

    def _steps(self, policy: nn.Module, batch: DecodeBatch, max_new_tokens: int) -> DecodingSteps:
        from lit_rl.generation.grouped_steps import GroupedSteps, fits, proven

        grouped = self.grouped_cache and fits(policy, batch.prompt_ids.shape[1] + max_new_tokens)
        if grouped and self._proven is None:
            self._proven = proven(policy)
        kind = GroupedSteps if grouped and self._proven else DecodingSteps
        return kind(policy, batch, max_new_tokens)


class _Responses:
    """Where the tokens go: written a step at a time, by the rows that still stand in the batch."""

    def __init__(self, n_rows: int, sampling: Sampling, device: torch.device) -> None:
        shape = (sampling.max_new_tokens, n_rows)
        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.kept_logmass = None if sampling.truncation.off else torch.zeros_like(self.logprobs)
        self.rows: Tensor | slice = slice(None)

    def write(self, position: int, drawn: Drawn, alive: Tensor) -> None:
        self.ids[position, self.rows] = drawn.tokens
        self.logprobs[position, self.rows] = drawn.logprobs
        self.mask[position, self.rows] = alive
        if self.kept_logmass is not None:
            assert drawn.kept_logmass is not None
            self.kept_logmass[position, self.rows] = drawn.kept_logmass

    def tail(self, position: int, window: int) -> Tensor:
        return self.ids[max(position + 1 - window, 0) : position + 1, self.rows].T

    def keep(self, kept: Tensor) -> None:
        self.rows = kept if isinstance(self.rows, slice) else self.rows[kept]

    def decoded(self, length: int, alive: Tensor) -> Decoded:
        ended = torch.ones_like(self.mask[0])
        ended[self.rows] = ~alive
        mass = None if self.kept_logmass is None else self.kept_logmass[:length].T
        return Decoded(self.ids[:length].T, self.mask[:length].T, self.logprobs[:length].T, ended, mass)


def for_another_policy(generator: Generator) -> Generator:
    """What draws for another model than the policy: a teacher, an opponent.

    An engine holds the policy and nothing else, so such completions are decoded in this process; a generator that
    decodes with whatever it is synced to serves as it is.
    """
    return generator if generator.exact else NativeGenerator()
