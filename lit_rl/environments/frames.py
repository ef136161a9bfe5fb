"""Frames: the replies to a turn as tokens, rendered in a small conversation so that no history is tokenised again.

The tokens of a conversation so far are those that the policy sampled. Rendering it again could change them: templates
drop thinking, strip blanks, and a text has other tokens than those it was decoded from. So only the answer is rendered,
behind a skeleton of two messages:

    [user, assistant(... alpha), answer(beta)]  ->  ... alpha ... <end of turn> ... beta ... <generation prompt>

The first token between alpha and beta that ends a turn is where the policy's own turn ended: what comes after it is the
answer's tokens. A turn that was cut gets that token first.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_rl.core.chat_template import apply_chat_template
from lit_rl.core.episode import Message
from lit_rl.core.errors import ConfigError, excerpt
from lit_rl.core.vision_inputs import Later, PromptVision
from lit_rl.core.visuals import ImageRef
from lit_rl.data.rendering import control_tokens
from lit_rl.data.visual_prompts import Processor, PromptVisuals, count_placeholders
from lit_rl.environments.observations import (
    ImageReturned,
    images_of_content,
    texts_of_content,
    with_texts,
    without_payload,
)

AnswerRole = Literal["tool", "user"]

_ALPHA, _BETA = "qqalphaqq", "zzbetazz"
"""Words that no template writes itself, and whose tokens stay apart from their neighbours'."""

_ANSWER = "what a tool or an environment answered"


class Frames(ABC):
    """An encoder of the messages that answer a turn."""

    @abstractmethod
    def encode(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Return the token ids between a turn of the policy and its next one.

        Args:
            messages: The messages that answer the turn, at least one, all of tools or all of the user. Tool messages
                hold ``name``, and may hold ``tool_call_id``.
            closed: True if the turn ended with one of the model's EOS tokens. What was cut, or ended by a stop string,
                is closed here.
        """

    @abstractmethod
    def encode_seen(self, messages: Sequence[Message], *, closed: bool) -> tuple[list[int], tuple[Later, ...]]:
        """Encode messages that show images, as `encode` does, with the vision inputs at their columns in the tokens.

        Raises:
            ImageReturned: images have no place here, or the chat template does not show all of them.
            DataError: the processor refuses an image.
        """


class TextFrames(Frames):
    """Frames of prompts that are plain text: the text of the messages. Control tokens in it are literal text.

    Args:
        tokenizer: Tokenizer of the policy.
        end_id: Token that closes a turn; None: nothing does.
    """

    def __init__(self, tokenizer: Any, end_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._end = [] if end_id is None else [end_id]

    def encode(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        text = "".join(message["content"] for message in messages)
        return [*([] if closed else self._end), *literal_ids(self._tokenizer, text)]

    def encode_seen(self, messages: Sequence[Message], *, closed: bool) -> tuple[list[int], tuple[Later, ...]]:
        raise ImageReturned(
            "A tool or an environment returned an image, and the prompts of this run are plain text, in which nothing "
            'says where an image stands. Make them lists of messages: [{"role": "user", "content": ...}].'
        )


class ChatFrames(Frames):
    """Frames of prompts that are chat messages: the policy's chat template around each reply.

    Args:
        tokenizer: Tokenizer of the policy, with its chat template.
        eos_ids: Every token that ends a turn.
        kinds: Roles that answer: tools, the user, or both. The template is tried with each.
        tools: Schemas of the tools, which the prompts are rendered with too.
        calls_are_text: True if the policy writes calls as part of its text, so that the template renders none.
        chat_template_kwargs: Arguments that the prompts are rendered with too.
        processor: Processor of a policy over images; None: it reads text.

    Raises:
        ConfigError: the template drops replies, or the assistant's earlier turns; or no EOS token stands
            between the two.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
        kinds: Sequence[AnswerRole] = ("tool", "user"),
        tools: Sequence[Mapping[str, Any]] | None = None,
        calls_are_text: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        processor: Processor | None = None,
    ) -> None:
        self._processor, self._images_are_separate = processor, False
        self._tokenizer, self._eos_ids = tokenizer, frozenset(eos_ids)
        self._calls_are_text = calls_are_text
        self._name = template_name(tokenizer)
        self._settings = {"tools": list(tools) if tools else None, **(chat_template_kwargs or {})}
        self._control = sorted({*control_tokens(tokenizer), *(() if processor is None else processor.reserved)})
        self._skeletons: dict[AnswerRole, _Skeleton] = {kind: self._find_skeleton(kind) for kind in kinds}
        self._ends: dict[tuple[AnswerRole, int], int | None] = {}
        for kind in kinds:
            self._ends[kind, 1] = self._ends_before(self._skeletons[kind], 1)

    def encode(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        kind: AnswerRole = "tool" if messages[0]["role"] == "tool" else "user"
        if not self._renders(kind, len(messages)):
            messages = [{**messages[0], "content": "\n".join(message["content"] for message in messages)}]
        skeleton, ids = self._skeletons[kind], list[int]()
        texts = [message["content"] for message in messages]
        if any(token in text for text in texts for token in self._control):
            # A text that spells a control token would become it: it is tokenised apart from what the template writes.
            marks = [f"{_BETA}{number}{_BETA}" for number in range(len(texts))]
            rest = self._rendered(skeleton, [{**message, "content": mark} for message, mark in zip(messages, marks)])
            for mark, content in zip(marks, texts):
                before, rest = rest.split(mark, 1)
                ids += [*self._ids(before), *literal_ids(self._tokenizer, skeleton.written(content))]
            ids += self._ids(rest)
        else:
            ids = self._ids(self._rendered(skeleton, messages))
        return ids[self._end_of_turn(kind, len(messages), ids) + closed :]

    def encode_seen(self, messages: Sequence[Message], *, closed: bool) -> tuple[list[int], tuple[Later, ...]]:
        kind: AnswerRole = "tool" if messages[0]["role"] == "tool" else "user"
        if not self._renders(kind, len(messages)):  # one message with the contents of all, a line each
            parts: list[dict[str, Any]] = []
            for message in messages:
                content = message["content"]
                parts += [{"type": "text", "text": "\n"}] if parts else []
                parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
            messages = [{**messages[0], "content": parts}]
        ids: list[int] = []
        later: list[Later] = []
        for piece, seen in self._pieces(self._skeletons[kind], messages):
            later += [] if seen is None else [Later(len(ids), seen, len(piece))]
            ids += piece
        begin = self._end_of_turn(kind, len(messages), ids) + closed
        return ids[begin:], tuple(each.from_column(begin) for each in later)

    def _end_of_turn(self, kind: AnswerRole, count: int, ids: Sequence[int]) -> int:
        """Return the place of the token that ends the assistant's turn, in a rendering of `count` replies."""
        ends = [place for place, token in enumerate(ids) if token in self._eos_ids]
        return ends[self._ends[kind, count] or 0]

    def history(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a whole conversation rendered again, up to the policy's next turn.

        No episode is made of these: see `encode`. Calls and their answers get the ids that it gives them.

        Raises:
            Exception: of any class: the chat template refuses the conversation.
        """
        settings = {"tokenize": False, "add_generation_prompt": True, **self._settings}
        return self._ids(str(apply_chat_template(self._tokenizer, self.with_calls(messages), **settings)))

    def with_calls(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with their calls as the chat template needs them: arguments as a mapping or as JSON text,
        and an id for each call and each reply that has none.

        Args:
            messages: Messages with the arguments of calls as mappings.
        """
        tools = self._skeletons.get("tool")
        text_arguments, answers, found = tools is not None and tools.arguments == "text", 0, []
        for message in messages:  # ids are counted in each turn
            if message["role"] == "tool":
                found.append(_with_call(message, answers))
                answers += 1
                continue
            answers = 0
            calls = [_call(call, number, text_arguments) for number, call in enumerate(message.get("tool_calls") or ())]
            found.append(message | {"tool_calls": calls} if calls else message)
        return found

    def _renders(self, kind: AnswerRole, count: int) -> bool:
        """Tell whether the template renders `count` replies to one turn. Some allow only one call a turn."""
        if (kind, count) not in self._ends:
            try:
                self._ends[kind, count] = self._ends_before(self._skeletons[kind], count)
            except ConfigError:
                raise
            except Exception:  # a template may raise anything
                self._ends[kind, count] = None
        return self._ends[kind, count] is not None

    def _pieces(
        self, skeleton: _Skeleton, messages: Sequence[Message]
    ) -> Iterator[tuple[list[int], PromptVision | None]]:
        """Yield the tokens of the small conversation in pieces, with the vision inputs of each: one piece, or, where a
        text spells a control token, that text apart from what the template writes around it."""
        images = [image for message in messages for image in images_of_content(message["content"])]
        texts = [text for message in messages for text in texts_of_content(message["content"])]
        apart = any(token in text for text in texts for token in self._control)
        marks = [f"{_BETA}{number}{_BETA}" if apart else text for number, text in enumerate(texts)]
        new = iter(marks)
        shown = []
        for message in messages:
            own = [next(new) for _ in texts_of_content(message["content"])]
            shown.append({**message, "content": without_payload(with_texts(message["content"], own))})
        rest = self._rendered(skeleton, shown)
        assert self._processor is not None
        if (places := self._processor.places(rest)) != len(images):
            raise ImageReturned(
                f"A tool or an environment returned images, and the {self._name} shows {places} of the {len(images)} "
                "of an answer. Give one that writes a placeholder for each with model.chat_template=FILE."
            )
        self._check_separate_images(images[0])
        for mark, text in zip(marks, texts) if apart else ():
            before, rest = rest.split(mark, 1)
            yield self._take_images(before, images)
            yield literal_ids(self._tokenizer, skeleton.written(text)), None
        yield self._take_images(rest, images)

    def _check_separate_images(self, image: ImageRef) -> None:
        """Check once that two images have twice the tokens of one."""
        if self._images_are_separate:
            return
        assert self._processor is not None
        counts = []
        for number in (1, 2):
            asked: list[Message] = [{"role": "user", "content": [{"type": "image"}] * number}]
            text = str(apply_chat_template(self._tokenizer, asked, tokenize=False, add_generation_prompt=True))
            ids, _ = self._processor.process(text, [image] * number, _ANSWER)
            counts.append(count_placeholders(self._processor.placeholders, ids))
        if counts[1] != 2 * counts[0]:
            raise ImageReturned(
                f"A tool or an environment returned an image, and the processor of this policy gives one {counts[0]} "
                f"tokens alone and two {counts[1]}: a conversation that is read anew would have other tokens than the "
                "policy learned from. Take a model that shows each image for itself, such as smolvlm_256m."
            )
        self._images_are_separate = True

    def _take_images(self, text: str, images: list[ImageRef]) -> tuple[list[int], PromptVision | None]:
        """Return the tokens of a text with its vision inputs; its images are removed from `images`."""
        assert self._processor is not None
        count = self._processor.places(text)
        if not count:
            return self._ids(text), None
        shown = tuple(images[:count])
        del images[:count]
        source = PromptVisuals(text, shown, _ANSWER)
        ids, seen = self._processor.process(text, shown, _ANSWER)
        assert seen is not None
        if any(int(values[0]) != seen.in_response[name] for name, values in seen.per_token.items()):
            raise ImageReturned(
                "A tool or an environment returned an image, and the policy reads texts with images both ways: such a "
                "text is its prompt, and cannot stand between its turns. Take a model that reads from left to right, "
                "such as smolvlm_256m."
            )
        return ids, replace(seen, source=source)

    def _rendered(self, skeleton: _Skeleton, messages: Sequence[Message]) -> str:
        answers = [_with_call(message, number) for number, message in enumerate(messages)]
        conversation = [{"role": "user", "content": "dummy"}, skeleton.turn(answers), *answers]
        settings = {"tokenize": False, "add_generation_prompt": True, **self._settings}
        return str(apply_chat_template(self._tokenizer, conversation, **settings))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # ------------------------------------------------------------------ trying the template

    def _find_skeleton(self, kind: AnswerRole) -> _Skeleton:
        """Return the first skeleton that the template renders whole."""
        why = ""
        forms: Sequence[_Skeleton] = (_Skeleton(kind, "mapping"), _Skeleton(kind, "text"))
        if kind == "user" or self._calls_are_text:
            forms = (_Skeleton(kind),)
        for skeleton in forms:
            try:
                text = self._rendered(skeleton, _probes(kind, 1))
            except ConfigError:
                raise
            except Exception as error:  # a template may raise anything
                why = why or f"it refuses them: {excerpt(str(error), 200)}"
                continue
            if _ALPHA not in text:
                why = "it drops the calls of tools" if skeleton.arguments else "it drops what the assistant said"
            elif _BETA not in text[text.rindex(_ALPHA) :]:
                why = f"it drops the messages of the {kind}"
            else:
                quoted = self._rendered(skeleton, [{**message, "content": f'{_BETA}"'} for message in _probes(kind, 1)])
                return replace(skeleton, escapes=f'{_BETA}\\"' in quoted)
        raise ConfigError(
            f"The {self._name} cannot render the answers of the {kind} behind a turn of the assistant: {why}. Give "
            "one that does with model.chat_template=FILE, or take another model."
        )

    def _ends_before(self, skeleton: _Skeleton, count: int) -> int:
        """Return the number of EOS tokens before the one that ends the assistant's turn, in a rendering of `count`
        replies."""
        text = self._rendered(skeleton, _probes(skeleton.kind, count))
        alpha = text.rindex(_ALPHA) + len(_ALPHA)
        beta = text.index(_BETA, alpha)
        before, behind = (sum(token in self._eos_ids for token in self._ids(text[:end])) for end in (alpha, beta))
        if behind == before:
            ends = {token: self._tokenizer.convert_ids_to_tokens(token) for token in sorted(self._eos_ids)}
            between = text[alpha - len(_ALPHA) : beta + len(_BETA)]
            raise ConfigError(
                f"No token that ends a turn stands in {between!r}, which the {self._name} writes; such "
                f"tokens are {ends}. So nobody would know where the policy's turn ends: take the "
                "template and the tokenizer of one model, or add the token to the model's generation config "
                "(eos_token_id)."
            )
        return before


@dataclass(frozen=True)
class _Skeleton:
    """The form in which a template takes the turn that is answered."""

    kind: AnswerRole
    arguments: Literal["mapping", "text"] | None = None
    """Form of the arguments of a call, text being JSON; None: the turn has no calls beside its content."""
    escapes: bool = False
    """True if the template writes a reply as the inside of a JSON string."""

    def written(self, text: str) -> str:
        """Return the text of a reply as the template writes it."""
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.escapes else text

    def turn(self, answers: Sequence[Message]) -> Message:
        """Return the assistant's turn, with a call for each reply of a tool."""
        if self.arguments is None:
            return {"role": "assistant", "content": _ALPHA}
        calls = []
        for number, answer in enumerate(answers):
            arguments: Any = {"a": _ALPHA if number == len(answers) - 1 else "x"}
            function = {
                "name": answer["name"],
                "arguments": json.dumps(arguments) if self.arguments == "text" else arguments,
            }
            calls.append({"type": "function", "id": answer["tool_call_id"], "function": function})
        return {"role": "assistant", "content": "", "tool_calls": calls}


def template_name(tokenizer: Any) -> str:
    """Return the name of the chat template for messages."""
    model = getattr(tokenizer, "name_or_path", "")
    return f"chat template of {model}" if model else "chat template"


def check_tools_are_rendered(
    tokenizer: Any, tools: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any]
) -> None:
    """Refuse a chat template that does not tell the policy of the tools.

    Args:
        tokenizer: Tokenizer of the policy, with its chat template.
        tools: Schemas of the tools.
        chat_template_kwargs: Arguments that prompts are rendered with, the tools among them.

    Raises:
        ConfigError: the name of one is not in what it renders.
    """
    asked = [{"role": "user", "content": "a"}]
    text = apply_chat_template(tokenizer, asked, tokenize=False, add_generation_prompt=True, **chat_template_kwargs)
    names = [tool["function"]["name"] for tool in tools]
    if missing := [name for name in names if name not in str(text)]:
        raise ConfigError(
            f"The {template_name(tokenizer)} does not tell the policy of the tools: {', '.join(missing)} is "
            "not in what it renders. Give one that does with model.chat_template=FILE, or take another model."
        )


def _probes(kind: AnswerRole, count: int) -> list[Message]:
    return [{"role": kind, "name": "probe", "content": _BETA} for _ in range(count)]


def _with_call(message: Message, number: int) -> Message:
    """Return a tool's reply with the id of its call."""
    return {"tool_call_id": _call_id(number), **message} if message["role"] == "tool" else dict(message)


def _call(call: Message, number: int, text_arguments: bool) -> Message:
    function = call["function"]
    if text_arguments:
        function = {**function, "arguments": json.dumps(function["arguments"])}
    return {"id": _call_id(number), **call, "function": function}


def _call_id(number: int) -> str:
    """Return an id of nine letters and digits, as Mistral's templates require."""
    return f"call{number:05d}"


def literal_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text in which control tokens are literal text."""
    settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return list(tokenizer(text, **settings)["input_ids"]) if text else []
