"""The help page: what it is, the groups with their choices, the keys that matter, three examples."""

from __future__ import annotations

import textwrap
from pathlib import Path

_NAMES = 10
"""Columns for the names of groups."""

_KEYS = """\
  model.name=PATH          a folder or a hub id (with model=local)
  model.lora.r=16          train LoRA adapters of that rank
  data.path=FILE           your rows: prompts, pairs, texts; data.prompt_key=COLUMN
  reward.fn=FILE.py:NAME   your reward (with reward=function)
  algo.group_size=8        completions a prompt
  data.prompts_per_rollout=32
  optimizer.lr=1e-6        learning rate
  sampling.max_new_tokens=512
  trainer.max_steps=100    optimizer steps
  run_dir=DIR              where everything goes; with ckpt_path=last it is resumed"""

_EXAMPLES = """\
  python train.py                                              # learns additions on a CPU in two to three minutes
  python train.py algo=rloo model=qwen0.5b data.path=mine.jsonl reward=function reward.fn=./mine.py:score
  python train.py algo=dpo model=qwen0.5b data.path=pairs.jsonl
  python train.py -m seed=1,2,3                                # a sweep: one folder a job"""


def page() -> str:
    """One screen of text."""
    folder = Path(__file__).parents[2] / "conf"
    if not folder.is_dir():  # installed from a wheel: conf is the package lit_rl.conf
        folder = Path(__file__).parents[1] / "conf"
    hydra = [path for path in folder.iterdir() if path.name != "lightning"]  # whole configs, of LightningCLI
    rows, parts = [], []
    groups = sorted(path for path in hydra if path.is_dir())
    for group in groups:
        if _choices(group) != ["default"]:  # keys to set, and nothing to choose
            rows += _row(group.name, _choices(group))
        places = sorted(path for path in group.rglob("*") if path.is_dir())
        parts += [f"{place.relative_to(folder).as_posix()}: {', '.join(_choices(place))}" for place in places]
    return (
        "lit_rl: RL post-training of language models on PyTorch Lightning\n"
        "python train.py [GROUP=CHOICE ...] [KEY=VALUE ...]     (or: lit-rl train ...; lit-rl eval ...)\n"
        "lit-rl replay run_dir=DIR losses=[grpo]; lit-rl transcripts run_dir=DIR (other objectives; episodes as HTML)\n"
        "lit-rl plan [GROUP=CHOICE ...]; lit-rl reward-test [...] (does a step fit? rewards of a few rows)\n"
        "lit-rl data-check data.path=FILE; lit-rl env-check env=... (what data become; is it fit to train on?)\n"
        "lit-rl chat run_dir=DIR; lit-rl best-of-n data.path=FILE (talk to a model; the best of several completions)\n"
        "lit-rl serve model=qwen0.5b; lit-rl doctor generator=vllm (vLLM's server; does an engine hold the policy?)\n"
        "lit-rl fit|validate|test|predict --config FILE         (LightningCLI; its own --help)\n\n"
        "Groups (`model=` is the Hugging Face model, `algo=` the LightningModule):\n"
        + "\n".join(rows)
        + "\n\nGroups inside a group:\n"
        + textwrap.fill(" · ".join(parts), 119, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        + "\n\nKeys that matter:\n"
        + _KEYS
        + "\nEvery key: python train.py --cfg job. Examples:\n"
        + _EXAMPLES
        + "\n"
    )


def _choices(group: Path) -> list[str]:
    return sorted(path.stem for path in group.glob("*.yaml"))


def _row(group: str, choices: list[str]) -> list[str]:
    """A group and its choices, on as many lines as they need."""
    if not choices:
        return []
    head = f"  {group:<{_NAMES}} "
    return textwrap.wrap(
        ", ".join(choices), 119, initial_indent=head, subsequent_indent=" " * (3 + _NAMES), break_on_hyphens=False
    )
