"""Break the code of `mutations.yaml` on purpose, one place at a time: tests have to fail.

    python scripts/mutations.py                  # each break against its nearest tests: half an hour
    python scripts/mutations.py --whole          # each break against everything that `make test` runs: hours
    python scripts/mutations.py --only sign clip # some of them
    python scripts/mutations.py --check          # no test: whether every text to break is still there

The checkout is copied (what git tracks, and new files that it does not ignore), and only the copy is broken. Without
`--whole`, the tests must first pass in a copy that is whole. A text that is not found, or stands in two places, is an
error that names the break: the code has changed, so write the break anew in `mutations.yaml`. Leaves with 1 where a
break survives or could not be tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]

TORCHVISION = "LIT_RL_TEST_TORCHVISION"
"""Where torchvision is, for the tests of families whose processors need it: see tests/torchvision_beside.py."""

OF_MAKE_TEST_ALL = "not exhaustive and not slow"
"""The marker expression of `make test-all`."""


@dataclass(frozen=True)
class Mutation:
    """One break, as `mutations.yaml` describes it."""

    name: str
    breaks: str
    where: str
    old: str
    new: str
    tests: str
    families: bool = False
    """True: the tests need torchvision, as those of `make test-families` do, which installs it."""


MUTATIONS = [
    Mutation(name, **fields)
    for name, fields in yaml.safe_load((ROOT / "scripts" / "mutations.yaml").read_text()).items()
]


def holder(root: Path, mutation: Mutation) -> Path:
    """The one file that holds the text.

    Raises:
        LookupError: none does, or it stands in several places.
    """
    where = root / mutation.where
    files = [where] if where.is_file() else sorted(where.rglob("*.py"))
    found = [path for path in files for _ in range(path.read_text().count(mutation.old))]
    if len(found) == 1:
        return found[0]
    places = "nowhere" if not found else "in " + ", ".join(str(path.relative_to(root)) for path in found)
    raise LookupError(
        f"{mutation.name}: the text to break stands {places} under {mutation.where}, and it must stand there once:\n"
        f"    {mutation.old}\nWrite this mutation anew, in scripts/mutations.yaml."
    )


def copied(target: Path) -> Path:
    """A copy of the checkout as it is now, with its environment linked in."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    if (ROOT / ".venv").exists():
        (target / ".venv").symlink_to(ROOT / ".venv")
    return target


def commands_of_make_test(root: Path) -> list[list[str]]:
    """What `make test` calls pytest with, stopped at the first failure."""
    made = subprocess.run(["make", "-n", "test", "args=-x"], cwd=root, check=True, capture_output=True, text=True)
    return [shlex.split(line) for line in made.stdout.splitlines() if re.search(r"-m pytest\b", line)]


def passes(root: Path, commands: list[list[str]], log: Path, families: bool = False) -> bool:
    """Whether every test passes.

    Raises:
        LookupError: pytest found no such tests, or could not begin; or those of `families` have no torchvision.
    """
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    torchvision = torchvision_folder()
    if families and not torchvision.is_dir():
        raise LookupError(f"{torchvision} is no folder: `make test-families` makes it, or set {TORCHVISION}")
    environment[TORCHVISION] = str(torchvision) if families else ""
    for command in commands:
        with log.open("a") as file:
            code = subprocess.run(command, cwd=root, env=environment, stdout=file, stderr=file).returncode
        if code == 1:
            return False
        if code:
            tail = "\n".join(log.read_text().splitlines()[-5:])
            raise LookupError(f"pytest left with {code}: {shlex.join(command)}\n{tail}")
    return True


def torchvision_folder() -> Path:
    return Path(os.environ.get(TORCHVISION) or ROOT / ".venv" / "torchvision").absolute()


def nearest(*tests: str) -> list[list[str]]:
    names = dict.fromkeys(name for each in tests for name in each.split())
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", OF_MAKE_TEST_ALL]
    return [[sys.executable, "-m", "pytest", *options, *names]]


def first_failure(log: Path) -> str:
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(), re.MULTILINE)
    return found[0] if found else ""


def tried(root: Path, mutation: Mutation, whole: bool, log: Path) -> bool:
    """Break the copy, test it, mend it. Returns whether a test failed."""
    path = holder(root, mutation)
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        commands = commands_of_make_test(root) if whole else nearest(mutation.tests)
        return not passes(root, commands, log, mutation.families)
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="everything that `make test` runs, for each break")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in MUTATIONS])
    parser.add_argument("--check", action="store_true", help="only look for the texts")
    given = parser.parse_args()
    chosen = [each for each in MUTATIONS if not given.only or each.name in given.only]

    missing = []
    for mutation in chosen:
        try:
            holder(ROOT, mutation)
        except LookupError as error:
            missing.append(str(error))
    if missing or given.check:
        print("\n\n".join(missing) or f"{len(chosen)} mutations, each text stands where it must.")
        return int(bool(missing))

    failed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root, width = copied(Path(folder, "copy").absolute()), max(len(each.breaks) for each in chosen)
        before = Path(folder, "before.log")
        for families in (False, True)[: 1 + torchvision_folder().is_dir()]:  # without, each break of theirs says so
            tests = [each.tests for each in chosen if each.families == families]
            if not given.whole and tests and not passes(root, nearest(*tests), before, families):
                print(f"A test fails without any break: {first_failure(before)}")
                return 1
        for mutation in chosen:
            log, started = Path(folder, f"{mutation.name}.log"), time.monotonic()
            try:
                caught = tried(root, mutation, given.whole, log)
                outcome = f"caught: {first_failure(log)}" if caught else "SURVIVED"
            except LookupError as error:
                outcome = f"not tried: {error}"
            failed += not outcome.startswith("caught")
            seconds = time.monotonic() - started
            print(f"{mutation.name:20}  {mutation.breaks:{width}}  {seconds:5.0f} s  {outcome}", flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} breaks were caught.")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
