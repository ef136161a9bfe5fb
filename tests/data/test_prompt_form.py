"""Whether a policy learns from plain text or from messages, as the data say: `lit-rl chat` asks in the same way."""

from __future__ import annotations

from typing import Any

import pytest

from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel

ASKED = [{"role": "user", "content": "1+1="}]
ANSWERED = [{"role": "assistant", "content": "2"}]
WRONG = [{"role": "assistant", "content": "3"}]


@pytest.mark.parametrize(
    ("make", "row", "form"),
    [
        (RolloutDataModule, {"prompt": "1+1="}, "text"),
        (RolloutDataModule, {"prompt": ASKED}, "messages"),
        (SupervisedDataModule, {"text": "1+1=2"}, "text"),
        (SupervisedDataModule, {"prompt": "1+1=", "completion": "2"}, "text"),
        (SupervisedDataModule, {"messages": ANSWERED}, "messages"),  # nothing before it
        (SupervisedDataModule, {"input_ids": [1, 2]}, None),
        (PreferenceDataModule, {"prompt": ASKED, "chosen": ANSWERED, "rejected": WRONG}, "messages"),
    ],
)
def test_the_form_of_the_prompts(make: Any, row: dict[str, Any], form: str | None):
    data = make(rows=[row] * 4, val_fraction=0)
    data.prepare(LanguageModel("tiny").tokenizer, stage="predict")
    assert data.prompt_form == form
