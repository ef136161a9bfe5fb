"""Completions and their texts from a batch of prompts.

`RolloutRequest.send_to` is the one place that syncs a generator and asks it. The functions turn completions into texts:
for rewards, judges and tables (`texts_of`, `as_reward_input`), and token by token for people (`pieces_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_rl.core.episode import Episode, Message, Prompt
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.ranks import in_background_thread, run_on_all_ranks
from lit_rl.core.rollout import Completions, PromptBatch, Prompts, Sampling
from lit_rl.environments.environment_base import EpisodeRequest, EpisodeSource, RunTogether
from lit_rl.generation.generator import ConversationsLost, EngineLost, Generator
from lit_rl.generation.noise import prompt_key, row_keys, sample_key
from lit_rl.models.language_model import LanguageModel
from lit_rl.rewards.jobs import OBJECTS


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's functions and special tokens that generation needs."""

    eos_ids: tuple[int, ...]
    pad_id: int
    decode: Callable[[Sequence[int]], str]
    """Token ids to text, special tokens kept."""
    encode: Callable[[str], Sequence[int]]
    """Text to token ids, no special tokens added."""

    @classmethod
    def of(cls, model: LanguageModel) -> Vocabulary:
        """Return the vocabulary of the model's description."""
        tokenizer: Any = model.tokenizer
        return cls(
            model.eos_ids, tokenizer.pad_token_id, tokenizer.decode, partial(tokenizer.encode, add_special_tokens=False)
        )

    def prompts(self, token_ids: Sequence[list[int]], keys: Sequence[int], group_size: int) -> Prompts:
        """Return a request for a generator, in this vocabulary."""
        return Prompts(token_ids, keys, group_size, self.eos_ids, self.pad_id, self.decode, self.encode)


@dataclass(frozen=True)
class RolloutRequest:
    """A request for completions of prompts by a policy.

    The samples depend on `seed`, the rollout, the row and its occurrence, never on rank or batch.
    """

    batch: PromptBatch
    policy: nn.Module
    """The model whose weights the generator draws with."""
    vocabulary: Vocabulary
    """The vocabulary of the prompts' tokenizer."""
    version: int
    """Optimizer steps that the policy has taken; the completions record it."""
    sampling: Sampling
    group_size: int
    """Completions of each prompt."""
    seed: int
    """Seed of the samples."""
    first_sample: int = 0
    """Completions of each prompt that come before these, on other ranks."""
    interaction: EpisodeSource | None = None
    """The source of replies to the policy's turns. None: a completion is one turn."""
    on_finished: Callable[[int, list[int]], None] | None = None
    """Callback for finished completions of one turn, while others are still written: see `Prompts.on_finished`."""

    def send_to(self, generator: Generator) -> Callable[[], Completions]:
        """Give the generator the weights of the policy, and return a function that draws completions of every prompt.

        Every request begins with this sync, so a stale engine cannot answer; no other may come in between.

        Raises:
            ConfigError: the generator cannot hold conversations, or cannot show images to the model.
        """
        interaction, batch, sampling = self.interaction, self.batch, self.sampling
        if interaction is not None and interaction.settings.converses:
            generator.check_converses()
        generator.sync(self.policy, self.version)
        keys = [
            int(prompt_key(self.seed, batch.rollout, row, occurrence))
            for row, occurrence in zip(batch.rows, batch.occurrences, strict=True)
        ]
        of_samples = [sample_key(key, self.first_sample) for key in keys] if self.first_sample else keys
        prompts = self.vocabulary.prompts(batch.prompt_ids, of_samples, self.group_size)
        if batch.vision is not None:
            prompts = replace(prompts, vision=tuple(batch.vision(batch.rows)))
            if not generator.sees:
                raise ConfigError(
                    f"{type(generator).__name__} would not see the images of the prompts. Use generator=native, hf, "
                    "vllm or vllm_server."
                )
            if interaction is not None and not interaction.settings.converses:
                raise ConfigError(
                    "A rollout function would not see the images of the prompts: leave env=rollout_func out."
                )
        block_eos = partial(with_blocked_eos, eos_ids=self.vocabulary.eos_ids, sampling=sampling)
        if interaction is None:
            prompts = replace(prompts, on_finished=self.on_finished)
            return lambda: block_eos(generator.generate(prompts, sampling))
        # Each rank asks by itself where the policy itself generates.
        agree: RunTogether = (lambda work: work()) if generator.exact else run_on_all_ranks
        row_noise = row_keys(of_samples, self.group_size).tolist()
        device = next((parameter.device for parameter in self.policy.parameters()), torch.device("cpu"))
        state: dict[str, Any] = {"context": generator.context, "version": self.version, "device": device}
        episodes = EpisodeRequest(generator.generate, agree, batch, prompts, sampling, row_noise, keys, **state)

        def draw() -> Completions:
            drawn = interaction.draw(episodes)
            moved = {name: value.to(device) for name, value in vars(drawn).items() if isinstance(value, Tensor)}
            return block_eos(replace(drawn, version=self.version, **moved))

        return partial(_retry_once_where_lost, draw, partial(generator.sync, self.policy, self.version))


def with_blocked_eos(completions: Completions, eos_ids: Sequence[int], sampling: Sampling) -> Completions:
    """Return the completions with the tokens that were blocked, for their scoring, where `sampling` blocks any."""
    if not sampling.min_new_tokens or not eos_ids:
        return completions
    held = torch.tensor(eos_ids, device=completions.response_ids.device)
    return replace(completions, blocked_eos=held.repeat(len(completions), 1))


def _retry_once_where_lost(draw: Callable[[], Completions], bring_back: Callable[[], None]) -> Completions:
    """Begin episodes again, once, where an engine was lost in the middle: it does not know the conversation so far.

    A background thread cannot bring it back: its caller has to.
    """
    try:
        return draw()
    except ConversationsLost as lost:  # it is back
        rank_zero_warn(f"{lost} They begin anew.")
    except EngineLost as lost:
        if in_background_thread():
            raise
        rank_zero_warn(f"{lost} What was drawn of the rollout is thrown away.")
        bring_back()
    try:
        return draw()
    except ConversationsLost as lost:
        raise GenerationError(f"{lost} It was the second time in one rollout, and the run ends.") from lost


# ------------------------------------------------------------------ texts of completions


def response_ids(completions: Completions) -> list[list[int]]:
    """Return the sampled tokens of each row, EOS included, without padding and the text that an environment wrote."""
    host = completions.on_host
    sampled = host.response_ids[host.response_mask].tolist()
    ends = host.lengths.cumsum(0).tolist()
    return [sampled[start:end] for start, end in zip([0, *ends], ends)]


def texts_of(completions: Completions, tokenizer: Any) -> list[str]:
    """Return the text of each row for rewards, judges and tables, without special tokens."""
    return tokenizer.batch_decode(response_ids(completions), skip_special_tokens=True)


def as_reward_input(
    batch: PromptBatch, texts: Sequence[str], episodes: Sequence[Episode] | None = None
) -> tuple[list[Prompt], list[str | list[Message]], dict[str, list]]:
    """Return prompts, completions and columns, one entry a completion, in the form for reward functions; completions of
    a prompt are neighbours.

    A message prompt makes its completions message lists too: `[{"role": "assistant", "content": text}]`, or all of the
    messages of its episode. Episodes are a column of their own, and so is each of their `extra` values.
    """
    rows = torch.arange(len(batch)).repeat_interleave(len(texts) // len(batch)).tolist()
    columns = {name: [values[i] for i in rows] for name, values in batch.columns.items()}
    prompts = [batch.prompts[i] for i in rows]
    if episodes is not None:
        prompts = [each.prompt for each in episodes]
        columns |= {"episodes": [each.plain() for each in episodes]}
        columns |= {name: [each.extra[name] for each in episodes] for name in episodes[0].extra}
        if any(each.environment is not None for each in episodes):
            columns[OBJECTS] = [each.environment for each in episodes]
        replies: list[str | list[Message]] = [
            text if isinstance(prompt, str) else each.messages
            for prompt, text, each in zip(prompts, texts, episodes, strict=True)
        ]
        return prompts, replies, columns
    return prompts, [answer_to(prompt, text) for prompt, text in zip(prompts, texts, strict=True)], columns


def answer_to(prompt: Prompt, text: str) -> str | list[Message]:
    """Return a completion in the form for reward functions: a message where the prompt is messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


# ------------------------------------------------------------------ the text of each token

UNFINISHED = "\ufffd"
"""The text of bytes that are no whole character."""

_MAX_UTF8_BYTES = 4
"""Most bytes of a character in UTF-8, and so most tokens of one."""


def pieces_of(rows: Sequence[Sequence[int]], tokenizer: Any) -> list[list[str]]:
    """Return the text of every token, special tokens by their names; the pieces of a row add up to its text.

    A character of several tokens stands at the last of them, and the others are empty.

    Args:
        rows: Token ids.
        tokenizer: Decodes them.
    """
    ids = sorted({int(each) for row in rows for each in row})
    # Decoded behind a letter: some tokenizers drop the space that a text begins with.
    (letter,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    before = _decode_rows([[letter]], tokenizer)[0]
    texts = _decode_rows([[letter, each] for each in ids], tokenizer)
    behind = [text.removeprefix(before) if text.startswith(before) else None for text in texts]
    plain = _decode_rows([[each] for each in ids], tokenizer) if None in behind else behind
    alone = {each: str(one if one is not None else other) for each, one, other in zip(ids, behind, plain)}
    return [_row_pieces([int(each) for each in row], alone, tokenizer) for row in rows]


def _row_pieces(row: list[int], alone: dict[int, str], tokenizer: Any) -> list[str]:
    pieces = [alone[each] for each in row]
    start = 0
    while start < len(row):
        end = start + 1
        if UNFINISHED in pieces[start]:
            ends = range(start + 2, min(len(row), start + _MAX_UTF8_BYTES) + 1)
            texts = _decode_rows([row[start:each] for each in ends], tokenizer)
            # The end of the tokens that spell whole characters; of the first one where they spell none.
            for each, text in zip(ends, texts):
                if UNFINISHED not in text:
                    pieces[start:each] = [*[""] * (each - start - 1), text]
                    end = each
                    break
        start = end
    return pieces


def _decode_rows(rows: list[list[int]], tokenizer: Any) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
