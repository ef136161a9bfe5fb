"""The first ten minutes of five people, played in a fresh clone under a pseudo-terminal, as a table.

    python scripts/first_minutes.py                         # clones, sets up, plays all: some fifteen minutes
    python scripts/first_minutes.py --venv .venv            # with an environment that is there
    python scripts/first_minutes.py --venv .venv --only typo            # a word of who types, or of the command
    python scripts/first_minutes.py --venv .venv --page docs/first-minutes.md   # writes its table into that page

A row is a command: seconds until its first line and until it ended, its exit code, and its last line where that is not
0, or what was slow.
Slow is a first line after 2 s or an error after 5 s. Which command is being played is said on stderr.
The script leaves with 1 where an exit code is not the expected one or where a traceback was printed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, LINES = 100, 40
LONGEST = 900.0
"""Seconds after which a command is killed."""
FIRST_LINE, FIRST_ERROR = 2.0, 5.0
"""Seconds after which a first line, and an error that is the first, is slow."""
ERROR = re.compile(rb"(?m)^(?:\w+Error: |[^\n]*: error: )")
"""Where a line begins that says what is wrong."""

DRAWN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")
"""What moves the cursor of a terminal or colours it."""


@dataclass(frozen=True)
class Typed:
    """A command, who types it, the exit code that is right, and the lines typed while it runs.

    They are typed one by one when the command is quiet; or, with `after`, as soon as the screen has shown that text.
    """

    who: str
    command: str
    code: int = 0
    lines: tuple[str, ...] = ()
    after: str = ""


NEWCOMER, TYPOS, TRL, LIGHTNING, GPUS = "newcomer", "typos", "from TRL", "from Lightning", "with GPUs"

SHORT = "trainer.max_steps=2 logger=none"
CTRL_C = "\x03"
STOPPED = "python train.py run_dir=runs/stopped trainer.max_steps=40 logger=none"
OWN_CLI = "--model.model tiny --model.reward lit_rl.rewards.exact_match --data.task lit_rl.data.tasks.Addition"

STEPS = (
    Typed(NEWCOMER, "make demo run_dir=runs/demo"),
    Typed(NEWCOMER, "lit-rl chat run_dir=runs/demo", lines=("17+25=", "\x04")),
    Typed(NEWCOMER, "lit-rl report run_dir=runs/demo"),
    Typed(NEWCOMER, "lit-rl"),
    Typed(NEWCOMER, "lit-rl --version"),
    Typed(NEWCOMER, "lit-rl env"),
    Typed(NEWCOMER, "lit-rl list algo"),
    Typed(NEWCOMER, "lit-rl chat --help"),
    Typed(NEWCOMER, "python train.py --help"),
    Typed(NEWCOMER, "lit-rl data-check data.path=mine.jsonl"),
    Typed(NEWCOMER, "lit-rl reward-test reward=./my_reward.py:score data.path=mine.jsonl"),
    Typed(NEWCOMER, f"python train.py reward=./my_reward.py:score {SHORT}"),
    Typed(NEWCOMER, f"python train.py data.path=mine.jsonl {SHORT}"),
    Typed(NEWCOMER, f"python train.py data.path=pairs.jsonl {SHORT}"),
    Typed(NEWCOMER, f"python train.py reward.fn=./my_reward.py:score {SHORT}"),
    Typed(NEWCOMER, "lit-rl --help"),
    Typed(NEWCOMER, "lit-rl train --help"),
    Typed(NEWCOMER, "lit-rl eval run_dir=runs/demo"),
    Typed(NEWCOMER, STOPPED, code=130, lines=(CTRL_C,), after=" reward="),
    Typed(NEWCOMER, f"{STOPPED} ckpt_path=last"),
    Typed(NEWCOMER, "lit-rl compare runs/demo runs/stopped"),
    Typed(NEWCOMER, "lit-rl export run_dir=runs/stopped"),
    Typed(NEWCOMER, f"python train.py --config-dir my_conf algo/loss=plain 'allow_targets=[my_losses]' {SHORT}"),
    Typed(TYPOS, "python train.py algo=gropo", code=2),
    Typed(TYPOS, "python train.py modle=tiny", code=2),
    Typed(TYPOS, "python train.py algo.group_siez=4", code=2),
    Typed(TYPOS, "python train.py trainer.max_steps=ten", code=2),
    Typed(TYPOS, "python train.py data.path=mien.jsonl", code=3),
    Typed(TYPOS, "python train.py reward=./my_reward.py:scroe", code=2),
    Typed(TYPOS, "python train.py algo=dpo data.path=mine.jsonl", code=2),
    Typed(TYPOS, "python train.py model=path/to/no/model", code=2),
    Typed(TYPOS, "lit-rl caht run_dir=runs/demo", code=2),
    Typed(TYPOS, "lit-rl eval run_dir=runs/dmeo", code=2),
    Typed(TYPOS, "python train.py --config-dir my_cnof algo/loss=plain", code=2),
    Typed(TYPOS, "python train.py beta=", code=2),
    Typed(TRL, f"python train.py learning_rate=5e-4 num_generations=8 beta=0.04 {SHORT}"),
    Typed(TRL, f"python train.py lr=5e-4 {SHORT}"),
    Typed(TRL, f"python train.py beta=0.04 {SHORT}"),
    Typed(TRL, f"python train.py batch_size=8 {SHORT}", code=2),
    Typed(TRL, f"python train.py per_device_train_batch_size=8 {SHORT}", code=2),
    Typed(TRL, f"python train.py loss_type=dapo {SHORT}", code=2),
    Typed(TRL, f"python train.py algo=dpo data.path=pairs.jsonl {SHORT}"),
    Typed(TRL, f"python train.py algo=sft data.path=texts.jsonl {SHORT}"),
    Typed(TRL, f"python train.py algo=dpo data=jsonl data.path=pairs.jsonl {SHORT}", code=2),
    Typed(TRL, f"python train.py algo=sft data=jsonl data.path=texts.jsonl {SHORT}", code=2),
    Typed(LIGHTNING, "python train.py trainer.max_epochs=1 trainer.max_steps=20 logger=none"),
    Typed(LIGHTNING, "lit-rl fit --config conf/lightning/addition.yaml --trainer.max_steps 2"),
    Typed(LIGHTNING, "lit-rl fit --config conf/lightning/additon.yaml", code=2),
    Typed(LIGHTNING, "lit-rl fit --config conf/lightning/addition.yaml --trainer.max_stpes 2", code=2),
    Typed(LIGHTNING, "python constructors.py"),
    Typed(LIGHTNING, f"python cli.py fit {OWN_CLI} --model.sampling.max_new_tokens 6 --trainer.max_steps 2"),
    Typed(GPUS, "lit-rl plan model=qwen0.5b data=gsm8k", code=8),
    Typed(GPUS, f"python train.py strategy=ddp trainer.devices=2 trainer.accelerator=cpu {SHORT}"),
    Typed(GPUS, "python train.py trainer.accelerator=gpu", code=8),
    Typed(GPUS, "python train.py generator=vllm", code=8),
    Typed(GPUS, "python train.py model=Qwen/Qwen2.5-0.5B-Instruct", code=8),
    Typed(GPUS, f"python train.py run_dir=runs/demo ckpt_path=last {SHORT}"),
    Typed(GPUS, f"python train.py -m seed=1,2 {SHORT}"),
    Typed(GPUS, "python -m pip install matplotlib && python scripts/run_curves.py plot runs/demo curve.png"),
)

FILES = {
    "cli.py": (
        "from lightning.pytorch.cli import LightningCLI\n\n"
        "from lit_rl import GRPO, RolloutDataModule\n\n"
        "LightningCLI(GRPO, RolloutDataModule)\n"
    ),
    "my_losses.py": (
        "def plain(logprobs, old_logprobs, advantages, mask, *, scale=1.0):\n"
        "    return -scale * advantages[:, None] * logprobs.masked_fill(~mask, 0.0), {}\n"
    ),
    "my_conf/algo/loss/plain.yaml": "_target_: my_losses.plain\n_partial_: true\nscale: 1.0\n",
    "mine.jsonl": "".join(
        f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a, b in ((17, 25), (30, 1), (5, 5), (8, 14))
    ),
    "pairs.jsonl": "".join(f'{{"prompt": "{n}+1=", "chosen": "{n + 1}", "rejected": "{n}"}}\n' for n in range(40)),
    "texts.jsonl": "".join(f'{{"prompt": "{n}+1=", "completion": "{n + 1}"}}\n' for n in range(40)),
    "my_reward.py": (
        "def score(prompts, completions, answer, **columns):\n"
        "    return [1.0 if c == a else 0.0 for c, a in zip(completions, answer)]\n"
    ),
    "constructors.py": (
        "import lightning as L\n\n"
        "from lit_rl.algorithms import GRPO, AdamW\n"
        "from lit_rl.data.prompt_module import RolloutDataModule\n"
        "from lit_rl.data.tasks import Addition\n"
        "from lit_rl.rewards import exact_match\n"
        "from lit_rl.core.rollout import Sampling\n\n"
        'module = GRPO("tiny", exact_match, sampling=Sampling(max_new_tokens=6), optimizer=AdamW(lr=5e-4))\n'
        "trainer = L.Trainer(max_steps=2, logger=False, limit_val_batches=1)\n"
        "trainer.fit(module, datamodule=RolloutDataModule(task=Addition()))\n"
        "print('fitted', trainer.global_step, 'steps')\n"
    ),
}
"""What the five people bring along; the constructors are the README's, with fewer steps."""


@dataclass(frozen=True)
class Played:
    """The screen of a terminal on which a command ran, and its times."""

    typed: Typed
    first: float
    """Seconds until the first line."""
    seconds: float
    code: int
    text: str
    error: float | None = None
    """Seconds until the first line that says what is wrong, if there is one."""

    @property
    def slow(self) -> str:
        """Return what kept the person waiting, or nothing."""
        waits = {f"first line {self.first:.1f} s": self.first > FIRST_LINE}
        if self.error is not None:
            waits[f"error {self.error:.1f} s"] = self.error > FIRST_ERROR
        return ", ".join(said for said, long in waits.items() if long)

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(shown(self.text)) if _says_something(line)), "")

    @property
    def wrong(self) -> str:
        """Return what is not as it should be, or nothing."""
        if "Traceback (most recent call last)" in self.text:
            return "a traceback"
        return "" if self.code == self.typed.code else f"left with {self.code} and not with {self.typed.code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--venv", type=Path, help="an environment with lit_rl's packages; without it `make setup` makes one"
    )
    parser.add_argument("--only", default="", help="plays what has this in the name of who types or in the command")
    parser.add_argument("--page", type=Path, help="a page of docs whose table is replaced")
    given = parser.parse_args()
    steps = [step for step in STEPS if given.only in f"{step.who}: {step.command}"]
    if not steps:
        parser.error(f"--only {given.only}: no command has this. They are: {', '.join(step.command for step in STEPS)}")
    with tempfile.TemporaryDirectory(prefix="first-minutes-") as folder:
        clone = Path(folder) / "lit_rl"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        if given.venv is None:
            steps = [Typed(NEWCOMER, "make setup"), *steps]
        else:
            _lend(given.venv.resolve(), clone)
        for name, text in FILES.items():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_text(text)
        played = list(_all_played(steps, clone))
    if given.page is not None:
        given.page.write_text(with_table(given.page.read_text(), table(played), machine()))
    wrong = [one for one in played if one.wrong]
    for one in wrong:
        print(f"\n$ {one.typed.command}\n{one.wrong}; its last lines:\n" + "\n".join(shown(one.text)[-30:]))
    print(f"{len(played)} commands, {len(wrong)} of them wrong.")
    return 1 if wrong else 0


def _all_played(steps: list[Typed], clone: Path) -> Iterator[Played]:
    print("\n".join(HEAD), flush=True)
    for number, step in enumerate(steps, 1):
        print(f"[{number} of {len(steps)}] $ {step.command}", file=sys.stderr, flush=True)
        one = play(step, clone)
        print(row(one), flush=True)
        yield one


def _lend(venv: Path, clone: Path) -> None:
    """Let the clone use an environment that is there, as if set up here: its packages, the clone's code."""
    (clone / ".venv").symlink_to(venv)
    (clone / "Makefile").write_text((clone / "Makefile").read_text().replace("demo: setup", "demo:"))


def play(typed: Typed, cwd: Path, *, longest: float = LONGEST) -> Played:
    """Type a command into a shell of `cwd` at a terminal of 100 columns and reads until it has ended."""
    started = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell cannot trap what whoever started us ignores
        os.execve("/bin/bash", ["bash", "-c", typed.command], _environment(cwd))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    text, first, error, waiting = b"", None, None, list(typed.lines)
    after = typed.after.encode()
    while True:
        ready, _, _ = select.select([terminal], [], [], 1.0)
        now = time.monotonic() - started
        if ready:
            try:
                read = os.read(terminal, 65536)
            except OSError:  # the other side is closed: all who wrote have ended
                break
            if not read:
                break
            text += read
            if first is None and any(shown(text.decode(errors="replace"))):
                first = now
            if error is None and ERROR.search(text, max(0, text.rfind(b"\n", 0, -len(read)))):
                error = now
            if after and waiting and after in text:
                os.write(terminal, waiting.pop(0).encode())
        elif not after and waiting and first is not None:  # it is quiet: it waits for the person
            os.write(terminal, (waiting.pop(0).rstrip("\n") + "\n").encode())
        if now > longest:
            os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    seconds = time.monotonic() - started
    text = text.replace(str(cwd).encode(), b".")  # where the clone lay is of no interest
    return Played(
        typed,
        seconds if first is None else first,
        seconds,
        os.waitstatus_to_exitcode(status),
        text.decode(errors="replace"),
        error,
    )


def _environment(cwd: Path) -> dict[str, str]:
    """Return that of an activated `.venv` of the clone, which comes first, whatever the environment was made for."""
    kept = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS")}
    path = f"{cwd / '.venv' / 'bin'}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(cwd), "TERM": "xterm-256color", "VIRTUAL_ENV": str(cwd / ".venv")}


def shown(text: str) -> list[str]:
    """Return the lines of a terminal's text without what colours them; of lines written over, the last state."""
    lines = DRAWN.sub("", text).replace("\r\n", "\n").split("\n")
    return [line for line in (line.split("\r")[-1].strip() for line in lines) if line]


def _says_something(line: str) -> bool:
    """Tell whether a line is not the frame of a table."""
    return any(character.isalnum() for character in line)


HEAD = ("| who | command | first line (s) | seconds | exit | ended with, or slow |", "|---|---|---:|---:|---:|---|")


def row(played: Played) -> str:
    """Return its row: with its last line where the exit code is not 0, otherwise with what was slow."""
    last = played.last_line
    last = (last if len(last) <= 90 else last[:87] + "...").replace("|", "\\|").replace("`", "'")
    command = played.typed.command.replace("|", "\\|")
    numbers = f"{played.first:.1f} | {played.seconds:.1f} | {played.code}"
    said = f"`{last}`" if played.code else played.slow
    return f"| {played.typed.who} | `{command}` | {numbers} | {said} |"


def table(played: list[Played]) -> str:
    return "\n".join([*HEAD, *map(row, played)])


def machine() -> str:
    """Return where and when the table was made."""
    name = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    load = os.getloadavg()[2]
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({name[1] if name else platform.processor()}), "
        f"Python {platform.python_version()}; mean load of the last fifteen minutes {load:.1f}."
    )


BEGIN, END = "<!-- table: scripts/first_minutes.py -->", "<!-- end of the table -->"


def with_table(page: str, rows: str, where: str) -> str:
    """Return the page with these rows between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{rows}\n\n{where}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if shutil.which("bash") is None:
        sys.exit("first_minutes.py types into bash, and there is none.")
    sys.exit(main())
