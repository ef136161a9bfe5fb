"""Shape of the code: how much a reader has to open, by package, and what stands out.

    python scripts/shape.py             # the table
    python scripts/shape.py --flags     # and every place that it flags
    python scripts/shape.py --root DIR  # of another checkout

Read from syntax trees, without importing anything of it. Code lines are lines with code: no blank line, comment or
docstring. It informs: nothing here is a limit. What fails a build (`tests/test_shape.py`) is a public class or a file
name that stands twice; layers and circles are import-linter's, the files of one step `scripts/trace_step.py`'s.

A function is *used once* where its name occurs once more in the package than it is defined, and nothing but Python
calls it: no decorator, no special method, no method of a class with a base that is not ours.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import collections
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import upstream

ROOT = Path(__file__).resolve().parents[1]

RIDDLES = {
    *("What", "Whether", "Of", "How", "Where", "Which", "Who", "Whose", "When", "While", "Those", "As", "By", "If"),
    *("Inside", "For", "From", "In", "With"),
}
"""First words of docstrings that begin a clause, where a noun or a verb is looked for."""

SMALL, LARGE_CLASS, SHORT = 40, 35, 4
"""Code lines of a module, methods of a class, statements of a function used once: below, above, below is flagged."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Module:
    """A file of the package."""

    path: Path
    root: Path
    tree: ast.Module = field(repr=False)

    @property
    def name(self) -> str:
        """The path below the package's folder, without its end."""
        return self.path.relative_to(self.root).with_suffix("").as_posix()

    @property
    def package(self) -> str:
        """The first folder of the path."""
        return self.name.split("/")[0] if "/" in self.name else "."

    @property
    def dotted(self) -> str:
        """The name by which it is imported."""
        path = f"{self.root.name}/{self.name}".replace("/", ".")
        return path.removesuffix(".__init__")

    @cached_property
    def docstrings(self) -> list[tuple[ast.AST, ast.Expr]]:
        """The docstrings, each with what it documents; those of attributes and constants with their own node."""
        found: list[tuple[ast.AST, ast.Expr]] = []
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            if not isinstance(node, DOCUMENTED) or not isinstance(body, list):
                continue
            for number, each in enumerate(body):
                text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                if text and isinstance(each.value.value, str):
                    found.append((node if number == 0 else each, each))
        return found

    @cached_property
    def code_lines(self) -> set[int]:
        """Numbers of the lines with code."""
        lines = self.path.read_text().splitlines()
        texts = {n for _, each in self.docstrings for n in range(each.lineno, (each.end_lineno or 0) + 1)}
        return {
            n for n, line in enumerate(lines, 1) if n not in texts and line.strip() and not line.strip().startswith("#")
        }

    @cached_property
    def functions(self) -> list[Function]:
        """The functions and methods."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """The classes."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def import_lines(self) -> int:
        """Code lines of imports."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)

    def body(self, function: Function) -> int:
        """Return the code lines of a function's body."""
        return len(self.code_lines & {*range(function.body[0].lineno, (function.end_lineno or 0) + 1)})


def modules(root: Path) -> list[Module]:
    """Return the modules of a package's folder."""
    return [Module(path, root, ast.parse(path.read_text())) for path in sorted(root.rglob("*.py"))]


def imported(module: Module, known: Iterable[str]) -> set[str]:
    """Return the dotted names of the modules that one imports, of those known."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found & {*known}


def with_one_importer(found: list[Module]) -> list[tuple[Module, Module]]:
    """Return the modules that one module alone imports, of the same package, each with that one."""
    by_name = {each.dotted: each for each in found}
    importers: dict[str, list[Module]] = collections.defaultdict(list)
    for each in found:
        for name in imported(each, by_name):
            importers[name].append(each)
    pairs = [(by_name[name], those[0]) for name, those in importers.items() if len(those) == 1]
    return [(one, by) for one, by in pairs if one.package == by.package and by.path.name != "__init__.py"]


def used_once(found: list[Module]) -> list[tuple[Module, Function, bool]]:
    """Return the functions that are used once, each with whether that is in its own file."""
    names: collections.Counter[str] = collections.Counter()
    within: dict[Path, collections.Counter[str]] = {}
    for module in found:
        mine: collections.Counter[str] = collections.Counter()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name):
                mine[node.id] += 1
            elif isinstance(node, ast.Attribute):
                mine[node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                mine[node.value] += 1
        within[module.path] = mine
        names += mine
    defined = collections.Counter(function.name for module in found for function in module.functions)
    ours = {each.name for module in found for each in module.classes}
    once = []
    for module in found:
        kept = {id(method) for each in module.classes if _of_others(each, ours) for method in each.body}
        for function in module.functions:
            plain = not (function.decorator_list or function.name.startswith("__") or id(function) in kept)
            if plain and names[function.name] == 1 and defined[function.name] == 1:
                once.append((module, function, within[module.path][function.name] == 1))
    return once


def _of_others(one: ast.ClassDef, ours: set[str]) -> bool:
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in one.bases]
    return any(base not in {*ours, *dir(builtins), "Protocol", "ABC", "NamedTuple", "Generic"} for base in bases)


def twice(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names that stand in several places, with the places; of pairs (name, place)."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: those for name, those in sorted(places.items()) if len(those) > 1}


def file_names_twice(found: list[Module]) -> dict[str, list[str]]:
    """Return the file names that stand in several folders."""
    return twice((each.path.name, each.name) for each in found if each.path.name != "__init__.py")


def class_names_twice(found: list[Module]) -> dict[str, list[str]]:
    """Return the public class names that are defined in several modules."""
    public = [(each.name, module) for module in found for each in module.tree.body if isinstance(each, ast.ClassDef)]
    return twice((name, module.name) for name, module in public if not name.startswith("_"))


def riddles(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and first words of docstrings that open with a clause."""
    for _, each in module.docstrings:
        assert isinstance(each.value, ast.Constant)
        text = str(each.value.value).strip()
        if (match := re.match(r"[\w']+", text)) and match[0] in RIDDLES:
            yield each.lineno, text.split("\n")[0]


def guesses(module: Module) -> Iterator[int]:
    """Yield lines that ask an object of ours whether it has an attribute: ``getattr(self, "name", default)``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            own = isinstance(node.args[0], ast.Name) and node.args[0].id in ("self", "cls", "module")
            if own and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
                yield node.lineno


def figures(
    found: list[Module], once: list[tuple[Module, Function, bool]], single: list[tuple[Module, Module]]
) -> dict[str, str]:
    """Return the row of some modules, of all whose functions are used once and all that have one importer."""
    lines = sum(len(each.code_lines) for each in found) or 1
    functions = sum(len(each.functions) for each in found)
    paths = {each.path for each in found}
    owns = [own for module, _, own in once if module.path in paths]
    singles = [len(one.code_lines) for one, _ in single if one.path in paths]
    texts = sum(len(each.docstrings) for each in found)
    puzzles = sum(1 for each in found for _ in riddles(each))
    raises = sum(isinstance(node, ast.Raise) for each in found for node in ast.walk(each.tree))
    return {
        "files": str(len(found)),
        "code lines": f"{lines:,}",
        "functions / 1,000": f"{1000 * functions / lines:.0f}",
        "mean body": f"{sum(m.body(f) for m in found for f in m.functions) / max(functions, 1):.1f}",
        "used once (in their file)": f"{len(owns)} ({sum(owns)})",
        "one importer (lines)": f"{len(singles)} ({sum(singles):,})",
        "imports": f"{sum(each.import_lines for each in found) / lines:.0%}",
        "raise / 1,000": f"{1000 * raises / lines:.1f}",
        f"below {SMALL} lines": str(sum(len(e.code_lines) < SMALL for e in found if e.path.name != "__init__.py")),
        f"classes above {LARGE_CLASS} methods": str(sum(map(_is_large, (c for e in found for c in e.classes)))),
        "getattr of one's own": str(sum(1 for each in found for _ in guesses(each))),
        "docstrings that open with a clause": f"{puzzles / max(texts, 1):.0%}",
    }


def _is_large(one: ast.ClassDef) -> bool:
    return sum(isinstance(each, Function) for each in one.body) > LARGE_CLASS


def flags(found: list[Module]) -> Iterator[str]:
    """Yield a line for each place that stands out."""
    for one, by in with_one_importer(found):
        yield f"one importer: {one.name} ({len(one.code_lines)} lines), by {by.name}"
    for module, function, _ in used_once(found):
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
        if statements < SHORT:
            yield f"used once: {module.name}:{function.lineno} {function.name} ({statements} statements)"
    for kind, doubles in ("file", file_names_twice(found)), ("class", class_names_twice(found)):
        yield from (f"{kind} name twice: {name}, {', '.join(places)}" for name, places in doubles.items())
    for module in found:
        if len(module.code_lines) < SMALL and module.path.name != "__init__.py":
            yield f"small: {module.name} ({len(module.code_lines)} lines)"
        for each in module.classes:
            if _is_large(each):
                yield f"large class: {module.name}:{each.lineno} {each.name}"
        yield from (f"own attribute guessed: {module.name}:{line}" for line in guesses(module))
        yield from (f"docstring: {module.name}:{line} {text}" for line, text in riddles(module))
    trees = [upstream.Module(f"lit_rl/{module.name}.py", module.tree) for module in found]
    for use in upstream.astray(upstream.uses(trees)):
        yield f"upstream private name: {use.file.removeprefix('lit_rl/').removesuffix('.py')}:{use.line} {use.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--flags", action="store_true", help="every place that stands out")
    given = parser.parse_args()
    found = modules(given.root.resolve() / "lit_rl")
    packages = {"lit_rl": found}
    for each in found:
        packages.setdefault(each.package, []).append(each)
    once, single = used_once(found), with_one_importer(found)
    rows = {name: figures(those, once, single) for name, those in packages.items()}
    columns = [*rows["lit_rl"]]
    print("| | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(row.values()) + " |")
    doubles = {"file names twice": file_names_twice(found), "class names twice": class_names_twice(found)}
    print("\n" + ", ".join(f"{what}: {len(names)}" for what, names in doubles.items()))
    if given.flags:
        print(*flags(found), sep="\n")


if __name__ == "__main__":
    main()
