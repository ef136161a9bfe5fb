"""The README.md of an exported model: names that mean something elsewhere, the papers it cites, and how to load it.

No path of this machine stands in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lit_rl.core.errors import ConfigError


class Paper(NamedTuple):
    """A paper, as a citation names it.

    Attributes:
        arxiv: Its id there.
        title: As arXiv has it.
        author: The first of its authors.
        year: Of its first version.
    """

    arxiv: str
    title: str
    author: str
    year: int


PAPERS = {
    "ppo": Paper("1707.06347", "Proximal Policy Optimization Algorithms", "Schulman, John", 2017),
    "dpo": Paper(
        "2305.18290",
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "Rafailov, Rafael",
        2023,
    ),
    "gkd": Paper(
        "2306.13649",
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "Agarwal, Rishabh",
        2023,
    ),
    "nashmd": Paper("2312.00886", "Nash Learning from Human Feedback", "Munos, R{\\'e}mi", 2023),
    "cpo": Paper(
        "2401.08417",
        "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
        "Xu, Haoran",
        2024,
    ),
    "kto": Paper("2402.01306", "KTO: Model Alignment as Prospect Theoretic Optimization", "Ethayarajh, Kawin", 2024),
    "grpo": Paper(
        "2402.03300",
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "Shao, Zhihong",
        2024,
    ),
    "onlinedpo": Paper("2402.04792", "Direct Language Model Alignment from Online AI Feedback", "Guo, Shangmin", 2024),
    "rloo": Paper(
        "2402.14740",
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "Ahmadian, Arash",
        2024,
    ),
    "orpo": Paper(
        "2403.07691", "ORPO: Monolithic Preference Optimization without Reference Model", "Hong, Jiwoo", 2024
    ),
    "bco": Paper(
        "2404.04656", "Binary Classifier Optimization for Large Language Model Alignment", "Jung, Seungjae", 2024
    ),
    "xpo": Paper(
        "2405.21046",
        "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient RLHF",
        "Xie, Tengyang",
        2024,
    ),
}
"""The paper of each class of algorithm that has one, as in docs/papers.md."""


def bibtex(arxiv: str) -> str:
    """Return an entry to cite a paper with; of an unknown one, its arXiv id alone."""
    fields = {"eprint": arxiv, "archivePrefix": "arXiv"}
    if (known := next((paper for paper in PAPERS.values() if paper.arxiv == arxiv), None)) is not None:
        fields = {"title": f"{{{known.title}}}", "author": f"{known.author} and others", "year": known.year} | fields
    lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
    return f"@misc{{arxiv_{arxiv.replace('.', '_')},\n{lines}\n}}"


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")
"""A model's folder in the hub's cache."""
_OF_A_RUN = re.compile(r"hf(?:_steps|_ema|_bema|_merged)?|step_\d+")
"""Folders of exports, which every run calls alike."""
_DATA = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip")
_FOLDERS = re.compile(r"(^|[=,:\[({'\" ])/(?:[^/,\])}'\"=]+/)+")
"""The folders of an absolute path in a word of a command, and what stands before them; of an address there are two
slashes behind the colon."""


@dataclass(frozen=True)
class ModelName:
    """The name of a model that a training began with."""

    name: str
    """The hub id, the short name (`tiny`), or the name of the folder; of a run's export the name of the run."""
    hub_id: str | None
    """The model's own hub id, or that of the model that it says it was made from."""
    is_folder: bool
    """True for a folder of this machine, which others do not have."""

    @classmethod
    def of(cls, model: str) -> ModelName:
        """Make the name for a value of `model.name`."""
        if is_hub_id(model):
            return cls(model, model, is_folder=False)
        folder = Path(model).expanduser()
        if not (model.startswith(("/", ".", "~")) or ("/" in model and folder.is_dir())):
            return cls(model, None, is_folder=False)
        if cached := _CACHED.search(folder.as_posix()):
            return cls("/".join(cached.groups()), "/".join(cached.groups()), is_folder=False)
        origin = next((each for each in _named_origins(folder) if is_hub_id(each)), None)
        own_names = [part for part in folder.resolve().parts[1:] if not _OF_A_RUN.fullmatch(part)]
        return cls(own_names[-1] if own_names else "model", origin, is_folder=True)

    def __str__(self) -> str:
        return self.name


def is_hub_id(name: str) -> bool:
    """Tell whether the name of a model or of a data set is one of the hub's, and not a folder or a file here."""
    return (
        _HUB_ID.fullmatch(name) is not None and name[0] != "." and not name.endswith(_DATA) and not Path(name).exists()
    )


def without_folders(word: str) -> str:
    """Return a word of a command, or the name of data, with `path/to/` in place of the folders of an absolute path."""
    return _FOLDERS.sub(r"\1path/to/", word)


def _named_origins(folder: Path) -> Iterator[str]:
    """Yield the models that a folder says it was made from: in its configs, and in the card of an earlier export."""
    import yaml
    from huggingface_hub import metadata_load

    for file, key in (("adapter_config.json", "base_model_name_or_path"), ("config.json", "_name_or_path")):
        try:
            config = json.loads((folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and isinstance(config.get(key), str):
            yield config[key]
    try:
        header = metadata_load(card) if (card := folder / "README.md").is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        return
    # Of a card that lit_rl wrote: others may name a distant ancestor of their model.
    if header and "lit_rl" in (header.get("tags") or ()) and isinstance(base := header.get("base_model"), str):
        yield base


_FACTS = (
    *("base_model", "algorithm", "results", "scores", "versions", "dataset", "title", "prompts", "paper", "command"),
)
CITATION = """@software{lit_rl,
  title = {{lit_rl: PyTorch Lightning modules for RL post-training of language models}},
  author = {{The lit_rl maintainers}},
  version = {0.1.0}
}"""
"""The entry of CITATION.cff, as BibTeX."""
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
    adapter: bool = False,
    tags: Sequence[str] = (),
) -> str:
    """Return a model card: YAML header, how to load, how it was trained, results, versions.

    Args:
        facts: ``base_model`` (hub id, short name, folder) and ``algorithm`` are needed. ``results`` and ``versions``
            map names to values, or a result to its values by column; ``scores`` maps names of results to numbers, for
            the header; ``dataset`` (several: with commas) and ``title`` are text, ``prompts`` is a `PromptForm`,
            ``paper`` the arXiv id of the method's paper, ``command`` the command lines of the run. A ``base_model`` or
            a ``dataset`` that is no ``owner/name`` of the hub stands in the text alone, a folder or a file by its name.
        loaded_by: The class of transformers that loads the model.
        pipeline: The hub's word for what the model does.
        how_to_load: The lines of Python that load it. None: those of the class `loaded_by`.
        adapter: Whether an adapter was trained, which is also there by itself.
        tags: The hub's words for how it was trained.

    Raises:
        ConfigError: a needed fact is missing, or a fact is unknown.
    """
    wrong = ({"base_model", "algorithm"} - facts.keys()) | (facts.keys() - set(_FACTS))
    if wrong:
        raise ConfigError(f"The facts of a model card are {', '.join(_FACTS)}; missing or unknown: {sorted(wrong)}.")
    base, algorithm = ModelName.of(str(facts["base_model"])), str(facts["algorithm"])
    if "dataset" in facts:
        facts = {**facts, "dataset": ", ".join(map(without_folders, str(facts["dataset"]).split(", ")))}
    citations = CITATION + (f"\n\n{bibtex(str(facts['paper']))}" if facts.get("paper") else "")
    title = _cell(facts.get("title", f"{base} trained with {algorithm}"))
    data = f" on {_cell(facts['dataset'])}" if "dataset" in facts else ""
    made_from = f", a model made from `{base.hub_id}`," if base.is_folder and base.hub_id else ""
    body = [
        f"# {title}",
        f"`{_cell(base)}`{made_from} trained with `{_cell(algorithm)}`{data}, by lit_rl.",
        *([_PROMPTS[facts["prompts"]]] if "prompts" in facts else []),
        _section(how_to_load) if how_to_load else _how_to_load(loaded_by, facts.get("prompts")),
        *([_adapter(base)] if adapter else []),
        *([_training(str(facts["command"]))] if "command" in facts else []),
        *_table(
            "Results", "held out, mean and 95 % interval" if "scores" in facts else "metric", facts.get("results", {})
        ),
        *_table("Versions", "package", facts.get("versions", {})),
        f"## Citation\n\n```bibtex\n{citations}\n```",
    ]
    return f"---\n{_header_of_card(facts, base.hub_id, title, pipeline, tags)}\n---\n\n" + "\n\n".join(body) + "\n"


def _header_of_card(facts: Mapping[str, Any], base: str | None, title: str, pipeline: str, tags: Sequence[str]) -> str:
    """Return the YAML that the hub reads, as its own client writes it."""
    from huggingface_hub import EvalResult, ModelCardData

    algorithm, paper = str(facts["algorithm"]), facts.get("paper")
    data = [name for name in str(facts.get("dataset", "")).split(", ") if is_hub_id(name)]
    measured_on = data[0] if len(data) == 1 else str(facts.get("dataset", "unknown"))
    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=measured_on,
            dataset_name=measured_on,
            metric_type="reward",
            metric_name=name,
            metric_value=round(float(value), 6),
        )
        for name, value in facts.get("scores", {}).items()
    ]
    return ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base else None,  # of an adapter too: the weights are merged
        datasets=data or None,
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["lit_rl", *tags, algorithm, *([f"arxiv:{paper}"] if paper else [])],
        model_name=title if results else None,
        eval_results=results or None,
    ).to_yaml()


_HOW_TO_LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"  # or the name of its repository on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)"""


_ASK = {
    "text": """inputs = tokenizer("...", return_tensors="pt")""",
    "messages": """messages = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")""",
}
_ANSWER = """written = model.generate(**inputs, max_new_tokens=256)
print(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def _adapter(base: ModelName) -> str:
    name = f"path/to/{base}" if base.is_folder else base.name
    return (
        "An adapter was trained. It is merged into these weights, and by itself in `adapter/`:\n\n```python\n"
        "from peft import PeftModel\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({name!r})\n"
        'model = PeftModel.from_pretrained(base, folder, subfolder="adapter")\n```'
    )


def _section(lines: str) -> str:
    return f"## How to load\n\n```python\n{lines}\n```"


def _training(command: str) -> str:
    fence = "```"
    while fence in command:  # as a word of it may be
        fence += "`"
    return f"## How it was trained\n\n{fence}bash\n{command}\n{fence}"


def _how_to_load(loaded_by: str, prompts: str | None) -> str:
    if loaded_by == "AutoModelForCausalLM" and prompts in _ASK:
        return _section(f"{_HOW_TO_LOAD}\n\n{_ASK[prompts]}\n{_ANSWER}")
    text = _section(_HOW_TO_LOAD.replace("AutoModelForCausalLM", loaded_by))
    if loaded_by != "AutoModelForImageTextToText":
        return text
    return text.replace("AutoTokenizer", "AutoProcessor").replace("tokenizer", "processor")


def _table(title: str, column: str, rows: Mapping[str, Any]) -> list[str]:
    """Return the title and the table: a row for each name, with its value, or with its values by column."""
    if not rows:
        return []
    values = {name: value if isinstance(value, Mapping) else {"value": value} for name, value in rows.items()}
    columns = list(dict.fromkeys(each for value in values.values() for each in value))
    lines = [[column, *columns], ["---"] * (1 + len(columns))]
    lines += [[name, *(value.get(each, "") for each in columns)] for name, value in values.items()]
    return [f"## {title}", "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)]


def _cell(value: Any) -> str:
    """Return a value as text in which a name is no link, no picture, no HTML, and has no control characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    return shown.replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
