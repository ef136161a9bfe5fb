"""Write docs/configuration/, a page for each group, and the tables of docs/configuration.md, from the YAML files of
`conf/` and the docstrings of the classes; lit_rl/cli/schema_keys.yaml, what each schema has
and what constructors allow; and lit_rl/reports/defaults.yaml, the defaults that `lit-rl report` compares with.

    python scripts/config_reference.py

What stands above the marker in the document is written by hand and kept. What constructors allow of a setting that is
one number or one word is read from their annotations: so that a range stands once, and is known before a constructor
can be imported (`lit_rl.cli.fast_checks` reads it in `schema_keys.yaml`). What depends on other settings is left to
the constructor.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import types
import typing
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from math import inf
from pathlib import Path
from typing import Any

import yaml
from hydra.utils import get_object
from source_pages import mark

from lit_rl.cli import listing, schemas
from lit_rl.core.declared_settings import declared_by, declared_parameters, setting_key
from lit_rl.core.errors import constructors_of
from lit_rl.reports import config_changes as constructors
from lit_rl.settings.base import Settings, sentences

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
DOCUMENT = ROOT / "docs" / "configuration.md"
PAGES = ROOT / "docs" / "configuration"
MARKER = "<!-- Below: `python scripts/config_reference.py`. Do not edit by hand. -->\n"
MARK = mark("config_reference.py", "`conf/` and docstrings")


def settings(name: str) -> Iterator[tuple[str, Any, str]]:
    """Yield `(parameter, default, meaning)` of what a schema names; of a class of ours not what a foreign parent
    explains."""
    path = {**schemas.TARGETS, **schemas.public_functions(), **SWITCHES}[name]
    target = schemas._load(path)
    meanings: dict[str, str] = {}
    theirs: set[str] = set()
    for described in reversed(target.__mro__ if isinstance(target, type) else [target]):
        found = arguments(inspect.cleandoc(described.__doc__ or ""))
        found = {key: text for key, text in found.items() if not (REFERS.fullmatch(text) and key in meanings)}
        theirs = theirs | found.keys() if is_foreign(described) else theirs - found.keys()
        meanings |= found
    if (config := config_of(target)) is not None:
        meanings |= sentences(config)
    for parameter, _ in schemas.parameters(target):
        if name in schemas.public_functions() and parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if parameter.name in theirs and not is_foreign(target):
            continue
        meaning = meanings.get(parameter.name, f"See `{path}`.")
        yield parameter.name, parameter.default, _meaning_of(parameter.name, meaning)


REFERS = re.compile(r"(?:See|As|As in) `(\w+)(?:\.(\w+))?`\.")
"""A sentence of a setting that has the meaning of another class's."""


def _meaning_of(name: str, meaning: str) -> str:
    """Return a meaning, or that of the class which it refers to."""
    found = REFERS.fullmatch(meaning)
    if found is None or found[1] not in schemas.TARGETS:
        return meaning
    return {key: text for key, _, text in settings(found[1])}.get(found[2] or name, meaning)


def config_of(target: Any) -> type[Settings] | None:
    """Return the dataclass of the settings that a constructor takes, if it has one."""
    return getattr(getattr(target, "__init__", None), "settings", None)


def is_foreign(target: Any) -> bool:
    """Return whether another package has made it."""
    return not target.__module__.startswith("lit_rl.")


def arguments(docstring: str) -> dict[str, str]:
    """Return the `Args:` section of a Google-style docstring."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return {}
    entries = re.split(r"^(\w+): ", textwrap.dedent(section[1]), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2])}


TERMS = [path.relative_to(CONF).as_posix() for path in sorted((CONF / "algo").rglob("*")) if path.is_dir()]
"""The sub-groups of `algo`."""

GROUPS = {
    "algo": "the method",
    "model": "the policy",
    "data": "what it learns from",
    "reward": "numbers for completions",
    "judge": "which of two completions is better",
    "reference": "what a KL is measured against",
    "sampling": "how completions are drawn",
    "generator": "what draws them",
    "env": "what answers the policy between its turns",
    "optimizer": "how weights move",
    "scheduler": "the learning rate over the steps",
    "eval": "validation",
    "trainer": "Lightning's Trainer",
    "strategy": "several devices",
    "logger": "where metrics go",
    "callbacks": "what watches and saves",
    "experiment": "whole recipes",
    "debug": "short runs that look for faults",
}
"""The groups at the top, each with a page of its own, and what it is about."""

SWITCHES = {name: f"lit_rl.core.speedups.{name}" for name in ("ModelSpeedups", "DecodingSpeedups")}
"""Settings that one key holds, and no schema."""

SURPRISING = ("algo.minibatches", "algo.beta", "algo.reward_beta")
EXPLAINED = " [Why this name](../configuration.md#names-that-surprise)."
"""Keys whose names the entry page explains, and what leads there."""

BY_NAME = ("algo.preference",)
"""Where several choices stand side by side, each under its own name."""


def schemas_in(group: str) -> list[str]:
    """Return the schemas that the files of a group take up, those that have settings."""
    files = sorted((CONF / group).glob("*.yaml"))
    names = [name for path in files for name in re.findall(r"/schemas/(\w+)@", path.read_text())]
    return [name for name in dict.fromkeys(names) if any(settings(name))]


ALGORITHMS = {
    "": ["GRPO", "RLOO", "Reinforce", "PPO"],
    "methods that learn from a data set": ["SFT", "GKD", "DPO", "CPO", "TPO", "ORPO", "KTO", "BCO"],
    "online preference methods": ["OnlineDPO", "NashMD", "XPO"],
    "reward models": ["RewardModeling", "ProcessRewardModeling"],
}

KEYS: list[tuple[str, str, list[str]]] = [
    *(("algo", of, names) for of, names in ALGORITHMS.items()),
    *((term.replace("/", "."), "", schemas_in(term)) for term in TERMS if schemas_in(term)),
    ("model", "", ["LanguageModel"]),
    ("model.lora", "", ["Lora"]),
    ("model.speedups", "each takes `true` or `false`", ["ModelSpeedups"]),
    ("data", "", ["RolloutDataModule"]),
    ("data", "data sets that are learned from", ["SupervisedDataModule", "PreferenceDataModule", "StepwiseDataModule"]),
    ("data.curriculum", "", ["Curriculum"]),
    (
        "data.task",
        "",
        [
            *("Addition", "Largest", "ReasoningGym", "Repeated", "Products"),
            *("GuessDemonstrations", "CalculatorDemonstrations", "RandomPlay", "Digits"),
        ],
    ),
    ("reward", "", ["from_paths", "Rewards", "RewardRecipes", "JointRewards"]),
    ("judge", "", ["RewardJudge", "FunctionJudge", "PairwiseJudge", "LLMJudge", "PairRMJudge"]),
    ("reference", "", ["FrozenCopy", "OtherModel", "EMAReference", "BEMAReference", "MixingReference"]),
    ("sampling", "", ["Sampling"]),
    ("generator", "", ["NativeGenerator", "HFGenerator", "HFContinuousGenerator"]),
    ("generator", "vLLM", ["VLLMGenerator", "VLLMServerGenerator"]),
    ("generator.speedups", "each takes `true` or `false`; NativeGenerator only", ["DecodingSpeedups"]),
    (
        "env",
        "",
        ["FunctionTools", "MCPTools", "CustomEnvironment", "GymnasiumEnvironment", "RolloutFunction"],
    ),
    ("optimizer", "", ["AdamW", "AdamW8bit", "AdamWSplit", "ByPath"]),
    ("scheduler", "", ["Linear", "Cosine", "Constant", "ScheduleByPath"]),
    ("eval", "", ["Evaluation"]),
    ("callbacks.samples", "", ["Samples"]),
    ("callbacks.token_samples", "", ["TokenSamples"]),
    ("callbacks.hub_samples", "", ["HubSamples"]),
    ("callbacks.rollouts", "", ["Rollouts"]),
    ("callbacks.progress", "", ["Progress"]),
    ("callbacks.histograms", "", ["Histograms"]),
    ("callbacks.preference_sets", "", ["PreferenceSets"]),
    ("callbacks.export", "", ["Export"]),
    ("callbacks.ema", "", ["EMAWeights"]),
    ("callbacks.bema", "", ["BEMAWeights"]),
    ("callbacks.merge", "", ["MergedWeights"]),
    ("callbacks.entropy_collapse", "", ["EntropyCollapse"]),
    ("callbacks.length_drift", "", ["LengthDrift"]),
    ("callbacks.repetition_drift", "", ["RepetitionDrift"]),
    ("callbacks.dead_groups", "", ["DeadGroups"]),
    ("callbacks.kl_blow_up", "", ["KLBlowUp"]),
    ("callbacks.clipped_share", "", ["ClippedShare"]),
    ("callbacks.held_out_flat", "", ["HeldOutFlat"]),
    ("callbacks.checkpoint", "", ["TimedCheckpoint"]),
]
"""Where the settings of a class stand in a config, of what, and the classes that may stand there."""

SLOTS = {
    **{name: name for name in ("model", "reward", "reference", "optimizer", "scheduler", "sampling")},
    **{name: name for name in ("generator", "env")},
    **{term.removeprefix("algo/"): term for term in TERMS if term.count("/") == 1},
    "ratio": "algo/loss/ratio",
    "statistic": "algo/rejection/statistic",
    "evaluation": "eval",
    "judge": "judge",
    "teacher": "model.*",
    "lora": "model.lora",
    "curriculum": "data.curriculum",
    "task": "data.task",
}
"""Constructor parameters that another group or table fills."""

DEPARTURES = [
    ("trainer", "trainer/default.yaml", "Trainer"),
    ("callbacks.checkpoint", "callbacks/default.yaml", "ModelCheckpoint"),
]
"""Lightning's own classes: key, file with our settings, schema."""


def tables() -> str:
    """Return everything below the marker of the entry page."""
    parts = [MARKER, "## The groups\n", f"{overview()}\n", "## Keys at the top\n", f"{top_level()}\n"]
    return "\n".join(parts).rstrip() + "\n"


def overview() -> str:
    """Return the groups, with their pages and the choice that a run takes where none is typed."""
    taken = listing.default_choices()
    rows = [
        f"| [`{group}`](configuration/{group}.md) | {about} | {f'`{taken[group]}`' if group in taken else ''} |"
        for group, about in GROUPS.items()
    ]
    return "\n".join(["| group | | where none is typed |", "|---|---|---|", *rows])


def page(group: str) -> str:
    """docs/configuration/<group>.md as it should be: its choices, those of groups inside it, and every key."""
    parts = [f"# `{group}`: {GROUPS[group]}\n", f"{MARK} [All groups](../configuration.md).\n", "## Choices\n"]
    if group == "algo":
        parts.append("Choices of `algo=`: [algorithms](../algorithms/README.md). Those of its parts:\n")
    parts += [f"{group_table(each)}\n" for each in (TERMS if group == "algo" else [group])]
    keys: list[str] = []
    written: dict[str, str] = {}
    for prefix, of, names in KEYS:
        if prefix.partition(".")[0] == group:
            title = f"`{prefix}.*`: {of}" if of else f"`{prefix}.*`"
            keys += [f"### {title}\n", f"{key_table(prefix, names, written)}\n"]
    for prefix, file, schema in DEPARTURES:
        if prefix.partition(".")[0] == group:
            title = f"### `{prefix}.*`: where we depart from Lightning\n"
            keys += [title, f"{departures(prefix, CONF / file, schema)}\n"]
    parts += ["## Every key\n", *keys] if keys else []
    return "\n".join(parts).rstrip() + "\n"


def group_table(group: str) -> str:
    """Return the choices of a group, each with the comment that opens its file."""
    rows = [f"| `{path.stem}` | {first_comment(path)} |" for path in sorted((CONF / group).glob("*.yaml"))]
    return "\n".join([f"| `{group}=` | |", "|---|---|", *rows])


def first_comment(path: Path) -> str:
    """Return the first comment that is not Hydra's own (`@package`)."""
    comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return cell(next(comment for comment in comments if not comment.startswith("@package")))


UNSAID = {
    "seed": "Of everything that is drawn.",
    "task": "What is done: `fit` trains, and every [command](commands.md) has its own.",
}
"""Keys at the top whose line says nothing of them."""


def top_level() -> str:
    """Return the keys of `conf/config.yaml` that belong to no group."""
    text = (CONF / "config.yaml").read_text().partition("\n\n")[2].partition("\nhydra:")[0]
    found = re.findall(r"^(\w+): (\S.*?)(?:\s+# (.*))?$", text, re.MULTILINE)
    rows = [f"| `{key}` | `{default}` | {cell(comment) or UNSAID[key]} |" for key, default, comment in found]
    return "\n".join(["| key | default | |", "|---|---|---|", *rows])


def key_table(prefix: str, names: list[str], written: dict[str, str]) -> str:
    """Return a line for each setting with what it takes, its default and a sentence; below, those without a line.

    A setting without a line is one that another group fills, or one whose line another table of the page has.

    Args:
        written: Lines of the page so far, by key. The table's own are added.
    """
    rows: dict[str, list[tuple[str, Any, str]]] = {}
    for name in names:
        for key, default, meaning in settings(name):
            rows.setdefault(f"{name}.{key}" if prefix in BY_NAME else key, []).append((name, default, meaning))
    lines, filled, above = [], [], []
    for key, found in rows.items():
        whole, field = f"{prefix}.{key}", key.rpartition(".")[2]
        if key in SLOTS and prefix != "judge":  # the model of a judge is a name
            named_so = SLOTS[key] in (key, whole, whole.replace(".", "/"))
            filled.append(f"`{whole}`" if named_so else f"`{whole}` ({SLOTS[key]})")
            continue
        text = sentence(found, [] if prefix in BY_NAME else names, whole)
        line = f"{takes(found, field)} | {defaults(found)} | {text} |"
        if written.get(whole) == line:
            above.append(f"`{whole}`")
            continue
        same = (other for other, row in written.items() if other.endswith(f".{field}") and row.endswith(f"| {text} |"))
        if len(text) > 40 and (other := next(same, None)):
            lines.append(f"| `{whole}` | {line.replace(f'| {text} |', f'| As `{other}`. |')}")
        else:
            lines.append(f"| `{whole}` | {line}")
        written[whole] = line
    text = "\n".join(["| key | takes | default | |", "|---|---|---|---|", *lines]) if lines else ""
    notes = [f"As above: {', '.join(above)}."] if above else []
    notes += [f"Filled by groups: {', '.join(filled)}."] if filled else []
    return "\n\n".join(part for part in [text, " ".join(notes)] if part)


def sentence(found: list[tuple[str, Any, str]], every: list[str], key: str) -> str:
    """Return what a setting is, for each class where that differs, and which classes have it.

    Args:
        every: The classes that may stand there; empty where that is one.
    """
    texts: dict[str, list[str]] = {}
    for name, _, meaning in found:
        texts.setdefault(short(meaning, limited=bool(limits(name, key.rpartition(".")[2]))), []).append(name)
    first, *others = texts
    if all(other and first.startswith(other) for other in others):
        of_all = not every or len(found) == len(every)
        distinct = len({shown(default) for _, default, _ in found}) > 1  # the defaults name the classes
        text = first if of_all or distinct else f"{first} ({_which([name for name, _, _ in found], every)})"
    else:
        most = first if len(texts[first]) > 2 and len(texts[first]) > len(found) / 2 else None
        parts = [each if each == most else f"{', '.join(names)}: {each}" for each, names in texts.items() if each]
        text = " ".join(parts)
    return cell(text.strip()) + (EXPLAINED if key in SURPRISING else "")


def _which(names: list[str], every: list[str]) -> str:
    """Return names of classes, or those that are left, where these are fewer."""
    others = [name for name in every if name not in names]
    return f"not {', '.join(others)}" if len(others) < len(names) else ", ".join(names)


VALUE = re.compile(
    r"(?:None|null)\b|[`\"0-9]|(?:False|True|Off|On|Needs|Not|Only|Above|Below|From|In Python|Each|Several|Built in)\b"
    r"|(?:No|Other|Its|With|What|Losses|Models|After|They are not learned|The same numbers)\b"
)
"""How a sentence begins that says what a value means, when the setting applies, or what to be careful of."""
BETWEEN = re.compile(r"(?<=[.!?])(?<!\beq\.)(?<!Dr\.) (?=[A-Z`\"0-9]|null\b)")
NUMBER = r"\d+(?:\.\d+)?"
RANGE = re.compile(rf"[,;]? (?:in [\[(][^\])]*[\])]|at least {NUMBER}|{NUMBER} or more|above {NUMBER})(?=[.;]|$)")


def short(meaning: str, limited: bool = False) -> str:
    """Return the first sentence, and those on what a value means.

    Args:
        limited: Leave out the range, which stands elsewhere.
    """
    first, *others = BETWEEN.split(meaning)
    kept = " ".join([first, *(each for each in others if VALUE.match(each))])
    if limited:
        kept = re.sub(rf"^At least {NUMBER}\.\s*", "", RANGE.sub("", kept))
    return kept


def target_of(name: str) -> Any:
    """Return what a schema names."""
    return schemas._load({**schemas.TARGETS, **schemas.public_functions(), **SWITCHES}[name])


def limits(name: str, key: str) -> dict[str, Any]:
    """Return what a schema's target declares of a setting: a range, words, null."""
    target = target_of(name)
    if not isinstance(target, type):
        return allowed.record if (allowed := declared_parameters(target).get(key)) else {}
    return {part: value for part, value in declared_values(target).get(key, {}).items() if part != "key"}


def takes(found: list[tuple[str, Any, str]], key: str) -> str:
    """Return the type and the range of a setting, for each class where they differ."""
    texts: dict[str, list[str]] = {}
    for name, default, _ in found:
        hints = {parameter.name: hint for parameter, hint in schemas.parameters(target_of(name))}
        texts.setdefault(taken(hints.get(key), limits(name, key), default), []).append(name)
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in texts.items())


KINDS: dict[Any, str] = {bool: "bool", int: "int", float: "float", str: "text", type(None): "null"}
KINDS |= {dict: "mapping", abc.Mapping: "mapping", list: "list", tuple: "list", abc.Sequence: "list"}
KINDS |= {abc.Callable: "function"}


def taken(hint: Any, record: dict[str, Any], default: Any) -> str:
    """Return the kinds of value that an annotation allows, as YAML has them; with what it declares."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    literals = (option for option in options if typing.get_origin(option) is typing.Literal)
    words = [f"`{word}`" for option in literals for word in typing.get_args(option)]
    kinds = ["mapping" if is_dataclass(each) else KINDS.get(typing.get_origin(each) or each, "") for each in options]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind and not (kind == "text" and "words" in record)]
    kinds = [] if kinds == ["null"] and not words else kinds  # of objects
    if not kinds and not record and type(default) in KINDS and default is not None:
        kinds = [KINDS[type(default)]]
    if "low" in record:
        number = "int" if record.get("whole") else "float"
        kinds = [f"{number} {bounds(record)}".rstrip(), *(kind for kind in kinds if kind not in ("int", "float"))]
    words = words or [f"`{word}`" for word in record.get("words", ())]
    kinds += ["null"] if record.get("null") and "null" not in kinds else []
    return ", ".join([*(kind for kind in kinds if kind != "null"), *words, *(["null"] if "null" in kinds else [])])


def bounds(record: dict[str, Any]) -> str:
    """Return a range as one writes it."""
    low, high = (f"{record.get(end, inf):.10g}" for end in ("low", "high"))
    if low == "-inf":
        return ""
    if high == "inf":
        return f"> {low}" if record.get("open_low") else f">= {low}"
    return f"{'(' if record.get('open_low') else '['}{low}, {high}{')' if record.get('open_high') else ']'}"


def defaults(found: list[tuple[str, Any, str]]) -> str:
    """Return one default, or one a class where they differ."""
    values: dict[str, list[str]] = {}
    for name, default, _ in found:
        values.setdefault(shown(default), []).append(name)
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in values.items())


def shown(default: Any) -> str:
    """Return a default as YAML has it."""
    if default is inspect.Parameter.empty:
        return "required"
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "`{}`"
    if inspect.isfunction(default):  # its address is another in each process
        return f"`{default.__name__}`"
    if isinstance(default, tuple):
        default = list(default)
    if isinstance(default, str) and "\n" in default:
        return f"`{json.dumps(default)}`" if len(default) < 20 else "a text of several lines"
    if default is None or isinstance(default, bool):
        return f"`{yaml.safe_dump(default).splitlines()[0]}`"
    return f"`{default}`"


def departures(prefix: str, path: Path, schema: str) -> str:
    """Return the settings that a YAML file makes and that are not the class's default, with the comment of their
    line."""
    text = path.read_text()
    if not prefix.startswith("trainer"):
        text = textwrap.dedent(text.partition(f"\n{prefix.rpartition('.')[2]}:\n")[2])
    usual = {name: default for name, default, _ in settings(schema)}
    found = re.findall(r"^(\w+): ([^\[\n]\S*)(?:\s+# (.*))?$", text, re.MULTILINE)
    found = [(key, value, comment) for key, value, comment in found if yaml.safe_load(value) != usual.get(key)]
    rows = [f"| `{prefix}.{key}` | `{value}` | {cell(comment)} |" for key, value, comment in found]
    return "\n".join(["| key | value | why |", "|---|---|---|", *rows])


def cell(text: str) -> str:
    """Return text that stands in one cell of a Markdown table."""
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", text.replace("``", "`"))
    text = re.sub(r"\bNone\b", "null", text)
    return text.replace("|", "\\|").replace("<", "&lt;").strip()


def document() -> str:
    """docs/configuration.md as it should be."""
    return DOCUMENT.read_text().partition(MARKER)[0] + tables()


def schema_keys() -> str:
    """lit_rl/cli/schema_keys.yaml as it should be."""
    lines = [
        "# The keys of every schema, each with its type and default; and what constructors allow. Do not edit by hand:",
        f"# `python scripts/config_reference.py` writes this file.\n_versions_: {in_a_line(schemas.schema_versions())}",
    ]
    lines += ["_allowed_:", *(f"  {path}: {in_a_line(found)}" for path, found in all_ranges().items())]
    lines += [
        f"{name}: {in_a_line(schemas.stored_fields(node))}" for name, node in sorted(schemas.all_schemas().items())
    ]
    return "\n".join(lines) + "\n"


def usual() -> str:
    """lit_rl/reports/defaults.yaml as it should be: of all that schemas and shipped files name."""
    named = {*schemas.TARGETS.values(), *schemas.public_functions().values()}
    for path in CONF.rglob("*.yaml"):
        named |= set(re.findall(r"_target_: ([\w.]+)", path.read_text()))
    found = {
        target: constructors.look_up_defaults(target)
        for target in sorted(named)
        if target.startswith(constructors.KNOWN_PACKAGES)
    }
    lines = [
        "# The defaults of constructors and functions, for `lit-rl report`. Do not edit by hand:",
        f"# `python scripts/config_reference.py` writes this file.\n_lightning_: {constructors.lightning_version()!r}",
    ]
    lines += [f"{target}: {in_a_line(constructors.plain_defaults(each))}" for target, each in found.items()]
    return "\n".join(lines) + "\n"


def in_a_line(value: Any) -> str:
    """Return as YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()


# --------------------------------------------------------------------------------------------- what constructors allow

Found = dict[str, dict[str, Any]]
"""By a parameter's name: its key, and what is allowed there (`Allowed.record`)."""


def declared_values(target: Any) -> Found:
    """Return what the annotations of a constructor, of those that it passes keywords on to, and of its settings
    allow."""
    found: Found = {}
    for constructor in constructors_of(target) if isinstance(target, type) else ():
        if (config := getattr(constructor, "settings", None)) is not None:
            for name, allowed in declared_by(config).items():
                found.setdefault(name, {"key": f"{config.key}.{name}", **allowed.record})
        elif hasattr(constructor, "key"):
            for name, allowed in constructor.declared().items():
                found.setdefault(name, {"key": setting_key(constructor, target, name), **allowed.record})
    return found


def declared_values_of_loss(loss: Callable[..., Any]) -> Found:
    """Return the same of a loss, whose annotations declare its ranges."""
    return {
        name: {"key": f"algo.loss.{name}", **allowed.record}
        for name, allowed in declared_parameters(loss).items()
        if allowed.range is not None
    }


def all_ranges() -> dict[str, Found]:
    """Return it by the path of what is built; and the words of Lightning's Trainer."""
    found = {path: declared_values(get_object(path)) for path in schemas.TARGETS.values() if path.startswith("lit_rl.")}
    losses = {
        path: declared_values_of_loss(get_object(path))
        for path in schemas.public_functions().values()
        if ".ops.policy_losses." in path
    }
    lora = get_object("lit_rl.models.Lora")  # a schema beside the model's names it by the module that it is in
    found[f"{lora.__module__}.{lora.__qualname__}"] = found["lit_rl.models.Lora"]
    found |= losses
    return {path: found[path] for path in sorted(found) if found[path]} | {"lightning.Trainer": _of_trainer()}


def _of_trainer() -> Found:
    import lightning as L
    from lightning.pytorch.accelerators import AcceleratorRegistry
    from lightning.pytorch.strategies import StrategyRegistry

    hints = {parameter.name: hint for parameter, hint in schemas.parameters(L.Trainer)}
    words = {
        "accelerator": ["auto", "gpu", *sorted(AcceleratorRegistry.available_accelerators())],
        "precision": ["auto", *(str(word) for word in dict.fromkeys(map(str, _literals(hints["precision"]))))],
        "strategy": ["auto", *sorted(StrategyRegistry.available_strategies())],
    }
    return {name: {"key": f"trainer.{name}", "words": allowed} for name, allowed in words.items()}


def _literals(hint: Any) -> Iterator[Any]:
    for each in typing.get_args(hint):
        if typing.get_origin(hint) is typing.Literal:
            yield each
        else:
            yield from _literals(each)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    PAGES.mkdir(exist_ok=True)
    for group in GROUPS:
        (PAGES / f"{group}.md").write_text(page(group))
    listing.SCHEMA_KEYS.write_text(schema_keys())
    constructors.DEFAULTS_FILE.write_text(usual())
