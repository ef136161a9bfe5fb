"""What the command lines set in their process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lit_rl.cli.process import _Visible  # pyright: ignore[reportPrivateUsage]
from lit_rl.core import errors

FREED = """
import os, re, sys
from lit_rl.cli import process
{setting}
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
before = resident()
block = bytearray(256 * 2**20)
block[::4096] = b"x" * (256 * 2**8)
del block
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
@pytest.mark.parametrize(
    ("setting", "variables", "kept"),
    [
        ("process._has_gpu = lambda: False; process.prepare()", {}, True),
        ("process._has_gpu = lambda: False; process.prepare()", {"MALLOC_ARENA_MAX": "2"}, False),
        ("process._has_gpu = lambda: True; process.prepare()", {}, False),
        ("", {}, False),
    ],
    ids=["a command line", "settings of the user's", "a GPU", "imported alone"],
)
def test_freed_memory_stays_with_the_process(setting: str, variables: dict[str, str], kept: bool) -> None:
    code = FREED.format(setting=setting)
    out = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert (float(out.stdout) > 200) == kept


OUTPUT = """
import sys
from lit_rl import cli
def run(arguments):
    cli.process.prepare()
    print("\\u2603")
    return 5
cli.run = run
cli.main([])
"""


def test_an_output_that_takes_nothing_or_not_every_letter_changes_no_exit_code() -> None:
    """A disk that is full, and a locale without UTF-8."""
    with open("/dev/full", "w") as full:
        lost = subprocess.run([sys.executable, "-c", OUTPUT], env={}, stdout=full, stderr=subprocess.PIPE)
    assert (lost.returncode, lost.stderr) == (5, b"")
    variables = {"PYTHONIOENCODING": "latin-1"}
    said = subprocess.run([sys.executable, "-c", OUTPUT], env=variables, capture_output=True, text=True)
    assert (said.returncode, said.stdout, said.stderr) == (5, "\\u2603\n", "")


CLOSED = OUTPUT.replace("return 5", "file = open('notes', 'w')\n    subprocess.run(['echo'])\n    return 5")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_output_loses_what_is_written_there(closed: str, tmp_path: Path) -> None:
    """And no file that is opened next becomes the output, which what a program that is called prints would spoil."""
    code = f"import subprocess\n{CLOSED}"
    said = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", code], cwd=tmp_path)
    assert (said.returncode, (tmp_path / "notes").read_bytes()) == (5, b"")


ENDS = """
import gc, sys
from lit_rl.cli import process
class Owner:
    def __init__(self, path):
        self.itself, self.file = self, open(path, "w")
    def __del__(self):
        sys.stderr.write("collected")
process.prepare()
gc.disable()
Owner(sys.argv[1]).file.write("the last line")
"""


def test_at_its_end_a_process_writes_files_out_and_collects_nothing(tmp_path: Path) -> None:
    """The object holds itself, so that nothing but the collector of Python's end would find it."""
    file = tmp_path / "notes"
    out = subprocess.run([sys.executable, "-c", ENDS, str(file)], capture_output=True, text=True, check=True)
    assert (file.read_text(), out.stderr) == ("the last line", "")


def test_a_warning_of_ours_shows_no_line_of_source() -> None:
    written = _Visible(warnings.formatwarning)
    for file, shown in ((errors.__file__, False), (__file__, True)):
        text = written("mind", UserWarning, file, 3)
        assert text.startswith(f"{file}:3: UserWarning: mind") and ("from __future__" in text) == shown
