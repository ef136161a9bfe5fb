"""The papers that model cards cite."""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    """As a citation names it.

    Attributes:
        title: As arXiv has it.
        author: The first of its authors.
        year: Of its first version.
    """

    title: str
    author: str
    year: int


PAPERS = {
    "1707.06347": Paper("Proximal Policy Optimization Algorithms", "Schulman, John", 2017),
    "2305.18290": Paper(
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", "Rafailov, Rafael", 2023
    ),
    "2306.13649": Paper(
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", "Agarwal, Rishabh", 2023
    ),
    "2312.00886": Paper("Nash Learning from Human Feedback", "Munos, R{\\'e}mi", 2023),
    "2401.08417": Paper(
        "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
        "Xu, Haoran",
        2024,
    ),
    "2402.01306": Paper("KTO: Model Alignment as Prospect Theoretic Optimization", "Ethayarajh, Kawin", 2024),
    "2402.03300": Paper(
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", "Shao, Zhihong", 2024
    ),
    "2402.04792": Paper("Direct Language Model Alignment from Online AI Feedback", "Guo, Shangmin", 2024),
    "2402.14740": Paper(
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "Ahmadian, Arash",
        2024,
    ),
    "2403.07691": Paper("ORPO: Monolithic Preference Optimization without Reference Model", "Hong, Jiwoo", 2024),
    "2404.04656": Paper("Binary Classifier Optimization for Large Language Model Alignment", "Jung, Seungjae", 2024),
    "2405.21046": Paper(
        "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient RLHF",
        "Xie, Tengyang",
        2024,
    ),
}
"""By arXiv id: those of `lit_rl.commands.export.PAPER_OF`, which has them by algorithm."""


def bibtex(arxiv: str) -> str:
    """An entry to cite a paper with; of one that is not known here, its arXiv id alone."""
    fields = {"eprint": arxiv, "archivePrefix": "arXiv"}
    if (known := PAPERS.get(arxiv)) is not None:
        fields = {"title": f"{{{known.title}}}", "author": f"{known.author} and others", "year": known.year} | fields
    told = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
    return f"@misc{{arxiv_{arxiv.replace('.', '_')},\n{told}\n}}"
