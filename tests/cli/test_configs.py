"""Every file of every group composes, resolves and builds; the presets set what their names say."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from cli_helpers import write_jsonl
from composed_configs import tree_of
from small_models import save_tokenizer
from tiers import quick

import lit_rl
from lit_rl.cli import listing
from lit_rl.cli.build import build
from lit_rl.cli.trainer_settings import trainer_precision
from lit_rl.core.errors import BackendError
from lit_rl.core.rollout import Structured
from lit_rl.models import LanguageModel

CONF = Path(lit_rl.__file__).parents[1] / "conf"
FILES = sorted(
    path.relative_to(CONF).with_suffix("").as_posix()
    for path in CONF.rglob("*.yaml")
    if path.parent != CONF and "lightning" not in path.parts  # whole configs of LightningCLI: they have their own tests
)
GROUPS = {
    group: [file.rpartition("/")[2] for file in FILES if file.rpartition("/")[0] == group]
    for group in sorted({file.rpartition("/")[0] for file in FILES})
}
"""The choices of each group."""
OF_THE_MODULE = {"eval", "generator", "judge", "model", "optimizer", "reference", "reward", "sampling", "scheduler"}

VALUES = {  # what has no default
    "data/jsonl": ["data.path=mine.jsonl"],
    "generator/vllm_server": ["generator.urls=[http://127.0.0.1:8000]"],
    "model/local": ["model.name=tiny"],
    "data/repeated": ["data.task.prompt='?'"],
    "data/verifiers": ["data.task.id=my_tasks"],
    "env/tools": [f"env.functions=['{Path(__file__).with_name('small_tools.py')}:double']"],
    "env/mcp": ["env.command=[python,server.py]"],
    "env/environment": ["env.path=lit_rl.environments.games:GuessNumber"],
    "env/rollout_func": [f"env.path='{Path(__file__).with_name('small_tools.py')}:rollout'"],
    "env/gymnasium": ["env.id=FrozenLake-v1"],
    "data/random_play": ["algo=sft", "data.task.id=FrozenLake-v1", "data.task.prompt='?'"],
    "experiment/smollm2_dpo": ["model.name=tiny"],
    "experiment/sft_then_grpo": ["model.name=tiny"],
    "experiment/smollm2_words": ["model.name=tiny"],
    "experiment/smollm2_tool": ["model.name=tiny"],
    "optimizer/by_path": ["optimizer.path=torch.optim.SGD"],
    "scheduler/by_path": ["scheduler.path=torch.optim.lr_scheduler.CosineAnnealingLR"],
    "reward/joint": ["reward.joint=lit_rl.rewards:contains"],
    "reward/function": ["reward.fn=lit_rl.rewards:contains"],
    "algo/advantage/gae": ["algo=ppo"],
    "algo/advantage/gae_of_turns": ["algo=ppo"],
    "algo/critic/separate": ["algo=ppo"],
    "algo/critic/shared_trunk": ["algo=ppo"],
    "algo/critic/adapter": ["algo=ppo", "model.lora.r=2"],
    **{f"algo/critic_scheduler/{name}": ["algo=ppo"] for name in ("same", "constant", "linear", "cosine")},
    "algo/kl_control/adaptive": ["algo.beta=0.1"],
    "algo/weight_norm/token": ["algo/correction=token_truncate"],
    "algo/weight_norm/sequence": ["algo/correction=sequence_mask"],
    "algo/rejection/statistic/k1": ["algo/rejection=sequence_mean", "algo.rejection.low=-0.1"],
    "algo/rejection/statistic/k2": ["algo/rejection=sequence_mean"],
    "algo/rejection/statistic/k3": ["algo/rejection=sequence_mean"],
    "algo/rejection/statistic/tv": ["algo/rejection=sequence_mean"],
    **{f"algo/preference/{path.stem}": ["algo=dpo"] for path in sorted((CONF / "algo/preference").glob("*.yaml"))},
    "algo/preference/simpo": ["algo=cpo"],
    "algo/preference/alphapo": ["algo=cpo"],
    **{f"algo/divergence/{name}": ["algo=dpo"] for name in ("reverse_kl", "forward_kl", "js", "alpha")},
    **{f"algo/imitation/{name}": ["algo=sft"] for name in ("cross_entropy", "dft", "chord")},
    **{f"algo/verdict/{name}": ["algo=kto"] for name in ("kto", "apo_zero_unpaired")},
    **{f"algo/prompt_weights/{name}": ["algo=bco"] for name in ("none", "density_ratio")},
    "algo/groups/best": ["algo/advantage=constant"],
    "data/preferences": ["algo=dpo", "data.path=mine.jsonl"],
    "data/texts": ["algo=sft", "data.path=mine.jsonl"],
    "data/steps": ["algo=process_reward_model", "data.path=mine.jsonl"],
    "judge/function": ["algo=online_dpo", "judge.fn=lit_rl.rewards:contains"],
    "judge/pairwise": [f"judge.fn='{Path(__file__).with_name('pairwise_judge.py')}:longer'"],
    "judge/pairrm": ["algo=online_dpo", "judge.name=o/m"],
    "judge/llm": ["algo=online_dpo", "judge.base_url=https://h/v1", "judge.model=m"],
    "algo/advantage/none": ["algo/teacher=model"],
    "algo/teacher/context/outcome": ["algo/teacher=self"],
    "algo/teacher/context/column": ["algo/teacher=self", "algo.teacher.context.column=answer"],
    **{
        f"algo/distillation/{name}": ["algo/teacher=model"]
        for name in ("policy_gradient", "reverse_kl", "student_top_k", "top_k", "top_k_weighted")
    },
    **{
        f"algo/distillation/estimator/{path.stem}": ["algo/teacher=model", "algo/distillation=reverse_kl"]
        for path in sorted((CONF / "algo/distillation/estimator").glob("*.yaml"))
    },
    **{
        f"algo/distillation/support/{name}": ["algo/teacher=model", "algo/distillation=top_k"]
        for name in ("with_tail", "renormalized")
    },
    "algo/teacher/server": ["algo.teacher.base_url=https://h/v1"],
    "algo/teacher/by_column": [
        "algo.teacher.column=answer",
        "+algo/teacher@algo.teacher.teachers.math=server",
        "algo.teacher.teachers.math.base_url=https://h/v1",
    ],
    **{
        f"algo/distillation/{name}": ["algo/teacher=server", "algo.teacher.base_url=https://h/v1"]
        for name in ("iw_opd", "forward_kl")
    },
    "reward/none": ["algo=dpo"],
    "reward/process_reward_model": ["reward.functions.process_reward_model.name=o/m"],
    "reference/path": ["reference.name=tiny"],
    "reward/code": ["reward.functions.code_execution.allow_execution=true"],
    "reward/judge": [
        *(f"reward.functions.judge.{word}" for word in ("base_url=https://h/v1", "model=m", "rubric=helpful"))
    ],
    "reward/judge_group": [
        "reward.functions.judge_group.base_url=https://h/v1",
        "reward.functions.judge_group.model=m",
    ],
    "reward/remote": ["reward.functions.remote.urls=[https://h/x]"],
    "reward/reward_model": ["reward.functions.reward_model.name=o/m"],
}
PACKAGES = {
    "strategy/deepspeed_1": "deepspeed",
    "strategy/deepspeed_2": "deepspeed",
    "strategy/deepspeed_3": "deepspeed",
    "logger/mlflow": "mlflow",
    "logger/trackio": "trackio",
    "logger/wandb": "wandb",
    "generator/vllm": "vllm",
}
"""What building needs beyond the package's own requirements."""

Tree = dict[str, Any]


@pytest.fixture
def composed() -> Callable[..., Tree]:
    """`composed("algo=rloo")` is the resolved config of `train.py algo=rloo`."""
    return lambda *overrides: tree_of("run_dir=run", "trainer.accelerator=cpu", *overrides)


def parts(tree: Tree) -> list[Any]:
    """Everything that the front door builds of a config, the Trainer last."""
    nodes = [tree["algo"], tree["data"], *tree["callbacks"].values(), *tree["logger"].values()]
    trainer = tree["trainer"] | {"precision": trainer_precision(tree["trainer"], None)}
    return [build(node) for node in (*nodes, trainer)]


@pytest.mark.all
def test_constraints_are_set_on_the_command_line(composed):
    for override, field, value in (
        ("sampling.bad_words=[no, never]", "bad_words", ("no", "never")),
        ("sampling.logit_bias={5: -1, 7: 2.5}", "logit_bias", {5: -1.0, 7: 2.5}),
        ("sampling.logit_bias.5=-1", "logit_bias", {5: -1.0}),
        ("sampling.structured.choice=[yes_, no_]", "structured", Structured(choice=("yes_", "no_"))),
        ("sampling.structured.json_schema={type: object}", "structured", Structured(json_schema={"type": "object"})),
        ("sampling.top_k=0", "structured", None),
        ("sampling.top_k=0", "logit_bias", {}),
    ):
        assert getattr(build(composed(override)["algo"]["sampling"]), field) == value


@pytest.mark.parametrize("group", quick(GROUPS, {"algo", "algo/loss", "data", "model", "reward", "logger", "trainer"}))
def test_every_file_composes_and_builds(composed, group, tmp_path, monkeypatch):
    """A term or a model is a part of the module, so of these files the module alone is built."""
    monkeypatch.chdir(tmp_path)
    for choice in GROUPS[group]:
        file = f"{group}/{choice}"
        tree = composed(*VALUES.get(file, []), f"{group}={choice}")
        if group in tree and group != "logger":  # of which several may stand side by side
            assert set(tree[group] or {}) <= listing.keys_of_choice(group, choice) <= listing.keys_of_group(group)
        package = PACKAGES.get(file)
        if package and importlib.util.find_spec(package) is None:
            with pytest.raises(BackendError, match=package):
                parts(tree)
        elif group in OF_THE_MODULE or group.startswith("algo/"):
            assert isinstance(build(tree["algo"]), L.LightningModule), file
        else:
            module, data, *_, trainer = parts(tree)
            assert isinstance(module, L.LightningModule) and isinstance(data, L.LightningDataModule), file
            assert isinstance(trainer, L.Trainer), file


def test_every_file_opens_with_a_line_that_says_what_it_is():
    assert PACKAGES.keys() | VALUES.keys() <= set(FILES)
    for file in FILES:
        lines = (CONF / f"{file}.yaml").read_text().splitlines()
        first = next(line for line in lines if line != "# @package _global_")
        assert first.startswith("# ") and len(first) > 10, file
        assert max(map(len, lines)) <= 120, file


@pytest.mark.all
class TestJudges:
    """`judge=` is of every algorithm that writes: what `eval.win_rate_against` asks."""

    WRITES = [
        path.stem
        for path in sorted((CONF / "algo").glob("*.yaml"))
        if "evaluation: ${eval}" in path.read_text() or "/policy_gradient@" in path.read_text()
    ]

    def test_every_algorithm_that_writes_takes_it(self, composed):
        assert len(self.WRITES) == 15
        for name in self.WRITES:
            tree = composed(f"algo={name}", "judge.soft=true")
            assert tree["algo"]["judge"] == tree["judge"] != {}, name

    def test_the_module_has_it(self, composed):
        for algorithm in ("sft", "grpo", "online_dpo"):
            assert build(composed(f"algo={algorithm}", "judge.soft=true")["algo"]).judge.soft is True

    def test_of_a_run_without_rewards(self, composed):
        fn = VALUES["judge/pairwise"]
        module = build(composed("algo=sft", "reward=none", "judge=pairwise", *fn)["algo"])
        assert not module.judge.reads_rewards and not module.reward_functions.names


class TestPresets:
    def test_the_command_line_beats_a_preset(self, composed):
        tree = composed("algo=dapo", "algo.loss.clip_high=0.25", "algo.mask_truncated=false")
        module = build(tree["algo"])
        assert module.policy_loss.keywords["clip_high"] == 0.25 and not module.mask_truncated

    def test_an_experiment_beats_the_groups_and_the_command_line_beats_it(self, composed):
        tree = composed("experiment=rloo_addition")
        assert tree["algo"]["_target_"] == "lit_rl.algorithms.RLOO"
        assert (tree["algo"]["group_size"], tree["data"]["prompts_per_rollout"]) == (4, 64)
        assert composed("experiment=rloo_addition", "algo.group_size=6")["algo"]["group_size"] == 6


@pytest.mark.all
class TestTinysRecommendation:
    def test_is_tinys(self, composed):
        tree = composed()
        assert tree["optimizer"]["lr"] > 1e-5
        assert tree["sampling"]["max_new_tokens"] == 6 and tree["scheduler"]["warmup_steps"] == 20

    def test_is_no_other_models(self, composed):
        for choice in set(GROUPS["model"]) - {"tiny", "digits"}:
            tree = composed(*VALUES.get(f"model/{choice}", []), f"model={choice}")
            assert tree["optimizer"]["lr"] == 1e-6
            assert tree["sampling"]["max_new_tokens"] == 512 and tree["scheduler"]["warmup_steps"] == 0


@pytest.mark.all
def test_keys_of_the_users_own_need_no_plus(composed):
    words = ["data.rename={name: value}", "model.init_kwargs.name=value", "optimizer=by_path"]
    tree = composed(*words, "optimizer.path=torch.optim.SGD", "optimizer.kwargs.name=value")
    for group, key in (("data", "rename"), ("model", "init_kwargs"), ("optimizer", "kwargs")):
        assert tree[group][key] == {"name": "value"}


class TestModels:
    def test_a_preset_names_its_repository_and_nothing_else(self, composed):
        for choice in set(GROUPS["model"]) - {"tiny", "digits", "local"}:
            model = build(composed(f"model={choice}")["model"])
            assert "/" in model.name and vars(model) == vars(LanguageModel(model.name)), choice

    def test_lora_is_there_once_one_of_its_settings_is(self, composed):
        assert build(composed("model=qwen0.5b")["model"]).lora is None
        lora = build(composed("model=qwen0.5b", "model.lora.r=4", "model.lora.rslora=true")["model"]).lora
        assert (lora.r, lora.rslora, lora.targets) == (4, True, "all-linear")
        assert build(composed("model.lora.targets=[q_proj]")["model"]).lora.r == 16


GSM8K = [{"question": f"What is {n} and {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(8)]
MATH = [{"problem": f"Double ${n}$.", "solution": f"So $\\boxed{{{2 * n}}}$.", "level": "Level 1"} for n in range(8)]


@pytest.mark.parametrize("choice, rows", [("gsm8k", GSM8K), ("math", MATH)])
@pytest.mark.all
class TestRecipes:
    def test_from_local_files_of_the_same_schema(self, composed, tmp_path, choice, rows):
        train, val = write_jsonl(tmp_path / "train.jsonl", rows[:6]), write_jsonl(tmp_path / "val.jsonl", rows[6:])
        local = [f"data.path={train}", f"data.val_path={val}", "data.val_split=null"]
        self.check(composed(f"data={choice}", *local, *self.WHOLE), 6, 2)

    def test_from_a_local_folder_laid_out_as_the_hubs(self, composed, tmp_path, choice, rows, monkeypatch):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        folder = tmp_path / "set"
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", rows[:6])
        write_jsonl(folder / "test.jsonl", rows[6:])
        self.check(composed(f"data={choice}", f"data.path={folder}", *self.WHOLE[1:]), 6, 2)

    WHOLE = ("data.split=null", "data.name=null", "data.prompts_per_rollout=2", "data.max_prompt_tokens=1000")

    def check(self, tree: Tree, train: int, val: int) -> None:
        data, reward = build(tree["data"]), build(tree["reward"])
        data.prepare(LanguageModel("tiny").tokenizer)
        assert data.report["train"]["kept"] == train and data.report["val"]["kept"] == val
        assert data.columns == ["answer"]
        reward.bind(data.columns)
        batch = data.peek(train)
        assert all(prompt[0]["role"] == "system" and "\\boxed{}" in prompt[0]["content"] for prompt in batch.prompts)
        answers = list(batch.columns["answer"])
        right = [[{"role": "assistant", "content": f"so \\boxed{{{answer}}}"}] for answer in answers]
        wrong = [[{"role": "assistant", "content": "so \\boxed{-1}"}] for _ in answers]
        assert reward.score(batch.prompts, right, batch.columns).total.tolist() == [1.0] * train
        assert reward.score(batch.prompts, wrong, batch.columns).total.tolist() == [0.0] * train


def test_a_tokenizer_alone_is_enough_to_look_at_the_data(composed, tmp_path):
    folder = save_tokenizer(tmp_path / "no weights")
    tree = composed("model=local", f"model.name='{folder}'")
    data = build(tree["data"])
    data.prepare(build(tree["model"]).tokenizer)
    assert data.report["train"]["kept"] > 1000


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        (["algo=sft", "model=qwen0.5b"], 2e-5),
        (["algo=reward_model", "model=qwen0.5b"], 1e-4),
        (["algo=dpo", "model=qwen0.5b"], 1e-6),
        (["algo=sft"], 5e-4),  # the tiny policy's own recommendation
        (["algo=sft", "optimizer.lr=3e-3"], 3e-3),
        (["algo=sft", "data.max_dropped=0.5"], 5e-4),  # what an error of any data module advises is a key of it
    ],
)
@pytest.mark.all
def test_supervised_methods_have_a_learning_rate_of_their_own(composed, overrides, lr):
    assert composed(*overrides)["algo"]["optimizer"]["lr"] == pytest.approx(lr)
