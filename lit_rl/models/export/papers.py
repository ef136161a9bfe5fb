"""The papers that model cards cite."""

from __future__ import annotations

from typing import NamedTuple


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
