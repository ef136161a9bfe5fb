"""`lit-rl replay`: the objectives of one saved rollout, side by side; and the callback that saves it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pyarrow.parquet
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from runs_helpers import EVERY_STEP, SMALL, rows

from lit_rl.algorithms import GRPO, Reinforce
from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.terms.groups import DynamicSampling, TopOfGroup, shortest
from lit_rl.callbacks import Rollouts, SavedRollout
from lit_rl.callbacks.saved_rollouts import saved_rollouts
from lit_rl.cli import run_trust
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.rollout import Rollout, Sampling
from lit_rl.ops.kl import k1, k3
from lit_rl.ops.policy_losses import kl_cov_loss
from lit_rl.ops.selection import top_entropy
from lit_rl.reports import run_files
from lit_rl.reports.run_samples import samples_of
from lit_rl.rewards import exact_match
from lit_rl.runs.replay_rollout import Replay, replay

pytestmark = [pytest.mark.all, pytest.mark.xdist_group("replay")]

RUN = [*SMALL, *EVERY_STEP, "trainer.max_steps=6", "data.task.max_operand=9"]


@pytest.fixture(scope="module")
def cache() -> dict[tuple[str, ...], Path]:
    return {}


@pytest.fixture
def finished(train: Callable[..., int], cache: dict, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`finished(*overrides)`: the folder of a finished run of six steps, with all its checkpoints."""

    def run(*overrides: str) -> Path:
        if overrides not in cache:
            folder = tmp_path_factory.mktemp("run") / "run"
            assert train(*RUN, *overrides, f"run_dir={folder}") == 0
            cache[overrides] = folder
        return cache[overrides]

    return run


ON_POLICY = ("trainer.accumulate_grad_batches=2", "callbacks.rollouts.keep=2")
"""One optimizer step a rollout: the newest rollout is of step 5, and checkpoint 5 is the policy that drew it."""

MINIBATCHES = ("algo.minibatches=2", "trainer.accumulate_grad_batches=2")
"""Three rollouts of two optimizer steps: the newest is of step 4, and the newest policy of step 6."""


@pytest.fixture
def compare(train: Callable[..., int]) -> Callable[..., dict[str, Any]]:
    """`compare(run, *names, **keys)`: what `replay_*.json` holds."""

    def run(folder: Path, *names: str, **keys: object) -> dict[str, Any]:
        before = set(folder.glob("replay_*.json"))
        arguments = [f"{key}={value}" for key, value in keys.items()]
        assert train("replay", f"run_dir={folder}", f"replay.losses=[{','.join(names)}]", *arguments) == 0
        (path,) = set(folder.glob("replay_*.json")) - before
        return json.loads(path.read_text())

    return run


def numbers(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {outcome["name"]: outcome for outcome in found["objectives"]}


@pytest.fixture
def direct(finished: Callable[..., Path], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`direct(*modules, **changes)`: the outcomes of modules for the newest rollout of the run, changed."""

    def run(*modules: PolicyGradient, **changes: Any) -> list[dict[str, Any]]:
        folder = finished(*MINIBATCHES)
        rollout = dataclasses.replace(newest_rollout(folder), **changes)
        checkpoint = folder / "checkpoints" / "step_00000006.ckpt"
        fabric = L.Fabric(accelerator="cpu", devices=1)
        named = [(str(i), module) for i, module in enumerate(modules)]
        replay(Replay(named, rollout, Path("mine.pt"), checkpoint, tmp_path, fabric, []))
        path = max(tmp_path.glob("replay_*.json"))
        return json.loads(path.read_text())["objectives"]

    return run


def newest_rollout(folder: Path) -> SavedRollout:
    return SavedRollout.read(saved_rollouts(folder / "rollouts")[-1])


def module(kind: type = GRPO, **settings: Any) -> PolicyGradient:
    return kind("tiny", exact_match, sampling=Sampling(max_new_tokens=6), **{"group_size": 4, **settings})


# ---------------------------------------------------------------------- what the numbers are


@pytest.mark.parametrize(
    "overrides",
    [
        ON_POLICY,
        ("algo=rloo", "algo.group_size=4"),
        ("model.lora.r=4", "algo.beta=0.1", "trainer.precision=bf16-mixed"),
        ("trainer.precision=bf16-true",),
        ("algo=remax",),  # whose greedy rewards are saved
        ("algo=otb",),  # as are norms of gradients
    ],
    ids=["grpo", "kl in the reward", "adapters", "masters", "remax", "otb"],
)
def test_at_the_step_of_the_rollout_it_is_the_step_that_training_took(finished, compare, overrides):
    """Loss and gradient norm of optimizer step 6, as metrics.jsonl has them."""
    folder = finished(*overrides)
    (logged,) = [row for row in rows(folder) if row["step"] == 6 and "train/loss" in row]
    found = compare(folder, "run", ckpt_path=folder / "checkpoints" / "step_00000005.ckpt")
    assert (found["rollout_step"], found["policy_step"], found["completions"]) == (5, 5, 16)
    (own,) = found["objectives"]
    # Without old log-probs the generator's stand for them; under bf16 these differ by rounding.
    tolerance = 2e-2 if "trainer.precision=bf16" in " ".join(overrides) else 1e-4
    assert own["gradient_norm"] == pytest.approx(logged["train/grad_norm"], rel=tolerance)
    assert own["loss"] == pytest.approx(logged["train/loss"], abs=1e-2 * tolerance * 100 * own["gradient_norm"])
    assert own["metrics"]["ratio_mean"] == pytest.approx(1, abs=tolerance)


def test_what_the_first_objective_saw_of_each_token_is_a_file_that_the_page_shows(finished, compare):
    folder = finished(*MINIBATCHES)
    found = numbers(compare(folder, "run", "rloo"))["run"]["metrics"]
    table = pyarrow.parquet.read_table(folder / "samples" / "replay_00000004.parquet").to_pylist()
    rollout = newest_rollout(folder)
    tokens = [dict(zip(_OF_TOKENS, each)) for row in table for each in zip(*(row[f"tokens/{n}"] for n in _OF_TOKENS))]
    learned = [each for each in tokens if each["learned"]]
    for name, value in (
        ("ratio_mean", sum(math.exp(each["logprobs"] - each["old_logprobs"]) for each in learned)),
        ("entropy", sum(each["entropies"] for each in learned)),
        ("advantage_size", sum(abs(each["advantages"]) for each in learned)),
    ):
        assert found[name] == pytest.approx(value / len(learned), rel=1e-4), name
    ids = rollout.completions.response_ids[rollout.completions.response_mask].tolist()
    assert [each["ids"] for each in tokens] == ids and [row["reward"] for row in table] == rollout.scores.total.tolist()
    (shown,) = [each for each in samples_of(run_files.RunFiles.of(folder)).files if each["name"].startswith("replayed")]
    assert {"ratio", "entropy", "mask", "advantage", "logprob", "text"} == shown["rows"][0]["t"].keys()


def test_what_a_run_writes_of_tokens_is_what_a_replay_of_its_last_update_computes(finished, compare):
    """Two passes over each rollout, in two micro-batches: the last pass over the rollout of step 4 is by policy 5."""
    shape = ("algo.iterations=2", "algo.beta=0.1", "trainer.accumulate_grad_batches=2")
    folder = finished(*shape, "callbacks.token_samples.every=1", "callbacks.token_samples.completions=6")
    assert [path.stem[-1] for path in sorted((folder / "samples").glob("tokens_*.parquet"))] == ["0", "2", "4"]
    (own,) = [
        each
        for each in samples_of(run_files.RunFiles.of(folder)).files
        if each["name"] == "rollout of step 4, by tokens"
    ]
    colours = {"ratio", "kl", "entropy", "mask", "advantage", "logprob", "text"}
    assert {frozenset(row["t"]) for row in own["rows"]} == {frozenset(colours)}, "no replay was needed"

    compare(folder, "run", ckpt_path=folder / "checkpoints" / "step_00000005.ckpt")
    mine, replayed = (
        pyarrow.parquet.read_table(folder / "samples" / f"{name}_00000004.parquet").to_pylist()
        for name in ("tokens", "replay")
    )
    by_row = {(row["prompt"], tuple(row["tokens/ids"])): row for row in replayed}
    found = [(row, by_row[row["prompt"], tuple(row["tokens/ids"])]) for row in mine]
    for name in (*_OF_TOKENS, "ref_logprobs", "sampler_logprobs"):
        for row, other in found:
            assert row[f"tokens/{name}"] == pytest.approx(other[f"tokens/{name}"], rel=1e-3, abs=1e-5), name
    assert len(found) == 6
    assert {"reward", "rewards/exact_match", "answer", "rank"} <= mine[0].keys() & replayed[0].keys()
    for name in ("reward", "rewards/exact_match", "answer", "rank"):
        assert [row[name] for row, _ in found] == [other[name] for _, other in found]
    assert all(row["answer"] for row in mine) and own["rows"][0]["f"] and own["rows"][0]["x"]["answer"]
    assert samples_of(run_files.RunFiles.of(folder)).files[1] == own, "behind the replay"
    ratios = [math.exp(a - b) for row in mine for a, b in zip(row["tokens/logprobs"], row["tokens/old_logprobs"])]
    assert max(ratios) > 1.001, "not those of the first pass, where every ratio is 1"


_OF_TOKENS = ("ids", "learned", "logprobs", "old_logprobs", "entropies", "advantages")


def test_the_same_objective_twice_is_the_same_column(finished, compare):
    found = compare(finished(*MINIBATCHES), "grpo", "run", "grpo", "gspo")
    first, own, again, other = found["objectives"]
    assert first == again == own | {"name": "grpo"}
    cosines = torch.tensor(found["cosines"], dtype=torch.float64)
    assert torch.equal(cosines, cosines.T)
    assert torch.allclose(cosines.diagonal(), torch.ones(4, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(cosines[:3, :3], torch.ones(3, 3, dtype=torch.float64), atol=1e-12)
    assert abs(found["cosines"][0][3]) < 0.999 and other["gradient_norm"] != first["gradient_norm"]


ALIKE = ("grpo", "cispo", "up_grpo", "dppo_tv"), ("gpg", "dr_grpo", "reinforce_pp_baseline", "rloo")
"""The first four have one advantage, and so have the next two, up to a factor."""


def test_at_ratio_one_what_shares_an_advantage_is_reinforce_and_all_of_it_fits_into_80_columns(
    finished, compare, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    folder, names = finished(*ON_POLICY), [*ALIKE[0], *ALIKE[1]]
    capsys.readouterr()
    found = compare(folder, *names, ckpt_path=folder / "checkpoints" / "step_00000005.ckpt")
    cosines = torch.tensor(found["cosines"])
    assert torch.allclose(cosines[:4, :4], torch.ones(4, 4), atol=1e-5)
    assert torch.allclose(cosines[4:6, 4:6], torch.ones(2, 2), atol=1e-5)
    assert float(cosines[0, 6]) < 0.999 and float(cosines[0, 7]) < 0.999
    assert [outcome["metrics"].get("clip_ratio/region_mean", 0) for outcome in found["objectives"]] == [0] * 8
    _check_tables(capsys.readouterr().out.partition("note:")[0], names, found)


def _check_tables(tables: str, names: list[str], found: dict[str, Any]) -> None:
    lines = tables.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in tables
    for number, name in enumerate(names, start=1):
        assert any(line.startswith(f"{name} ") for line in lines)
        assert sum(line.startswith(f"{number} {name} ") for line in lines) == 2  # the matrix comes in two blocks
    shown = next(line.split() for line in lines if line.startswith("dr_grpo "))
    outcome = numbers(found)["dr_grpo"]
    assert float(shown[1]) == pytest.approx(outcome["loss"], rel=1e-2)
    assert float(shown[2]) == pytest.approx(outcome["gradient_norm"], rel=1e-2)
    assert float(shown[3]) == pytest.approx(found["cosines"][0][5], abs=1e-3)


def test_after_the_update_objectives_differ_and_the_clip_stops_gradients(finished, compare):
    found = compare(finished(*MINIBATCHES), "grpo", "cispo")
    clipped, weighted = found["objectives"]
    assert found["rollout_step"] < found["policy_step"]
    assert clipped["metrics"]["clip_ratio/region_mean"] > 0
    gap = clipped["metrics"]["no_gradient"] - weighted["metrics"]["no_gradient"]
    assert gap == pytest.approx(clipped["metrics"]["clip_ratio/region_mean"])
    assert found["cosines"][0][1] < 0.999


CUTS: dict[str, Callable[[], PolicyGradient]] = {
    "grpo": module,
    "a quantile over the step": lambda: module(selection=partial(top_entropy, share=0.3)),
    "a share of the step": lambda: module(loss=partial(kl_cov_loss, share=0.1)),
    "whitened tokens": lambda: module(Reinforce),
}


@pytest.mark.parametrize("make", CUTS.values(), ids=CUTS.keys())
def test_the_cut_into_micro_batches_changes_nothing(direct, make):
    (one,), (four,) = (direct(make(), micro_batches=count) for count in (1, 4))
    assert one["gradient_norm"] > 0
    assert four["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-5)
    assert four["loss"] == pytest.approx(one["loss"], abs=1e-5 * one["gradient_norm"])
    assert four["metrics"] == pytest.approx(one["metrics"], rel=1e-4, nan_ok=True)


def test_old_logprobs_are_those_that_were_saved(finished, direct, capsys):
    saved = newest_rollout(finished(*MINIBATCHES))
    assert saved.old_logprobs is not None
    (now,), (less,) = direct(module()), direct(module(), old_logprobs=saved.old_logprobs - 1)
    assert less["metrics"]["ratio_mean"] == pytest.approx(math.e * now["metrics"]["ratio_mean"], rel=1e-4)
    assert "generator" not in capsys.readouterr().out
    (sampled,) = direct(module(), old_logprobs=None)
    assert sampled["gradient_norm"] == pytest.approx(now["gradient_norm"], rel=1e-3)
    assert "those that the generator reported" in capsys.readouterr().out


def test_a_saved_reference_is_used_and_one_that_was_not_saved_is_the_initial_policy(finished, direct):
    saved = newest_rollout(finished(*MINIBATCHES))
    assert saved.ref_logprobs is None and saved.old_logprobs is not None
    (initial,) = direct(module(beta=0.1, kl=k3))
    (mine,) = direct(module(beta=0.1, kl=k1), ref_logprobs=saved.old_logprobs)
    (shifted,) = direct(module(beta=0.1, kl=k1), ref_logprobs=saved.old_logprobs - 1)
    assert initial["metrics"]["kl"] > 0
    assert shifted["metrics"]["kl"] == pytest.approx(mine["metrics"]["kl"] + 1, abs=1e-5)


def test_settings_that_lead_elsewhere_lead_to_the_run(finished, compare, tmp_path):
    """Dr. GRPO divides by the longest response that the run allows: of twice the length, half the loss."""
    folder, longer = finished(*ON_POLICY), tmp_path / "longer"
    shutil.copytree(folder, longer)
    text = (folder / "config.yaml").read_text()
    (longer / "config.yaml").write_text(text.replace("max_new_tokens: 6", "max_new_tokens: 12"))
    (short,), (long,) = (compare(run, "dr_grpo")["objectives"] for run in (folder, longer))
    assert short["gradient_norm"] == pytest.approx(2 * long["gradient_norm"], rel=1e-5)


def test_rewards_are_the_saved_ones_and_equal_ones_teach_nothing(finished, direct):
    scores = newest_rollout(finished(*MINIBATCHES)).scores
    equal = dataclasses.replace(scores, values=torch.ones_like(scores.values), total=torch.ones_like(scores.total))
    dropping = module(groups=DynamicSampling(max_draws=0))
    for outcome in direct(module(), dropping, scores=equal):
        assert outcome["gradient_norm"] == 0 and outcome["loss"] == 0


def test_groups_are_chosen_anew_for_each_objective(finished, direct):
    """Without the groups that teach nothing, the mean size of an advantage is that of the others."""
    every, spread, best = direct(
        module(), module(groups=DynamicSampling(max_draws=0)), module(groups=TopOfGroup(2, shortest))
    )
    rollout = newest_rollout(finished(*MINIBATCHES))
    std = rollout.scores.total.view(4, 4).std(1).repeat_interleave(4)
    lengths = rollout.completions.lengths
    kept = float(lengths[std > 0].sum() / lengths.sum())
    assert 0 < kept < 1
    assert every["metrics"]["advantage_size"] == pytest.approx(kept * spread["metrics"]["advantage_size"], rel=1e-4)
    assert best["metrics"]["advantage_size"] != every["metrics"]["advantage_size"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"world_size": 2}, "a share of 1/2"),
        ({"step": 6}, "are of the same step"),
        ({"step": 7}, "the policy is older"),
    ],
)
def test_what_a_reader_has_to_know_is_said(direct, capsys, change, told):
    direct(module(), **change)
    assert told in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------------- the command


def test_nothing_of_the_run_is_changed(finished, compare):
    def state() -> dict[Path, str]:
        files = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("replay_")]
        return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    folder = finished(*MINIBATCHES)
    before = state()
    compare(folder, "grpo", "rloo")
    assert state() == before


REFUSED = {
    "unknown": (["replay.losses=[grppo]"], 2, "'grppo' is no algo preset. Did you mean 'grpo'?"),
    "offline": (["replay.losses=[grpo,dpo]"], 2, "dpo is no objective over the rewards of a rollout"),
    "pairs": (["replay.losses=[online_dpo]"], 2, "online_dpo is no objective over the rewards of a rollout"),
    "critic": (["replay.losses=[grpo,ppo]"], 2, "ppo learns with a critic"),
    "teacher": (["replay.losses=[sdpo]"], 2, "sdpo learns from what a teacher said of the rollout"),
    "norms": (["replay.losses=[otb]"], 2, "otb reads how large a gradient each token had"),
    "greedy": (["replay.losses=[remax]"], 2, "remax compares with the reward of greedy completions"),
    "none": ([], 2, "replay.losses=[] must be a list of algo presets"),
    "one": (["losses=grpo"], 2, "replay.losses=grpo must be a list"),
    "other key": (["replay.losses=[grpo]", "algo.beta=1"], 2, "algo.beta cannot be set"),
    "preset as group": (["replay.losses=[grpo]", "algo=gspo"], 2, "Name presets in replay.losses"),
    "no such rollout": (
        ["replay.losses=[grpo]", "replay.rollout=nowhere.pt"],
        2,
        "replay.rollout=nowhere.pt does not exist",
    ),
    "no such policy": (["replay.losses=[grpo]", "ckpt_path=nowhere.ckpt"], 2, "ckpt_path=nowhere.ckpt does not exist"),
}


@pytest.mark.parametrize(("arguments", "code", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_replayed_is_refused(finished, train, capsys, arguments, code, told):
    folder = finished(*MINIBATCHES)
    assert train("replay", f"run_dir={folder}", *arguments) == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["rollouts", "config.yaml", "checkpoints"])
def test_a_folder_that_lacks_something_is_refused(finished, train, capsys, tmp_path, missing):
    folder = tmp_path / "run"
    shutil.copytree(finished(*MINIBATCHES), folder)
    told = {"rollouts": "callbacks.rollouts", "config.yaml": "no config.yaml", "checkpoints": "no whole checkpoint"}
    if missing == "config.yaml":
        (folder / missing).unlink()
    else:
        shutil.rmtree(folder / missing)
    assert train("replay", f"run_dir={folder}", "replay.losses=[grpo]") == (7 if missing == "checkpoints" else 2)
    assert told[missing] in capsys.readouterr().err


def test_single_completions_have_nothing_for_grpo(finished, train, capsys, tmp_path):
    folder, path = finished(*MINIBATCHES), tmp_path / "single.pt"
    rollout = newest_rollout(folder)
    completions = dataclasses.replace(rollout.completions, group_id=torch.arange(16))
    dataclasses.replace(rollout, rows=list(range(16)), completions=completions).write(path)
    assert train("replay", f"run_dir={folder}", "replay.losses=[grpo]", f"replay.rollout={path}") == 2
    assert "the rollout has 1 completions a prompt" in capsys.readouterr().err
    assert train("replay", f"run_dir={folder}", "replay.losses=[reinforce_pp]", f"replay.rollout={path}") == 0


def test_files_of_another_kind_are_refused(finished, train, capsys):
    folder = finished(*MINIBATCHES)
    rollout, checkpoint = folder / "rollouts" / "step_00000004.pt", folder / "checkpoints" / "step_00000006.ckpt"
    given = (("replay.rollout", checkpoint, "is no"), ("ckpt_path", rollout, "cannot be used as a checkpoint"))
    for key, path, message in given:
        assert train("replay", f"run_dir={folder}", "replay.losses=[grpo]", f"{key}={path}") == 7
        assert f"{path} {message}" in capsys.readouterr().err
    assert train("replay", f"run_dir={folder}", "replay.losses=[grpo]", f"ckpt_path={folder / 'checkpoints'}") == 7
    assert "a folder of pieces" in capsys.readouterr().err
    for path in (folder / "config.yaml", folder / "metrics.jsonl"):
        with pytest.raises(StorageError, match="is no rollout"):
            SavedRollout.read(path)


def test_the_runs_config_builds_only_what_is_allowed(finished, train, capsys, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished(*MINIBATCHES), folder)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("lit_rl.ops.advantages.group_normalized", "os.system"))
    assert train("replay", f"run_dir={folder}", "replay.losses=[run]") == 2
    assert "not on the list of what a config may build" in capsys.readouterr().err
    (tmp_path / "theirs.py").write_text("open(__file__ + '.canary', 'w').close()\ndef f(completions): return []\n")
    tree = yaml.safe_load(text)
    tree["algo"]["loss"] = {"_target_": "lit_rl.rewards.FunctionFromPath", "path": f"{tmp_path}/theirs.py:f"}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    assert train("replay", f"run_dir={folder}", "replay.losses=[run]") == 2
    told = capsys.readouterr().err
    assert "algo.loss._target_=lit_rl.rewards.contract.FunctionFromPath" in told and "trust_run=true" in told
    assert not list(tmp_path.rglob("*.canary"))


@pytest.mark.parametrize("place", ["algo.loss", "algo.generator", "sampling.stop"])
def test_a_reference_in_a_runs_config_is_a_text(finished, train, capsys, tmp_path, place):
    """Whatever is built of it: the check of what may be built has seen a text."""
    folder, canary = tmp_path / "run", tmp_path / "canary"
    shutil.copytree(finished(*MINIBATCHES), folder)
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    part, name = place.split(".")
    tree[part][name] = f"${{oc.create:{{_target_: os.mkdir, path: {canary}}}}}"
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    train("replay", f"run_dir={folder}", "replay.losses=[run,grpo]")
    assert not canary.exists() and "Traceback" not in capsys.readouterr().err


CODE = {"_target_": "lit_rl.rewards.FunctionFromPath", "path": "theirs.py:f"}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no algorithm": ({"_target_": CODE["_target_"], "loss": 3}, "run is no objective .*FunctionFromPath"),
    "no class": ({"_target_": None, "advantage": 3}, "run is no objective"),
    "no model": ({"model": None, "loss": 3}, "algo.model of the run's config.yaml"),
    "code in two places": ({"loss": CODE, "kl": CODE}, "there is no file .*theirs.py"),
    "numbers for functions": ({"loss": 3, "kl": []}, r"(loss|kl) is (3|\[\])"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_run_with_several_faults_in_its_config_is_refused_by_one_of_them(finished, train, capsys, tmp_path, kind):
    folder, (faults, told) = tmp_path / "run", FAULTS[kind]
    shutil.copytree(finished(*MINIBATCHES), folder)
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    algo = {name: node for name, node in (tree["algo"] | faults).items() if node is not None or name not in faults}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree | {"algo": algo}))
    assert train("replay", f"run_dir={folder}", "replay.losses=[run]", "trust_run=true") == 2
    said = capsys.readouterr().err
    assert re.search(told, said) and "Traceback" not in said, said
    (folder / "config.yaml").write_text(yaml.safe_dump(tree | {"algo": 3}))
    assert train("replay", f"run_dir={folder}", "replay.losses=[run]") == 2
    assert "is not the config of a run" in capsys.readouterr().err


def test_a_run_that_is_trusted_may_name_code():
    asked = OmegaConf.create({"allow_targets": [], "trust_run": False})
    for parts, word in (
        ({"model": {"name": "a/b", "trust_remote_code": True}}, "model.trust_remote_code"),
        ({"model": {"name": "a", "attn_implementation": "b/kernel"}}, "model.attn_implementation=b/kernel"),
        ({"model": {"name": "a", "init_kwargs": {"use_kernels": True}}}, "model.init_kwargs.use_kernels"),
        ({"data": {"map_row": {"_target_": "hydra.utils.get_method", "path": "lit_rl.rewards.from_paths"}}}, "map_row"),
        ({"data": {"map_row": "./mine.py:f"}}, "data.map_row=./mine.py:f"),
        ({"data": {"map_row": "lit_rl.data.recipes/../mine.py:f"}}, "data.map_row=lit_rl.data.recipes/../mine.py:f"),
        ({"data": {"sources": [{"path": "a", "map_row": "mine.f"}]}}, r"data.sources\[0\].map_row=mine.f"),
        ({"reward": {"_target_": "lit_rl.rewards.RemoteReward", "urls": ["http://a.b"]}}, "RemoteReward"),
        ({"judge": {"_target_": "lit_rl.rewards.LLMJudge", "base_url": "http://a.b"}}, "LLMJudge"),
        ({"data": {"task": {"_target_": "lit_rl.data.tasks.VerifiersTasks"}}}, "VerifiersTasks"),
        ({"reward": {"_target_": "lit_rl.rewards.contract.load_by_path", "path": "x:y"}}, "load_by_path"),
        ({"optimizer": {"_target_": "lit_rl.algorithms.optim.optimizers.ByPath", "path": "x.Y"}}, "optimizer"),
        ({"s": {"_target_": "lit_rl.algorithms.optim.schedules.ScheduleByPath", "path": "x.Y"}}, "ScheduleByPath"),
    ):
        with pytest.raises(ConfigError, match=f"{word}.*trust_run=true"):
            run_trust.check(parts, asked)
        run_trust.check(parts, OmegaConf.create({"allow_targets": [], "trust_run": True}))
    run_trust.check({"model": {"name": "a", "attn_implementation": "sdpa"}}, asked)
    run_trust.check({"data": {"task": {"_target_": "lit_rl.environments.games.Products"}}}, asked)
    run_trust.check({"data": {"map_row": "lit_rl.data.recipes.gsm8k"}}, asked)


# ---------------------------------------------------------------------- the callback


def test_a_rollout_is_plain_data_and_the_newest_ones_stay(finished):
    folder = finished(*ON_POLICY)
    files = sorted(p.name for p in (folder / "rollouts").iterdir())
    assert files == ["step_00000004.pt", "step_00000005.pt"]
    plain = torch.load(folder / "rollouts" / files[-1], weights_only=True)
    assert plain["step"] == 5 and len(plain["rows"]) == 4 and plain["scores"]["values"].shape == (16, 1)
    assert plain["scores"]["names"] == ("exact_match",) and plain["scores"]["weights"].tolist() == [[1.0]] * 16


def test_a_later_step_of_another_run_does_not_count_as_newer(finished, tmp_path):
    folder = tmp_path / "rollouts"
    saved = SavedRollout.read(finished(*MINIBATCHES) / "rollouts" / "step_00000004.pt")
    saved.write(folder / "step_00000099.pt")
    Rollouts().on_train_batch_end(_trainer(tmp_path), _module(saved), None, SimpleNamespace(slot=0), 0)
    assert [p.name for p in folder.iterdir()] == ["step_00000004.pt"]


@pytest.mark.parametrize("case", ["later slot", "other rank", "fast_dev_run", "nothing scored"])
def test_nothing_is_written_where_there_is_nothing_new(finished, tmp_path, case):
    saved = SavedRollout.read(finished(*MINIBATCHES) / "rollouts" / "step_00000004.pt")
    trainer, module, batch = _trainer(tmp_path), _module(saved), SimpleNamespace(slot=int(case == "later slot"))
    trainer.is_global_zero, trainer.fast_dev_run = case != "other rank", case == "fast_dev_run"
    if case == "nothing scored":
        module.scored = None
    Rollouts().on_train_batch_end(trainer, module, None, batch, 0)
    assert not list(tmp_path.iterdir())


def test_logprobs_of_rows_that_a_buffer_replaced_are_left_out(finished):
    """What was scored is saved; a group of the buffer in its place has other tokens."""
    saved = SavedRollout.read(finished(*MINIBATCHES) / "rollouts" / "step_00000004.pt")
    module = _module(saved)
    assert SavedRollout.of(module).old_logprobs is saved.old_logprobs
    others = dataclasses.replace(saved.completions, response_ids=saved.completions.response_ids.flip(0))
    module.rollout = dataclasses.replace(module.rollout, completions=others)
    again = SavedRollout.of(module)
    assert again.old_logprobs is None and again.completions is saved.completions


def _trainer(folder: Path) -> Any:
    return SimpleNamespace(is_global_zero=True, fast_dev_run=False, default_root_dir=str(folder))


def _module(saved: SavedRollout) -> Any:
    """What the callback asks of a module, holding a saved rollout."""
    batch = SimpleNamespace(rows=saved.rows, rollout=saved.number)
    total = saved.scores.total
    mask, old = saved.completions.response_mask, saved.old_logprobs
    rollout = Rollout(saved.completions, total, total, mask, old_logprobs=old)
    return SimpleNamespace(
        scored=SimpleNamespace(
            batch=batch, completions=saved.completions, scores=saved.scores, greedy_rewards=None, gradient_norms=None
        ),
        rollout=rollout,
        plan=SimpleNamespace(minibatches=2, accumulate=2, split_groups=1, world_size=1),
    )


# ------------------------------------------------------------------ episodes


PAYS_DIGITS = """
class PaysDigits:
    def reset(self, *, seed):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        return "?=", float(sum(map(int, filter(str.isdigit, action)))), self.turns == 2, False, {}
"""


def test_episodes_are_replayed_with_the_credit_of_their_turns(finished, compare, tmp_path):
    """Loss masks, turns and their rewards are those that training had; no environment is asked: its file is gone."""
    game = tmp_path / "pays_digits.py"
    game.write_text(PAYS_DIGITS)
    limits = ["env.max_turns=3", "env.max_tokens=48", "env.max_observation_tokens=8", "sampling.max_new_tokens=6"]
    credit = ["reward=environment_turns", "algo/advantage=centered_return_to_go"]
    folder = finished("env=environment", f"env.path={game}:PaysDigits", *limits, *credit)
    game.unlink()
    (logged,) = [row for row in rows(folder) if row["step"] == 6 and "train/loss" in row]
    found = compare(folder, "run", "grpo", ckpt_path=folder / "checkpoints" / "step_00000005.ckpt")
    own, whole = found["objectives"]
    assert own["gradient_norm"] == pytest.approx(logged["train/grad_norm"], rel=1e-4) and own["gradient_norm"] > 0
    assert found["cosines"][0][1] < 0.999, "whole episodes are credited as turns are"
    assert whole["gradient_norm"] > 0


def test_episodes_that_fork_are_replayed_branch_by_branch(finished, compare):
    """Each token behind what the policy read: else ratios would not be 1, and the gradient another."""
    agent = Path(__file__).parents[1] / "algorithms" / "forking_agents.py"
    limits = ["env.max_branches=3", "env.max_tokens=24", "sampling.max_new_tokens=4"]
    folder = finished("env=rollout_func", f"env.path={agent}:forking", *limits, "reward=function", f"reward.fn={agent}:letters")  # fmt: skip  # noqa: E501
    assert newest_rollout(folder).completions.follows is not None
    (logged,) = [row for row in rows(folder) if row["step"] == 6 and "train/loss" in row]
    (own,) = compare(folder, "run", ckpt_path=folder / "checkpoints" / "step_00000005.ckpt")["objectives"]
    assert own["metrics"]["ratio_mean"] == pytest.approx(1, abs=1e-4) and own["gradient_norm"] > 0
    assert own["gradient_norm"] == pytest.approx(logged["train/grad_norm"], rel=1e-4)
