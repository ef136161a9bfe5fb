from __future__ import annotations

from typing import Any

import pytest
from byte_tokenizers import make_tokenizer
from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(40)]
