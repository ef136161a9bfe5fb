"""Write docs/errors.md: every class of error with its exit code and what it means.

python scripts/errors_reference.py
python scripts/errors_reference.py --check    # whether the page is what it would be
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from lit_rl import errors

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "errors.md"

HEAD = """# Errors

<!-- `python scripts/errors_reference.py` writes this page. Do not edit by hand. -->

A message on stderr names the key or the file, what came, what is allowed and the likely fix. The class of the error
decides the exit code of `train.py` and `lit-rl`; in Python, catch it (`from lit_rl.errors import ConfigError`).
All of them are `LitRLError`. Anything else is a defect of lit_rl and keeps its traceback (exit code 1);
`LIT_RL_TRACEBACK=1` shows the traceback of the others too. What a run leaves when one ends it:
[when something goes wrong](reliability.md).

"""


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
    return HEAD + "\n".join([*rows, *signals]) + "\n"


def classes() -> list[type[errors.LitRLError]]:
    """Those of `lit_rl/errors.py`, in its order."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LitRLError)]
    return [kind for kind in found if kind is not errors.LitRLError]


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
