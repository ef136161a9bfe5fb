"""A run with a curriculum: what it tells the data of its rollouts, what it logs, and that it resumes exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from small_rollouts import batch, completions, scores, trainer

from lit_rl.algorithms import GRPO, AdamW, Constant, Evaluation
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts.scored import CurriculumFeedback, Scored
from lit_rl.algorithms.terms.groups import DynamicSampling
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.rollout import Sampling
from lit_rl.data.curriculum import Curriculum, RowDraws
from lit_rl.data.order import RolloutOrder
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.prompt_set import PromptSet
from lit_rl.rewards import Rewards

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + 4 * b)} for a in range(4) for b in range(4)]


def parity(completions: list[str], answer: list[str]) -> list[float]:
    """Even numbers of characters at one half of the prompts; the other half gets one and the same."""
    return [float(len(text) % 2 == 0) if int(a) % 2 else float(a != "8") for text, a in zip(completions, answer)]


class Watch(L.Callback):
    """Keeps the rows of each rollout, what was measured for it, and what was logged."""

    def __init__(self) -> None:
        self.drawn: list[list[int]] = []
        self.kept: list[list[int]] = []
        self.told: list[list[Any]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.slot == 0:
            self.drawn.append(list(batch.rows))
            self.kept.append(list(pl_module.scored.batch.rows))
            self.told.append(list(pl_module.feedback._outcomes))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.logged.append({name: value for name, value in metrics.items() if "time" not in name})


def module_of(**settings: Any) -> GRPO:
    common = {
        "group_size": 4, "sampling": Sampling(max_new_tokens=4), "optimizer": AdamW(lr=2e-3), "scheduler": Constant(),
        "minibatches": 2, "evaluation": Evaluation(limit=4), **settings,
    }  # fmt: skip
    return GRPO("tiny", common.pop("reward", parity), **common)


def fitted(folder: Path, module: Any, *, steps: int = 12, ckpt: Path | None = None, **data: Any) -> tuple[Watch, Any]:
    watch = Watch()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    limits = {"limit_val_batches": data.pop("limit_val_batches", 0), "val_check_interval": 0.5}
    run = trainer(folder, max_steps=steps, callbacks=[watch, saving], enable_checkpointing=True, **limits)
    curriculum = data.pop("curriculum", Curriculum(weights=[0.3, 1.0, 0.3]))
    rows = {"rows": ROWS, "prompts_per_rollout": 4, "val_fraction": 0, **data}
    datamodule = RolloutDataModule(curriculum=curriculum, **rows)
    run.fit(module, datamodule=datamodule, ckpt_path=ckpt, weights_only=True)
    return watch, datamodule


def assert_same_draws(one: RolloutDataModule, two: RolloutDataModule) -> None:
    assert one.draws is not None and two.draws is not None
    np.testing.assert_array_equal(one.draws._means, two.draws._means)
    assert one.draws.state()["draws"] == two.draws.state()["draws"]


def test_the_data_learns_the_last_mean_of_every_prompt_and_the_estimate_is_weighed_back(tmp_path):
    watch, data = fitted(tmp_path, module_of())
    known = np.full(len(ROWS), np.nan, np.float32)
    for number, (rows, told) in enumerate(zip(watch.drawn, watch.told, strict=True)):
        assert [outcome.row for outcome in told] == rows and {outcome.scored for outcome in told} == {4}
        pools = Curriculum().pools(known, ~np.isnan(known))
        weights = np.asarray([0.3, 1.0, 0.3, 1.0])[pools[rows]]
        means = np.asarray([outcome.total / outcome.scored for outcome in told])
        logged = watch.logged[2 * number + 1]
        uniform = (means / weights).sum() / (1 / weights).sum()
        assert logged["train/curriculum/uniform/reward"] == pytest.approx(uniform)
        assert logged["train/curriculum/uniform/rewards/parity"] == pytest.approx(uniform)
        assert logged["train/reward"] == pytest.approx(means.mean())
        for pool, name in enumerate(["pool_0", "pool_1", "pool_2", "unseen", "unscored"]):
            assert logged[f"train/curriculum/rows/{name}"] == pytest.approx((pools == pool).mean())
            assert logged[f"train/curriculum/drawn/{name}"] == pytest.approx((pools[rows] == pool).mean())
        assert logged["train/curriculum/uniform/coverage"] == 1 and logged["train/curriculum/evenly"] == 0
        for row in set(rows):
            of_row = [outcome for outcome in told if outcome.row == row]
            known[row] = sum(outcome.total for outcome in of_row) / (4 * len(of_row))
    np.testing.assert_array_equal(data.draws._means, known)
    assert any(
        abs(each["train/curriculum/uniform/reward"] - each["train/reward"]) > 0.01 for each in watch.logged[1::2]
    )


def test_groups_that_are_refused_and_spare_prompts_are_measured(tmp_path):
    watch, data = fitted(tmp_path, module_of(groups=DynamicSampling(6)), steps=4)
    for number, (rows, told, kept) in enumerate(zip(watch.drawn, watch.told, watch.kept)):
        logged = watch.logged[2 * number + 1]
        assert [outcome.row for outcome in told[:4]] == rows and len(told) == 4 + logged["train/groups/drawn"]
        refused = [outcome for outcome in told[:4] if outcome.total in (0.0, 4.0)]
        assert len(refused) == logged["train/groups/dropped"] > 0
        assert set(kept) <= {outcome.row for outcome in told}
        assert not {outcome.row for outcome in told[4:8]} & set(rows)  # spare prompts are other ones
    seen = {outcome.row for told in watch.told for outcome in told}
    assert set(np.flatnonzero(~np.isnan(data.draws._means))) == seen


def test_what_is_evaluated_is_not_measured(tmp_path):
    """The validation rows are training rows too."""
    plain, without = fitted(tmp_path / "without", module_of(), steps=6)
    watched, with_it = fitted(tmp_path / "with", module_of(), steps=6, val=ROWS, limit_val_batches=1.0)
    assert any(name.startswith("val/") for name in watched.logged[-1])
    assert plain.drawn == watched.drawn
    assert_same_draws(without, with_it)


def test_a_rollout_that_fails_tells_nothing_and_is_drawn_again(tmp_path):
    calls: list[int] = []

    def breaks(completions: list[str], answer: list[str]) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no")
        return parity(completions, answer)

    whole, data = fitted(tmp_path / "whole", module_of(reward={"parity": parity}))
    with pytest.raises(RewardError):
        fitted(tmp_path / "broken", module_of(reward={"parity": breaks}))
    saved = tmp_path / "broken" / "step=4.ckpt"
    rest, resumed = fitted(tmp_path / "rest", module_of(reward={"parity": parity}), ckpt=saved)
    assert rest.drawn == whole.drawn[2:]
    assert_same_draws(resumed, data)


# ---------------------------------------------------------------------- what decides


def feedback_of(names: list[str], **settings: Any) -> CurriculumFeedback:
    opponent = settings.pop("opponent_writes", False)
    data = PromptSet([f"prompt {i}" for i in range(4)], [[i] for i in range(4)], {})
    draws = RowDraws(Curriculum(**settings), data, RolloutOrder((4,), 2))
    functions = {name: centred if name == "centred" else len for name in names} or None
    return CurriculumFeedback(draws, Rewards(functions), opponent_writes=opponent)


def centred(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


centred.is_centred = True  # pyright: ignore[reportFunctionMemberAccess]


def means_of(feedback: CurriculumFeedback, said: Any, group_size: int) -> list[float]:
    drawn = completions([1] * len(said.total), group_size)
    feedback.begin(Scored(batch([2, 0]), drawn, said), Ranks())
    feedback.end(Ranks())
    return feedback.draws._means[[2, 0]].tolist()


def test_a_reward_that_compares_completions_is_told_the_groups_of_the_run(tmp_path):
    def grouped(completions, group_ids=None):
        seen.append(group_ids)
        return [float(len(completion)) for completion in completions]

    grouped.compares_rows, seen = True, list[Any]()  # pyright: ignore[reportFunctionMemberAccess]
    fitted(tmp_path, module_of(reward={"grouped": grouped}), steps=1)
    assert seen == [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4]


def test_what_is_0_in_the_mean_over_each_prompt_cannot_decide():
    for names, settings in ((["centred"], {}), (["centred", "right"], {"metric": "centred"})):
        with pytest.raises(ConfigError, match=r"data\.curriculum\.metric=.*mean is 0 for every prompt.*centred"):
            feedback_of(names, **settings)
    feedback_of(["centred", "right"])
    with pytest.raises(ConfigError, match="one pool"):  # a weight of 0 adds nothing to the sum
        draws = feedback_of(["right"]).draws
        CurriculumFeedback(draws, Rewards({"centred": centred, "right": len}, {"right": 0.0}))


def test_the_named_function_decides_before_its_weight_and_unscored_completions_are_left_out():
    values = {"right": [1.0, 0.0, 0.0, None], "length": [-0.1, -0.9, 0.0, 0.0]}
    functions = {name: (lambda completions, said=said: said) for name, said in values.items()}
    said = Rewards(functions, {"right": 0.0, "length": 1.0}).score(["p"] * 4, ["c"] * 4, {})
    assert means_of(feedback_of(["right", "length"], metric="right"), said, 2) == [0.5, 0.0]
    assert means_of(feedback_of(["right", "length"]), said, 2) == [-0.5, 0.0]


def test_a_prompt_without_any_score_is_unscored_and_not_in_the_estimate():
    feedback = feedback_of(["f0"])
    found = scores([math.nan, math.nan, 1.0, 0.0])
    logged = feedback.begin(Scored(batch([2, 0]), completions([1] * 4, 2), found), Ranks())
    above, below = logged["curriculum/uniform/reward"]  # pyright: ignore[reportGeneralTypeIssues]
    assert (float(above), float(below)) == (0.5, 1.0)
    feedback.end(Ranks())
    assert feedback.draws._pools().tolist() == [1, 3, 4, 3]


def test_an_opponents_completions_do_not_count():
    assert means_of(feedback_of(["f0"], opponent_writes=True), scores([1.0, 0.0, 0.0, 1.0]), 2) == [1.0, 0.0]


def test_a_function_that_does_not_exist_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.curriculum\.metric='paritty' is no reward.*Did you mean 'parity'"):
        fitted(tmp_path, module_of(), curriculum=Curriculum(metric="paritty"))
    with pytest.raises(ConfigError, match=r"data\.curriculum draws rows by their rewards, and there is no reward"):
        feedback_of([])
