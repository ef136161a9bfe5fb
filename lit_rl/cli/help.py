"""Help pages of `lit-rl`, of a training, and of each other command: one screen each, and nothing heavy loads."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from lit_rl.cli.listing import default_choices

_KEYS = """\
  model=PATH_OR_HUB_ID         or one of: lit-rl list model
  model.lora.r=16              train LoRA adapters of that rank
  data.path=FILE               your rows: prompts, pairs, texts; data.prompt_key=COLUMN
  reward=./FILE.py:NAME        your reward, or one of: lit-rl list reward
  algo.group_size=8            completions a prompt
  data.prompts_per_rollout=32  prompts a rollout
  optimizer.lr=1e-6            learning rate
  sampling.max_new_tokens=512  longest completion
  trainer.max_steps=100        optimizer steps
  run_dir=DIR                  where everything goes; with ckpt_path=last it is resumed"""

_EXAMPLES = """\
  python train.py                                              # learns additions on a CPU in two to three minutes
  python train.py algo=rloo model=qwen0.5b data.path=mine.jsonl reward=./mine.py:score
  python train.py algo=dpo model=qwen0.5b data.path=pairs.jsonl
  python train.py -m seed=1,2,3                                # a sweep: one folder a job"""


@dataclass(frozen=True)
class Command:
    """The purpose of a command, and the words that it takes."""

    does: str
    """One line of the overview."""
    lines: tuple[str, ...]
    """Commands as they are typed."""
    keys: tuple[tuple[str, str], ...] = ()
    """Its own keys, each with its meaning."""
    more: str = ""


_RUN = ("run_dir", "the folder of a run")
_LAST = ("ckpt_path", "a checkpoint of it, or `last`: the newest whole one")

COMMANDS = {
    "train": Command("learn; `lit-rl train` alone is the demo, which learns additions", ()),
    "eval": Command(
        "score a trained policy on the validation data, with intervals",
        ("lit-rl eval run_dir=runs/x ckpt_path=last eval.group_size=8 eval.temperature=1",),
        (
            _RUN,
            _LAST,
            ("eval.group_size", "completions a prompt; above 1 also pass@k"),
            ("eval.temperature", "0: greedy"),
        ),
        "Model, data, algorithm and reward are the run's. What is typed counts more; a line names what differs.",
    ),
    "plan": Command(
        "does a run fit into memory, and how long does a step take",
        ("lit-rl plan model=qwen0.5b data=gsm8k",),
        (("plan.memory_gb", "memory of another machine"), ("plan.probe", "false: do not time a step")),
        "Takes the arguments of `lit-rl train`. It writes nothing.",
    ),
    "chat": Command(
        "talk to a model",
        ("lit-rl chat run_dir=runs/x", "lit-rl chat model=path/to/a/model"),
        (
            _RUN,
            _LAST,
            ("chat.plain", "true: each line is a prompt; false: a conversation; null: as it was trained"),
            ("chat.system_prompt", "opens the conversation"),
            ("sampling.temperature", "and the other keys of sampling"),
            ("seed", "the same replies again"),
        ),
    ),
    "data-check": Command(
        "what a data set becomes: format, rows as tokens, lengths, filters",
        ("lit-rl data-check data.path=pairs.jsonl", "lit-rl data-check algo=sft data.path=texts.jsonl model=qwen0.5b"),
        (("data.path", "a file, a folder or a hub id"), ("data_check.rows", "how many rows are shown")),
        "It loads a tokenizer and no weights, and writes nothing.",
    ),
    "reward-test": Command(
        "what a reward says of a few rows",
        ("lit-rl reward-test data.path=mine.jsonl reward=./mine.py:score",),
        (("reward_test.rows", "how many rows"), ("reward_test.completions", "a JSONL file of completions to score")),
        "It loads no weights, and writes nothing.",
    ),
    "best-of-n": Command(
        "the best of several completions of every prompt, as a data set",
        ("lit-rl best-of-n data.path=mine.jsonl eval.group_size=8 run_dir=runs/x ckpt_path=last",),
        (("data.path", "the prompts"), ("eval.group_size", "completions a prompt"), _RUN, _LAST),
    ),
    "replay": Command(
        "the loss and gradient of other methods on a recorded rollout",
        ("lit-rl replay run_dir=runs/x replay.losses=[grpo,gspo,cispo]",),
        (
            _RUN,
            ("replay.losses", "algo presets; `run` is the run's own"),
            ("replay.rollout", "a file of run_dir/rollouts"),
        ),
    ),
    "transcripts": Command(
        "recorded episodes as a page for the browser",
        ("lit-rl transcripts run_dir=runs/x",),
        (
            _RUN,
            ("transcripts.files", "names of samples/"),
            ("transcripts.rollouts", "how many files"),
            ("transcripts.episodes", "how many of each"),
            ("transcripts.tokens", "how many of each episode"),
        ),
    ),
    "report": Command(
        "a run as a page for the browser: curves, samples, config, time, alarms",
        ("lit-rl report run_dir=runs/x",),
        (_RUN,),
        "A run writes it at its end. It loads no weights, and changes nothing of the run.",
    ),
    "export": Command(
        "a checkpoint of a run as a Hugging Face folder, verified; to the hub if you say so",
        ("lit-rl export run_dir=runs/x", "lit-rl export run_dir=runs/x export.push_to_hub=user/name"),
        (
            _RUN,
            _LAST,
            ("export.folder", "where to; null is hf in the run's folder, or hf_steps/step_N of another checkpoint"),
            ("export.push_to_hub", "a repository of the hub; HF_TOKEN has to be set"),
            ("export.private", "false: a new repository is public"),
        ),
    ),
    "compare": Command(
        "two runs on the same validation prompts: paired tests, curves on top of each other",
        ("lit-rl compare runs/a runs/b",),
        (),
        "It loads no weights, and writes one page into the first folder.",
    ),
    "env-check": Command(
        "is an environment fit to train on",
        ("lit-rl env-check env=environment env.path=./my_game.py:Game reward=environment data.path=mine.jsonl",),
        (("env_check.actions", "what the policy says, turn by turn"),),
        "It loads no weights, and writes nothing.",
    ),
    "serve": Command(
        "vLLM's server for a training",
        ("lit-rl serve model=qwen0.5b serve.port=0",),
        (
            ("serve.host", "an address; any but 127.0.0.1 lets others replace the weights"),
            ("serve.port", "0 takes a free one"),
            ("serve.log", "a file for its output"),
            ("serve.startup_timeout", "seconds until it has to answer"),
        ),
    ),
    "doctor": Command(
        "does a generator hold the policy, and how near are its log-probs",
        ("lit-rl doctor generator=vllm model=qwen0.5b",),
        (("doctor.prompts", "how many prompts"), ("doctor.completions", "how many completions of them")),
    ),
    "list": Command(
        "the choices of a group, and what each is",
        ("lit-rl list", "lit-rl list algo", "lit-rl list algo/loss --config-dir my_conf"),
    ),
    "env": Command("versions, devices and optional packages of this machine", ("lit-rl env",)),
    "completion": Command(
        "words for the TAB key of bash, zsh and fish",
        (
            'eval "$(lit-rl completion bash)"          # in ~/.bashrc to keep it',
            'eval "$(lit-rl completion zsh)"           # in ~/.zshrc',
            "lit-rl completion fish | source           # in ~/.config/fish/config.fish",
        ),
    ),
}
"""Every command but LightningCLI's, in the order of the overview."""


def overview() -> str:
    """Return the overview of `lit-rl`."""
    wide = max(map(len, COMMANDS))
    return (
        "lit_rl: RL post-training of language models on PyTorch Lightning\n\n"
        "  lit-rl COMMAND [GROUP=CHOICE ...] [KEY=VALUE ...]\n\n"
        + "\n".join(f"  {name:<{wide}}  {command.does}" for name, command in COMMANDS.items())
        + "\n\n  lit-rl fit|validate|test|predict --config FILE: LightningCLI, which has a --help of its own\n\n"
        "`lit-rl train --help` shows the keys that matter, `lit-rl COMMAND --help` those of a command,\n"
        "`lit-rl --version` the version. The demo: lit-rl train\n"
    )


def page() -> str:
    """Return the help page of a training."""
    taken = " ".join(f"{group}={choice}" for group, choice in default_choices().items())
    fill = {"width": 119, "initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
    return (
        "lit_rl: RL post-training of language models on PyTorch Lightning\n\n"
        "  python train.py [GROUP=CHOICE ...] [KEY=VALUE ...]       (or: lit-rl train ...)\n\n"
        "Groups (`model=` is a Hugging Face model, `algo=` a LightningModule), as they stand where nothing is typed:\n"
        + textwrap.fill(taken, **fill)
        + "\n  The choices of one: lit-rl list algo. A whole recipe: experiment=NAME. In a group: algo/loss=cispo.\n\n"
        "Keys that matter (every key: python train.py --cfg job):\n"
        + _KEYS
        + "\n\nExamples:\n"
        + _EXAMPLES
        + "\n\nOther commands: lit-rl --help"
        + "\n"
    )


def of(name: str) -> str:
    """Return the help page of one command."""
    if name == "train":
        return page()
    command = COMMANDS[name]
    wide = max((len(key) for key, _ in command.keys), default=0)
    parts = [f"lit-rl {name}: {command.does}", "\n".join(f"  {line}" for line in command.lines)]
    if command.keys:
        parts.append("Keys:\n" + "\n".join(f"  {key:<{wide}}  {said}" for key, said in command.keys))
    if command.more:
        parts.append(textwrap.fill(command.more, 119))
    parts.append("More: docs/commands.md. Every key of the config: lit-rl train --cfg job")
    return "\n\n".join(parts) + "\n"
