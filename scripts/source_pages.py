"""Write docs/errors.md: every class of error with its exit code and what it means, and its messages.

python scripts/errors_reference.py
python scripts/errors_reference.py --check    # whether the page is what it would be
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_rl.core import errors

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "errors.md"

HEAD = """# Errors

<!-- `python scripts/errors_reference.py` writes this page. Do not edit by hand. -->

A message on stderr names the key or the file, what came, what is allowed and the likely fix. The class of the error
decides the exit code of `train.py` and `lit-rl`; in Python, catch it (`from lit_rl.core.errors import ConfigError`).
All of them are `LitRLError`. Anything else is a defect of lit_rl and keeps its traceback (exit code 1);
`LIT_RL_TRACEBACK=1` shows the traceback of the others too. What a run leaves when one ends it:
[when something goes wrong](reliability.md).

"""

SAID = """
## Messages

What does your message mean? Search this page for a few words of it. Take words that do not name anything of yours,
such as a file or a number: in their place the page has `<...>` or `<name>`. The left column says what is wrong, the
middle one what to do about it, and the right one which module of `lit_rl` says so.

The list is read from the source. It leaves out a message that

- begins with a key of the config or an argument, as `sampling.stop=...`: look the key up in
  [configuration](configuration.md), which says what is allowed;
- has fewer than three words that are always the same, since its words are another library's;
- is of a part that is there only where you asked for it: <LEFT_OUT>.
  Their pages explain them.
"""
OPTIONAL = {
    "environments": "environments",
    "callbacks/alarms": "alarms",
    "data/row_visuals": "images and videos",
    "data/visual_prompts": "images and videos",
    "core/visuals": "images and videos",
    "core/task_sets": "task sets of verifiers",
    "generation": "generators",
    **{f"rewards/{name}_rewards": "rewards that are shipped" for name in ("text", "token", "math", "task", "code")},
    **{f"rewards/{name}": "rewards that are shipped" for name in ("sandbox", "code_runner")},
    **{f"rewards/{name}": "judges" for name in ("judges", "llm_judge", "pair_ranker")},
    **{f"rewards/{name}": "scorers" for name in ("classifiers", "model_rewards", "remote_reward")},
    "models/scoring": "scorers",
    "models/adapters": "adapters of PEFT",
    "models/merging": "adapters of PEFT",
    "cli/lightning_": "the command line of LightningCLI",
}
"""What begins so, below `lit_rl`, is of such a part."""

KEY = re.compile(r"(?:<[a-z_.]+>)?(?:[a-z_0-9]+[./][a-z_./0-9<]+|[a-z_0-9]+=)|<[a-z_.]+>(?:[.=]|: <error>)")
"""How a message begins that the page leaves out: with a key."""
WORD = re.compile(r"(?<![<_.\w])[A-Za-z]{2,}(?![>_.]\w)")
ADVICE = re.compile(
    r"(?<=[.;:?]) (?=(?:add|allowed|build|call|check|choose|free|get|give|go|install|leave|load|look|lower|make|move|"
    r"name|pass|pip install|put|raise|remove|rename|repair|resume|say|see|set|start|take|type|use|wait|write)\b)",
    re.IGNORECASE,
)
"""Between what is wrong and what to do."""


CAUGHT = ("NotFolded", "NotGrouped")
"""Classes that are always caught, for another way to compute the same."""


def _derived() -> Iterator[tuple[str, str]]:
    """Classes anywhere below `lit_rl` with one parent, and its name."""
    for path in sorted((ROOT / "lit_rl").rglob("*.py")):
        found = re.findall(r"^class (\w+)\((\w+)\):", path.read_text(), re.MULTILINE)
        yield from (each for each in found if each[0] not in CAUGHT)


KINDS = {name: name for name, kind in vars(errors).items() if isinstance(kind, type)}
KINDS = {name: KINDS[base] for name, base in _derived() if base in KINDS} | KINDS
"""Classes by name, and under which the page has their messages: its own, or the one that it is derived from."""


@dataclass(frozen=True, order=True)
class Message:
    """What one `raise` says: its class, the file below `lit_rl` and the text, with `<name>` for what differs."""

    kind: str
    module: str
    text: str

    @property
    def usual(self) -> bool:
        """Whether the page has it; the page says the rule."""
        if KEY.match(self.text) or self.module.startswith(tuple(OPTIONAL)):
            return False
        return len(WORD.findall(self.text)) > 2

    @property
    def row(self) -> str:
        wrong, *advice = ADVICE.split(self.text, maxsplit=1)
        return f"| {_cell(wrong)} | {_cell(''.join(advice))} | {self.module} |"


def messages() -> list[Message]:
    """Of every `raise` of one of the classes whose message is written there, by class, module and text."""
    found = set()
    sources = {path: path.read_text() for path in sorted((ROOT / "lit_rl").rglob("*.py"))}
    shared: dict[str, str] = {}
    for source in sources.values():
        shared = _texts_in(_at_the_top(ast.parse(source))) | shared
    for path, source in sources.items():
        module = path.relative_to(ROOT / "lit_rl").with_suffix("").as_posix()
        imported = {alias.name for node in ast.walk(ast.parse(source)) for alias in _imports(node)}
        known = {name: text for name, text in shared.items() if name in imported}
        found |= {Message(kind, module, text) for kind, text in raised(source, known)}
    return sorted(found)


def raised(source: str, imported: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """The class and the text of every message that a module's text raises; variables are `<name>`.

    Args:
        source: Of the module.
        imported: Texts that it imports from other modules, by their names there.
    """
    tree = ast.parse(source)
    yield from _raised(tree, {**(imported or {}), **_texts_in(_at_the_top(tree))})


def _raised(tree: ast.AST, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The same below a node; `known` are the names that stand for one text there."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case (
                ast.Raise(exc=ast.Call(func=ast.Name(id=kind), args=[said, *_]))
                | ast.Return(value=ast.Call(func=ast.Name(id=kind), args=[said, *_]))
            ) if kind in KINDS:
                yield KINDS[kind], " ".join(_text(said, known).split())
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _raised(node, {**_others(known, node), **_texts_in(list(ast.walk(node)), known)})
            case _:
                yield from _raised(node, known)


def _others(known: Mapping[str, str], function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """Those that the function gives no other meaning."""
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return {name: text for name, text in known.items() if name not in bound}


def _at_the_top(module: ast.Module) -> list[ast.AST]:
    """The nodes of a module that are in no function and no class."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for statement in module.body if not isinstance(statement, kinds) for node in ast.walk(statement)]


def _texts_in(nodes: Sequence[ast.AST], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names that are given one text, and nothing else, with what it says."""
    stored = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    stored += Counter(n.arg for n in nodes if isinstance(n, ast.arg))
    given = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    words = {name: _text(value, known) for name, value in given.items() if _is_text(value) and stored[name] == 1}
    return {name: text for name, text in words.items() if WORD.search(text)}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _imports(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lit_rl") else []


def _text(node: ast.expr, known: Mapping[str, str] | None = None) -> str:
    """A literal as it is, what is joined as its parts, a name that stands for one text as that, and everything else as
    the last name in it."""
    known = known or {}
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(_text(value, known) for value in values)
        case ast.FormattedValue(value=value):
            return _text(value, known)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, known) + _text(right, known)
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.Call(func=ast.Name(id="did_you_mean")):
            return ""
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return f"<{name.strip('_').lower()}>"
        case ast.Call(args=[first, *_]) if not isinstance(first, ast.GeneratorExp | ast.ListComp):
            return _text(first, known)
    return "<...>"


def _cell(text: str) -> str:
    return "" if not text else f"`{text.strip().replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def message_tables() -> str:
    """The section of the messages: a table a class."""
    parts = [SAID.replace("<LEFT_OUT>", ", ".join(dict.fromkeys(OPTIONAL.values())))]
    usual = [message for message in messages() if message.usual]
    for kind in classes():
        rows = [message.row for message in usual if message.kind == kind.__name__]
        head = f"### {kind.__name__}: exit code {kind.exit_code}"
        parts.append("\n".join([head, "", "| what is wrong | what to do | module |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def page() -> str:
    """The whole document."""
    rows = ["| class | exit code | what is wrong |", "|---|---|---|"]
    for kind in classes():
        meaning = " ".join((inspect.getdoc(kind) or "").split())
        rows.append(f"| `{kind.__name__}` | {kind.exit_code} | {meaning} |")
    signals = [
        "",
        f"A signal that ends a run gives {errors.SIGNALLED} and its number: {errors.INTERRUPTED} for SIGINT, "
        f"{errors.TERMINATED} for SIGTERM.",
    ]
    return HEAD + "\n".join([*rows, *signals]) + "\n" + message_tables()


def classes() -> list[type[errors.LitRLError]]:
    """Return those of `lit_rl/core/errors.py` with a page of messages, in its order; `UnknownKeyword` has one
    message."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LitRLError)]
    return [kind for kind in found if kind not in (errors.LitRLError, errors.UnknownKeyword)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if DOCUMENT.read_text() != page():
            print(f"{DOCUMENT.relative_to(ROOT)} is not what the classes say: python scripts/errors_reference.py")
            return 1
        return 0
    DOCUMENT.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
