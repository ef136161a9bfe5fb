"""What a model card says, read as the hub reads it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, metadata_load

from lit_rl.algorithms import GRPO, SFT
from lit_rl.models.model_card import CITATION, PAPERS, ModelName, bibtex, model_card
from lit_rl.reports.secrets import redact_command
from lit_rl.runs.export_checkpoint import card_facts, commands_for_readers

NAN = {"reward": float("nan")}
SUMMARY = {
    "before": {"": {"greedy": {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6}}},
    "after": {"": {"greedy": {"reward": 0.8, "reward_low": 0.7, "reward_high": 0.9}}},
}


def test_a_card_says_how_good_it_is_and_what_to_cite() -> None:
    text = model_card(card_facts("me/base", "grpo", "sums", SUMMARY))
    card = ModelCard(text)
    assert card.data.base_model == "me/base" and "arxiv:2402.03300" in card.data.tags
    assert "| held out, mean and 95 % interval | before | after |\n| --- | --- | --- |\n" in text
    assert "| reward, greedy | 0.500 [0.400, 0.600] | 0.800 [0.700, 0.900] |" in text
    assert CITATION in text and "eprint = {2402.03300}" in text


def test_the_header_is_what_the_hubs_client_reads(tmp_path: Path) -> None:
    path, both = tmp_path / "README.md", {"after": {"": SUMMARY["after"][""], "hard: 1": {"sampled at 1": NAN}}}
    path.write_text(
        model_card(
            card_facts("me/base", "grpo", "ann/sums, data/mine.jsonl, bob/words", both), tags=GRPO.export_form.tags
        )
    )
    told = metadata_load(path)
    assert told is not None and told["datasets"] == ["ann/sums", "bob/words"]
    assert (told["base_model"], told["base_model_relation"], told["library_name"]) == (
        *("me/base", "finetune"),
        "transformers",
    )
    assert told["tags"] == ["lit_rl", "reinforcement-learning", "grpo", "arxiv:2402.03300"]
    (result,) = ModelCard.load(path).data.eval_results or ()  # of a `model-index` that is whole, else None
    assert (result.metric_name, result.metric_value, result.task_type) == ("reward, greedy", 0.8, "text-generation")
    path.write_text(model_card(card_facts("me/base", "grpo", "ann/sums", both)))
    (result,) = ModelCard.load(path).data.eval_results or ()
    assert result.dataset_type == result.dataset_name == "ann/sums"

    path.write_text(model_card(card_facts("tiny", "sft", "addition", {}), tags=SFT.export_form.tags))
    told = metadata_load(path)
    assert told is not None and not told.keys() & {"base_model", "base_model_relation", "datasets", "model-index"}
    assert "reinforcement-learning" not in told["tags"]


def test_a_card_has_the_command_without_its_folder_and_without_secrets() -> None:
    lengths = ["sampling.max_new_tokens=6", "--data.max_prompt_tokens=null", "data.path=my data.jsonl"]
    typed = ["python", "train.py", "reward=[format,exact_match]", *lengths, "run_dir=/data/x"]
    secrets = ["+judge.api_key=k1", "model.name=ann:pw@hub", "reward.url=https://ann:pw@host/v1", "x=hf_" + "a" * 24]
    secrets += ["+judge={api_key:k2,url:x}", "+reward.headers={Authorization:Bearer k3}", "+env.env.MY_ACCESS_KEY=k4"]
    secrets += ["data.path=https://h/x?sig=k5", "+a.hf_token@b=k6", "+a.tokens=k7", "+a.token=123"]
    command = redact_command(shlex.join([*typed, *secrets, "model.revision=" + "ab" * 20, "y=```"]))
    text = model_card(card_facts("me/base", "grpo", "sums", SUMMARY | {"command": command}))
    (told,) = re.findall(r"## How it was trained\n\n````bash\n(.*)\n````\n", text)
    assert shlex.split(told) == [
        *typed[:-1], "+judge.api_key=<redacted>", "model.name=ann:pw@hub", "reward.url=https://<redacted>host/v1",
        "x=<redacted>", "+judge=<redacted>", "+reward.headers=<redacted>", "+env.env.MY_ACCESS_KEY=<redacted>",
        "data.path=https://h/x?sig=<redacted>", "+a.hf_token@b=<redacted>", "+a.tokens=<redacted>",
        "+a.token=<redacted>", "model.revision=" + "ab" * 20, "y=```",
    ]  # fmt: skip
    assert "How it was trained" not in model_card(card_facts("me/base", "grpo", "sums", SUMMARY))


def test_a_card_of_a_run_that_was_gone_on_with_has_every_command() -> None:
    own = {"command": "lit-rl train algo=rloo run_dir=/data/x/mine", "went_on": [
        "lit-rl train algo=rloo trainer.max_steps=9 run_dir=/data/x/mine ckpt_path=last"]}  # fmt: skip
    text = model_card(card_facts("me/base", "rloo", "sums", SUMMARY | own))
    assert re.findall(r"```bash\n(.*?)\n```", text, re.DOTALL) == [
        "lit-rl train algo=rloo run_dir=runs/mine\n"
        "lit-rl train algo=rloo trainer.max_steps=9 run_dir=runs/mine ckpt_path=last"
    ]


def test_a_base_that_is_on_no_hub_is_not_in_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    named = {
        "tiny": "tiny",
        "./runs/a/hf": "a",
        "../a": "a",
        "/a/b": "b",
        "models/mine": "mine",
        "~/x/hf_steps/step_9": "x",
    }
    for name, told in named.items():
        text = model_card(
            card_facts(name, "sft", "/a/b/sums.jsonl, /c/d.csv", {"after": SUMMARY["after"]}), adapter=True
        )
        assert ModelCard(text).data.base_model is None and f"`{told}` trained with" in text
        assert "on path/to/sums.jsonl, path/to/d.csv, by" in text and "/a/" not in text and "~" not in text
        assert f"from_pretrained('{told if name == told else f'path/to/{told}'}')" in text
        assert "| 0.800 [0.700, 0.900] |" in text and "@misc" not in text


@pytest.mark.parametrize("told_by", ["config.json", "adapter_config.json", "README.md", "snapshots"])
def test_a_folder_that_says_what_it_was_made_from_is_named_by_both(told_by: str, tmp_path: Path) -> None:
    """A cached snapshot is that model; a card of others does not count, nor a path in a config."""
    folder = tmp_path / "said" / "hf"
    files = {"config.json": {"_name_or_path": "me/base"}, "adapter_config.json": {"base_model_name_or_path": "me/base"}}
    if told_by == "snapshots":
        folder = tmp_path / "models--me--base" / "snapshots" / "0a1b"
    folder.mkdir(parents=True)
    if told_by in files:
        (folder / told_by).write_text(json.dumps(files[told_by]))
    elif told_by == "README.md":
        (folder / told_by).write_text(model_card(card_facts("me/base", "sft", "sums", {})))
    text = model_card(card_facts(str(folder), "grpo", "sums", {}))
    assert ModelCard(text).data.base_model == "me/base" and str(tmp_path) not in text
    own = "`me/base`" if told_by == "snapshots" else "`said`, a model made from `me/base`,"
    assert f"\n{own} trained with `grpo`" in text

    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("---\nbase_model: me/base\n---\n")
    (other / "config.json").write_text(json.dumps({"_name_or_path": "/a/ann/base"}))
    assert ModelName.of(str(other)) == ModelName("other", None, is_folder=True)


def test_commands_of_a_card_name_no_folder_of_the_author() -> None:
    word = "python /a/b/train.py model.name=/a/b/runs/x/hf data.path=[/a/m.jsonl,/a/b/n.csv] reward.fn=/a/r.py:f x=https://h/v/1"
    assert commands_for_readers([f"{word} y=./z/a.py"]) == (
        "python train.py model.name=path/to/hf 'data.path=[path/to/m.jsonl,path/to/n.csv]' reward.fn=path/to/r.py:f "
        "x=https://h/v/1 y=./z/a.py"
    )


def test_citations_are_those_of_the_repository(root: Path) -> None:
    told = yaml.safe_load((root / "CITATION.cff").read_text())
    for value in (told["title"], told["version"], told["authors"][0]["name"]):
        assert value in CITATION
    papers = (root / "docs" / "papers.md").read_text()
    assert not [paper.arxiv for paper in PAPERS.values() if paper.arxiv not in papers]


def test_the_paper_of_a_method_is_cited_as_one_cites() -> None:
    assert bibtex("2402.01306") == (
        "@misc{arxiv_2402_01306,\n  title = {{KTO: Model Alignment as Prospect Theoretic Optimization}},\n"
        "  author = {Ethayarajh, Kawin and others},\n  year = {2024},\n  eprint = {2402.01306},\n"
        "  archivePrefix = {arXiv}\n}"
    )
    assert bibtex("1234.56789").splitlines()[1] == "  eprint = {1234.56789},"


def test_a_card_names_no_version_of_what_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As lit_rl is none where it is found by PYTHONPATH."""

    def version(name: str) -> str:
        if name == "lit-rl":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert set(card_facts("tiny", "grpo", "rows", {})["versions"]) == {"torch", "transformers", "lightning"}
