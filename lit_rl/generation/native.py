"""Our own decode loop over any Hugging Face causal LM: a prompt is computed once a group, rows leave when they end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lit_rl.generation.base import Generator, InProcessGenerator
from lit_rl.generation.batches import Decoded, Waiting, decode_batches
from lit_rl.generation.decoding import DecodingSteps
from lit_rl.generation.responses import Responses
from lit_rl.generation.transforms import TokenSampler
from lit_rl.rollout import Prompts, Sampling

_COMPACT_BELOW = 0.75
"""Drop finished rows once this share of the rows still runs. A step rewrites the key-value cache anyway, so dropping a
quarter pays back within a few steps, and happens only a few times a batch."""


class NativeGenerator(InProcessGenerator):
    """Decodes in this process with the weights of the live policy: no copy, no server, nothing to install.

    The prompts are run once a group, and one token a row a step follows. Rows that ended leave, and groups that wait
    take their places, where every layer of the model keeps all of a text. Works with bf16 weights, autocast and PEFT:
    logits are sampled in float32.

    Args:
        batch_size: Sequences that are decoded at a time; None decodes all at once. Bounds memory: samples do not depend
            on it.
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

    def _decode(
        self, policy: nn.Module, prompts: Prompts, sampling: Sampling, device: torch.device
    ) -> Iterator[tuple[Tensor, Decoded]]:
        (whole,) = decode_batches(prompts, None, device)
        sampler = TokenSampler.of(whole, prompts, sampling)
        responses = Responses(prompts, sampling, len(whole.rows), device)
        kind = self._kind(policy, whole.prompt_ids.shape[1] + sampling.max_new_tokens)
        places = self.rows_a_batch or len(whole.rows)
        waiting = Waiting(prompts, places, device)
        while waiting:
            batch = waiting.take(places)
            assert batch is not None, "a group, or a slice of it, fits where no row runs"
            steps, rows = kind(policy, batch, sampling.max_new_tokens), batch.rows.to(device)
            while True:
                drawn = sampler(steps.logits, responses.lengths[rows], rows)
                running, tokens = responses.add(rows, drawn), drawn.tokens
                left = int(running.sum())
                if left == 0:
                    break
                thinned = left <= _COMPACT_BELOW * len(rows) or steps.full
                if thinned:
                    kept = running.nonzero().squeeze(-1)
                    rows, tokens = rows[kept], tokens[kept]
                    steps.keep(kept)
                steps.advance(tokens)
                if thinned and steps.joinable and (more := waiting.take(places - left)):
                    steps.join(kind(policy, more, sampling.max_new_tokens))
                    rows = torch.cat([rows, more.rows.to(device)])
        yield whole.rows, responses.decoded()

    def _kind(self, policy: nn.Module, length: int) -> type[DecodingSteps]:
        """The steps for texts of up to `length` tokens."""
        from lit_rl.generation.grouped_steps import GroupedSteps, fits, proven

        grouped = self.grouped_cache and fits(policy, length)
        if grouped and self._proven is None:
            self._proven = proven(policy)
        return GroupedSteps if grouped and self._proven else DecodingSteps


def for_another_policy(generator: Generator) -> Generator:
    """What draws for another model than the policy: a teacher, an opponent.

    An engine holds the policy and nothing else, so such completions are decoded in this process; a generator that
    decodes with whatever it is synced to serves as it is.
    """
    return generator if generator.exact else NativeGenerator()
