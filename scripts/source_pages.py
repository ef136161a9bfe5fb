"""Write what is made from source alone: the errors, the modules and the API, and what names of other tools are here.

    python scripts/source_pages.py                     # all of them
    python scripts/source_pages.py errors|api|names    # docs/errors.md; docs/modules.md and docs/api; other_names.yaml
    python scripts/source_pages.py --check             # name those that are not as they would be written

docs/errors.md has every class of error with its exit code and what it means, and its messages.

docs/modules.md has the first sentence of every module. A page of docs/api has a table for each of its `:::` lines:
every public class and function of the module with the first sentence of its docstring. The site shows the whole
docstrings; in the repository the table is what one reads. Where a `:::` line has `members` below it, the table and the
site have these names of the module and no others.

Two columns of lit_rl/core/other_names.yaml have what a name of TRL or verl is here, from the tables of docs/from-trl.md
and docs/from-verl.md.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lit_rl.core import errors
from lit_rl.core.other_names import TABLE

# -------------------------------------------------------------------------------------------------------------- errors


ROOT = Path(__file__).resolve().parents[1]
ERRORS = ROOT / "docs" / "errors.md"

ERRORS_HEAD = """# Errors

<!-- `python scripts/source_pages.py errors` writes this page. Do not edit by hand. -->

A message on stderr names the key or the file, what came, what is allowed and the likely fix. The class of the error
decides the exit code of `train.py` and `lit-rl`; in Python, catch it (`from lit_rl.core.errors import ConfigError`).
All of them are `LitRLError`. Anything else is a defect of lit_rl and keeps its traceback (exit code 1);
`LIT_RL_TRACEBACK=1` shows the traceback of the others too. What a run leaves when one ends it:
[when something goes wrong](reliability.md).

"""

MESSAGES_HEAD = """
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
    """Yield classes anywhere below `lit_rl` with one parent, and its name."""
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
        """Return whether the page has it; the page says the rule."""
        if KEY.match(self.text) or self.module.startswith(tuple(OPTIONAL)):
            return False
        return len(WORD.findall(self.text)) > 2

    @property
    def row(self) -> str:
        wrong, *advice = ADVICE.split(self.text, maxsplit=1)
        return f"| {_cell(wrong)} | {_cell(''.join(advice))} | {self.module} |"


def messages() -> list[Message]:
    """Return those of every `raise` of a class whose message is written there, by class, module and text."""
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
    """Yield the class and the text of every message that a module's text raises; variables are `<name>`.

    Args:
        source: Of the module.
        imported: Texts that it imports from other modules, by their names there.
    """
    tree = ast.parse(source)
    yield from _raised(tree, {**(imported or {}), **_texts_in(_at_the_top(tree))})


def _raised(tree: ast.AST, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the same below a node; `known` are the names that stand for one text there."""
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
    """Return those that the function gives no other meaning."""
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return {name: text for name, text in known.items() if name not in bound}


def _at_the_top(module: ast.Module) -> list[ast.AST]:
    """Return the nodes of a module that are in no function and no class."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for statement in module.body if not isinstance(statement, kinds) for node in ast.walk(statement)]


def _texts_in(nodes: Sequence[ast.AST], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return names that are given one text, and nothing else, with what it says."""
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
    """Return a literal as it is, what is joined as its parts, a name that stands for one text as that, and everything
    else as the last name in it."""
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
    """Return the section of the messages: a table a class."""
    parts = [MESSAGES_HEAD.replace("<LEFT_OUT>", ", ".join(dict.fromkeys(OPTIONAL.values())))]
    usual = [message for message in messages() if message.usual]
    for kind in classes():
        rows = [message.row for message in usual if message.kind == kind.__name__]
        head = f"### {kind.__name__}: exit code {kind.exit_code}"
        parts.append("\n".join([head, "", "| what is wrong | what to do | module |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def errors_page() -> str:
    """Return the whole document."""
    rows = ["| class | exit code | what is wrong |", "|---|---|---|"]
    for kind in classes():
        meaning = " ".join((inspect.getdoc(kind) or "").split())
        rows.append(f"| `{kind.__name__}` | {kind.exit_code} | {meaning} |")
    signals = [
        "",
        f"A signal that ends a run gives {errors.SIGNALLED} and its number: {errors.INTERRUPTED} for SIGINT, "
        f"{errors.TERMINATED} for SIGTERM.",
    ]
    return ERRORS_HEAD + "\n".join([*rows, *signals]) + "\n" + message_tables()


def classes() -> list[type[errors.LitRLError]]:
    """Return those of `lit_rl/core/errors.py` with a page of messages, in its order; `UnknownKeyword` has one
    message."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LitRLError)]
    return [kind for kind in found if kind not in (errors.LitRLError, errors.UnknownKeyword)]


# ------------------------------------------------------------------------------------------------- modules and the API


PAGES = ROOT / "docs" / "api"
MODULES = ROOT / "docs" / "modules.md"
MODULES_HEAD = """# Every module in a line

_Generated by `python scripts/source_pages.py api` from the docstrings of `lit_rl/`: do not edit._

The layers and one step through them are in [architecture](architecture.md).
"""
BEGIN, END = "<!-- names: `python scripts/source_pages.py api`; not by hand -->", "<!-- end -->"
MODULE = re.compile(r"^::: (\S+)$(?:\n    options:\n      members: \[(.+)\]$)?", re.M)
"""A module, and those of its names that a user asks for, where it has others."""


def public(module: str) -> Iterator[tuple[str, str]]:
    """Yield names and first sentences of the classes and functions that are written in a module."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name, first_sentence(ast.get_docstring(node) or "")


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def offered(module: str, members: str) -> list[tuple[str, str]]:
    """Return those of a module's names that the page asks for.

    Args:
        members: With a comma and a space between them; empty for all.
    """
    found = dict(public(module))
    names = members.split(", ") if members else list(found)
    if lacking := [name for name in names if name not in found]:
        sys.exit(f"{module} has no public {', '.join(lacking)}: correct `members` below its `:::` line.")
    return [(name, found[name]) for name in names]


def table(modules: list[tuple[str, str]]) -> str:
    rows = [
        f"| [`{name}`](../../{module.replace('.', '/')}.py) | {sentence} |"
        for module, members in modules
        for name, sentence in offered(module, members)
    ]
    return "\n".join([BEGIN, "", "| name | |", "|---|---|", *rows, "", END])


def written(text: str) -> str:
    """Return the page, with its table made anew: before the first module that it names."""
    modules = MODULE.findall(text)
    bare = re.sub(rf"{re.escape(BEGIN)}.*?{re.escape(END)}\n\n", "", text, flags=re.S)
    at = bare.index(f"::: {modules[0][0]}\n")
    return f"{bare[:at]}{table(modules)}\n\n{bare[at:]}"


DETAIL = re.compile(
    r"(?<=[\w`])(?:: |; | \(|, and (?=[^,]*$)"
    r"|, (?:with|which|so|as|by|from|in|for|because|without|read|known|made|not) )"
)
"""Where a sentence goes into detail."""


def gist(sentence: str) -> str:
    """Return a sentence up to where it goes into detail, if four words or more are before that.

    Code is not cut, and a list keeps its last part.
    """
    text = sentence.replace("``", "`").removesuffix(".")
    kept = [
        text[: found.start()]
        for found in DETAIL.finditer(text)
        if text.count("`", 0, found.start()) % 2 == 0 and not (found[0] == ", and " and "," in text[: found.start()])
    ]
    return next((part for part in kept if len(part.split()) > 3), text)


def modules_page() -> str:
    """Return the page of every module, a list for each folder."""
    package = ROOT / "lit_rl"
    folders = [package, *(path for path in sorted(package.rglob("*")) if path.is_dir() and path.name != "conf")]
    lists = []
    for folder in folders:
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        docs = [(path.stem, ast.get_docstring(ast.parse(path.read_text())) or "") for path in files]
        rows = [f"- `{name}`: {gist(first_sentence(doc))}" for name, doc in docs]
        lists += ["\n".join([f"\n## `{folder.relative_to(package).as_posix()}/`\n", *rows])] if rows else []
    return "\n".join([MODULES_HEAD.rstrip(), *lists]).replace("\\|", "|") + "\n"  # a list needs no escape


# ------------------------------------------------------------------------------------------------ names of other tools


_NAMES_HEAD = (
    "# Names of settings in other libraries, a row each; core/other_names.py says what the columns are.\n"
    "# TRL and verl are written by `python scripts/source_pages.py names`: edit the others alone.\n"
)
_ACTOR = ("actor", "rollout", "ref", "model")
"""What the page on verl writes without the `actor_rollout_ref` in which it stands."""
_CONFIGS = {
    "Fields of GRPO, RLOO and online DPO": ["GRPOConfig", "RLOOConfig", "OnlineDPOConfig"],
    "Fields of all data-set methods": ["methods that learn from a data set"],
    "Fields inherited from transformers.TrainingArguments": ["the others"],
    "Fields of ScriptArguments": ["ScriptArguments"],
}
"""Configs that a table is about, where its heading names none."""


def rows_of(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield `(heading, cells)` of every line of every table."""
    heading = ""
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith(("|---", "| TRL |", "| verl |")):
            yield heading, [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def typed(here: str, place: int = 0, fields: int = 1) -> str:
    """Return what to type; for one of several fields with as many keys, its own."""
    words = re.findall(r"`([^`]+)`", here)
    keys = [word for word in words if "=" not in word]
    if fields > 1 and len(keys) == fields:
        words = [word for word in words if "=" in word or word == keys[place]]
    return " ".join(word if "=" in word else f"{word}=..." for word in words) or here


def note(differs: str) -> str:
    """Return the first sentence of what differs, in brackets; without defaults, and what only the page can show."""
    text = re.sub(r"^(`[^`]+`, )*here `[^`]+`(, `[^`]+`)*(: |$)", "", differs)
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "").replace("\\|", "|")
    text = re.sub(r"(^|, )see (the .*|above)", "", re.split(r"(?<=\w)\. ", text)[0].rstrip("."))
    return f" ({text})" if text else ""


def names_of_trl() -> dict[str, str]:
    """Return what every field of its configs is; where that is several things, of which config it is what."""
    found: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for heading, cells in rows_of("from-trl.md"):
        if not heading.startswith("Fields "):
            continue
        configs = _CONFIGS.get(heading) or re.findall(r"\w+Config", heading)
        names = re.findall(r"`([^`]+)`", cells[0])
        for place, name in enumerate(names):
            answers, here = found.setdefault(name, {}), typed(cells[1], place, len(names))
            said, of = answers.get(here, ("", []))
            answers[here] = (said or note(cells[2]), [*of, *configs])
    return {name: _joined(answers) for name, answers in found.items()}


def _joined(answers: dict[str, tuple[str, list[str]]]) -> str:
    if len(answers) == 1:
        return "".join(f"{words}{said}" for words, (said, _) in answers.items())
    return "; ".join(f"of {', '.join(configs)}: {words}{said}" for words, (said, configs) in answers.items())


def keys_of_verl() -> dict[str, str]:
    """Return what every whole key is; of one whose values are told, each value."""
    found: dict[str, dict[str, str]] = {}
    for _, cells in rows_of("from-verl.md"):
        before = ""
        for word in re.findall(r"`([^`]+)`", cells[0]):
            key, _, value = word.partition("=")
            key = before + key if key.startswith(".") else key
            before = key.rpartition(".")[0]
            whole = f"actor_rollout_ref.{key}" if key.partition(".")[0] in _ACTOR else key
            found.setdefault(whole, {}).setdefault(value, typed(cells[1]) + note(cells[2]))
    return {key: "; ".join(f"{v}: {text}" if v else text for v, text in said.items()) for key, said in found.items()}


def other_names() -> str:
    """Return the table with these two columns as they should be; the others are kept."""
    table = {name: dict(cells) for name, cells in yaml.safe_load(TABLE.read_text(encoding="utf-8")).items()}
    for library, names in (("TRL", names_of_trl()), ("verl", keys_of_verl())):
        for cells in table.values():
            cells.pop(library, None)
        for name, text in names.items():
            table.setdefault(name, {})[library] = text
    return _NAMES_HEAD + "".join(f"{name}:{_cells(cells)}\n" for name, cells in sorted(table.items()) if cells)


def _cells(cells: Mapping[str, object]) -> str:
    """Return the lines of a row. JSON is YAML."""
    return "".join(f"\n  {name}: {json.dumps(text, ensure_ascii=False)}" for name, text in cells.items())


def made(kind: str) -> dict[Path, str]:
    """Return the files of a kind as they should be."""
    if kind == "errors":
        return {ERRORS: errors_page()}
    if kind == "names":
        return {TABLE: other_names()}
    pages = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    return {path: written(text) for path, text in pages.items() if MODULE.search(text)} | {MODULES: modules_page()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["errors", "api", "names"]
    parser.add_argument("kinds", nargs="*", metavar="KIND", choices=[[], *kinds], help=f"{', '.join(kinds)}; or all")
    parser.add_argument("--check", action="store_true", help="write nothing; leave with 1 where a file would change")
    given = parser.parse_args()
    stale = []
    for kind in given.kinds or kinds:
        for path, text in made(kind).items():
            if path.read_text(encoding="utf-8") != text:
                stale.append(path.name)
                if not given.check:
                    path.write_text(text, encoding="utf-8")
    print(f"{'not as they would be written' if given.check else 'written'}: {', '.join(stale) or 'none'}")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
