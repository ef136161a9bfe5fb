"""Whether the pretended GPU notices: places where lit_rl names a device are taken out, one at a time. Run by hand.

    python tests/pretended_gpu/planted.py trace                # all tests here, once: which places do they execute?
    python tests/pretended_gpu/planted.py trace tests/pretended_gpu/test_new.py      # tests that came later
    python tests/pretended_gpu/planted.py draw                 # 30 places (--count), by chance (--seed 0)
    python tests/pretended_gpu/planted.py draw --only 4ab 91c  # these alone, by the name that `draw` prints
    python tests/pretended_gpu/planted.py list                 # every place, and how many tests execute it

A place is a `device=` of a call of torch, a `.to(...)` or `to_device(...)` that names a device, or the device of a
`torch.Generator`, found by its syntax. `EXCLUDED` says what is left out. The checkout is copied, and the place is taken
out of the copy; then the cheapest tests that execute it are run, at most five, until one fails. A place that no test
executes counts as not caught.

Which places are drawn depends on their text and the function they are in, not on the file: a draw stays the same where
modules move. The map that `trace` makes and what pytest said of each place are in ``build/planted/``. A trace takes six
minutes, a draw of 30 eight.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "scripts"))
from mutations import copied  # noqa: E402

KEPT = HERE / "build" / "planted"
MAP = KEPT / "map.json"
EXCLUDED = {
    "vllm": "vLLM needs a GPU of its own",
    "deepspeed": "DeepSpeed needs CUDA's kernels",
    "zero": "DeepSpeed needs CUDA's kernels",
    "liger": "Liger needs Triton",
    "bitsandbytes": "bitsandbytes needs CUDA's kernels",
    "meta": "the device `meta` holds no memory",
}
"""What this tier does not run by design: words of a module's path, and the device `meta`."""
EXCLUDED_PLACES = {
    "DeepSpeed needs CUDA's kernels": "41f6fd",
    "folded attention is the CPU's alone": "c02f46 f80d3e 36a45c 78229e 77a8fa fcae9d",
    "what vLLM says alone comes here": "5c101c f195de 879dab",
    "flash attention alone comes here": "661a42",
}
"""The same, where a module's path does not say it: names of places, as `list` prints them."""
MOST_TESTS = 5
LONGEST = 300
"""Seconds that the tests of a place may take."""
TOO_LONG = 124

# Written into the copy. An expression that names a device becomes `(hit(number) or expression)`, and pytest loads it.
_HITS = """
import json, os
FILE, seen = __file__ + ".jsonl", set()
def write(*row):
    with open(FILE, "a") as file:
        file.write(json.dumps(row) + "\\n")
def hit(name):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (name, test) not in seen:
        seen.add((name, test))
        write("hit", name, test)
def pytest_runtest_logreport(report):
    write("ran", report.nodeid, report.when, report.outcome, report.duration)
"""


@dataclass(frozen=True)
class Place:
    """An expression that names a device.

    Args:
        file: Of the checkout.
        line: Of the file.
        text: The expression on one line.
        span: Where it begins and ends, in bytes of the file.
        without: What it becomes without the device.
        name: The first digits of a hash of what stays when a module moves.
        excluded: Why it is left out, or nothing.
    """

    file: str
    line: int
    text: str
    span: tuple[int, int]
    without: str
    name: str
    excluded: str

    def __str__(self) -> str:
        return f"{self.name}  {self.file}:{self.line}  {self.text[:110]}"


def _names_a_device(value: ast.expr) -> bool:
    """Whether an argument of `.to` is a device and no dtype or tensor."""
    while isinstance(value, ast.Call):
        value = value.func
    return re.search(r"(device|place|['\"](cpu|cuda|meta)['\"])$", ast.unparse(value)) is not None


def _without(call: ast.Call) -> str | None:
    """Return a call without the device that it names, or None if it names none."""
    name, less = ast.unparse(call.func), copy.deepcopy(call)
    less.keywords = [each for each in call.keywords if each.arg != "device"]
    if name == "to_device":
        return f"({ast.unparse(call.args[0])})"
    if name == "torch.Generator" and (call.args or len(less.keywords) < len(call.keywords)):
        return "torch.Generator()"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to":
        less.args = [each for each in call.args if not _names_a_device(each)]
        if len(less.args) + len(less.keywords) == len(call.args) + len(call.keywords):
            return None
        said = [*less.args, *(each for each in less.keywords if each.arg != "non_blocking")]
        return ast.unparse(less) if said else f"({ast.unparse(call.func.value)})"
    of_torch = name.startswith(("torch.", "nn.")) or re.search(r"\.new_\w+$", name)
    return ast.unparse(less) if of_torch and len(less.keywords) < len(call.keywords) else None


def _calls(node: ast.AST, within: str = "") -> Iterator[tuple[ast.Call, str]]:
    """Yield each call below a node, outer ones first, and the function it is in."""
    if isinstance(node, ast.JoinedStr):
        return  # in Python 3.11 what is in one has no place of its own
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        within = f"{within}.{node.name}"
    if isinstance(node, ast.Call):
        yield node, within
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, within)


def places() -> list[Place]:
    """Return each place of lit_rl that names a device, with those that are left out."""
    found, same = [], collections.Counter[tuple[str, str]]()
    for path in sorted((ROOT / "lit_rl").rglob("*.py")):
        raw, file = path.read_bytes(), str(path.relative_to(ROOT))
        begins = [0]
        for line in raw.split(b"\n"):
            begins.append(begins[-1] + len(line) + 1)
        for call, within in _calls(ast.parse(raw)):
            without = _without(call)
            if without is None:
                continue
            assert call.end_lineno and call.end_col_offset
            span = (begins[call.lineno - 1] + call.col_offset, begins[call.end_lineno - 1] + call.end_col_offset)
            text = ast.unparse(call)
            same[within, text] += 1
            name = hashlib.sha256(f"{within} {text} {same[within, text]}".encode()).hexdigest()[:6]
            words = re.split(r"[/.]", file) + (["meta"] if "'meta'" in text else [])
            reasons = [reason for word, reason in EXCLUDED.items() if word in words]
            reasons += [reason for reason, names in EXCLUDED_PLACES.items() if name in names.split()]
            excluded = reasons[0] if reasons else ""
            found.append(Place(file, call.lineno, text, span, without, name, excluded))
    if gone := {*" ".join(EXCLUDED_PLACES.values()).split()} - {each.name for each in found}:
        raise SystemExit(
            f"EXCLUDED_PLACES names places that are gone: {' '.join(sorted(gone))}. `list` has their names."
        )
    return found


def drawn(seed: int, count: int) -> list[Place]:
    """Return places in an order by chance, the first `count`. What is added to lit_rl changes little of it."""
    chance = {each: hashlib.sha256(f"{seed} {each.name}".encode()).digest() for each in places() if not each.excluded}
    return sorted(chance, key=chance.__getitem__)[:count]


def _traced(root: Path) -> None:
    """Rewrite a copy of the checkout so that it notes each place and the test that came there."""
    (root / "planted_hits.py").write_text(_HITS)
    inserted: dict[str, list[tuple[int, int, bytes]]] = collections.defaultdict(list)
    for number, each in enumerate(places()):  # outer ones come first
        before = f'(__import__("planted_hits").hit("{each.name}") or '.encode()
        inserted[each.file] += [(each.span[0], number, before), (each.span[1], -1, b")")]
    for file, texts in inserted.items():
        raw = (root / file).read_bytes()
        for at, _number, text in sorted(texts, reverse=True):
            raw = raw[:at] + text + raw[at:]
        ast.parse(raw)
        (root / file).write_bytes(raw)


def pytest_in(root: Path, log: Path, *words: str) -> int:
    """Run tests of a copy on two pretended devices; return pytest's exit code, or `TOO_LONG`."""
    environment = {**os.environ, "PRETEND": "2", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / HERE.relative_to(ROOT) / "site")])
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words]
    with log.open("w") as file:
        try:
            return subprocess.run(
                command, cwd=root, env=environment, stdout=file, stderr=file,
                timeout=None if "planted_hits" in words else LONGEST,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return TOO_LONG


def _copy(folder: str) -> Path:
    root = copied(Path(folder, "copy").resolve())
    (root / HERE.relative_to(ROOT) / "build").symlink_to(HERE / "build")  # the compiled library
    return root


def trace(tests: list[str]) -> int:
    """Run tests in a copy that notes places, and write or widen the map."""
    KEPT.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = json.loads(MAP.read_text()) if tests and MAP.exists() else {"hits": {}, "seconds": {}}
    for name, those in known["hits"].items():  # what is traced again may be gone
        known["hits"][name] = [each for each in those if not each.startswith(tuple(tests))]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = _copy(folder)
        _traced(root)
        marked = ["-m", "not exhaustive and not slow"]
        code = pytest_in(
            root, KEPT / "trace.log", "-p", "planted_hits", *marked, *(tests or [str(HERE.relative_to(ROOT))])
        )
        noted = root / "planted_hits.py.jsonl"
        if not noted.exists():
            raise SystemExit(f"pytest left with {code}: {KEPT / 'trace.log'}")
        rows = [json.loads(line) for line in noted.read_text().splitlines()]
    failed = {row[1] for row in rows if row[0] == "ran" and row[3] != "passed"}
    seconds: dict[str, float] = collections.defaultdict(float)
    setup: dict[str, float] = collections.defaultdict(float)
    for _ran, test, when, _outcome, took in (row for row in rows if row[0] == "ran"):
        file = test.partition("::")[0]
        if when == "setup":  # what the tests of a file share is made for each of them that is run alone
            setup[file] = max(setup[file], took)
        else:
            seconds[test] += took
    known["seconds"] |= {test: took + setup[test.partition("::")[0]] for test, took in seconds.items()}
    for _hit, name, test in (row for row in rows if row[0] == "hit"):
        if test and test not in failed:
            known["hits"][name] = sorted({*known["hits"].get(name, []), test})
    MAP.write_text(json.dumps(known, indent=1))
    print(f"{len(seconds)} tests, {len(failed)} of them failed or were skipped; pytest left with {code}.")
    return code


def _tests(known: dict[str, Any], place: Place) -> list[str]:
    """Return the tests that execute a place, the cheapest first."""
    return sorted(known["hits"].get(place.name, []), key=known["seconds"].__getitem__)


def _reason(log: Path) -> str:
    text = log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?: - |$)", text, re.MULTILINE)
    errors = re.findall(r"\b(?:\w+Error|UserWarning): .*device.*", text) or re.findall(r"^E\s+(.*)", text, re.MULTILINE)
    return f"{failed[1].rpartition('/')[2] if failed else '?'}: {errors[-1][:150] if errors else '?'}"


def try_out(chosen: list[Place]) -> int:
    """Take each place out of a copy, run its tests, and say what came of it."""
    known = json.loads(MAP.read_text())
    outcomes: dict[str, list[Place]] = {"caught": [], "survived": [], "not executed": [], "too long": []}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = _copy(folder)
        for place in chosen:
            tests, began, outcome, why = _tests(known, place)[:MOST_TESTS], time.monotonic(), "not executed", ""
            if tests:
                path, log = root / place.file, KEPT / f"{place.name}.log"
                raw = path.read_bytes()
                path.write_bytes(raw[: place.span[0]] + place.without.encode() + raw[place.span[1] :])
                ast.parse(path.read_bytes())
                try:
                    code = pytest_in(root, log, "-x", *tests)
                finally:
                    path.write_bytes(raw)
                if code not in (0, 1, TOO_LONG):
                    raise SystemExit(f"pytest left with {code}: {log}")
                outcome = {0: "survived", 1: "caught", TOO_LONG: "too long"}[code]
                why = _reason(log) if outcome == "caught" else f"{len(tests)} tests"
            outcomes[outcome].append(place)
            print(f"{outcome:12}  {time.monotonic() - began:3.0f} s  {place}  {why}", flush=True)
    for outcome, those in outcomes.items():
        print(f"{len(those)} of {len(chosen)} {outcome}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("trace").add_argument("tests", nargs="*", help="all of this folder where none is named")
    steps.add_parser("list")
    draw = steps.add_parser("draw")
    draw.add_argument("--seed", type=int, default=0)
    draw.add_argument("--count", type=int, default=30)
    draw.add_argument("--only", nargs="+", metavar="NAME", default=[])
    given = parser.parse_args()
    if given.step == "trace":
        return trace(given.tests)
    if given.step == "draw":
        named = [each for each in places() if given.only and each.name.startswith(tuple(given.only))]
        return try_out(named or drawn(given.seed, given.count))
    known = json.loads(MAP.read_text()) if MAP.exists() else {"hits": {}, "seconds": {}}
    for place in places():
        print(f"{len(_tests(known, place)):4}  {place}" + f"  ({place.excluded})" * bool(place.excluded))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
