"""The first ten minutes of four people in a fresh clone, under a pseudo-terminal: the table of docs/first-minutes.md.

    python scripts/first_minutes.py [--venv FOLDER] [--only WORD] [--dry]

Each command is run as a person would type it; how long until something is on the screen, how long in all, the exit code
and the last line go into the table. The script fails where an exit code is another one than is expected, or where a
traceback is on the screen.

Without `--venv` the clone sets up its own, as the README says. With it, the commands run with the packages of that
environment, and the clone's code.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from algorithm_pages import write

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-minutes.md"
WIDTH = 100
"""Columns of the terminal."""

FILES = {
    "mine.jsonl": '{"prompt": "17+25=", "answer": "42"}\n{"prompt": "30+1=", "answer": "31"}\n'
    '{"prompt": "5+5=", "answer": "10"}\n{"prompt": "8+14=", "answer": "22"}\n',
    "pairs.jsonl": "".join(
        f'{{"prompt": "{a}+{b}=", "chosen": "{a + b}", "rejected": "{a + b + 1}"}}\n'
        for a in range(4)
        for b in range(4)
    ),
    "my_reward.py": "def score(prompts, completions, answer, **columns):\n"
    "    return [float(c == a) for c, a in zip(completions, answer)]\n",
    "by_hand.py": "import lightning as L\n"
    "from lit_rl.algorithms import GRPO, AdamW\nfrom lit_rl.data.datamodule import RolloutDataModule\n"
    "from lit_rl.data.tasks import Addition\nfrom lit_rl.rewards import exact_match\n"
    "from lit_rl.rollout import Sampling\n"
    'module = GRPO("tiny", exact_match, sampling=Sampling(max_new_tokens=6), optimizer=AdamW(lr=5e-4))\n'
    "trainer = L.Trainer(max_steps=5, gradient_clip_val=1.0)\n"
    "trainer.fit(module, datamodule=RolloutDataModule(task=Addition()))\n",
    "own_cli.py": "from lightning.pytorch.cli import LightningCLI\n"
    "from lit_rl.algorithms import GRPO\nfrom lit_rl.data.datamodule import RolloutDataModule\n"
    "LightningCLI(GRPO, RolloutDataModule)\n",
}
"""What the people write, in the clone."""

SHORT = "trainer.max_steps=3 eval.limit=16"


@dataclass(frozen=True)
class Typed:
    """A command of one of the people."""

    words: str
    code: int = 0
    keys: str = ""
    """What is typed into it, and an end of input."""
    after: float = 0.0
    """Seconds after the first line until Ctrl-C; 0 is never."""


PEOPLE: dict[str, list[Typed]] = {
    "a newcomer": [
        Typed("python train.py run_dir=runs/demo"),
        Typed("lit-rl"),
        Typed("lit-rl --version"),
        Typed("lit-rl env"),
        Typed("lit-rl chat run_dir=runs/demo", keys="17+25=\n"),
        Typed("lit-rl list algo"),
        Typed("lit-rl chat --help"),
        Typed(f"python train.py data.path=mine.jsonl data.prompts_per_rollout=2 data.val_fraction=0.25 {SHORT}"),
        Typed(f"python train.py reward=./my_reward.py:score {SHORT}"),
        Typed("lit-rl reward-test reward=./my_reward.py:score data.path=mine.jsonl"),
        Typed("lit-rl data-check data.path=mine.jsonl"),
        Typed("python train.py algo=grop", code=2),
        Typed("python train.py algo.group_sise=4", code=2),
        Typed("python train.py algo.loss.clip_hihg=0.3", code=2),
        Typed("python train.py trainer.max_step=3", code=2),
        Typed("python train.py data.path=nope.jsonl", code=3),
        Typed("lit-rl tran", code=2),
    ],
    "a user of TRL": [
        Typed(f"python train.py learning_rate=1e-4 num_generations=4 {SHORT}"),
        Typed("python train.py batch_size=8", code=2),
        Typed("python train.py per_device_train_batch_size=8", code=2),
        Typed(f"python train.py max_completion_length=6 {SHORT}"),
        Typed(f"python train.py algo=dpo data.path=pairs.jsonl data.batch_size=4 beta=0.2 {SHORT}"),
        Typed("python train.py algo=dpo data.path=mine.jsonl", code=3),
        Typed("python train.py model=Qwen/Qwen2.5-0.5B", code=8),
        Typed(f"python train.py reward.fn=./my_reward.py:score {SHORT}"),
        Typed("lit-rl replay run_dir=runs/demo 'losses=[grpo,gspo,cispo]'"),
    ],
    "a user of Lightning": [
        Typed("lit-rl fit --config conf/lightning/addition.yaml --trainer.max_steps 5"),
        Typed("lit-rl fit --config conf/lightning/addition.yaml --trainer.max_step 5", code=2),
        Typed("lit-rl fit --model.model tiny --trainer.fast_dev_run true", code=2),
        Typed("python own_cli.py fit --help"),
        Typed("python by_hand.py"),
        Typed("python train.py trainer.fast_dev_run=true"),
    ],
    "a practitioner": [
        Typed("python train.py run_dir=runs/stopped", code=130, after=15),
        Typed("python train.py run_dir=runs/stopped ckpt_path=last trainer.max_steps=60 eval.limit=16"),
        Typed("python train.py run_dir=runs/stopped", code=2),
        Typed("lit-rl plan strategy=fsdp trainer.devices=2 trainer.accelerator=cpu"),
        Typed("python train.py trainer.devices=8 trainer.accelerator=gpu", code=8),
        Typed(f"python train.py -m seed=1,2 {SHORT}"),
        Typed("lit-rl doctor generator=hf"),
        Typed("python train.py generator=vllm", code=8),
        Typed("lit-rl eval run_dir=runs/demo ckpt_path=last eval.group_size=4 eval.temperature=1"),
    ],
}


@dataclass(frozen=True)
class Seen:
    """What came of a command."""

    first: float
    seconds: float
    code: int
    text: str

    @property
    def last(self) -> str:
        """The last line that says something."""
        lines = [line.strip(" │┃└┘─━") for line in plain(self.text).splitlines()]
        return next((line for line in reversed(lines) if line), "")


def plain(text: str) -> str:
    """A screen's text without colours; of a line that was written over, what stayed."""
    without = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07", "", text).replace("\r\n", "\n")
    return "\n".join(line.rsplit("\r", 1)[-1] for line in without.splitlines())


def play(typed: Typed, folder: Path, environment: dict[str, str]) -> Seen:
    """Run a command under a terminal, to its end."""
    began, ours = time.monotonic(), b""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        words = shlex.split(typed.words)
        os.execvpe(words[0], words, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    first, interrupted = 0.0, False
    if typed.keys:
        os.write(terminal, typed.keys.encode() + b"\x04")
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.05)
        now = time.monotonic() - began
        if ready:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # how a terminal says that its other end is closed
                break
            if not part:
                break
            ours += part
            echoed = typed.keys.replace("\n", "\r\n").encode()
            first = first or (now if ours.replace(echoed, b"").replace(b"^D\x08\x08", b"").strip() else 0.0)
        if typed.after and first and not interrupted and now > first + typed.after:
            os.kill(pid, signal.SIGINT)
            interrupted = True
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(status)
    return Seen(first, time.monotonic() - began, code, ours.decode(errors="replace"))


def row(typed: Typed, seen: Seen, folder: Path) -> str:
    """A line of the table."""
    last = seen.last.replace(str(folder), ".").replace("|", "\\|").replace("`", "'")
    last = last if len(last) <= WIDTH else last[: WIDTH - 1] + "…"
    then = f", then Ctrl-C after {typed.after:g} s" if typed.after else ""
    return f"| `{typed.words}`{then} | {seen.first:.1f} | {seen.seconds:.1f} | {seen.code} | {last} |"


def clone(folder: Path, venv: Path | None) -> dict[str, str]:
    """A fresh clone with the people's files, and the environment in which its commands run."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    if venv is None:
        subprocess.run(["make", "setup"], cwd=folder, check=True)
        venv = folder / ".venv"
    environment = {
        **os.environ,
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "TERM": "xterm-256color",
    }
    return environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--venv", type=Path, help="an environment that is there, in place of `make setup`")
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--dry", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "lit_rl"
        environment = clone(folder, options.venv.resolve() if options.venv else None)
        lines = []
        for person, commands in PEOPLE.items():
            lines += ["", f"### As {person}", "", "| command | first line | seconds | exit code | last line |"]
            lines.append("|---|---|---|---|---|")
            for typed in commands:
                if options.only not in typed.words:
                    continue
                seen = play(typed, folder, environment)
                lines.append(row(typed, seen, folder))
                print(lines[-1], flush=True)
                if seen.code != typed.code or "Traceback (most recent call last)" in seen.text:
                    wrong.append(f"{typed.words}\n{plain(seen.text)}")
    if wrong:
        print("\n\n".join(["Not as expected:", *wrong]), file=sys.stderr)
        return 1
    if not options.dry and not options.only:
        write(PAGE, {"first minutes": "\n".join(lines).strip()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
