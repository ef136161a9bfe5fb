"""What the command lines set in their process."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
