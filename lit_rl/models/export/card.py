"""The README.md of an exported model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rl.errors import ConfigError

_FACTS = ("base_model", "algorithm", "results", "versions", "dataset", "title", "prompts", "paper", "command")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CITATION = """@software{lit_rl,
  title = {{lit_rl: PyTorch Lightning modules for RL post-training of language models}},
  author = {{The lit_rl maintainers}},
  version = {0.1.0}
}"""
"""What CITATION.cff says, as BibTeX."""
_PROMPTS = {
    "text": "Prompts were plain text, and are given as they stand: without the chat template, if there is one.",
    "messages": "Prompts were messages, which its chat template renders.",
}


def model_card(
    facts: Mapping[str, Any],
    *,
    loaded_by: str = "AutoModelForCausalLM",
    pipeline: str = "text-generation",
    how_to_load: str | None = None,
) -> str:
    """A model card: YAML header, how to load, how it was trained, results, versions.

    Args:
        facts: ``base_model`` (hub id or short name) and ``algorithm`` are needed. ``results`` and ``versions`` map
            names to values, ``dataset`` and ``title`` are text, ``prompts`` is a `PromptForm`, ``paper`` the arXiv id
            of the method's paper, ``command`` the command line of the run. A ``base_model`` that is no ``owner/name``
            stands in the text alone.
        loaded_by: The class of transformers that loads the model.
        pipeline: The hub's word for what the model does.
        how_to_load: The lines of Python that load it. None: those of the class `loaded_by`.

    Raises:
        ConfigError: a needed fact is missing, or a fact is unknown.
    """
    wrong = ({"base_model", "algorithm"} - facts.keys()) | (facts.keys() - set(_FACTS))
    if wrong:
        raise ConfigError(f"The facts of a model card are {', '.join(_FACTS)}; missing or unknown: {sorted(wrong)}.")
    base, algorithm = str(facts["base_model"]), str(facts["algorithm"])
    paper = facts.get("paper")
    header = [
        "---",
        # JSON strings are YAML strings, so nothing in a name can break the header
        *([f"base_model: {json.dumps(base)}"] if _is_hub_id(base) else []),
        "library_name: transformers",
        f"pipeline_tag: {pipeline}",
        f"tags: {json.dumps(['lit_rl', 'reinforcement-learning', algorithm, *([f'arxiv:{paper}'] if paper else [])])}",
        "---",
    ]
    data = f" on {_cell(facts['dataset'])}" if "dataset" in facts else ""
    body = [
        f"# {_cell(facts.get('title', f'{base} trained with {algorithm}'))}",
        f"`{_cell(base)}` trained with `{_cell(algorithm)}`{data}, by lit_rl.",
        *([_PROMPTS[facts["prompts"]]] if "prompts" in facts else []),
        _section(how_to_load) if how_to_load else _how_to_load(loaded_by),
        *([_training(str(facts["command"]))] if "command" in facts else []),
        *_table("Results", "metric", facts.get("results", {})),
        *_table("Versions", "package", facts.get("versions", {})),
        f"## Citation\n\n```bibtex\n{CITATION}{_of_paper(str(paper), algorithm) if paper else ''}\n```",
    ]
    return "\n".join(header) + "\n\n" + "\n\n".join(body) + "\n"


_HOW_TO_LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)"""


def _is_hub_id(base: str) -> bool:
    """Whether a model's name is one of the hub's, and not a folder here."""
    return _HUB_ID.fullmatch(base) is not None and base[0] != "." and not Path(base).is_dir()


def _of_paper(arxiv: str, algorithm: str) -> str:
    return (
        f"\n\n@misc{{arxiv_{arxiv.replace('.', '_')},\n"
        f"  title = {{arXiv:{arxiv}, on which lit_rl's {algorithm} is built}},\n"
        f"  eprint = {{{arxiv}}},\n  archivePrefix = {{arXiv}}\n}}"
    )


def _section(lines: str) -> str:
    return f"## How to load\n\n```python\n{lines}\n```"


def _training(command: str) -> str:
    fence = "```"
    while fence in command:  # as a word of it may be
        fence += "`"
    return f"## How it was trained\n\n{fence}bash\n{command}\n{fence}"


def _how_to_load(loaded_by: str) -> str:
    text = _section(_HOW_TO_LOAD.replace("AutoModelForCausalLM", loaded_by))
    if loaded_by != "AutoModelForImageTextToText":
        return text
    return text.replace("AutoTokenizer", "AutoProcessor").replace("tokenizer", "processor")


def _table(title: str, column: str, rows: Mapping[str, Any]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {column} | value |", "|---|---|", *(f"| {_cell(key)} | {_cell(rows[key])} |" for key in rows)]
    return [f"## {title}", "\n".join(lines)]


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
