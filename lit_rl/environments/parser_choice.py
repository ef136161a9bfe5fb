"""Which parser reads the calls of a model: the one that reads back what the model's own chat template writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lit_rl.chat_template import apply_chat_template
from lit_rl.data.templates import control_tokens
from lit_rl.environments.literal_parsers import Gemma4Parser, Lfm2Parser
from lit_rl.environments.named_parsers import DeepSeekV3Parser, GptOssParser
from lit_rl.environments.parsers import (
    HermesParser,
    Llama3Parser,
    MistralParser,
    ParsedTurn,
    Parser,
    RegexParser,
    TemplateParser,
)
from lit_rl.environments.tagged_parsers import Glm4Parser, MuseGlimmerParser, Qwen35Parser
from lit_rl.environments.thoughts import Thoughts, generation_prompt
from lit_rl.environments.tools import ToolCall
from lit_rl.errors import ConfigError, one_of

Schemas = Sequence[Mapping[str, Any]]

PYTHON_CALL = r"(?P<name>\w+)\((?P<arguments>[^)]*)\)"
"""``multiply(17, 25)``."""

_FAMILIES: dict[str, Callable[[Schemas], Parser]] = {
    "hermes": lambda _: HermesParser(),
    "llama3": Llama3Parser,
    "mistral": lambda _: MistralParser(),
    "qwen3_5": Qwen35Parser,
    "glm4": Glm4Parser,
    "gptoss": lambda _: GptOssParser(),
    "deepseek_v3": lambda _: DeepSeekV3Parser(),
    "gemma4": lambda _: Gemma4Parser(),
    "lfm2": lambda _: Lfm2Parser(),
    "muse_glimmer": MuseGlimmerParser,
}

PARSERS = (*_FAMILIES, "regex")
"""Names of the forms that `env.parser` may choose."""

_TOLD = {
    "<tool_call>\n{": "hermes",
    "<tool_call>\\n{": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3",
    "'\"parameters\": '": "llama3",
}
"""Marks in the source of a chat template that describes calls of a form, where it does not render them itself."""

_AS_IT_IS: Mapping[str, Any] = MappingProxyType({})
"""A chat template without arguments."""

_PROBE = ToolCall("qqprobeqq", {"text": "qqalphaqq", "number": 17})
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "number": {"type": "integer", "description": "A number."},
            },
            "required": ["text", "number"],
        },
    },
}


def check_parser(name: str, pattern: str | None, prefix: str = "") -> None:
    """Check that there is such a parser, and that it reads a pattern where one is given.

    Args:
        name: One of `PARSERS`, or ``auto``.
        pattern: Pattern of ``regex``, or None.
        prefix: Prefix of the names of the two settings, such as ``env.``.

    Raises:
        ConfigError: otherwise.
    """
    one_of(f"{prefix}parser", name, ("auto", *PARSERS))
    if name != "regex" and pattern is not None:
        raise ConfigError(
            f"{prefix}parser={name} and {prefix}call_pattern={pattern!r}: a pattern is read by {prefix}parser=regex, "
            "and by nothing else."
        )


def parser_for(
    name: str,
    tokenizer: Any,
    schemas: Schemas,
    pattern: str | None,
    template_kwargs: Mapping[str, Any] | None = _AS_IT_IS,
) -> Parser:
    """Return the parser of a name, or the one that fits a tokenizer, with its marks of thoughts.

    Args:
        name: One of `PARSERS`, or ``auto``: by the tokenizer's ``response_template``; else the first that reads back
            a call which its chat template renders; else by what the chat template tells the model to write.
        tokenizer: Tokenizer of the policy.
        schemas: Schemas of the tools.
        pattern: Pattern of ``regex``; None is `PYTHON_CALL`.
        template_kwargs: Arguments that prompts are rendered with; None: prompts are plain texts.

    Raises:
        ConfigError: ``auto``, and nothing says how the model writes calls.
    """
    parser = _parser(name, tokenizer, schemas, pattern, template_kwargs)
    parser.thoughts = parser.thoughts.of(tokenizer, template_kwargs)
    return parser


def _parser(
    name: str, tokenizer: Any, schemas: Schemas, pattern: str | None, template_kwargs: Mapping[str, Any] | None
) -> Parser:
    if name == "regex":
        return RegexParser(PYTHON_CALL if pattern is None else pattern, schemas)
    if name != "auto":
        return _FAMILIES[name](schemas)
    if getattr(tokenizer, "response_template", None):
        begin = generation_prompt(tokenizer, template_kwargs) if template_kwargs is not None else ""
        return TemplateParser(tokenizer, schemas, begin)
    family = _family_of(tokenizer)
    if family is not None:
        return _FAMILIES[family](schemas)
    raise ConfigError(
        "env.parser=auto: neither a response_template of the tokenizer nor its chat template says how the model writes "
        f"calls of tools. Say it: env.parser is {', '.join(PARSERS[:-1])}, or regex with env.call_pattern."
    )


def rendered_call(tokenizer: Any, call: ToolCall, schemas: Schemas) -> Iterator[str]:
    """Yield the turn that calls a tool, as the chat template writes it: up to each of its control tokens, as one of
    them ends it, and then the whole turn. Nothing where the template renders no calls.

    Args:
        tokenizer: Tokenizer with a chat template.
        call: The call.
        schemas: Schemas of the tools that the template renders; may be none.
    """
    for arguments in (dict(call.arguments), json.dumps(dict(call.arguments))):
        function = {"name": call.name, "arguments": arguments}
        calls = [{"type": "function", "id": "call00000", "function": function}]
        asked = [{"role": "user", "content": "a"}]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        settings = {"tokenize": False, "tools": list(schemas) or None}
        try:
            begun = apply_chat_template(tokenizer, asked, add_generation_prompt=True, **settings)
            before = apply_chat_template(tokenizer, asked, **settings)
            whole = apply_chat_template(tokenizer, [*asked, said], **settings)
        except ConfigError:
            raise
        except Exception:  # a template may raise anything
            continue
        goes_on = whole.startswith(begun)
        turn = whole[len(begun if goes_on else before) :]
        turn = turn if goes_on else Thoughts().of(tokenizer, {"tools": settings["tools"]}).going_on(turn)
        cuts = (turn.rpartition(token) for token in control_tokens(tokenizer))
        yield from (before_it for before_it, token, _ in cuts if token)
        yield turn
        return


def _family_of(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    turns = list(rendered_call(tokenizer, _PROBE, [_PROBE_SCHEMA]))
    for name, parser in _FAMILIES.items():
        if any(_asks_the_probe(parser([_PROBE_SCHEMA]).parse(turn)) for turn in turns):
            return name
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    return next((name for mark, name in _TOLD.items() if mark in template), None)


def _asks_the_probe(turn: ParsedTurn) -> bool:
    return [isinstance(call, ToolCall) and replace(call, id=None) for call in turn.calls] == [_PROBE]
