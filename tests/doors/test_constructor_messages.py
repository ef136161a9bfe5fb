"""What people hand to constructors out of habit: it works, or a message of ours says what to pass."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import trl
from datasets import Dataset
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lit_rl.algorithms import DPO, GRPO, KTO, PPO, SFT, AdamW, Constant, ProcessRewardModeling, RewardModeling
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.core import errors as keywords
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule, StepwiseDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.rewards import exact_match


def grpo(**settings: Any) -> GRPO:
    return GRPO("tiny", exact_match, sampling=Sampling(max_new_tokens=2), group_size=2, **settings)


def fit(module: Any, folder: Path, data: Any = None, **settings: Any) -> L.Trainer:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(2)]
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=1, accelerator="cpu", default_root_dir=folder, **quiet, **settings)
    trainer.fit(module, datamodule=data or RolloutDataModule(rows=rows, prompts_per_rollout=2, val_fraction=0))
    return trainer


def of_tokens(logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any) -> Any:
    return -advantages[:, None] * logprobs * mask


@pytest.mark.parametrize(
    ("returned", "came"),
    [
        (lambda tokens: tokens.sum(), r"a tensor of shape \(\) alone"),
        (lambda tokens: None, "a NoneType"),
    ],
)
def test_a_loss_of_another_form(returned: Any, came: str, tmp_path: Path) -> None:
    def loss(logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any) -> Any:
        return returned(of_tokens(logprobs, old_logprobs, advantages, mask))

    with pytest.raises(ConfigError, match=rf"loss returned {came}, expected"):
        fit(grpo(loss=loss), tmp_path)


ADAM = torch.optim.Adam([torch.zeros(1, requires_grad=True)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (10, r"scheduler is a int\. Allowed is Linear, "),
        (StepLR(ADAM, 10), r"scheduler is a StepLR\."),
        (StepLR, r"scheduler=StepLR was called with the optimizer alone and failed: .*step_size"),
        (partial(ReduceLROnPlateau), r"scheduler=ReduceLROnPlateau needs a metric"),
        (lambda optimizer: 0.1, "scheduler=<lambda> returned a float"),
    ],
)
def test_what_is_no_schedule(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(grpo(scheduler=given), tmp_path)


def test_a_critics_warm_up_and_a_scheduler_of_torch(tmp_path: Path) -> None:
    drawn: dict[str, Any] = {"sampling": Sampling(max_new_tokens=2), "group_size": 1, "minibatches": 1}
    one = partial(StepLR, step_size=1)
    for more in ({"critic_warmup": 1}, {"critic_scheduler": Constant()}):
        with pytest.raises(ConfigError, match="scheduler is a scheduler of torch"):
            fit(PPO("tiny", exact_match, scheduler=one, **drawn, **more), tmp_path)


ROWS = [{"prompt": "1+1=", "answer": "2"}]


def test_what_was_not_taken_travels_between_processes() -> None:
    """Pools pickle what their workers raise."""
    with pytest.raises(keywords.UnknownKeyword) as told:
        Sampling(max_tokens=2)  # pyright: ignore
    again = pickle.loads(pickle.dumps(told.value))
    assert (type(again), again.keyword, str(again)) == (keywords.UnknownKeyword, "max_tokens", str(told.value))


def test_a_data_module_of_yours_may_take_more() -> None:
    class Mine(RolloutDataModule):
        def __init__(self, rows: Any, **more: Any) -> None:
            self.batch_size = more.pop("batch_size")
            super().__init__(rows, **more)

    assert Mine(ROWS, batch_size=2, val_fraction=0).batch_size == 2
    with pytest.raises(ConfigError, match=r"Mine takes no eval_dataset=\."):
        Mine(ROWS, batch_size=2, eval_dataset=ROWS)


def test_values_keep_their_signatures_and_are_copied() -> None:
    for made in (Sampling, AdamW, ByPath):
        fields = [field.name for field in dataclasses.fields(made)]
        assert list(inspect.signature(made).parameters) == fields
    drawn = Sampling(max_new_tokens=2, stop=("a",))
    assert dataclasses.replace(drawn, top_k=3) == Sampling(max_new_tokens=2, stop=("a",), top_k=3)
    assert copy.deepcopy(drawn) == pickle.loads(pickle.dumps(drawn)) == drawn


OF_TRL = [
    (trl.GRPOTrainer, GRPO, (exact_match,)),
    (trl.DPOTrainer, DPO, ()),
    (trl.KTOTrainer, KTO, ()),
    (trl.SFTTrainer, SFT, ()),
    (trl.RewardTrainer, RewardModeling, ()),
]


@pytest.mark.parametrize(("theirs", "ours", "more"), OF_TRL)
def test_every_argument_of_a_trainer_of_trl_is_ours_or_answered_by_name(theirs: Any, ours: Any, more: Any) -> None:
    names = [name for name in inspect.signature(theirs.__init__).parameters if name != "self"]
    for name in names:
        if name in keywords.keyword_names(ours):
            continue
        with pytest.raises(ConfigError, match=rf"{ours.__name__} takes no {name}=\. \S") as said:
            ours("tiny", *more, **{name: object()})
        assert "Did you mean" not in str(said.value) and f" {name}=. help(" not in str(said.value)


@pytest.mark.parametrize("made", [Dataset.from_list, DataLoader], ids=["data set", "loader"])
def test_rows_in_the_place_of_a_data_module(made: Any, tmp_path: Path) -> None:
    for module, ours in ((grpo(), "RolloutDataModule"), (DPO("tiny"), "PreferenceDataModule")):
        with pytest.raises(ConfigError, match=rf"datamodule is a \w+, .*lit_rl\.{ours}\(rows\)"):
            fit(module, tmp_path, made(ROWS))
    with pytest.raises(ConfigError, match="datamodule is the class RolloutDataModule"):
        fit(grpo(), tmp_path, type("RolloutDataModule", (RolloutDataModule,), {}))


def test_the_policy_is_saved_as_a_user_of_transformers_says_it(tmp_path: Path) -> None:
    module = grpo()
    with pytest.raises(ConfigError, match=r"not loaded yet: call trainer\.fit"):
        module.save_pretrained(tmp_path / "hf")
    module.configure_model()
    report = module.save_pretrained(tmp_path / "hf")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert report is not None and report.max_abs_diff == 0
    assert all(torch.equal(saved[name], weight) for name, weight in module.policy.state_dict().items())


def test_the_signature_keeps_what_is_needed_and_a_module_can_be_copied() -> None:
    assert list(inspect.signature(GRPO).parameters)[:2] == ["model", "reward"]
    assert inspect.signature(GRPO).parameters["reward"].default is inspect.Parameter.empty
    module = GRPO("tiny", exact_match, group_size=4)
    for copied in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(copied, GRPO) and copied.group_size == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advantage": lambda rewards, group_id: rewards.sum()}, r"advantage returned a tensor of shape \(\)"),
        ({"reduction": lambda tokens, mask, totals: tokens}, r"reduction returned a tensor of shape \(4, \d\)"),
        ({"optimizer": lambda groups: 3}, "optimizer returned a int"),
    ],
)
def test_a_function_that_returns_something_else(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(grpo(**given), tmp_path)


def test_a_loss_of_pairs_that_is_a_scalar(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "x"} for n in range(2)]
    module = DPO("tiny", preference=lambda pairs, beta: (pairs.rejected - pairs.chosen).mean())
    data = PreferenceDataModule(rows, batch_size=2, val_fraction=0)
    with pytest.raises(ConfigError, match=r"preference returned a tensor of shape \(\)"):
        fit(module, tmp_path, data)


def test_completions_of_a_sampling_that_nobody_chose_fit_the_context(tmp_path: Path) -> None:
    module = GRPO("tiny", exact_match, group_size=2)
    with pytest.warns(UserWarning, match=r"max_new_tokens=\d+, in place of the default of 512") as said:
        fit(module, tmp_path)
    context, longest = module.model.context_length, module.trainer.datamodule.longest_prompt  # pyright: ignore
    assert context is not None and module.sampling == Sampling(max_new_tokens=context - longest)
    assert sum("in place of the default of 512" in str(each.message) for each in said) == 1
    typed = GRPO("tiny", exact_match, group_size=2, sampling=Sampling(max_new_tokens=512))
    with pytest.raises(ConfigError, match=rf"Lower sampling\.max_new_tokens to {context - longest}"):
        fit(typed, tmp_path)


def test_a_module_is_not_called() -> None:
    with pytest.raises(ConfigError, match=r"GRPO is not called\. Train it with trainer\.fit"):
        grpo()("17+25=")


def test_generating_needs_the_policy() -> None:
    module, data = grpo(), RolloutDataModule([{"prompt": "1+1=", "answer": "2"}], val_fraction=0)
    data.prepare(module.tokenizer, stage="predict")
    with pytest.raises(ConfigError, match=r"not loaded yet: call module\.configure_model\(\) first"):
        module.generate(data.peek(1))
    module.configure_model()
    with module.rollout_context():
        assert module.generate(data.peek(1)).response_ids.shape[0] == 2


def test_a_text_to_complete() -> None:
    module = grpo()
    with pytest.raises(ConfigError, match=r"generate takes .* got a int"):
        module.generate(3)  # pyright: ignore
    with pytest.raises(ConfigError, match=r"call module\.configure_model\(\) first, then generate"):
        module.generate("17+25=")
    module.configure_model()
    greedy = Sampling(temperature=0, max_new_tokens=3)
    one, both = module.generate("17+25=", greedy), module.generate(["17+25=", "1+1=", "17+25="], greedy)
    assert isinstance(one, str) and one
    assert len(both) == 3 and one == both[0] == both[2]


def test_a_checkpoint_needs_what_the_constructor_needs(tmp_path: Path) -> None:
    trainer = fit(grpo(), tmp_path)
    trainer.save_checkpoint(path := tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=r"GRPO\.load_from_checkpoint needs.*reward"):
        GRPO.load_from_checkpoint(path)
    loaded = GRPO.load_from_checkpoint(path, model="tiny", reward=exact_match)
    assert isinstance(loaded, GRPO)


PAIRS = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 2
OTHER_DATA: list[tuple[Any, Any, list[str]]] = [
    (grpo, lambda: PreferenceDataModule(PAIRS), ["GRPO", "PreferenceDataModule", "RolloutDataModule(", "lit_rl.DPO("]),
    (DPO, lambda: RolloutDataModule(ROWS), ["DPO", "pairs", "RolloutDataModule", "Pass datamodule=PreferenceData"]),
    (DPO, lambda: SupervisedDataModule([{"text": "a"}]), ["DPO", "pairs", "SupervisedDataModule"]),
    (RewardModeling, lambda: StepwiseDataModule(STEPS), ["StepwiseDataModule", "Pass datamodule=PreferenceDataModule"]),
    (ProcessRewardModeling, lambda: PreferenceDataModule(PAIRS), ["Pass datamodule=StepwiseDataModule"]),
    (DPO, lambda: PreferenceDataModule(PAIRS * 8, batch_size=10), ["data.batch_size=10", "data.batch_size=8", "=12"]),
]
STEPS = [{"prompt": "1", "completions": ["2"], "labels": [True]}]


def test_data_of_another_kind_or_size_is_told_what_to_pass(tmp_path: Path) -> None:
    """And not that they fill no step: rows that nobody needs are not counted."""
    for make, data, words in OTHER_DATA:
        module = make() if make is grpo else make("tiny")
        with pytest.raises(ConfigError) as told:
            fit(module, tmp_path, data(), accumulate_grad_batches=4 if "=12" in words else 1)
        assert [word for word in words if word not in str(told.value)] == [], str(told.value)
