"""What is wrong with a tokenizer, a data set or a reward ends the run with its exit code and a message.

Where it can be known before weights are read, the model is a folder without weights: reaching them would be exit 7.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import Command, Outcome, contents, metrics, refused, write_jsonl
from safetensors.torch import load_file
from small_models import SPECIAL, save_model, save_tokenizer
from tiers import quick
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lit_rl.core import chat_template

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]
CHAT = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}], "answer": str(2 * n)} for n in range(8)]

Trial = Callable[..., Outcome]


@pytest.fixture
def weightless(tmp_path: Path) -> Path:
    """A model of which everything is there but the weights."""
    return save_tokenizer(tmp_path / "weightless")


@pytest.fixture
def look(step: Command, cwd: Path, weightless: Path) -> Trial:
    """`look(rows or text, *overrides)`: a run on that file with the model that has no weights."""

    def run(content: list[dict[str, Any]] | str | bytes, *overrides: str, name: str = "mine.jsonl") -> Outcome:
        path = cwd / name
        if isinstance(content, list):
            write_jsonl(path, content)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        model = ["model=local", f"model.name={weightless}"]
        return step(*model, "data=jsonl", f"data.path={name}", "run_dir=run", *overrides)

    return run


def reaches_the_weights(outcome: Outcome) -> None:
    """The data and the reward were accepted."""
    refused(outcome, 7, "safetensors")


def report(step: Command, *overrides: str) -> dict[str, Any]:
    """The counts of the data in the summary of a run with the shipped policy."""
    outcome = step("data=jsonl", "data.path=mine.jsonl", "run_dir=counted", *overrides)
    assert outcome.code == 0, outcome.err
    return json.loads(Path("counted/summary.json").read_text())["data"]


@pytest.mark.all
class TestTokenizer:
    def test_without_a_pad_token_one_is_chosen_and_exported(self, step: Command, cwd, tmp_path):
        folder = save_model(tmp_path / "model", pad=None)
        outcome = step("model=local", f"model.name={folder}", "run_dir=run")
        assert outcome.code == 0, outcome.err
        tokenizer, hf = AutoTokenizer.from_pretrained(cwd / "run" / "hf"), cwd / "run" / "hf"
        assert tokenizer.pad_token == "<pad>"
        assert GenerationConfig.from_pretrained(hf).pad_token_id == tokenizer.pad_token_id

    def test_without_an_end_nothing_could_stop(self, step: Command, cwd, tmp_path):
        save_tokenizer(tmp_path / "weightless", eos=None)
        model = ["model=local", f"model.name={tmp_path / 'weightless'}"]
        refused(step(*model), 2, "no EOS token", "model.eos_token", "<|im_end|>")
        refused(step(*model, "model.eos_token='<|imend|>'"), 2, "model.eos_token='<|imend|>'", "'<|im_end|>'")
        reaches_the_weights(step(*model, "model.eos_token='<|im_end|>'"))

    def test_every_end_is_an_end(self, step: Command, cwd, tmp_path):
        every = list(range(264))  # whatever is sampled first ends the response
        folder = save_model(tmp_path / "model", generation={"eos_token_id": every})
        outcome = step("model=local", f"model.name={folder}", "run_dir=run")
        assert outcome.code == 0, outcome.err
        logged = metrics(cwd / "run")
        assert logged["train/completions/mean_length"] == 1 and logged["train/completions/clipped_ratio"] == 0
        assert sorted(GenerationConfig.from_pretrained(cwd / "run" / "hf").eos_token_id) == every

    def test_messages_without_a_chat_template(self, step: Command, cwd, tmp_path):
        folder = save_tokenizer(tmp_path / "weightless", template=None)
        write_jsonl(cwd / "mine.jsonl", CHAT)
        data = ["model=local", f"model.name={folder}", "data=jsonl", "data.path=mine.jsonl"]
        refused(step(*data), 3, "mine.jsonl:1", "no chat template", "Instruct", "model.chat_template", "plain strings")
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        (cwd / "template.jinja").write_text(template)
        reaches_the_weights(step(*data, "model.chat_template=template.jinja"))

    def test_a_chat_template_that_hardly_ends(self, look: Trial, cwd, monkeypatch):
        monkeypatch.setattr(chat_template, "LIMIT", 0.2)
        loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
        (cwd / "theirs.jinja").write_text(loops)
        words = ["model.chat_template=theirs.jinja", "data.on_bad_row=skip"]  # no row of these is merely bad
        refused(look(CHAT, *words), 2, "The chat template of", "still ran after 0.2 s", "model.chat_template=FILE")


GOOD = json.dumps(ROWS[0])
BAD_FILES: dict[str, tuple[Any, list[str], list[str]]] = {
    "no-prompt-column": ([{"promt": "1", "answer": "1"}], [], ["mine.jsonl:1", "'prompt'", "promt", "data.prompt_key"]),
    "less-than-a-rollout": (ROWS, ["data.prompts_per_rollout=64"], ["data.prompts_per_rollout=64", "held_out"]),
    "broken-line": (f'{GOOD}\n{{"prompt": "x"\n', [], ["mine.jsonl:2", "not valid JSON", '{"prompt": "x"']),
    "split-of-a-file": (ROWS, ["data.split=train"], ["data.split='train'", "remove"]),
}


@pytest.mark.parametrize("case", quick(BAD_FILES, {"no-prompt-column", "broken-line"}))
def test_a_bad_data_set_is_refused_before_any_weight_is_read(look: Trial, case):
    content, overrides, words = BAD_FILES[case]
    outcome = look(content, *overrides)
    refused(outcome, 2 if case == "split-of-a-file" else 3, *words)  # a fault of the settings, not of the data
    assert len(outcome.err) < 1500


@pytest.mark.all
def test_a_kind_of_file_that_is_not_read(look: Trial):
    refused(look(ROWS, name="mine.xls"), 3, "mine.xls", "'.xls'", ".jsonl", ".parquet")


@pytest.mark.all
def test_numbers_and_texts_in_one_column_become_texts(look: Trial):
    reaches_the_weights(look([*ROWS, {"prompt": "1+1=", "answer": 2}]))


@pytest.mark.all
class TestCounts:
    """Whatever is left out is in the summary."""

    def test_bad_lines_empty_prompts_and_long_ones(self, step: Command, cwd: Path):
        long = {"prompt": "1" * 30 + "+1=", "answer": "1"}
        empty = [{"prompt": "", "answer": "1"}, {"prompt": " \n", "answer": "1"}]
        write_jsonl(cwd / "mine.jsonl", [*ROWS, long, *empty])
        with (cwd / "mine.jsonl").open("a") as file:
            file.write('{"prompt": \n[1]\n')
        refused(step("data=jsonl", "data.path=mine.jsonl"), 3, "mine.jsonl:12", "data.on_bad_row=skip")
        settings = ["data.on_bad_row=skip", "data.val_fraction=0", "data.max_prompt_tokens=10"]
        counts = report(step, *settings)["train"]
        assert (counts["rows"], counts["bad"], counts["empty"], counts["kept"]) == (13, 2, 2, 8)
        assert (counts["overlong"], counts["longest"]) == (1, 33)


@pytest.mark.all
def test_pairs_that_say_nothing_are_counted_and_too_many_are_refused(command: Command, cwd, weightless):
    good = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "x"} for n in range(8)]
    bad = [good[0] | fault for fault in ({"rejected": "0"}, {"chosen": ""}, {"prompt": " "})]
    write_jsonl(cwd / "mine.jsonl", good + bad)
    words = ["algo=dpo", "data=preferences", "data.path=mine.jsonl", "data.val_fraction=0", "run_dir=run"]
    words += ["data.batch_size=2", "trainer.max_steps=1", "trainer.accelerator=cpu", "logger=none"]
    refusal = command(*words, "model=local", f"model.name={weightless}")
    refused(refusal, 3, "mine.jsonl: 3 of 11 rows", "data.max_dropped=0.1", "equal 1", "empty 2")
    assert contents(cwd) == ["mine.jsonl"]
    outcome = command(*words, "data.max_dropped=0.3")
    assert outcome.code == 0, outcome.err
    counts = json.loads((cwd / "run" / "summary.json").read_text())["data"]["train"]
    assert (counts["rows"], counts["equal"], counts["empty"]) == (11, 1, 2)


@pytest.fixture
def score(cwd: Path, step: Command) -> Trial:
    """`score(body, *overrides)`: one step with a reward whose function body that is."""

    def run(body: str, *overrides: str, signature: str = "prompts, completions, **columns") -> Outcome:
        (cwd / "my_reward.py").write_text(f"import math\ndef score({signature}):\n    {body}\n")
        write_jsonl(cwd / "mine.jsonl", ROWS)
        data = ["data=jsonl", "data.path=mine.jsonl", "data.val_fraction=0"]
        return step(*data, "reward=function", "reward.fn=./my_reward.py:score", "run_dir=run", *overrides)

    return run


@pytest.mark.all
class TestSignature:
    def test_that_does_not_fit_the_columns(self, score: Trial, weightless):
        outcome = score("return [1.0]", "model=local", f"model.name={weightless}", signature="completions, anwser")
        refused(outcome, 4, "'score'", "'anwser'", "Columns: answer", "'answer'")

    def test_that_misses_a_column_of_a_validation_set(self, score: Trial, weightless, cwd):
        write_jsonl(cwd / "val.jsonl", [{"prompt": "1+1="}])
        model = ["model=local", f"model.name={weightless}", "data.val_path=val.jsonl"]
        outcome = score("return [1.0]", *model, signature="completions, answer")
        refused(outcome, 4, "'answer'", "validation set")


@pytest.mark.all
def test_a_model_that_is_no_reward_model_ends_the_run_before_the_policys_weights_are_read(look: Trial, tmp_path):
    config = json.loads((save_tokenizer(tmp_path / "judge") / "config.json").read_text())
    (tmp_path / "judge" / "config.json").write_text(json.dumps(config | {"num_labels": 2}))
    name = f"reward.functions.reward_model.name={tmp_path / 'judge'}"
    outcome = look(ROWS, "data.val_fraction=0", "reward=reward_model", name, "reward.on_error=0")
    refused(outcome, 2, "judge", "num_labels=2", "Set label to the one that is the reward")


BAD_RETURNS = {
    "one-too-few": ("return [1.0] * (len(completions) - 1)", ["'score'", "a list of 3 values", "4 numbers"]),
    "raises": ("return [1 / 0 for _ in completions]", ["'score'", "ZeroDivisionError", "line 3", "my_reward.py"]),
}


@pytest.mark.parametrize("case", quick(BAD_RETURNS, {"one-too-few"}))
def test_a_bad_return_value_is_refused(score: Trial, case):
    body, words = BAD_RETURNS[case]
    refused(score(body), 4, *words)  # nothing was learned, so there is no folder


@pytest.mark.all
def test_a_reward_that_hangs_ends_the_run_at_its_limit(score: Trial):
    hangs = score("import time; time.sleep(60)", "reward.timeout=1")
    refused(hangs, 4, "'score'", "more than 1 seconds", "reward.timeout")


def finite(logged: dict[str, Any]) -> dict[str, float]:
    """All that was logged in training is a number; a mean of nothing is not logged, or null."""
    assert not [key for key, value in logged.items() if isinstance(value, float) and not math.isfinite(value)]
    return {key: value for key, value in logged.items() if value is not None}


def unchanged(run_dir: Path, model: Path) -> bool:
    after, before = load_file(run_dir / "hf" / "model.safetensors"), load_file(model / "model.safetensors")
    return all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.all
class TestNothingToLearnFrom:
    def test_no_reward_for_one_group(self, score: Trial, cwd, tiny_dir):
        outcome = score("return [float(i) if p == prompts[0] else None for i, p in enumerate(prompts)]")
        assert outcome.code == 0, outcome.err
        logged = finite(metrics(cwd / "run"))
        assert logged["train/grad_norm"] > 0 and logged["train/reward"] == 0.5
        assert not unchanged(cwd / "run", tiny_dir)

    def test_every_completion_cut_and_masked(self, score: Trial, cwd, tiny_dir):
        cut = ["sampling.max_new_tokens=1", "algo.mask_truncated=true"]
        outcome = score("return [float(i) for i, _ in enumerate(completions)]", *cut)
        assert outcome.code == 0, outcome.err
        logged = finite(metrics(cwd / "run"))
        assert logged["train/completions/clipped_ratio"] == 1 and logged["train/loss"] == 0
        assert unchanged(cwd / "run", tiny_dir)

    @pytest.mark.parametrize(("algo", "token"), [("grpo", "<|im_end|>"), ("dr_grpo", "<|im_start|>")])
    def test_completions_without_a_word(self, score: Trial, cwd, tmp_path, algo, token):
        folder = always(save_model(tmp_path / "model"), 256 + SPECIAL.index(token))
        body = "assert completions == [''] * len(completions); return [float(i) for i, _ in enumerate(completions)]"
        outcome = score(body, "model=local", f"model.name={folder}", f"algo={algo}")
        assert outcome.code == 0, outcome.err
        logged = finite(metrics(cwd / "run"))
        length = 1 if token == "<|im_end|>" else 6
        assert logged["train/completions/mean_length"] == length
        assert logged["train/completions/clipped_ratio"] == (length > 1)


def always(folder: Path, token: int) -> Path:
    """The model made to say one token whatever the prompt: one hidden unit is always large, and feeds its logit."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight.zero_()
        model.lm_head.weight[token, 0] = 100
    model.save_pretrained(folder)
    return folder
