"""A name of another library gets one answer at each of the three doors, from one table (`core/other_names.yaml`)."""

from __future__ import annotations

from lit_rl import (
    DPO,
    GRPO,
    AdamW,
    PreferenceDataModule,
    RolloutDataModule,
    Sampling,
    SupervisedDataModule,
)
from lit_rl.core import other_names
from lit_rl.core.errors import keyword_names
from lit_rl.core.speedups import DecodingSpeedups, ModelSpeedups


def test_every_switch_of_a_speedup_has_its_key_and_its_keyword() -> None:
    rows: dict[str, tuple[str, str]] = {}
    for key, kind in (("model.speedups", ModelSpeedups), ("generator.speedups", DecodingSpeedups)):
        for name, usual in vars(kind()).items():
            said = f"write speedups={{{name!r}: {not usual}}}, where {usual} is the default"
            rows[name] = (f"{key}.{name}", said)
    assert {
        name: (other_names.column("key")[name], said) for name, said in other_names.column("speedups").items()
    } == rows


def test_keywords_in_the_table_are_of_classes_and_every_place_has_a_name() -> None:
    taken = {
        "algorithm": keyword_names(GRPO) | keyword_names(DPO),
        "data": keyword_names(RolloutDataModule)
        | keyword_names(PreferenceDataModule)
        | keyword_names(SupervisedDataModule),
        "optimizer": keyword_names(AdamW),
        "sampling": keyword_names(Sampling),
    }
    used = set()
    for column, names in taken.items():
        for name, answer in other_names.column(column).items():
            if isinstance(answer, list):
                missing = {*answer} - names - {"max_completion_tokens", "separator", "last_step_only", "betas"}
                assert not missing, (column, name)
            used.add(answer if isinstance(answer, str) else "")
    assert other_names.PLACES.keys() <= used
