"""SFT against TRL 1.16: what is learned of each kind of row, both losses, packing and accumulation, every metric."""

from __future__ import annotations

from typing import Any

import pytest
from oracle_cases import assert_same_step
from oracle_sft import CHATS, PAIRS, TEXTS, Rows, make_trainer, our_batches, ours, their_batches, theirs

KINDS: dict[str, tuple[Rows, str]] = {
    "completion": (PAIRS, "completion"),
    "prompts too": (PAIRS, "all"),
    "texts": (TEXTS, "all"),
    "chats, the assistant": (CHATS, "assistant"),
    "chats, all": (CHATS, "all"),
}


@pytest.fixture(scope="module", params=["full", "lora"])
def trl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer(tmp_path_factory.mktemp(request.param), lora=request.param == "lora")


def assert_same(trl: Any, kind: str, *, loss: str = "nll", packed: int | None = None, micro: int = 9, aux: float = 0):
    rows, learn = KINDS[kind]
    how: dict[str, Any] = {"packed": packed, "micro": micro}
    mine = ours(trl, our_batches(trl, rows, learn, **how), loss=loss, aux=aux)
    other = theirs(trl, their_batches(trl, rows, learn, **how), loss=loss, aux=aux)
    assert_same_step(mine, other)
    assert mine.metrics.keys() == other.metrics.keys()
    for name, values in other.metrics.items():
        # Packed rows stand in another order there.
        found = sorted(mine.metrics[name]) if packed else mine.metrics[name]
        assert found == pytest.approx(sorted(values) if packed else values, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("loss", ["nll", "dft"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_of_each_kind_of_row(trl: Any, kind: str, loss: str) -> None:
    assert_same(trl, kind, loss=loss)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows(trl: Any, kind: str) -> None:
    assert_same(trl, kind, packed=70)


@pytest.mark.parametrize("loss", ["nll", "dft"])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_micro_batches_of_uneven_token_counts(trl: Any, micro: int, loss: str) -> None:
    assert_same(trl, "completion", micro=micro, loss=loss)


def test_packed_micro_batches(trl: Any) -> None:
    assert_same(trl, "texts", packed=40, micro=1)


@pytest.mark.parametrize("micro", [9, 2])
def test_the_routers_loss(trl: Any, micro: int) -> None:
    assert_same(trl, "texts", aux=0.3, micro=micro)
