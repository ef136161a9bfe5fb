"""`lit-rl chat`: a conversation with a policy in the terminal or through a pipe. Replies go to stdout, all else to
stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.callbacks.display import printable
from lit_rl.core.episode import Message, Prompt
from lit_rl.core.errors import ConfigError, DataError, NumericError
from lit_rl.core.rollout import PromptForm, Sampling
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.core.visuals import ImageRef
from lit_rl.data.rendering import control_tokens, encode_prompt, render_prompt
from lit_rl.data.row_visuals import PART, image_of
from lit_rl.generation.collect import Vocabulary
from lit_rl.generation.decoding import DecodingSteps
from lit_rl.generation.generator import check_request, decode_batches, rollout_mode
from lit_rl.generation.noise import prompt_key
from lit_rl.generation.token_sampler import EndDetector, TokenSampler
from lit_rl.models.language_model import LanguageModel
from lit_rl.runs.saved_policy import load_policy

_COMMANDS = "/reset forgets the conversation, /quit ends it"
_SHOWING = "/image FILE shows an image with the next line, "
_HALF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Chat:
    """The policy to talk to, and the settings."""

    model: LanguageModel
    sampling: Sampling
    fabric: L.Fabric
    """Device and precision."""
    checkpoint: Path | None = None
    """Checkpoint with the weights; None: the model's own."""
    seed: int = 0
    system_prompt: str | None = None
    """First message of the conversation."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template: those of the training."""
    plain: bool = False
    """True for lines that are prompts by themselves, also where the tokenizer has a chat template."""
    trained_on: PromptForm | None = None
    """Kind of prompt that the policy was trained on, if that is known."""

    @property
    def templated(self) -> bool:
        reader = self.model.processor or self.model  # a processor may bring the template
        return bool(reader.tokenizer.chat_template) and not self.plain

    @property
    def commands(self) -> str:
        """Commands that may be typed beside lines to be answered."""
        return f"{_SHOWING if self.model.sees and self.templated else ''}{_COMMANDS}"


@dataclass
class _History:
    """A conversation so far."""

    messages: list[Message]
    images: list[ImageRef] = field(default_factory=list)
    """Images of the messages, in order."""
    waiting: list[ImageRef] = field(default_factory=list)
    """Images for the next message."""
    turn: int = 0


def chat(job: Chat) -> int:
    """Answer every line of stdin until it ends, or a line is `/quit`.

    With a chat template the conversation is kept; without, each line is a prompt that is completed. `/image FILE` shows
    a policy that sees an image with the next line. Turn ``n`` of a conversation is drawn with noise that `seed` and
    ``n`` name, so a script gets the same replies again. Ctrl-C stops a reply in a terminal; where the next line is
    waited for it ends the conversation, as the end of the input does.

    Raises:
        ConfigError: a system prompt without a chat template.
        StorageError: the checkpoint is of another model.
        NumericError: the policy's logits hold NaN.
    """
    if job.system_prompt is not None and not job.templated:
        raise ConfigError(
            "chat.system_prompt needs a chat template: set model.chat_template, and chat.plain=false where the model "
            "was trained on plain text."
        )
    policy = load_policy(job.model, job.fabric, seed=job.seed, checkpoint=job.checkpoint)
    on_text = job.trained_on == "text"
    if job.templated:
        prompts = "a conversation" + (" (it was trained on plain text: chat.plain=true)" if on_text else "")
    else:
        hint = " (as it was trained; chat.plain=false takes its chat template)" if on_text else ""
        prompts = f"every line is a prompt of its own{hint}"
    _note(f"{job.model.name}: {prompts}; {job.commands}.")
    try:
        _talk(job, policy)
    except BrokenPipeError:  # who reads has gone; Python would complain once more when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _talk(job: Chat, policy: Any) -> None:
    opening: list[Message] = [{"role": "system", "content": job.system_prompt}] if job.system_prompt else []
    history = _History(opening)
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            history = _History(opening)
        elif line.split()[0] == "/image":
            history.waiting += _images(job, line.removeprefix("/image").strip())
        elif line.startswith("/"):
            _note(f"{printable(line)} is not a command: {job.commands}.")
        else:
            images = [*history.images, *history.waiting]
            parts = [*(dict(PART) for _ in history.waiting), {"type": "text", "text": line}]  # images before the words
            messages = [*history.messages, {"role": "user", "content": parts if history.waiting else line}]
            history.waiting = []
            try:
                reply = _reply(job, policy, messages if job.templated else line, images, history.turn)
            except DataError as error:  # the line alone is at fault
                left_out = "line and its images are" if len(images) > len(history.images) else "line is"
                _note(printable(f"{error} The {left_out} left out; /reset begins anew.", sys.maxsize))
                continue
            history = _History([*messages, {"role": "assistant", "content": reply}], images, turn=history.turn + 1)


def _images(job: Chat, path: str) -> list[ImageRef]:
    """Return the image of a file, for the next line; none, and the reason, where it cannot be shown."""
    name = path[1:-1] if path[:1] == path[-1:] and path[:1] in ("'", '"') else path  # as a terminal pastes it
    try:
        if not job.model.sees:
            raise DataError(
                f"{job.model.name} reads text only, no images. Take a model that reads them, such as model=digits or "
                "model=smolvlm_256m."
            )
        if not job.templated:
            raise DataError("Images are shown in messages: set a chat template, and chat.plain=false.")
        if not name:
            raise DataError("/image needs the path of a file: /image photos/3.png.")
        ref = image_of(name if "://" in name else Path(name).expanduser().resolve(), "/image")
        ref.open()  # a damaged one is said now
    except DataError as error:
        _note(printable(str(error), sys.maxsize))
        return []
    _note(f"{printable(ref.name)}, {ref.width} x {ref.height}: it is shown with the next line.")
    return [ref]


def _lines() -> Iterator[str]:
    """Yield the lines of stdin that are not blank."""
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


def _read(job: Chat, prompt: Prompt, images: Sequence[ImageRef]) -> tuple[list[int], PromptVision | None]:
    """Return the tokens of a prompt, and its images for the model."""
    tokenizer, processor, where = job.model.tokenizer, job.model.processor, "The line"
    if processor is None or isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt, where=where, chat_template_kwargs=job.template_kwargs), None
    control = [*control_tokens(tokenizer), *processor.reserved]
    return processor.process(render_prompt(tokenizer, prompt, where, job.template_kwargs, control), images, where)


def _reply(job: Chat, policy: Any, prompt: Prompt, images: Sequence[ImageRef], turn: int) -> str:
    """Write the reply while it is drawn, and return it."""
    tokenizer: Any = job.model.tokenizer
    ids, vision = _read(job, prompt, images)
    context, most = job.model.context_length, job.sampling.max_new_tokens
    left = most if context is None else min(most, context - len(ids))
    if left < max(1, job.sampling.min_new_tokens):
        raise DataError(
            f"The conversation has {len(ids)} tokens, and the context of {job.model.name} holds {context}: there is no "
            "room for a reply."
        )
    sampling = replace(job.sampling, max_new_tokens=left)
    drawn, written, ended = [], "", False
    try:
        for token, last in stream(job, policy, ids, sampling, turn, vision):
            drawn.append(token)
            ended = last
            text = tokenizer.decode(drawn, skip_special_tokens=True)
            if not text.endswith(_HALF_A_CHARACTER):
                written = _write_new_text(text, written)
        written = _write_new_text(tokenizer.decode(drawn, skip_special_tokens=True), written)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        if not sys.stdin.isatty():
            raise
        return written
    sys.stdout.write("\n")
    sys.stdout.flush()
    if not ended:
        _note(f"(cut at sampling.max_new_tokens={sampling.max_new_tokens})")
    return written


def stream(
    job: Chat, policy: Any, ids: list[int], sampling: Sampling, turn: int, vision: PromptVision | None = None
) -> Iterator[tuple[int, bool]]:
    """Yield the tokens that `NativeGenerator` would draw, one at a time, and whether each ends the reply.

    Args:
        job: The chat, with seed, vocabulary and precision.
        policy: The model, on its device.
        ids: The prompt.
        sampling: Sampling settings.
        turn: Names the noise, with the seed.
        vision: Images of the prompt; None: there are none.
    """
    key = int(prompt_key(job.seed, turn, 0, 0))
    prompts = Vocabulary.of(job.model).prompts([ids], [key], group_size=1)
    prompts = replace(prompts, vision=[vision] if vision is not None else ())
    check_request(prompts, sampling, policy)
    device = next(policy.parameters()).device
    (batch,) = decode_batches(prompts, None, device)
    with rollout_mode(policy), job.fabric.autocast():
        steps = DecodingSteps(policy, batch, sampling.max_new_tokens)
        sampler = TokenSampler(batch, prompts, sampling)
        ends = EndDetector(prompts, sampling, device)
        drawn: list[int] = []
        for position in range(sampling.max_new_tokens):
            one = sampler(steps.logits, position)
            if not one.logprobs.isfinite().all():
                raise NumericError("The policy gave NaN or infinite logits: its weights are damaged or diverged.")
            drawn.append(int(one.tokens))
            ended = drawn[-1] in prompts.eos_ids or ends.behind(drawn, len(drawn), 1) == 0
            yield drawn[-1], ended
            if ended:
                return
            if position + 1 < sampling.max_new_tokens:
                steps.advance(one.tokens)


def _write_new_text(text: str, written: str) -> str:
    """Write the new part of the text; control characters as escapes, so that no model moves the cursor."""
    fresh = text[len(written) :].replace("\t", "    ")
    sys.stdout.write(printable(fresh, sys.maxsize))
    sys.stdout.flush()
    return text


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
