"""A record becomes token ids, split exactly where its completion begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lit_rl.data.checks import excerpt
from lit_rl.data.image_prompts import Processor, refuse_reserved
from lit_rl.data.offline.conversations import Text
from lit_rl.data.offline.example import Encoded
from lit_rl.data.offline.rendering import check_prefix, marked_tokens, render
from lit_rl.data.templates import (
    check_template_kwargs,
    control_tokens,
    encode_prompt,
    refuse_control_tokens,
    require_chat_template,
)
from lit_rl.errors import ConfigError, DataError
from lit_rl.rollout import Message, Prompt
from lit_rl.videos import Visual

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Learn = Literal["completion", "assistant", "all"]
LEARN = ("completion", "assistant", "all")


@dataclass
class Encoder:
    """Renders and tokenises the parts of records.

    Strings: the prompt's tokens are those of `encode_prompt`, with which the model is asked when it generates. Where
    they begin the tokens of prompt and completion together, those are the text, as in TRL 1.16. Where a token would
    straddle the boundary, the completion is tokenised apart, so the prompt keeps all its tokens (TRL leaves the
    prompt's end out). Tokenizers that mark the start of a text as they mark a space cannot tokenise it apart: there
    the straddling token is the completion's first. EOS follows unless it was written; no BOS and no EOS comes twice.

    Messages: the chat template renders the whole conversation once, and that is tokenised once, as it stands (so does
    TRL 1.16). Tokens that end where the rendering of the prompt ends, or before, are the prompt's; one that straddles
    is the completion's first. Tokenizers without offsets tokenise the two parts apart. White space that the template
    writes after the last EOS stays in the text and is not learned: generation ends before it (TRL learns it).

    Args:
        tokenizer: The policy's.
        template_kwargs: Further arguments of the chat template.
        processor: Of a policy that sees: makes tokens of messages with images. None: of one over text.
        learn: `completion`: what follows the prompt. `assistant`: of it what the chat template marks as the
            assistant's. `all`: every token.

    Raises:
        ConfigError: `template_kwargs` sets what is fixed here; an unknown `learn` is the caller's to refuse.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    learn: Learn = "completion"
    processor: Processor | None = None

    def __post_init__(self) -> None:
        check_template_kwargs(self.template_kwargs)
        self.control = control_tokens(self.tokenizer)
        if self.processor is not None:
            self.control = sorted({*self.control, *self.processor.reserved})
        self.marks_start = marks_start(self.tokenizer)
        self.spaces: dict[int, bool] = {}
        self.latest: tuple[str, list[int]] = ("", [])
        """A string prompt and its tokens: those of a pair ask for them twice."""

    def encode(
        self,
        prompt: Prompt | None,
        completion: Text,
        where: str,
        *,
        tools: Sequence[Any] | None = None,
        every_turn: bool = False,
        images: Sequence[Visual] = (),
    ) -> Encoded:
        """A prompt, if there is one, and what follows it, of one kind: strings or messages.

        `every_turn`: for `learn="assistant"` also the assistant's turns of the prompt.

        Raises:
            DataError: no chat template; it refuses the messages, or renders the prompt differently when the completion
                follows; a message holds a control token; no token comes out. The message opens with `where`.
            ConfigError: `learn` is `assistant`, and there is nothing that marks the assistant's tokens.
        """
        if isinstance(completion, str):
            assert prompt is None or isinstance(prompt, str)
            return self._text(prompt, completion, where)
        assert not isinstance(prompt, str)
        text = self._messages(prompt or [], completion, where, tools, images)
        if self.learn == "completion":
            learned = [True] * self._end(text.ids)
        elif self.learn == "all":
            learned = [True] * len(text)
        elif images:
            raise ConfigError(
                f"{where}: data.learn=assistant cannot tell whose tokens are whose beside images: set it to completion."
            )
        else:
            learned = marked_tokens(self.tokenizer, [*(prompt or []), *completion], where, self._kwargs(tools))
        if images and self.processor is not None:  # no policy may say a placeholder
            learned = [flag and id not in self.processor.placeholders for flag, id in zip(learned, text.ids)]
        start = 0 if self.learn == "all" or (self.learn == "assistant" and every_turn) else text.prompt_tokens
        learned = learned + [False] * (len(text) - len(learned))
        return Encoded(text.ids, _from(start, learned), text.prompt_tokens, text.shown)

    def pair(
        self,
        prompt: Prompt,
        completions: Sequence[Text],
        where: str,
        *,
        tools: Sequence[Any] | None = None,
        images: Sequence[Visual] = (),
    ) -> tuple[Encoded, ...]:
        """Several completions of one prompt; all texts begin with the same prompt tokens.

        A token is the prompt's only where every text has it; as in TRL, what differs is learned.

        Raises:
            DataError, ConfigError: as `encode`.
        """
        texts = [self.encode(prompt, completion, where, tools=tools, images=images) for completion in completions]
        common = min(text.prompt_tokens for text in texts)
        for text in texts:
            common = min(common, _shared(texts[0].ids[:common], text.ids))
        return tuple(_moved(text, common) for text in texts)

    def steps(
        self, prompt: Prompt, steps: Sequence[str], separator: str, where: str, *, tools: Sequence[Any] | None = None
    ) -> Encoded:
        """A prompt and the steps of its solution; the last token of each separator is learned, and no EOS follows.

        Steps and separators are tokenised apart, as in TRL 0.26, so that a step ends where its separator does.

        Raises:
            DataError: the prompt makes no token, or cannot be rendered.
            ConfigError: the separator makes no token.
        """
        ids = self.prompt_ids(prompt, where, tools=tools)
        count = len(ids)
        end = self._plain(separator)
        if not end:
            raise ConfigError(f"data.separator={separator!r} makes no token; the end of a step needs at least one.")
        learned = [False] * count
        for step in steps:
            tokens = [*self._plain(step), *end]
            ids = [*ids, *tokens]
            learned += [False] * (len(tokens) - 1) + [True]
        return Encoded(ids, learned, count)

    def prompt_ids(self, prompt: Prompt, where: str, *, tools: Sequence[Any] | None = None) -> list[int]:
        """`encode_prompt` with the settings of this encoder."""
        kwargs = self._kwargs(tools)
        return encode_prompt(self.tokenizer, prompt, where=where, chat_template_kwargs=kwargs, control=self.control)

    def _text(self, prompt: str | None, completion: str, where: str) -> Encoded:
        if self.learn == "assistant":
            raise ConfigError(
                f"{where}: data.learn=assistant needs rows of chat messages, and this one is plain text: set "
                "data.learn=completion."
            )
        if self.processor is not None:
            refuse_reserved(self.processor, (prompt or "") + completion, where)
            self.processor.refuse_without_images(where)
        if prompt and prompt != self.latest[0]:
            self.latest = (prompt, self.prompt_ids(prompt, where))
        begin = self.latest[1] if prompt else []
        ids = self.prompt_ids((prompt or "") + completion, where)
        count = len(begin)
        if ids[:count] != begin:
            if self.marks_start:
                count = _shared(begin, ids)
            else:
                ids = [*begin, *self._plain(completion)]
        eos: Any = self.tokenizer.eos_token_id
        if ids[-2:] == [eos, eos] and not completion.endswith(str(self.tokenizer.eos_token) * 2):
            ids = ids[:-1]  # one that was written and one that the tokenizer adds
        elif ids[-1] != eos:
            ids = [*ids, eos]
        return Encoded(ids, _from(0 if self.learn == "all" else count, [True] * len(ids)), count)

    def _messages(
        self,
        prompt: list[Message],
        completion: list[Message],
        where: str,
        tools: Sequence[Any] | None,
        images: Sequence[Visual],
    ) -> Encoded:
        require_chat_template(self.tokenizer, where)
        refuse_control_tokens(self.control, [*prompt, *completion], where)
        kwargs = self._kwargs(tools)
        whole = render(self.tokenizer, [*prompt, *completion], where, kwargs)
        begin = render(self.tokenizer, prompt, where, kwargs, add_generation_prompt=True) if prompt else ""
        check_prefix(begin, whole, where)
        if self.processor is not None:
            if images:
                return self._shown(self.processor, begin, whole, images, where)
            self.processor.refuse_without_images(where)
        ids, count = self._split(whole, len(begin))
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of this conversation: {excerpt(whole)}")
        return Encoded(ids, [], count)

    def _shown(self, processor: Processor, begin: str, whole: str, images: Sequence[Visual], where: str) -> Encoded:
        """A rendered text of which images are shown where it begins.

        The prompt is processed, and what follows is tokenised: a processor may end its text by a mark of its own
        (PaliGemma's ends the prompt), and the prompt's tokens are then those with which the model is asked to write.
        """
        if not begin:
            return Encoded(processor.process(whole, images, where)[0], [], 0, whole)
        first, _ = processor.process(begin, images, where)
        bare, ids = self._plain(begin), self._plain(whole)
        if ids[: len(bare)] == bare:
            return Encoded([*first, *ids[len(bare) :]], [], len(first), begin)
        ids, _ = processor.process(whole, images, where)  # a token straddles: it is the reply's
        return Encoded(ids, [], _shared(first, ids), begin)

    def _split(self, text: str, boundary: int) -> tuple[list[int], int]:
        """Ids of a rendered text, and how many of them end at the boundary or before."""
        if not self.tokenizer.is_fast:
            begin = self._plain(text[:boundary])
            return [*begin, *self._plain(text[boundary:])], len(begin)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: Any = encoding["input_ids"]
        ends: Any = encoding["offset_mapping"]
        count = next((i for i, (_, end) in enumerate(ends) if end > boundary), len(ids))
        return list(ids), count

    def _end(self, ids: Sequence[int]) -> int:
        """How many tokens there are up to the last EOS, where only white space follows it; otherwise all."""
        eos = self.tokenizer.eos_token_id
        for i in range(len(ids) - 1, -1, -1):
            if ids[i] == eos:
                return i + 1
            blank = self.spaces.get(ids[i])
            if blank is None:
                blank = self.spaces[ids[i]] = not self.tokenizer.decode([ids[i]]).strip()  # pyright: ignore
            if not blank:
                break
        return len(ids)

    def _kwargs(self, tools: Sequence[Any] | None) -> dict[str, Any]:
        return {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}

    def _plain(self, text: str) -> list[int]:
        ids: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)


def _moved(text: Encoded, start: int) -> Encoded:
    """The same tokens with a completion that begins earlier."""
    if start == text.prompt_tokens:
        return text
    learned = [start <= i < text.prompt_tokens or flag for i, flag in enumerate(text.learned)]
    return Encoded(text.ids, _from(0, learned), start, text.shown)


def _from(start: int, learned: Sequence[bool]) -> list[bool]:
    """Nothing predicts the first token, and the prompt is given."""
    given = min(max(1, start), len(learned))
    return [False] * given + list(learned[given:])


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (mine, theirs) in enumerate(zip(one, other)) if mine != theirs), min(len(one), len(other)))


def marks_start(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text by itself begins with a mark that it does not have inside another one."""
    alone: Any = tokenizer("a", add_special_tokens=False)["input_ids"]
    spaced: Any = tokenizer(" a", add_special_tokens=False)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(alone)
    return bool(tokens) and (str(tokens[0]).startswith(("\u2581", "\u0120")) or list(alone) == list(spaced))
