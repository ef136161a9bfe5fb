"""The native decode loop over any Hugging Face causal LM: a prompt is computed once a group, finished rows leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.generation.base import Generator, InProcessGenerator
from lit_rl.generation.batches import DecodeBatch, Decoded, decode_batches
from lit_rl.generation.decoding import DecodingSteps, empty_cache, keeps_all
from lit_rl.generation.native_loop import DecodeLoop
from lit_rl.models.policy.trunk import base_of
from lit_rl.rollout import Prompts, Sampling

Kind = Callable[[nn.Module, DecodeBatch, int], DecodingSteps]
"""A function that makes the steps of a policy for a batch of rows and their number of new tokens."""


class NativeGenerator(InProcessGenerator):
    """A generator that decodes in this process with the live policy: no copy, no server, nothing to install.

    The prompts are run once a group, and one token a row a step follows. Rows that ended leave. Works with bf16
    weights, autocast and PEFT: logits are sampled in float32.

    Args:
        batch_size: Sequences that are decoded at a time; None decodes all at once. Bounds memory: samples do not depend
            on it.
        grouped_cache: Hold the keys and values of a prompt once a group, with an attention of our own that reads them
            for all its rows together: less memory, and faster. Only where a model is proven to attend so. Switched off,
            and for any other model, transformers' own attention and cache decode, in which a prompt is repeated for
            each sample.
        lean_steps: Take decode steps over such a cache by operations on the model's weights, past transformers'
            modules: faster for small models. Only where a model is proven to be made of the same operations (Llama,
            Qwen2, Qwen3, Mistral, SmolLM2, with LoRA or without). Switched off, and for any other model, its own
            modules take the steps.
        cuda_graphs: Capture lean steps, draws included, as CUDA graphs, and replay them: where the host cannot launch
            the operations of a step as fast as a GPU computes them, that is faster. No card has shown yet that it is,
            nor that samples stay as they are: off by default. Only where lean steps are taken on a CUDA device, and a
            model is proven to be captured right; not with images. Switched off, and for any other model, the host
            launches each operation of each step.
        continuous_batching: Let groups that wait take the places of rows that ended, in the middle of a batch. Only
            where every layer of a model's cache keeps all of a text. Switched off, and for any other model, the next
            groups begin when all rows of those before are over. Samples do not depend on it.
    """

    sees = True

    def __init__(
        self,
        batch_size: int | None = None,
        grouped_cache: bool = True,
        lean_steps: bool = True,
        continuous_batching: bool = True,
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__(batch_size)
        self.grouped_cache = grouped_cache
        self.lean_steps = lean_steps
        self.continuous_batching = continuous_batching
        self.cuda_graphs = cuda_graphs
        self.steps: str | None = None
        """The steps of the last batch: `cuda_graphs` of lean steps, `lean_steps`, a `grouped_cache` without them, or,
        with none of these, the model's `own` attention and cache."""

    def _decode(
        self, policy: nn.Module, prompts: Prompts, sampling: Sampling, device: torch.device
    ) -> Iterator[tuple[Tensor, Decoded]]:
        (whole,) = decode_batches(prompts, None, device)
        longest = prompts.longest_response(sampling)
        kind = DecodingSteps if prompts.vision else self._kind(policy, whole.prompt_ids.shape[1] + longest)
        self.steps = _named(kind)
        if prompts.responder is not None and kind is DecodingSteps:
            _refuse_partial_caches(policy)
        graphs = None
        if self.steps == "cuda_graphs":
            from lit_rl.generation.step_graphs import StepGraphs

            graphs = StepGraphs(device)
        places = self.rows_a_batch or len(whole.rows)
        loop = DecodeLoop(
            lambda batch: kind(policy, batch, longest),
            prompts,
            sampling,
            places,
            whole,
            continuous=self.continuous_batching,
            graphs=graphs,
        )
        yield whole.rows, loop.run()

    def _kind(self, policy: nn.Module, length: int) -> Kind:
        """Return the steps for texts of up to `length` tokens."""
        from lit_rl.generation.grouped_steps import GroupedSteps, fits, proven

        grouped = self.grouped_cache and fits(policy, length) and proven(policy)
        lean = self._lean(policy, length) if grouped else None
        graphed = self._graphed(policy, lean) if self.cuda_graphs else None
        return graphed or lean or (GroupedSteps if grouped else DecodingSteps)

    def _lean(self, policy: nn.Module, length: int) -> partial[Any] | None:
        """Return lean steps over the model's weights, where they are proven; else None."""
        from lit_rl.generation.lean_steps import LeanModel, LeanSteps, fits, proven

        lean = self.lean_steps and fits(policy) and proven(policy)
        return partial(LeanSteps, LeanModel(policy, length)) if lean else None

    def _graphed(self, policy: nn.Module, lean: partial[Any] | None) -> Kind | None:
        """Return captured lean steps, where they are proven; else None."""
        from lit_rl.generation.step_graphs import GraphedSteps, proven

        fits = proven(policy, lean=lean is not None)
        return partial(GraphedSteps, *lean.args) if lean and fits else None


def _named(kind: Kind) -> str:
    """Return the value of `NativeGenerator.steps`."""
    if not isinstance(kind, partial):
        return "own" if kind is DecodingSteps else "grouped_cache"
    steps: Any = kind.func
    return "cuda_graphs" if steps.whole else "lean_steps"


def _refuse_partial_caches(policy: nn.Module) -> None:
    """Refuse a cache that does not keep all of a text: a waiting row of a conversation keeps its part of it."""
    if not keeps_all(policy, empty_cache(policy)):
        raise ConfigError(
            f"generator=native cannot hold conversations with {type(base_of(policy)).__name__}: it is no model of "
            "transformers, or layers of its cache have a window and may drop tokens. Use generator=hf with it."
        )


def for_another_policy(generator: Generator) -> Generator:
    """Return a generator for another model than the policy: a teacher, an opponent.

    An engine holds the policy and nothing else, so such completions are decoded in this process. An in-process
    generator decodes with any model that it is synced to, and is returned itself.
    """
    return generator if isinstance(generator, InProcessGenerator) else NativeGenerator()
