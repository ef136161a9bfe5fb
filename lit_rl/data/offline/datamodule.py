"""Data modules of the methods that learn from a data set: texts, pairs or verdicts, and labelled steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from lit_rl.data.hub import GivenRows
from lit_rl.data.offline.example_module import ExampleDataModule


class SupervisedDataModule(ExampleDataModule):
    """Texts to imitate, for `SFT`.

    Args:
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`.
        learn: Tokens that are learned: `completion` (all tokens of a text without a prompt), `assistant` (what the chat
            template marks as the assistant's), or `all`.
        packing: `none` is a row a text; `best_fit` puts whole texts together into rows of `max_length`, `wrapped` cuts
            them wherever a row is full. Texts of a row never see each other.
        shared: Further arguments of `ExampleDataModule`.
    """

    serves = ("texts",)

    def __init__(
        self,
        rows: GivenRows | None = None,
        *,
        learn: Literal["completion", "assistant", "all"] = "completion",
        packing: Literal["none", "best_fit", "wrapped"] = "none",
        **shared: Any,
    ) -> None:
        super().__init__(rows, **shared)
        self.options = replace(self.options, learn=learn, packing=packing)


class PreferenceDataModule(ExampleDataModule):
    """Pairs of a chosen and a rejected completion, or single completions with a verdict.

    Methods that learn from verdicts take pairs too: each gives two.

    Args:
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`.
        shared: Further arguments of `ExampleDataModule`.
    """

    serves = ("pairs", "verdicts")

    def __init__(self, rows: GivenRows | None = None, **shared: Any) -> None:
        super().__init__(rows, **shared)


class StepwiseDataModule(ExampleDataModule):
    """Solutions in steps, each step labelled right or wrong, for a process reward model.

    Args:
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`.
        separator: Ends every step.
        last_step_only: Learn the label of the last step only.
        shared: Further arguments of `ExampleDataModule`.
    """

    serves = ("stepwise",)

    def __init__(
        self, rows: GivenRows | None = None, *, separator: str = "\n", last_step_only: bool = False, **shared: Any
    ) -> None:
        super().__init__(rows, **shared)
        self.options = replace(self.options, separator=separator, last_step_only=last_step_only)
