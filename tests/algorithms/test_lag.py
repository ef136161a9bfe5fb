"""`generator.lag=N`: rollouts to come are drawn with the weights of this one, while this one is learned from."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from copied_engines import CopiedPolicyGenerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from small_rollouts import EachBatch, completions, trainer

from lit_rl.algorithms import GRPO, AdamW, Constant, Evaluation, OnlineDPO
from lit_rl.algorithms.checks.policy_gradient_checks import check_weight_copies
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts.rollout_source import Ahead, fail_on_all_ranks
from lit_rl.algorithms.rollouts.rollout_source import DrawnAhead as DrawnAhead
from lit_rl.algorithms.terms.groups import DynamicSampling
from lit_rl.callbacks import GracefulStop
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.interrupts import Interrupted
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.generator import EngineLost, Gap
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.forward import score
from lit_rl.rewards import exact_match

STEPS = 4


class Drawn(L.Callback):
    """Keeps the completions of each rollout, and which policy learned from them."""

    def __init__(self) -> None:
        self.rollouts: list[tuple[int, int, Completions]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.now = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.slot == 0:
            self.rollouts.append((batch.rollout, self.now, pl_module.scored.completions))


def module_of(algorithm: Any = GRPO, reward: Any = exact_match, **settings: Any) -> Any:
    return algorithm(
        "tiny",
        reward,
        **{
            "group_size": 4,
            "sampling": Sampling(max_new_tokens=5),
            "optimizer": AdamW(lr=2e-3),
            "scheduler": Constant(),
            "evaluation": Evaluation(limit=2),
            "generator": CopiedPolicyGenerator(lag=1),
            **settings,
        },
    )


def data_of(**settings: Any) -> RolloutDataModule:
    """4 rollouts an epoch."""
    return RolloutDataModule(**{"task": Addition(max_operand=5, val_rows=4), "prompts_per_rollout": 8, **settings})


def fitted(tmp_path: Any, module: Any, *, resume: Path | None = None, **settings: Any) -> tuple[Drawn, L.Trainer]:
    drawn = Drawn()
    callbacks = [drawn, *settings.pop("callbacks", [])]
    run = trainer(tmp_path, **{"max_steps": STEPS, "callbacks": callbacks, **settings})
    run.fit(module, datamodule=data_of(), ckpt_path=resume, weights_only=True)
    return drawn, run


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.policy.named_parameters()}


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(one[name], two[name]) for name in one)


def assert_same_tokens(one: Completions, two: Completions) -> None:
    assert torch.equal(one.response_ids, two.response_ids) and torch.equal(one.response_mask, two.response_mask)
    assert torch.equal(one.group_id, two.group_id) and torch.equal(one.prompt_ids, two.prompt_ids)
    torch.testing.assert_close(one.sampler_logprobs, two.sampler_logprobs)


# ---------------------------------------------------------------------- which weights draw what


@pytest.mark.all
def test_without_a_lag_nothing_changes(tmp_path):
    """An engine that copies the weights at each sync and corrects nothing is the in-process run, bit for bit.

    Every row is computed in both: an engine's rows are measured, and calls of other sizes differ in their last bits.
    """
    plain, lagless = (
        module_of(generator=NativeGenerator(), skip_zero_advantages=False),
        module_of(generator=CopiedPolicyGenerator(), correction=None, skip_zero_advantages=False),
    )
    first, _ = fitted(tmp_path, plain)
    second, _ = fitted(tmp_path, lagless)
    assert_same(weights_of(plain), weights_of(lagless))
    for (_, now, one), (_, _, two) in zip(first.rollouts, second.rollouts, strict=True):
        assert torch.equal(one.response_ids, two.response_ids) and one.version == two.version == now
    assert not lagless.source._ahead.requests


@pytest.mark.parametrize("steps", [2])
@pytest.mark.all
def test_every_rollout_but_the_first_is_drawn_with_the_weights_of_the_one_before(tmp_path, steps):
    module = module_of(minibatches=steps)
    seen = EachBatch(lambda m: dict(m.trainer.callback_metrics))
    drawn, run = fitted(tmp_path, module, max_steps=6 * steps, callbacks=[seen], accumulate_grad_batches=2)
    assert [(number, now, c.version) for number, now, c in drawn.rollouts] == [
        (k, k * steps, max(0, k - 1) * steps) for k in range(6)
    ]
    logged = {k: float(v) for k, v in run.callback_metrics.items() if "staleness" in k}
    assert logged == {"train/sampling/staleness/mean": steps, "train/sampling/staleness/max": steps}
    first = next(metrics for metrics in seen.seen if "train/sampling/staleness/max" in metrics)
    assert float(first["train/sampling/staleness/max"]) == 0
    assert module.generator.synced == [k * steps for k in (0, 0, 1, 2, 3, 4)]  # no sync for a rollout that never comes


@pytest.mark.all
def test_the_weights_of_the_correction_are_those_of_the_age(tmp_path):
    """By hand: pi_now / pi_then of each token, cut at 3."""
    kept = EachBatch(lambda m: m.rollout)
    drawn, _ = fitted(tmp_path, module_of(minibatches=2), max_steps=4, callbacks=[kept])
    rollout = kept.seen[2]
    mask = rollout.loss_mask
    ratio = (rollout.old_logprobs - rollout.completions.sampler_logprobs).exp().clamp(max=3.0)
    torch.testing.assert_close(rollout.weights[mask], ratio[mask])
    assert float((ratio[mask] - 1).abs().max()) > 1e-2 and drawn.rollouts[1][2].version == 0


@pytest.mark.all
def test_prompts_go_on_over_the_end_of_an_epoch_and_end_with_the_run(tmp_path):
    upcoming: list[Any] = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            upcoming.append((batch.rollout, batch.slot, batch.rows, batch.upcoming))

    cases: list[tuple[dict[str, Any], int, int]] = [
        ({"max_steps": 6}, 5, 1),
        ({"max_epochs": 2, "max_steps": -1}, 7, 3),
    ]
    for settings, last, lag in cases:
        upcoming.clear()
        module = module_of(generator=CopiedPolicyGenerator(lag=lag))
        fitted(tmp_path, module, callbacks=[Look()], accumulate_grad_batches=2, **settings)
        starts = [entry for entry in upcoming if entry[1] == 0]
        assert [entry[3] for entry in upcoming if entry[1] == 1] == [()] * len(starts)
        assert len(starts) == last + 1 and starts[-1][3] == ()
        each = [(number, list(rows)) for number, _, rows, _ in starts]
        for k, (_, _, _, named) in enumerate(starts):
            assert [(batch.rollout, list(batch.rows)) for batch in named] == each[k + 1 : k + 1 + lag]


@pytest.mark.parametrize("meanwhile", ["rewards", "learning"])
def test_drawing_goes_on_while_the_policy_is_scored_and_learns(tmp_path, meanwhile):
    """The second rollout is not drawn until the first is scored, or learned from; in turn, neither would end."""
    happened = threading.Event()

    def scored(completions: list[str]) -> list[float]:
        if meanwhile == "rewards":
            happened.set()
        return [float(len(text)) for text in completions]

    class Waits(CopiedPolicyGenerator):
        def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
            if threading.current_thread() is not threading.main_thread():
                assert happened.wait(60), f"no {meanwhile} meanwhile"
            return super().generate(prompts, sampling)

    class Learned(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            happened.set()

    learned = [Learned()] if meanwhile == "learning" else []
    module = module_of(reward=scored, generator=Waits(lag=1))
    drawn, _ = fitted(tmp_path, module, callbacks=learned, max_steps=2)
    assert len(drawn.rollouts) == 2


@pytest.mark.all
def test_validation_and_fresh_groups_wait_for_what_is_in_flight(tmp_path):
    """Whatever else is drawn in between, each rollout is that of the run without it."""
    slow: list[int] = []

    class Slow(CopiedPolicyGenerator):
        def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.2)
                slow.append(self._version)
            return super().generate(prompts, sampling)

    alone, _ = fitted(tmp_path, module_of())
    module = module_of(generator=Slow(lag=1))
    validated, _ = fitted(tmp_path, module, limit_val_batches=1.0, val_check_interval=1)
    for (_, _, one), (_, _, two) in zip(alone.rollouts, validated.rollouts, strict=True):
        assert_same_tokens(one, two)
        assert one.version == two.version
    assert slow == [0, 1, 2]
    redrawn, _ = fitted(tmp_path, module_of(generator=Slow(lag=1), groups=DynamicSampling(8)))
    assert [c.version for _, _, c in redrawn.rollouts] == [0, 0, 1, 2]


# ---------------------------------------------------------------------- more than one ahead


@pytest.mark.all
def test_a_slow_rollout_is_waited_for_only_when_it_is_needed(tmp_path):
    """Rollout 2 is not drawn until rollout 1 is learned from, although the weights of then draw rollout 3."""
    happened = threading.Event()

    class Waits(CopiedPolicyGenerator):
        def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
            if threading.current_thread().name == "rollout 2":
                assert happened.wait(60), "rollout 1 waited for rollout 2"
            return super().generate(prompts, sampling)

    class Learned(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch.rollout == 1:
                happened.set()

    drawn, _ = fitted(tmp_path, module_of(generator=Waits(lag=2)), callbacks=[Learned()])
    assert [c.version for _, _, c in drawn.rollouts] == [0, 0, 0, 1]


class Late(CopiedPolicyGenerator):
    """Takes weights over in a thread once the policy has moved on from them; its probe's gap says which they are."""

    def __init__(self) -> None:
        super().__init__(lag=2)
        self.module: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"module": None}

    def sync(self, policy: torch.nn.Module, version: int) -> None:
        until = time.monotonic() + 60
        while threading.current_thread() is not threading.main_thread() and self.module.global_step <= version:
            assert time.monotonic() < until, "the policy waits for the update"
            time.sleep(0.01)
        super().sync(policy, version)
        self.gap = Gap(float(version), float(version), 1, "float32")


def late(**settings: Any) -> Any:
    module = module_of(generator=Late(), minibatches=2, **settings)
    module.generator.module = module
    return module


class Policies(L.Callback):
    """Keeps the policy as it was when each rollout began."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.slot == 0:
            self.kept.append(copy.deepcopy(pl_module.policy))


def probed(looks: EachBatch) -> list[float]:
    """What each rollout, of two steps, logged of its probe."""
    ends = looks.seen[::-2][::-1]
    return [float(metrics["train/sampling/sampling_logp_difference/probe_mean"]) for metrics in ends]


@pytest.mark.all
def test_two_ahead_are_drawn_with_the_weights_of_two_rollouts_before(tmp_path):
    whole, looks, policies = late(), EachBatch(lambda m: dict(m.trainer.callback_metrics)), Policies()
    drawn, _ = fitted(tmp_path, whole, max_steps=12, callbacks=[looks, policies])
    versions = [2 * max(0, k - 2) for k in range(6)]
    assert [(number, now, c.version) for number, now, c in drawn.rollouts] == [
        (k, 2 * k, versions[k]) for k in range(6)
    ]
    assert whole.generator.synced == versions and probed(looks) == versions
    for k, (_, _, c) in enumerate(drawn.rollouts):
        then, now = (score(policies.kept[i], c, whole.sampling).logprobs for i in (max(0, k - 2), k))
        torch.testing.assert_close(then[c.response_mask], c.sampler_logprobs[c.response_mask], atol=1e-4, rtol=0)
        assert k == 0 or float((now - c.sampler_logprobs).detach()[c.response_mask].abs().max()) > 1e-3
    trained = sum(p.numel() for p in whole.policy.parameters())
    assert whole.memory().others["copies for rollouts ahead"] == 2 * 4 * trained

    validated, _ = fitted(tmp_path, late(), max_steps=6, limit_val_batches=1.0, val_check_interval=1)
    for (_, _, one), (_, _, two) in zip(drawn.rollouts, validated.rollouts):
        assert_same_tokens(one, two)
        assert one.version == two.version


@pytest.mark.all
def test_what_a_lost_engine_owed_is_drawn_anew(tmp_path):
    class Lost(CopiedPolicyGenerator):
        def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
            if threading.current_thread().name == "rollout 3":
                raise EngineLost("the engine is gone")
            return super().generate(prompts, sampling)

    with pytest.warns(UserWarning, match="the engine is gone Completions drawn ahead are lost"):
        drawn, _ = fitted(tmp_path, module_of(generator=Lost(lag=2)), max_steps=7)
    assert [c.version for _, _, c in drawn.rollouts] == [0, 0, 0, 3, 3, 3, 4]


def test_an_update_beside_leaves_the_training_its_autocast_copies_of_weights():
    class Casts(CopiedPolicyGenerator):
        def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
            with torch.autocast("cpu", enabled=False):
                return super().generate(prompts, sampling)

    module, data, weight = module_of(generator=Casts(lag=2)), data_of(), torch.ones(2, 2, requires_grad=True)
    module.configure_model()
    data.prepare(module.tokenizer, stage="predict")

    def cast() -> Any:
        product: Any = (torch.ones(2, 2) @ weight).grad_fn
        return product.next_functions[1][0]

    with torch.autocast("cpu", torch.bfloat16):
        before = cast()
        module.source.request_ahead([module.request(data.peek(1))])
        assert len(module.source._ahead.peek()) == 1
        assert cast() is before, "the weight is cast once, and its gradients are added before they are cast back"


# ---------------------------------------------------------------------- checkpoints and failures


class Saves(L.Callback):
    """A checkpoint after every micro-batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_what_was_drawn_ahead_does_not_go_over_to_another_number_of_processes():
    """Each rank drew its part of the prompts, and parts are others now."""
    module, kept = module_of(), {"tokens_seen": 7, "input_tokens_seen": 9, "unscored": 0}
    kept |= {"terms": {"kl_control": {}}}
    saved = [kept | {"ahead": {"rollout": 1}}, kept]
    assert module.merge_rank_states(saved) == kept
    assert "drawn ahead are dropped" in module.describe_dropped_state(saved, 1)


def test_completions_ahead_of_a_checkpoint_replace_those_of_an_earlier_run_in_this_process():
    kept, module = module_of(), module_of()
    kept.source._ahead.put((3, (1, 2)), DrawnAhead(completions([1], 1)))
    saved = kept.source.state(Ranks())
    module.source._ahead.put((9, (9,)), DrawnAhead(completions([1], 1)))
    module.source.load_state(saved, torch.device("cpu"), lambda row: None, lambda: None)
    assert module.source.state(Ranks())["ahead"][0]["rows"] == [1, 2] and [
        each.name for each in module.source._ahead.requests
    ] == [(3, (1, 2))]


def test_what_is_there_is_kept_where_another_rank_gives_up_its_wait():
    class OtherIsTold(Ranks):
        def counts(self, count: int) -> list[int]:
            return [count, 3]

    module, name, asked = module_of(), (0, (1,)), None
    module.source._ahead.put(name, DrawnAhead(completions([1], 1)))
    with pytest.raises(Interrupted):
        module.source.take_ahead(asked, OtherIsTold(), max_age=1)
    assert [each.name for each in module.source._ahead.requests] == [name]


@pytest.mark.parametrize("another_error", [False, True])
def test_ranks_save_together_if_nothing_but_generators_failed(another_error):
    """A rank with another error does not save, and the others would wait for it."""
    answers = iter([1, int(another_error)])  # of the other rank: it failed; with an error that is no generator's

    class OtherFailed(Ranks):
        def counts(self, count: int) -> list[int]:
            return [count, next(answers)]

    with pytest.raises(GenerationError, match="another rank") as failed, fail_on_all_ranks(OtherFailed(world_size=2)):
        pass
    assert failed.value.on_every_rank is not another_error


@pytest.mark.all
def test_completions_of_other_prompts_are_thrown_away_and_said(tmp_path):
    module = module_of()
    for name in ((7, (1, 2)), (8, (3, 4))):
        module.source._ahead.put(name, DrawnAhead(completions([1], 1)))
    with pytest.warns(UserWarning, match="rollout 7.*rollout 0"):
        drawn, _ = fitted(tmp_path, module, max_steps=1)
    assert drawn.rollouts[0][2].version == 0


class Dies(CopiedPolicyGenerator):
    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        if threading.current_thread() is not threading.main_thread() and self._version == 1:
            raise GenerationError("the server died")
        return super().generate(prompts, sampling)


@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.all)])
def test_a_failure_in_the_thread_ends_the_run_where_it_is_needed_and_all_is_saved(tmp_path, lag):
    module = module_of(generator=Dies(lag=lag))
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=100)
    saves = [GracefulStop(), checkpoint, Saves(tmp_path)]
    drawn = Drawn()
    run = trainer(tmp_path, max_steps=5, callbacks=[drawn, *saves], enable_checkpointing=True)
    with pytest.raises(GenerationError, match="the server died") as caught:
        run.fit(module, datamodule=data_of())
    needed = 1 + lag  # what the weights of step 1 were to draw
    assert caught.value.exit_code == 5 and run.global_step == needed
    known = {  # saved when it was raised, and earlier, while it was known and not asked for yet
        tmp_path / "kept" / f"step_{needed:08d}.ckpt": {1: [(2, 2), (3, 2), (4, 3)], 2: [(3, 3), (4, 3)]}[lag],
        tmp_path / "2.ckpt": {1: [(2, 2), (3, 2), (4, 3)], 2: [(2, 0), (3, 2), (4, 2)]}[lag],
    }
    for saved, versions in known.items():
        rest, _ = fitted(tmp_path, module_of(generator=CopiedPolicyGenerator(lag=lag)), max_steps=5, resume=saved)
        assert [(number, c.version) for number, _, c in rest.rollouts] == versions


def test_completions_that_are_too_old_are_not_learned_from(tmp_path):
    class Stale(CopiedPolicyGenerator):
        def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
            drawn = super().generate(prompts, sampling)
            return drawn if self._version < 3 else dataclasses.replace(drawn, version=0)

    with pytest.raises(GenerationError, match=r"rollout 4 are 4 optimizer steps old.*may be 1"):
        fitted(tmp_path, module_of(generator=Stale(lag=1)), max_steps=6)


# ---------------------------------------------------------------------- what is refused


REFUSED = [
    ({"correction": None}, r"generator\.lag=1.*algo/correction"),
    ({"generator": CopiedPolicyGenerator(lag=2), "correction": None}, r"generator\.lag=2.*algo/correction"),
    ({"generator": CopiedPolicyGenerator(lag=-1)}, r"generator\.lag=-1"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=["uncorrected", "two", "negative"])
def test_a_lag_that_nothing_corrects_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        module_of(**settings)


def test_a_lag_of_the_policy_itself_is_refused():
    generator: Any = NativeGenerator()
    generator.lag = 1
    with pytest.raises(ConfigError, match=r"NativeGenerator decodes with the policy itself"):
        module_of(generator=generator)


def test_two_ahead_are_refused_where_weights_are_several_processes():
    two = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    one = L.Trainer(accelerator="cpu", devices=1, strategy=ModelParallelStrategy(), logger=False)
    for run, words in ((two, "world size 2 with DDPStrategy"), (one, "world size 1 with ModelParallelStrategy")):
        with pytest.raises(ConfigError, match=rf"generator\.lag=2.*{words}.*generator\.lag=1"):
            check_weight_copies(CopiedPolicyGenerator(lag=2), run)
        check_weight_copies(CopiedPolicyGenerator(lag=1), run)


def test_methods_of_pairs_refuse_a_lag():
    with pytest.raises(ConfigError, match=r"generator\.lag=1.*OnlineDPO"):
        OnlineDPO("tiny", exact_match, generator=CopiedPolicyGenerator(lag=1))


# ---------------------------------------------------------------------- the thread


def test_a_request_that_failed_is_told_once_and_forgotten_with_those_behind_it():
    ahead, begun = Ahead(), list[str]()

    def fails() -> DrawnAhead:
        raise GenerationError("no")

    def draws() -> DrawnAhead:
        begun.append(threading.current_thread().name)
        return DrawnAhead(completions([1], 1))

    for number, draw in enumerate((draws, fails, draws)):
        ahead.start((number, (1,)), draw)
    assert [name for name, _ in ahead.peek()] == [(0, (1,))] and len(ahead.requests) == 3
    taken = ahead.take()
    assert taken is not None and taken[0] == (0, (1,))
    with pytest.raises(GenerationError, match="no"):
        ahead.take()
    assert not ahead.requests and ahead.take() is None and begun == ["rollout 0"]


def test_a_copy_has_no_request():
    ahead, go = Ahead(), threading.Event()
    ahead.start((0, (1,)), lambda: go.wait(10))  # pyright: ignore
    try:
        assert not copy.deepcopy(ahead).requests
    finally:
        go.set()
        ahead.wait()
