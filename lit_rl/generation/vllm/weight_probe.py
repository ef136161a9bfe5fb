"""Proof that the engine holds the policy: the log-probs of a probe under both, after every update.

The probe has two requests, and a third where the policy takes images. A fixed text is scored, so that its log-probs can
be compared over time: where the policy's have moved and the engine's have not, the update had no effect (a stale
adapter, an output head that was not packed again). A prompt of more than one block of the engine's cache is continued
through the prefix cache: one that an update did not reset shows. And a prompt with an image is continued: an engine
caches its encoding, and one from older weights shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rl.core.errors import DataError, GenerationError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.core.visuals import as_png, pillow
from lit_rl.data.rendering import render_prompt
from lit_rl.data.row_visuals import image_of
from lit_rl.data.visual_prompts import PromptVisuals
from lit_rl.generation.generator import Gap, rollout_mode
from lit_rl.generation.vllm.engine import Engine, EngineAnswer, Facts, Request, complete, completions_of, requests_of
from lit_rl.models.forward import score
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.sharding import device_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT = (
    "A train leaves at 7:45 and arrives at 9:10. How long does it travel? From 7:45 to 8:45 is one hour, and from 8:45 "
    "to 9:10 are 25 minutes, so it travels for 1 hour and 25 minutes. Then 3 + 4 = 7, and 12 * 5 = 60. "
)

_SCORED = 32
"""Tokens of the text that is scored."""

_WRITTEN = 8
"""Tokens that the engine adds to the long prompt."""


@dataclass(frozen=True)
class ProbeLimit:
    """The largest allowed difference of two log-probs of one token, in nats."""

    mean: float
    max: float


LIMITS = {"float32": ProbeLimit(1e-3, 1e-2), "bfloat16": ProbeLimit(0.1, 1.0), "float16": ProbeLimit(0.03, 0.3)}
"""Limits by the coarser type of the two sides. Equal weights differ by 1e-5 in float32, and by 0.02 (mean) and 0.16
(max) in bfloat16; a single missed update of a trained model by far more (`docs/generators.md`)."""

VISIBLE = {"float32": 1e-4, "bfloat16": 0.2, "float16": 0.06}
"""Smallest change of the policy's log-prob of a scored token, in nats and by the same type, after which an engine that
answers the same to the last bit counts as one without an update: rounding to a coarse type may swallow a small step.
Steps add up until then."""


@dataclass(frozen=True)
class ProbeAnswers:
    """An engine's answers to a probe."""

    ids: list[int]
    """The long prompt; it begins with the text that is scored."""
    scored: Tensor
    """Log-probs of the scored tokens, ``(k,)``."""
    written: list[list[EngineAnswer]]
    """The continuation of the long prompt, and that of the prompt with an image where it was asked: one each."""
    dtype: str
    """The engine's."""


class WeightProbe:
    """A comparison of an engine with the policy, with the last log-probs of both.

    Args:
        tokenizer: The policy's: encodes the probe's text.
        picture: One prompt with an image. None for a policy over text.
        forbidden: Forbidden tokens.
        mean_limit: Largest mean difference, in nats. None takes that of the type in `LIMITS`.
        max_limit: Largest difference of a token, in nats. None takes that of the type in `LIMITS`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        picture: Prompts | None = None,
        *,
        forbidden: Sequence[int] = (),
        mean_limit: float | None = None,
        max_limit: float | None = None,
    ) -> None:
        self._text = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
        self._picture, self._forbidden = picture, forbidden
        self._limits = mean_limit, max_limit
        self._then: tuple[Tensor, Tensor] | None = None
        self._ours = torch.zeros(0)

    def ask(self, engine: Engine) -> ProbeAnswers:
        """Return the engine's answers to the probe."""
        facts = engine.facts()
        ids = self._prompt(facts)
        fields: dict[str, Any] = {"n": 1, "temperature": 1.0, "seed": 0, "logprobs": 0, "ignore_eos": True}
        fields |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        scored_prompt = Request(ids[: _SCORED + 1], fields | {"max_tokens": 1, "prompt_logprobs": 0})
        requests = [scored_prompt, Request(ids, fields | {"max_tokens": _WRITTEN})]
        if self._picture is not None and len(self._picture.token_ids[0]) + _WRITTEN <= facts.max_model_len:
            requests += requests_of(self._picture, Sampling(max_new_tokens=_WRITTEN))
        scored, *written = complete(engine, requests)
        return ProbeAnswers(ids, torch.tensor(scored[0].prompt_logprobs), written, facts.dtype)

    def compare(self, asked: ProbeAnswers, policy: nn.Module) -> Gap:
        """Score the policy's side, under the current precision, and return the gap. A collective where the policy is
        sharded."""
        device = device_of(policy)
        with rollout_mode(policy):
            text = torch.tensor([asked.ids[: _SCORED + 1]], device=device)
            scored = Completions(
                prompt_ids=text[:, :1],
                prompt_mask=torch.ones_like(text[:, :1], dtype=torch.bool),
                response_ids=text[:, 1:],
                response_mask=torch.ones_like(text[:, 1:], dtype=torch.bool),
                sampler_logprobs=torch.zeros(1, text.shape[1] - 1, device=device),
                ended=torch.zeros(1, dtype=torch.bool, device=device),
                group_id=torch.zeros(1, dtype=torch.long, device=device),
            )
            self._ours = _logprobs(policy, scored)
            parts = [self._ours - asked.scored]
            long = Prompts(token_ids=[asked.ids], keys=[0], group_size=1, eos_ids=(), pad_id=0)
            for prompts, answers in zip((long, self._picture), asked.written):
                assert prompts is not None
                written = completions_of(prompts, [answers], version=0, device=device, forbidden=self._forbidden)
                parts.append(_logprobs(policy, written) - written.sampler_logprobs[0].cpu())
        differences = torch.cat(parts).abs().nan_to_num(nan=torch.inf)
        dtype = coarser_dtype(asked.dtype, policy)
        return Gap(differences.mean().item(), differences.max().item(), len(differences), dtype)

    def judge(self, asked: ProbeAnswers, gap: Gap, version: int) -> None:
        """Refuse an engine whose log-probs differ too much from the policy's, or did not change with them.

        Raises:
            GenerationError: the two differ by more than the limit, or the policy has moved and the engine has not.
        """
        limit = self.limit(gap.dtype)
        if gap.mean > limit.mean or gap.max > limit.max:
            sight = "" if self._picture is None else " and of that of a prompt with an image"
            raise GenerationError(
                f"The engine does not hold policy version {version}: over {gap.tokens} tokens of a probe, its "
                f"log-probs differ from the trainer's by {gap.mean:.3g} nats on average (allowed in {gap.dtype}: "
                f"{limit.mean:g}) and by {gap.max:.3g} at most (allowed: {limit.max:g}). Compared were the prompt "
                f"log-probs of a fixed text, and the sampled log-probs of its continuation{sight}, at temperature 1. "
                "Wrong weights differ by whole nats: then look at `lit-rl doctor`. A coarse type differs by little: "
                "set generator.dtype to the training's, or raise generator.probe_mean_limit and "
                "generator.probe_max_limit."
            )
        ours, theirs = self._ours, asked.scored
        if self._then is not None and torch.equal(theirs, self._then[1]):
            moved = (ours - self._then[0]).abs().max().item()
            if moved > VISIBLE[gap.dtype]:
                raise GenerationError(
                    f"The engine's log-probs of the probe did not change, and the trainer's have, by {moved:.3g} nats, "
                    f"up to policy version {version}: the update had no effect. Look at `lit-rl doctor`."
                )
            return  # compared with the same state again, so that many small steps add up
        self._then = ours, theirs

    def _prompt(self, facts: Facts) -> list[int]:
        """Return text of more than a block of the cache, as far as the context allows."""
        wanted = min(facts.block_size + _SCORED + 1, facts.max_model_len - _WRITTEN)
        return (self._text * (wanted // len(self._text) + 1))[: max(wanted, 2)]

    def limit(self, dtype: str) -> ProbeLimit:
        """Return the limit for two sides, the coarser of which computes in `dtype`."""
        usual = LIMITS[dtype]
        mean, largest = self._limits
        return ProbeLimit(usual.mean if mean is None else mean, usual.max if largest is None else largest)


def coarser_dtype(dtype: str, policy: nn.Module) -> str:
    """Return the coarser of the engine's type, the policy's and autocast's, by mantissa."""
    first = next(policy.parameters())
    kinds = [dtype, str(first.dtype).removeprefix("torch.")]
    kind = device_of(policy).type
    if torch.is_autocast_enabled(kind):
        kinds.append(str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
    return max((kind for kind in kinds if kind in LIMITS), key=lambda kind: LIMITS[kind].mean)


def _logprobs(policy: nn.Module, completions: Completions) -> Tensor:
    return score(policy, completions, Sampling()).logprobs[0].cpu()


# ------------------------------------------------------------------ the prompt with an image

_SIDE = 64
_WHERE = "the probe of the generator"
_ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is 7 + 5?"}]}]


def image_probe(model: LanguageModel) -> Prompts | None:
    """Return one prompt with an image, for one completion that nothing ends; None where the model takes none.

    Those are a model over text, and one whose chat template shows no images: no data with images can be read for it.
    """
    if model.processor is None:
        return None
    tokenizer: Any = model.tokenizer
    # Bands and a slope, in which any vision tower finds a signal.
    places = ((x, y) for y in range(_SIDE) for x in range(_SIDE))
    pixels = bytes(value for x, y in places for value in (x * 4, y * 4, 255 * (x // 8 + y // 16 & 1)))
    picture = image_of(as_png(pillow().frombytes("RGB", (_SIDE, _SIDE), pixels)), _WHERE)
    try:
        text = render_prompt(tokenizer, _ASKED, _WHERE, {})  # pyright: ignore[reportArgumentType]
        ids, vision = model.processor.process(text, (picture,), _WHERE)
    except DataError:
        return None
    assert vision is not None
    encode = partial(tokenizer.encode, add_special_tokens=False)
    seen = replace(vision, source=PromptVisuals(text, (picture,), _WHERE))
    return Prompts([ids], [0], 1, (), model.pad_id, encode=encode, vision=[seen])
