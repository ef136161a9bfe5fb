"""Records become token ids: encoded and split exactly where the completion begins, truncated, and packed.

Texts are truncated in token space; both sides of a pair keep the same tokens of their prompt. Packing puts several
texts in one row, so that no padding is computed.
"""

from __future__ import annotations

import bisect
import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lit_rl.core.chat_template import common_prefix_length, marks_start, tokenize_parts
from lit_rl.core.episode import Message, Prompt
from lit_rl.core.errors import ConfigError, DataError, excerpt, in_range
from lit_rl.core.visuals import Visual
from lit_rl.data.assistant_turns import RenderPart, borders_of_turns, training_rows
from lit_rl.data.example_formats import Text
from lit_rl.data.example_set import Encoded, Example
from lit_rl.data.rendering import (
    GENERATION,
    TemplateOmissions,
    check_prefix,
    check_template_kwargs,
    control_tokens,
    encode_prompt,
    end_marks,
    marked_characters,
    refuse_control_tokens,
    render,
    render_prompt,
    require_chat_template,
    template_source,
    tokens_with_places,
    turn_end,
    unknown_end_fix,
    variables,
)
from lit_rl.data.rows import is_blank
from lit_rl.data.visual_prompts import Processor, PromptVisuals, refuse_reserved

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Learn = Literal["completion", "assistant", "all"]
_TURN_ENDS = 1024
"""Ends of turns that are remembered, of as many arguments of the chat template."""


_UNSPLIT = (
    "the chat template renders earlier turns differently once the conversation continues. In a completion of several "
    "messages the assistant's tokens cannot be told from those of users and tools. Give a template that only appends "
    "(model.chat_template=FILE), move all but the last reply into the prompt, or leave such rows out with "
    "data.on_bad_row=skip."
)


@dataclass(frozen=True)
class _Rendered:
    """A conversation as the chat template writes it."""

    text: str
    borders: list[int]
    """Offsets where the prompt ends, and then where the assistant's turns end and begin again, alternating."""
    closes: bool
    """True if an end of generation has to follow its last turn."""

    @property
    def parts(self) -> list[str]:
        """The prompt, and then the learned and unlearned texts between the borders, alternating."""
        return [self.text[start:end] for start, end in zip([0, *self.borders], [*self.borders, len(self.text)])]


@dataclass
class Encoder:
    """A renderer and tokeniser of the parts of records.

    Strings: the prompt's tokens are those of `encode_prompt`, with which the model is asked when it generates. Where
    they begin the tokens of prompt and completion together, those are the text, as in TRL 1.16. Where a token would
    straddle the boundary, the completion is tokenised apart, so the prompt keeps all its tokens (TRL leaves the
    prompt's end out). Tokenizers that mark the start of a text as they mark a space cannot tokenise it apart: there
    the straddling token is the completion's first. EOS follows unless it was written; no BOS and no EOS comes twice.

    Messages: the chat template renders the whole conversation once (so does TRL 1.16). The tokens of what stands before
    a reply are those that generation would see (`lit_rl.core.chat_template`). What is learned ends with the token at
    which generation ends: white space, and any such token more, that the template writes behind it stays in the text
    and is not learned (TRL learns it). Where the template writes none behind the last reply, EOS takes the place of the
    white space that it writes there. In a completion of several messages only the assistant's are learned (TRL learns
    all of them). Where the template writes replies otherwise once the conversation goes on, `rows` makes several rows
    of it.

    Args:
        tokenizer: The policy's.
        template_kwargs: Further arguments of the chat template.
        processor: Processor of a policy over images, which makes tokens of messages with images; None for one over
            text.
        learn: `completion`: what follows the prompt. `assistant`: of it what the assistant wrote, which a chat template
            with generation markers says itself. `all`: every token.
        eos_ids: Every token at which generation ends. None: the tokenizer's EOS token. Empty: of a model that scores,
            whose conversations end as the template says.

    Raises:
        ConfigError: `template_kwargs` sets what is fixed here; an unknown `learn` is the caller's to refuse.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    learn: Learn = "completion"
    processor: Processor | None = None
    eos_ids: Collection[int] | None = None

    def __post_init__(self) -> None:
        check_template_kwargs(self.template_kwargs)
        self.control = control_tokens(self.tokenizer)
        if self.processor is not None:
            self.control = sorted({*self.control, *self.processor.reserved})
        self.marks_start = marks_start(self.tokenizer)
        eos: Any = self.tokenizer.eos_token_id
        self.ends = frozenset((eos,) if self.eos_ids is None else self.eos_ids)
        """Tokens at which generation ends. EOS where nothing is generated: the text after it is still not learned."""
        self.closes = bool(self.ends)
        self.ends = self.ends or frozenset((eos,))
        self.left_out = TemplateOmissions(self.tokenizer, self.template_kwargs)
        self.spaces: dict[int, bool] = {}
        self.turn_ends: dict[str, str] = {}
        """The text that the chat template writes after the last turn, by its arguments as JSON; shared by encoders of
        rows."""
        self.latest: tuple[str, list[int]] = ("", [])
        """A string prompt and its tokens: those of a pair ask for them twice."""

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> Encoder:
        """Return the encoder of a row with its own arguments of the chat template; this one says what is left out."""
        if not kwargs:
            return self
        own = copy(self)
        own.template_kwargs = {**self.template_kwargs, **kwargs}
        own.__dict__.pop("turn_end", None)  # of other arguments
        return own

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
        """Encode a completion and the prompt before it, if there is one; both strings or both messages.

        `every_turn`: what `learn` allows is learned of the prompt too.

        Raises:
            DataError: no chat template; it refuses the messages, or renders the prompt differently when the completion
                follows; a message holds a control token; no token comes out. The message opens with `where`.
            ConfigError: `learn` is `assistant`, and the chat template does not mark the assistant's tokens: `rows`
                finds them.
        """
        if isinstance(completion, str):
            assert prompt is None or isinstance(prompt, str)
            return self._text(prompt, completion, where)
        assert not isinstance(prompt, str)
        return self._messages(prompt or [], completion, where, tools, images, every_turn)

    def rows(
        self,
        prompt: Prompt | None,
        completion: Text,
        where: str,
        *,
        tools: Sequence[Any] | None = None,
        every_turn: bool = False,
        images: Sequence[Visual] = (),
    ) -> list[Encoded]:
        """Encode a completion and its prompt as rows that teach each reply once; see `assistant_turns.training_rows`.

        One row, as `encode` makes it, for texts, for one reply, for `learn="all"`, where the chat template marks the
        assistant's tokens of text, and for `learn="completion"` beside images. Of a row's `prompt_tokens` the rest is
        its first reply and what follows; with `every_turn` its last reply.

        Returns:
            No row where the assistant says nothing.

        Raises:
            DataError, ConfigError: as `encode`.
        """
        by_turns = self.learn == "assistant" and (bool(images) or not self.marks_replies)
        if self.learn == "completion" and not isinstance(completion, str):
            by_turns = any(message["role"] != "assistant" for message in completion) and not images
        if isinstance(completion, str) or not by_turns:
            return [self.encode(prompt, completion, where, tools=tools, every_turn=every_turn, images=images)]
        assert not isinstance(prompt, str)
        messages, kwargs = [*(prompt or []), *completion], self._kwargs(tools)
        self._check(messages, where, kwargs)
        first = 0 if every_turn else len(messages) - len(completion)
        choices = [choice for choice in self._switches if not choice.keys() & kwargs.keys()]
        found = training_rows(self._renderer(where, kwargs), messages, first, self._end_texts, choices, where)
        if any(message["role"] == "assistant" and is_blank([message]) for message in messages[first:]):
            self.left_out.note("blank", f"Replies that say nothing are not learned, from {where} on.")
        texts, heard = list[Encoded](), 0
        for row in found:
            for turn in row.turns:
                part, place = messages[heard : turn.number + 1], turn.number - heard
                self.left_out.compare(part, row.text[: turn.end], where, kwargs, replies=(place, turn.begin))
                heard = turn.number + 1
                for name, value in turn.arguments.items():
                    self.left_out.note(
                        f"{name}={value}",
                        "Some replies do not continue the generation prompt; they are learned as the chat template "
                        f"writes prompt and reply with {name}={value}, from {where} on.",
                    )
            *earlier, last = row.turns
            borders = [*(place for turn in earlier for place in (turn.begin, turn.end)), last.begin]
            rendered = _Rendered(self._open_end(row.text, last.begin), borders, self.closes)
            ids, ends = self._tokens(rendered, where)
            shown = _shown_between(messages, [turn.number for turn in row.turns], images, where)
            if self.processor is not None and any(shown):
                text = self._shown_turns(self.processor, rendered, ids, ends, shown, where, last=every_turn)
            else:
                self.refuse_unseen("", where)
                text = Encoded(ids, _alternating(ends), ends[-2 if every_turn else 0])
            texts.append(self._finished(rendered, text, where, 0))
        return texts

    def pair(
        self,
        prompt: Prompt,
        completions: Sequence[Text],
        where: str,
        *,
        tools: Sequence[Any] | None = None,
        images: Sequence[Visual] = (),
    ) -> tuple[Encoded, ...]:
        """Encode several completions of one prompt; all texts begin with the same prompt tokens.

        A token is the prompt's only where every text has it; as in TRL, what differs is learned.

        Raises:
            DataError, ConfigError: as `encode`.
        """
        texts = [self.encode(prompt, completion, where, tools=tools, images=images) for completion in completions]
        common = min(text.prompt_tokens for text in texts)
        for text in texts:
            common = min(common, common_prefix_length(texts[0].ids[:common], text.ids))
        moved = []  # the same tokens, with completions that begin earlier
        for text in texts:
            if text.prompt_tokens != common:
                learned = [common <= i < text.prompt_tokens or flag for i, flag in enumerate(text.learned)]
                text = Encoded(text.ids, _learned_from(0, learned), common, text.shown)
            moved.append(text)
        return tuple(moved)

    def steps(
        self, prompt: Prompt, steps: Sequence[str], separator: str, where: str, *, tools: Sequence[Any] | None = None
    ) -> Encoded:
        """Encode a prompt and the steps of its solution; the last token of each separator is learned, and no EOS
        follows.

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

    def render_prompt(self, prompt: list[Message], where: str, *, tools: Sequence[Any] | None = None) -> str:
        """Render a prompt by `rendering.render_prompt` with the settings of this encoder."""
        return render_prompt(self.tokenizer, prompt, where, self._kwargs(tools), self.control, self.left_out)

    def refuse_unseen(self, text: str, where: str) -> None:
        """Refuse a row without images where the policy cannot read it so.

        Args:
            text: Plain text of the row; a placeholder in it would be taken for an image.
            where: The row, for messages.

        Raises:
            DataError: the text holds a placeholder, or the model takes no prompt without images.
        """
        if self.processor is not None:
            refuse_reserved(self.processor, text, where)
            self.processor.refuse_without_images(where)

    def prompt_ids(self, prompt: Prompt, where: str, *, tools: Sequence[Any] | None = None) -> list[int]:
        """Encode a prompt by `encode_prompt` with the settings of this encoder."""
        kwargs = self._kwargs(tools)
        return encode_prompt(
            self.tokenizer,
            prompt,
            where=where,
            chat_template_kwargs=kwargs,
            control=self.control,
            left_out=self.left_out,
        )

    def _text(self, prompt: str | None, completion: str, where: str) -> Encoded:
        if self.learn == "assistant":
            raise ConfigError(
                f"{where}: data.learn=assistant needs rows of chat messages, and this one is plain text: set "
                "data.learn=completion."
            )
        self.refuse_unseen((prompt or "") + completion, where)
        if prompt and prompt != self.latest[0]:
            self.latest = (prompt, self.prompt_ids(prompt, where))
        begin = self.latest[1] if prompt else []
        ids = self.prompt_ids((prompt or "") + completion, where)
        count = len(begin)
        if ids[:count] != begin:
            if self.marks_start:
                count = common_prefix_length(begin, ids)
            else:
                ids = [*begin, *self._plain(completion)]
        eos: Any = self.tokenizer.eos_token_id
        if ids[-2:] == [eos, eos] and not completion.endswith(str(self.tokenizer.eos_token) * 2):
            ids = ids[:-1]  # one written, and one added by the tokenizer
        elif ids[-1] != eos:
            ids = [*ids, eos]
        return Encoded(ids, _learned_from(0 if self.learn == "all" else count, [True] * len(ids)), count)

    def _messages(
        self,
        prompt: list[Message],
        completion: list[Message],
        where: str,
        tools: Sequence[Any] | None,
        images: Sequence[Visual],
        every_turn: bool,
    ) -> Encoded:
        rendered = self._rendered(prompt, completion, where, tools, every_turn)
        ids, ends = self._tokens(rendered, where)
        if self.learn == "assistant":
            if not self.marks_replies:
                raise ConfigError(
                    f"{where}: data.learn=assistant may make several rows of a conversation if the chat template has "
                    "no generation markers, and one is needed here: set data.learn=completion."
                )
            marks = marked_characters(self.tokenizer, [*prompt, *completion], where, self._kwargs(tools))
            text = self._marked(rendered, Encoded(ids, [], ends[0]), marks)
        else:
            learned = _alternating(ends) if self.learn == "completion" else [True] * len(ids)
            text = Encoded(ids, learned, ends[0])
        if self.processor is not None and images:
            text = self._shown(self.processor, rendered, text, images, where)
        else:
            self.refuse_unseen("", where)
        start = 0 if self.learn == "all" or every_turn else text.prompt_tokens
        return self._finished(rendered, text, where, start)

    def _finished(self, rendered: _Rendered, text: Encoded, where: str, start: int) -> Encoded:
        """Return the text learned from a token on, each turn up to its end of generation."""
        if self.learn != "all":
            text = replace(text, learned=self._up_to_ends(text))
        if rendered.closes:
            text = self._closed(text, where)
        return replace(text, learned=_learned_from(start, text.learned))

    def _tokens(self, rendered: _Rendered, where: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a rendering, and their number up to the end of each part."""
        ids, ends = tokenize_parts(self.tokenizer, rendered.parts)
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of this conversation: {excerpt(rendered.text)}")
        return ids, ends

    def _check(self, messages: list[Message], where: str, kwargs: Mapping[str, Any]) -> None:
        """Refuse messages that cannot be rendered safely."""
        require_chat_template(self.tokenizer, where)
        refuse_control_tokens(self.control, messages, where, tokenizer=self.tokenizer, tools=kwargs.get("tools"))

    def _renderer(self, where: str, kwargs: Mapping[str, Any]) -> RenderPart:
        def render_part(part: list[Message], **how: Any) -> str:
            return render(self.tokenizer, part, where, {**kwargs, **how})

        return render_part

    def _rendered(
        self,
        prompt: list[Message],
        completion: list[Message],
        where: str,
        tools: Sequence[Any] | None,
        every_turn: bool,
    ) -> _Rendered:
        messages, kwargs = [*prompt, *completion], self._kwargs(tools)
        self._check(messages, where, kwargs)
        render_part = self._renderer(where, kwargs)
        whole = render_part(messages)
        begin = render_part(prompt, add_generation_prompt=True) if prompt else ""
        check_prefix(begin, whole, where)
        replies = (0, 0) if every_turn else (len(prompt), len(begin))
        self.left_out.compare(messages, whole, where, kwargs, replies=replies)
        closes = self.closes and messages[-1]["role"] == "assistant"
        if closes:
            whole = self._open_end(whole, len(begin))
        borders = [len(begin)]
        if self.learn == "completion" and any(message["role"] != "assistant" for message in completion):
            later = borders_of_turns(render_part, messages, len(prompt), whole, self.control, self._end_texts)
            if later is None:
                raise DataError(f"{where}: {_UNSPLIT}")
            borders += later
        return _Rendered(whole, borders, closes)

    def _open_end(self, text: str, begin: int) -> str:
        """Return a text without the blanks with which the template ends a turn where it writes nothing else there."""
        if self.closes and self.turn_end.isspace() and text.endswith(self.turn_end, begin):
            return text[: -len(self.turn_end)]
        return text

    @cached_property
    def _end_texts(self) -> list[str]:
        """The texts of the tokens at which generation ends."""
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(sorted(self.ends))]

    @cached_property
    def marks_replies(self) -> bool:
        """True if the chat template marks what the assistant says, and the tokenizer can tell which tokens that is."""
        return bool(self.tokenizer.is_fast) and GENERATION.search(template_source(self.tokenizer)) is not None

    @cached_property
    def _switches(self) -> list[dict[str, bool]]:
        """The arguments by which the chat template opens a thought or none."""
        read = variables(template_source(self.tokenizer)) or ()
        return [{name: value} for name in ("enable_thinking", "thinking") if name in read for value in (False, True)]

    @cached_property
    def turn_end(self) -> str:
        """Return what the chat template writes after the last turn."""
        key = json.dumps(self.template_kwargs, sort_keys=True, default=str)
        if key not in self.turn_ends:
            if len(self.turn_ends) >= _TURN_ENDS:
                self.turn_ends.clear()
            self.turn_ends[key] = turn_end(self.tokenizer, self.template_kwargs)
        return self.turn_ends[key]

    def _marked(self, rendered: _Rendered, text: Encoded, marks: Sequence[bool]) -> Encoded:
        """Return the text with the tokens learned that have a marked character."""
        for parts in ([rendered.text], rendered.parts):
            ids, places = tokens_with_places(self.tokenizer, parts)
            if ids == text.ids:
                count = text.prompt_tokens
                break
        else:  # parts tokenised after other texts have no offsets
            ids, places = tokens_with_places(self.tokenizer, [rendered.text])
            count = next((i for i, (_, end) in enumerate(places) if end > rendered.borders[0]), len(ids))
        return Encoded(ids, [any(marks[start:end]) for start, end in places], count)

    def _shown(
        self, processor: Processor, rendered: _Rendered, text: Encoded, images: Sequence[Visual], where: str
    ) -> Encoded:
        """Return the tokens of a rendered text that begins with images.

        The prompt is processed, and what follows is tokenised: a processor may end its text by a mark of its own
        (PaliGemma's ends the prompt), and the prompt's tokens are then those with which the model is asked to write.
        """
        begin, count, every = rendered.parts[0], text.prompt_tokens, self.learn == "all"
        if not begin or text.ids[:count] != self._plain(begin):  # or a token straddles: it is the reply's
            ids, _ = processor.process(rendered.text, images, where)
            count = common_prefix_length(processor.process(begin, images, where)[0], ids) if begin else 0
            learned = [every or i >= count for i in range(len(ids))]
            text = Encoded(ids, learned, count, PromptVisuals(begin or rendered.text, tuple(images), where))
        else:
            first, _ = processor.process(begin, images, where)
            learned = [every] * len(first) + text.learned[count:]
            text = Encoded([*first, *text.ids[count:]], learned, len(first), PromptVisuals(begin, tuple(images), where))
        never = processor.placeholders  # never learned
        return replace(text, learned=[flag and id not in never for flag, id in zip(text.learned, text.ids)])

    def _shown_turns(
        self,
        processor: Processor,
        rendered: _Rendered,
        ids: list[int],
        ends: list[int],
        images: Sequence[Sequence[Visual]],
        where: str,
        *,
        last: bool,
    ) -> Encoded:
        """Return a row that shows images, whose replies are learned.

        The text before the last reply is processed as one, so the model meets what the processor makes of the whole
        conversation. It has to be made of the tokens of its pieces: with those the model is asked for each reply.

        Args:
            processor: The processor.
            rendered: The rendering, whose parts are in turn not learned and learned.
            ids: Its tokens, without images.
            ends: Their number up to the end of each part.
            images: What is shown before the first reply, and between each reply and the next.
            where: The row, for messages.
            last: Whether the row's prompt ends where its last reply begins, and not its first, behind which nothing is
                shown then.

        Raises:
            DataError: the tokens before a reply are not those with which the model is asked for it.
        """
        parts, learned, every = rendered.parts, _alternating(ends), [each for some in images for each in some]
        same = len(parts) == 2 or ids[: ends[0]] == self._plain(parts[0])
        if len(parts) == 2 or not last:
            text = self._shown(processor, rendered, Encoded(ids, learned, ends[0]), every, where)
        else:
            begin = "".join(parts[:-1])
            whole, _ = processor.process(begin, every, where)
            place, flags = 0, list[bool]()
            for number, (start, stop) in enumerate(pairwise([0, *ends[:-1]])):
                own, count = ids[start:stop], stop - start
                if number % 2 == 0 and (seen := images[number // 2]):
                    alone, _ = processor.process(parts[number], seen, where)
                    count += len(alone) - len(self._plain(parts[number]))
                    own = alone[1:]  # the first token of a text may be another one inside a text
                place += count
                flags += [number % 2 == 1] * count
                same = same and whole[place - len(own) : place] == own
            same = same and place == len(whole)
            text = Encoded(
                [*whole, *ids[ends[-2] :]],
                [*flags, *learned[ends[-2] :]],
                len(whole),
                PromptVisuals(begin, tuple(every), where),
            )
        if not same:
            raise DataError(
                f"{where}: the tokens before a reply are others where it is asked for than in the whole conversation "
                "with its images, so its replies cannot be learned together. Set data.learn=completion."
            )
        return text

    def _up_to_ends(self, text: Encoded) -> list[bool]:
        """Return what is learned of each turn: up to the token at which generation ends, and that one."""
        learned, ids, stop = list(text.learned), text.ids, 0
        while True in text.learned[stop:]:
            start = text.learned.index(True, stop)
            stop = text.learned.index(False, start) if False in text.learned[start:] else len(ids)
            end = self._end(ids, start, stop)
            if end is not None:
                learned[end:stop] = [False] * (stop - end)
            elif stop < len(ids) and ids[stop] in self.ends:  # the template writes the end as part of the next turn
                learned[stop] = True
            elif True in text.learned[stop:]:  # a turn in the middle
                known = end_marks(self.tokenizer, "")
                mark = next((token for token in (ids[stop - 1], ids[stop]) if token in known), None)
                if mark is None and self.learn == "assistant" and self.marks_replies:  # it may go on within the turn
                    continue
                shown = self.tokenizer.decode(list(ids[max(start, stop - 3) : stop + 1]))
                fix = "" if mark is None else f" Should it end there, {unknown_end_fix(self.tokenizer, mark)}"
                self.left_out.note(
                    "ends",
                    f"The chat template writes {shown!r} where a reply ends and the conversation goes on, and no token "
                    f"at which generation ends: the policy does not learn to stop there.{fix}",
                )
        return learned

    def _end(self, ids: Sequence[int], start: int, stop: int) -> int | None:
        """Return the place after the first ending token at the end of a turn, white space aside; None where there is
        none."""
        found = None
        for i in range(stop - 1, start - 1, -1):
            if ids[i] in self.ends:
                found = i + 1
            elif not self._blank(ids[i]):
                break
        return found

    def _closed(self, text: Encoded, where: str) -> Encoded:
        """Return the text with an end of its last turn, at which generation ends.

        Raises:
            ConfigError: the template ends it by a control token at which generation does not end.
        """
        last = max((i for i, flag in enumerate(text.learned) if flag), default=None)
        if last is None or self._end(text.ids, 0, len(text) if self.learn == "all" else last + 1) is not None:
            return text
        rest = [token for token in text.ids[text.prompt_tokens :] if not self._blank(token)]
        if rest and (mark := rest[-1]) in end_marks(self.tokenizer, self.turn_end):
            raise ConfigError(
                f"{where}: the chat template ends the reply with {self.tokenizer.convert_ids_to_tokens(mark)!r}, "
                "which is no EOS token, so the policy would not learn to stop: "
                f"{unknown_end_fix(self.tokenizer, mark)}"
            )
        eos: Any = self.tokenizer.eos_token_id
        keep = last + 1 if all(map(self._blank, text.ids[last + 1 :])) else len(text)
        return replace(text, ids=[*text.ids[:keep], eos], learned=[*text.learned[:keep], True])

    def _blank(self, token: int) -> bool:
        """Tell whether a token is white space."""
        blank = self.spaces.get(token)
        if blank is None:
            blank = self.spaces[token] = not self.tokenizer.decode([token]).strip()  # pyright: ignore
        return blank

    def _kwargs(self, tools: Sequence[Any] | None) -> dict[str, Any]:
        return {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}

    def _plain(self, text: str) -> list[int]:
        ids: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)


def _shown_between(
    messages: Sequence[Message], replies: Sequence[int], images: Sequence[Visual], where: str
) -> list[Sequence[Visual]]:
    """Return what is shown before the first reply, and between each reply and the next.

    Args:
        messages: The conversation.
        replies: Numbers of the messages that are learned.
        images: What the conversation shows, in the order of its parts.
        where: The row, for messages.

    Raises:
        DataError: a reply of the assistant shows an image.
    """
    counts = [0]  # of the messages up to each
    for number, message in enumerate(messages):
        parts = message["content"] if isinstance(message["content"], list) else []
        counts.append(counts[-1] + sum(part.get("type") in ("image", "video") for part in parts))
        if counts[-1] > counts[-2] and number in replies:
            raise DataError(
                f"{where}: message {number} is a reply of the assistant with an image, and the policy learns to "
                "write text alone. Show the image in a message of the user or of a tool, or set "
                "data.learn=completion."
            )
    return [images[counts[begin] : counts[end]] for begin, end in pairwise([0, *replies])]


def _alternating(ends: Sequence[int]) -> list[bool]:
    """Return the mask of every second part, by the numbers of tokens up to the end of each."""
    return [i % 2 == 1 for i, (start, stop) in enumerate(pairwise([0, *ends])) for _ in range(start, stop)]


def _learned_from(start: int, learned: Sequence[bool]) -> list[bool]:
    """Clear the mask up to `start`, and on the first token, which nothing predicts."""
    unlearned = min(max(1, start), len(learned))
    return [False] * unlearned + list(learned[unlearned:])


Keep = Literal["start", "end"]
Overlong = Literal["truncate", "drop", "error"]


def kept_windows(
    texts: Sequence[Encoded], max_length: int | None, max_completion_tokens: int | None, keep: Keep
) -> list[range]:
    """Return the window of tokens that stays of each text.

    Completions are first cut at their end to `max_completion_tokens`. Then, where a text is longer than `max_length`,
    `keep="start"` cuts its end, and `keep="end"` cuts the prompt's start: by what the longest of the texts needs, from
    all of them, so that the same prompt is left in each. A completion that is longer than `max_length` by itself then
    loses its own start, and no prompt is left.

    Args:
        texts: One text, or those that begin with the same prompt tokens.
        max_length: Tokens of prompt and completion together; None is no limit.
        max_completion_tokens: Tokens of the completion; None is no limit.
        keep: The end of a too long text that stays.
    """
    stops = [len(text) for text in texts]
    if max_completion_tokens is not None:
        stops = [min(stop, text.prompt_tokens + max_completion_tokens) for stop, text in zip(stops, texts)]
    if max_length is None:
        return [range(stop) for stop in stops]
    if keep == "start":
        return [range(min(stop, max_length)) for stop in stops]
    prompt = min(text.prompt_tokens for text in texts)
    start = min(prompt, max(0, max(stops) - max_length))
    return [range(max(start, stop - max_length), stop) for stop in stops]


def truncate(text: Encoded, window: range) -> Encoded:
    """Return the tokens of the window; the first of them is not learned, since nothing predicts it."""
    if len(window) == len(text):
        return text
    learned = text.learned[window.start : window.stop]
    left = min(max(0, text.prompt_tokens - window.start), len(window))
    return Encoded(text.ids[window.start : window.stop], [i > 0 and flag for i, flag in enumerate(learned)], left)


def truncate_labels(text: Encoded, labels: Sequence[float], window: range) -> tuple[float, ...]:
    """Return the labels of the learned tokens that stay learned; before truncation each learned token has one."""
    places = (i for i, flag in enumerate(text.learned) if flag)
    return tuple(label for i, label in zip(places, labels) if window.start < i < window.stop)


Packing = Literal["none", "best_fit", "wrapped"]


class PackedPiece(NamedTuple):
    """Tokens ``[start, stop)`` of a text."""

    text: int
    start: int
    stop: int


def pack(lengths: Sequence[int], capacity: int, how: Literal["best_fit", "wrapped"]) -> list[list[PackedPiece]]:
    """Return rows of pieces that hold every token once, at most `capacity` tokens a row. Deterministic in the lengths.

    `best_fit` splits no text: from the longest to the shortest, each goes into the fullest row that has room for it
    (best-fit decreasing, as in 2404.10830), in O(n log n). Rows stand in the order of their first text, and texts in a
    row in their own. `wrapped` puts the texts one after another and cuts after every `capacity` tokens; only the last
    row may be short. Texts without tokens are in no row.

    Args:
        lengths: Tokens of each text.
        capacity: Tokens of a row, at least 1.
        how: One of the two.

    Raises:
        ConfigError: `capacity` is below 1, or `best_fit` has a text that is longer.
    """
    in_range("data.max_length", capacity, low=1)
    return _best_fit(lengths, capacity) if how == "best_fit" else _wrapped(lengths, capacity)


def pack_examples(
    examples: Sequence[Example], capacity: int, how: Literal["best_fit", "wrapped"]
) -> list[list[Encoded]]:
    """Return the texts of the examples as pieces in rows; see `pack`.

    Pieces of a row must not see each other, so no piece's first token is learned. That holds for the second part of a
    text that `wrapped` cuts as well: it goes on without what stood before.

    Args:
        examples: Each has one text.
        capacity: Tokens of a row.
        how: `best_fit` or `wrapped`.

    Raises:
        ConfigError: as `pack`.
    """
    texts = [text for example in examples for text in example.texts]
    rows = pack([len(text) for text in texts], capacity, how)
    return [[truncate(texts[piece.text], range(piece.start, piece.stop)) for piece in row] for row in rows]


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[PackedPiece]]:
    rows: list[list[int]] = []
    # Rows by their free tokens (`room`), and the values of it that occur, sorted.
    by_room: dict[int, deque[int]] = {}
    rooms: list[int] = []
    for text in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[text]
        if length > capacity:
            raise ConfigError(
                f"data.packing=best_fit splits no text, and text {text} has {length} tokens where a row has "
                f"data.max_length={capacity}: raise it, set data.overlong to truncate or drop, or data.packing=wrapped."
            )
        if not length:
            continue
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = by_room[room].popleft()
            if not by_room[room]:
                del by_room[room], rooms[place]
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(text)
        room -= length
        if room:
            if room not in by_room:
                by_room[room] = deque()
                bisect.insort(rooms, room)
            by_room[room].append(row)
    ordered = sorted(sorted(row) for row in rows)
    return [[PackedPiece(text, 0, lengths[text]) for text in row] for row in ordered]


def _wrapped(lengths: Sequence[int], capacity: int) -> list[list[PackedPiece]]:
    rows: list[list[PackedPiece]] = []
    room = 0
    for text, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                rows.append([])
                room = capacity
            stop = min(length, start + room)
            rows[-1].append(PackedPiece(text, start, stop))
            room -= stop - start
            start = stop
    return rows
