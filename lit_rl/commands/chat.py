"""`lit-rl chat`: talk to a policy in the terminal, or through a pipe. Replies go to stdout, all else to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.callbacks.text import printable
from lit_rl.data.templates import encode_prompt
from lit_rl.errors import ConfigError, DataError, NumericError, StorageError
from lit_rl.generation.base import check_request, rollout_mode
from lit_rl.generation.batches import decode_batches
from lit_rl.generation.collect import Vocabulary
from lit_rl.generation.decoding import DecodingSteps
from lit_rl.generation.noise import prompt_key
from lit_rl.generation.transforms import EndDetector, TokenSampler
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.rollout import Message, Prompt, Sampling

_COMMANDS = "/reset forgets the conversation, /quit ends it"
_HALF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Chat:
    """Who is talked to, and how."""

    model: LanguageModel
    sampling: Sampling
    fabric: L.Fabric
    """Device and precision."""
    checkpoint: Path | None = None
    """Whose weights to take; None: the model's own."""
    seed: int = 0
    system_prompt: str | None = None
    """Opens the conversation."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template: those of the training."""
    plain: bool = False
    """Every line is a prompt by itself, also where the tokenizer has a chat template."""

    @property
    def templated(self) -> bool:
        return bool(self.model.tokenizer.chat_template) and not self.plain


def chat(job: Chat) -> int:
    """Answer every line of stdin until it ends, or a line is `/quit`.

    With a chat template the conversation is kept; without, each line is a prompt that is completed. Turn ``n`` of a
    conversation is drawn with noise that `seed` and ``n`` name, so a script gets the same replies again. Ctrl-C stops a
    reply in a terminal; where the next line is waited for it ends the conversation, as the end of the input does.

    Raises:
        ConfigError: a system prompt without a chat template.
        StorageError: the checkpoint is of another model.
        NumericError: the policy's logits hold NaN.
    """
    if job.system_prompt is not None and not job.templated:
        raise ConfigError("chat.system_prompt needs a chat template: set model.chat_template, and not chat.plain.")
    policy = _load(job)
    kind = "a conversation" if job.templated else "every line is a prompt of its own"
    _note(f"{job.model.name}: {kind}; {_COMMANDS}.")
    try:
        _talk(job, policy)
    except BrokenPipeError:  # who reads has gone; Python would complain once more when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _talk(job: Chat, policy: Any) -> None:
    opening: list[Message] = [{"role": "system", "content": job.system_prompt}] if job.system_prompt else []
    messages, turn = list(opening), 0
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            messages, turn = list(opening), 0
        elif line.startswith("/"):
            _note(f"{printable(line)} is no command: {_COMMANDS}.")
        else:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                reply = _reply(job, policy, asked if job.templated else line, turn)
            except DataError as error:  # the line alone is at fault
                _note(printable(f"{error} The line is left out; /reset begins anew.", sys.maxsize))
                continue
            messages, turn = [*asked, {"role": "assistant", "content": reply}], turn + 1


def _lines() -> Iterator[str]:
    """The lines of stdin that say something."""
    at_terminal = sys.stdin.isatty()
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    while True:
        try:
            line = input("> " if at_terminal else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            break
        if line.strip():
            yield line.strip()
    if at_terminal:
        _note("")


def _reply(job: Chat, policy: Any, prompt: Prompt, turn: int) -> str:
    """Write the reply while it is drawn; what was written."""
    tokenizer: Any = job.model.tokenizer
    ids = encode_prompt(tokenizer, prompt, where="The line", chat_template_kwargs=job.template_kwargs)
    sampling = _fitting(job, len(ids))
    drawn, said, ended = [], "", False
    try:
        for token, last in stream(job, policy, ids, sampling, turn):
            drawn.append(token)
            ended = last
            text = tokenizer.decode(drawn, skip_special_tokens=True)
            if not text.endswith(_HALF_A_CHARACTER):
                said = _say(text, said)
        said = _say(tokenizer.decode(drawn, skip_special_tokens=True), said)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        if not sys.stdin.isatty():
            raise
        return said
    sys.stdout.write("\n")
    sys.stdout.flush()
    if not ended:
        _note(f"(cut at sampling.max_new_tokens={sampling.max_new_tokens})")
    return said


def stream(job: Chat, policy: Any, ids: list[int], sampling: Sampling, turn: int) -> Iterator[tuple[int, bool]]:
    """The tokens that `NativeGenerator` would draw, one at a time, and whether each ends the reply.

    Args:
        job: Whose seed, vocabulary and precision to use.
        policy: The model, on its device.
        ids: The prompt.
        sampling: How to draw.
        turn: Names the noise, with the seed.
    """
    key = int(prompt_key(job.seed, turn, 0, 0))
    prompts = Vocabulary.of(job.model).prompts([ids], [key], group_size=1)
    check_request(prompts, sampling, policy)
    device = next(policy.parameters()).device
    (batch,) = decode_batches(prompts, None, device)
    with rollout_mode(policy), job.fabric.autocast():
        steps = DecodingSteps(policy, batch, sampling.max_new_tokens)
        sampler = TokenSampler.of(batch, prompts, sampling)
        ends = EndDetector(prompts, sampling, device)
        drawn = torch.zeros((1, 0), dtype=torch.long, device=device)
        for position in range(sampling.max_new_tokens):
            one = sampler(steps.logits, position)
            if not one.logprobs.isfinite().all():
                raise NumericError("The policy gave NaN or infinite logits: its weights are damaged or diverged.")
            drawn = torch.cat([drawn, one.tokens[:, None]], 1)
            alive = torch.ones(1, dtype=torch.bool, device=device)
            ended = bool(ends(drawn[:, -ends.window :], position, alive))
            yield int(one.tokens), ended
            if ended:
                return
            if position + 1 < sampling.max_new_tokens:
                steps.advance(one.tokens)


def _fitting(job: Chat, length: int) -> Sampling:
    """The sampling, shortened to what the context still holds."""
    context = job.model.context_length
    left = job.sampling.max_new_tokens if context is None else min(job.sampling.max_new_tokens, context - length)
    if left < max(1, job.sampling.min_new_tokens):
        raise DataError(
            f"The conversation has {length} tokens, and the context of {job.model.name} holds {context}: nothing more "
            "fits."
        )
    return replace(job.sampling, max_new_tokens=left)


def _load(job: Chat) -> Any:
    """The policy on its device, with the weights of the checkpoint if there is one."""
    module = PolicyModule(job.model, seed=job.seed)
    module.configure_model()
    if job.checkpoint is not None:
        try:
            saved = torch.load(job.checkpoint, map_location="cpu", weights_only=True)["state_dict"]
        except Exception as error:  # an unpickler fails on a file of another kind in every way there is
            raise StorageError(f"{job.checkpoint} is no checkpoint of a run: {error}.") from error
        weights = {name: tensor for name, tensor in saved.items() if name.startswith("policy.")}
        module.on_load_checkpoint({"state_dict": weights})  # refuses another model's
        module.load_state_dict(weights, strict=False)
    job.fabric._precision.convert_module(module)
    return module.policy.to(job.fabric.device)


def _say(text: str, said: str) -> str:
    """Write what is new of the text; control characters as escapes, so that no model moves the cursor."""
    fresh = text[len(said) :].replace("\t", "    ")
    sys.stdout.write(printable(fresh, sys.maxsize))
    sys.stdout.flush()
    return text


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
