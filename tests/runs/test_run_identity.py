"""A resumed run is the run: each part of what it was is gone on with, or its change is refused by name, or said."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rl import GRPO, AdamW, Constant, Cosine, FunctionTools, LanguageModel, Lora, RolloutDataModule, Sampling
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.algorithms.loop import run_identity
from lit_rl.callbacks.exported_weights import EMAWeights
from lit_rl.core.errors import StorageError
from lit_rl.core.model_paths import TINY
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.models.references import FrozenCopy
from lit_rl.ops.policy_losses import clipped_policy_loss
from lit_rl.rewards import Rewards, from_paths
from lit_rl.rewards.judges import RewardJudge

ROWS = [{"prompt": f"{n}+1="} for n in range(4)]
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def score(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def another(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def another_tool(a: int) -> int:
    """Add one.

    Args:
        a: The number.
    """
    return a + 1


class Mine(GRPO):
    """As GRPO, by another name."""


def made(
    lora: Any = None, model: dict[str, Any] | None = None, reward: Any = score, kind: Any = GRPO, **settings: Any
) -> GRPO:
    settings = {"sampling": Sampling(max_new_tokens=3), "optimizer": AdamW(lr=0.01), "beta": 0.0} | settings
    described = {"name": "tiny", "lora": Lora(r=2, targets=["q_proj"]) if lora is None else lora} | (model or {})
    return kind(LanguageModel(**described), reward, group_size=2, **settings)


def fitted(module: Any, folder: Path, steps: int, resume: Path | None = None, **trainer: Any) -> Path:
    data = RolloutDataModule(rows=ROWS, prompts_per_rollout=2, val_fraction=0)
    how = {"max_steps": steps, "accelerator": "cpu", "enable_checkpointing": False, **QUIET, **trainer}
    run = L.Trainer(default_root_dir=folder, **how)
    run.fit(module, datamodule=data, ckpt_path=resume)
    run.save_checkpoint(folder / f"{steps}.ckpt")
    return folder / f"{steps}.ckpt"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a LoRA run's first step."""
    return fitted(made(), tmp_path_factory.mktemp("begun"), 1)


@pytest.fixture(scope="module")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped policy with one other weight: most of a fine-tuned model's are others."""
    folder = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(TINY)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(run_identity, "rank_zero_info", lines.append)
    return lines


REFUSED: dict[str, tuple[Any, str]] = {
    "alpha": (Lora(r=2, targets=["q_proj"], alpha=512), r"model\.lora\.alpha 32 -> 512"),
    "r": (Lora(r=4, targets=["q_proj"]), r"model\.lora\.r 2 -> 4"),
    "targets": (
        Lora(r=2, targets=["q_proj", "v_proj"]),
        r"model\.lora\.targets \['q_proj'\] -> \['q_proj', 'v_proj'\]",
    ),
    "rslora": (Lora(r=2, targets=["q_proj"], rslora=True), r"model\.lora\.rslora \(not set\) -> True"),
    "dora": (Lora(r=2, targets=["q_proj"], dora=True), r"model\.lora\.dora \(not set\) -> True"),
    "kind": (peft.LoHaConfig(r=2, target_modules=["q_proj"]), r"model\.lora\.kind LORA -> LOHA"),
    "pattern": (
        peft.LoraConfig(r=2, lora_alpha=32, target_modules=["q_proj"], alpha_pattern={"q_proj": 5}),
        r"model\.lora\.alpha_pattern \(not set\) -> \{'q_proj': 5\}",
    ),
}


@pytest.mark.parametrize("part", REFUSED)
def test_another_adapter_is_refused_by_the_name_of_its_setting(part: str, begun: Path, tmp_path: Path) -> None:
    lora, message = REFUSED[part]
    with pytest.raises(StorageError, match=rf"{message}.*model\.allow_changed=true"):
        fitted(made(lora), tmp_path, 2, begun)


def test_no_adapter_is_refused_too(begun: Path, tmp_path: Path) -> None:
    full = GRPO("tiny", score, group_size=2, sampling=Sampling(max_new_tokens=3))
    with pytest.raises(StorageError, match=r"frozen weights.*model\.lora\.r 2 -> \(not set\)"):
        fitted(full, tmp_path, 2, begun)


def test_another_base_is_refused_or_accepted(begun: Path, other_base: str, said: list[str], tmp_path: Path) -> None:
    """By training, by what only looks, and by what exports."""
    other = {"name": other_base}
    with pytest.raises(StorageError, match=rf"model\.name tiny -> {other_base}, frozen weights changed"):
        fitted(made(model=other), tmp_path, 2, begun)
    looking = made(model=other)
    looking.configure_model()
    saved = torch.load(begun, weights_only=True)
    with pytest.raises(StorageError, match="frozen weights changed"):
        looking.on_load_checkpoint({key: saved[key] for key in ("state_dict", "run")})
    fitted(made(model={**other, "allow_changed": True}), tmp_path, 2, begun)
    assert any(f"model.name tiny -> {other_base}, frozen weights changed" in line for line in said)
    moved = tmp_path / "moved"  # the same model somewhere else
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(moved)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(moved)
    said.clear()
    fitted(made(model={"name": str(moved)}), tmp_path, 2, begun)
    assert not any("model.name" in line for line in said)


def test_another_tokenizer_and_an_object_over_another_base_are_refused(begun: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(TINY)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with torch.no_grad():
        base.model.norm.weight.mul_(2)
    policy = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=32, target_modules=["q_proj"]))
    with pytest.raises(StorageError, match="frozen weights changed"):
        fitted(
            GRPO(LoadedModel(policy, tokenizer), score, group_size=2, sampling=Sampling(max_new_tokens=3)),
            tmp_path,
            2,
            begun,
        )
    before = run_identity.model_record(described := LanguageModel("tiny"), base, None)
    described.tokenizer.add_tokens(["<new>"])
    with pytest.raises(StorageError, match="tokenizer changed"):
        run_identity.check_model(before, run_identity.model_record(described, base, None), allowed=False)


def test_a_reference_that_is_not_the_runs_is_refused(other_base: str, tmp_path: Path) -> None:
    """All weights are in the checkpoint, but what they are measured against is not."""

    def full(name: str, **settings: Any) -> GRPO:
        return GRPO(name, score, group_size=2, sampling=Sampling(max_new_tokens=3), **settings)

    first = fitted(full("tiny", beta=0.1), tmp_path, 1)
    with pytest.raises(StorageError, match="reference weights changed"):
        fitted(full(other_base, beta=0.1), tmp_path, 2, first)
    fitted(full(other_base), tmp_path, 2, first)  # nothing of the base is left


SAID: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"loss": partial(clipped_policy_loss, clip_high=0.3)}, "algo.loss.clip_high (not set) -> 0.3"),
    "another loss": ({"loss": lambda logprobs, old, advantages, mask: (logprobs, {})}, "algo.loss (<lambda>) changed"),
    "beta": ({"beta": 0.2}, "algo.beta 0 -> 0.2"),
    "seed": ({"seed": 3}, "algo.seed 0 -> 3"),
    "sampling": ({"sampling": Sampling(max_new_tokens=3, temperature=0.5)}, "sampling.temperature 1 -> 0.5"),
    "stop": ({"sampling": Sampling(max_new_tokens=3, stop=("a",))}, "sampling.stop changed"),
    "reward": ({"reward": another}, "reward (score -> another) changed"),
    "reward weights": ({"reward": Rewards([score], weights=[2.0])}, "reward.weights.score (not set) -> 2"),
    "reward limits": ({"reward": Rewards([score], timeout=3.0)}, "reward.timeout (not set) -> 3"),
    "reference": ({"reference": FrozenCopy()}, "reference models.references.Auto -> models.references.FrozenCopy"),
    "schedule": (
        {"scheduler": Cosine()},
        "scheduler algorithms.optim.schedules.Linear -> algorithms.optim.schedules.Cosine",
    ),
    "dropout": ({"lora": Lora(r=2, targets=["q_proj"], dropout=0.1)}, "model.lora.dropout 0 -> 0.1"),
    "template": ({"model": {"chat_template": "{{ messages[0].content }}"}}, "model.chat_template changed"),
    "end": ({"model": {"pad_token": "<|endoftext|>"}}, "model.pad_token changed"),
    "eos_token": ({"model": {"eos_token": "<|im_end|>"}}, "model.eos_token changed"),
    "dtype": ({"model": {"dtype": "bfloat16"}}, "model.dtype float32 -> bfloat16"),
    "attention": ({"model": {"attn_implementation": "eager"}}, "model.attn_implementation (not set) -> eager"),
    "a choice": ({"env": FunctionTools([add], seed="sample")}, "env.seed (not set) -> sample"),
    "a class of yours": ({"kind": Mine}, "algo (Mine) changed"),
    "overrides": (
        {"model": {"init_kwargs": {"attention_dropout": 0.1}}},
        "model.init_kwargs.attention_dropout (not set) -> 0.1",
    ),
    "generator": (
        {"generator": HFGenerator()},
        "generator generation.native.NativeGenerator -> generation.hf.HFGenerator",
    ),
    "setting of the generator": (
        {"generator": NativeGenerator(speedups={"lean_steps": False})},
        "generator.speedups.lean_steps True -> False",
    ),
    "validation": ({"evaluation": Evaluation(temperature=0.5)}, "eval.temperature 0 -> 0.5"),
    "judge": ({"judge": RewardJudge(soft=True)}, "judge.soft False -> True"),
    "frozen parts": ({"model": {"lora": None, "freeze": ["model.layers.0"]}}, "model.freeze changed"),
    "group": ({"algo": 4}, "algo.group_size 2 -> 4"),
}


@pytest.mark.parametrize("part", SAID)
def test_a_setting_that_changed_is_said_by_its_key(part: str) -> None:
    changed, line = SAID[part]
    before = made()._settings()
    if part == "group":
        now = GRPO(
            LanguageModel("tiny", lora=Lora(r=2)), score, group_size=4, sampling=Sampling(max_new_tokens=3)
        )._settings()
    else:
        now = made(**changed)._settings()
    assert line in run_identity.differences(before, now)
    assert run_identity.differences(before, made()._settings()) == []


OF_TRAINER: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"max_steps": 7}, "trainer.max_steps -1 -> 7"),
    "epochs": ({"max_epochs": 7}, "trainer.max_epochs 3 -> 7"),
    "overfitting": ({"overfit_batches": 2}, "trainer.overfit_batches 0 -> 2"),
    "validation": ({"limit_val_batches": 2}, "trainer.limit_val_batches 1 -> 2"),
    "validations": ({"val_check_interval": 5}, "trainer.val_check_interval 1 -> 5"),
    "decay": ({"callbacks": [EMAWeights(decay=0.5)]}, "callbacks.ema.decay 0.9 -> 0.5"),
}


@pytest.mark.parametrize("part", OF_TRAINER)
def test_a_setting_of_the_trainer_that_changed_is_said_by_its_key(part: str) -> None:
    changed, line = OF_TRAINER[part]

    def noted(**settings: Any) -> Any:
        module = made()
        how = {"max_epochs": 3, "callbacks": [EMAWeights(decay=0.9)], "accelerator": "cpu", **QUIET, **settings}
        module.trainer = L.Trainer(**how)
        return module._settings()

    assert line in run_identity.differences(noted(), noted(**changed))
    assert run_identity.differences(noted(), noted()) == []


def test_what_changed_is_used_and_said_in_one_line(begun: Path, said: list[str], tmp_path: Path) -> None:
    module = made(
        optimizer=AdamW(lr=0.5, weight_decay=0.1, betas=(0.8, 0.9)), scheduler=Constant(), beta=0.2, reward=another
    )
    changed = {"gradient_clip_val": 0.5, "precision": "bf16-mixed", "limit_train_batches": 3}
    fitted(module, tmp_path, 2, begun, **changed)
    (line,) = (line for line in said if "Going on" in line)
    for part in (
        *(
            "optimizer.lr 0.01 -> 0.5",
            "optimizer.weight_decay 0.0 -> 0.1",
            "optimizer.betas ",
            "algo.beta 0 -> 0.2",
            "reward (score -> another)",
        ),
        *("trainer.gradient_clip_val (not set) -> 0.5", "trainer.max_steps 1 -> 2"),
        *("trainer.precision 32-true -> bf16-mixed", "trainer.limit_train_batches 1 -> 3"),
    ):
        assert part in line, part
    (group,) = module.trainer.optimizers[0].param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    with pytest.raises(StorageError, match=r"optimizer=torch\.optim\.AdamW, .*torch\.optim\.SGD"):
        fitted(made(optimizer=partial(torch.optim.SGD, lr=0.1)), tmp_path, 2, begun)


def test_an_equal_run_says_nothing(begun: Path, said: list[str], tmp_path: Path) -> None:
    fitted(made(), tmp_path, 1, begun)
    assert said == []


def test_what_is_noted_is_plain_and_holds_no_string_that_was_typed(begun: Path) -> None:
    class Client:
        def __init__(self, key: str, tries: int) -> None:
            self.key, self.tries = key, tries

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

    noted = made(reward=Client("sk-secret", 3))._settings()
    assert "sk-secret" not in str(noted) and noted["reward.tries"] == 3
    kept = torch.load(begun, weights_only=True)["run"]
    assert kept.keys() == {"model", "settings", "optimizer"}
    assert all(isinstance(value, bool | int | float | str) for value in kept["settings"].values())


def test_a_function_of_a_file_is_another_where_its_text_is(tmp_path: Path) -> None:
    file, noted = tmp_path / "mine.py", []
    for value in ("0.0", "0.0", "1.0"):
        file.write_text(f"def pays(completions, **_):\n    return [{value} for _ in completions]\n")
        noted.append(made(reward=from_paths(f"{file}:pays"))._settings())
    assert run_identity.differences(noted[0], noted[1]) == []
    assert run_identity.differences(noted[0], noted[2]) == ["reward.functions.pays (pays) changed"]


def enclosing(threshold: float) -> Any:
    def pays(completions: list[str], **_: Any) -> list[float]:
        return [threshold for _ in completions]

    return pays


def worth(share: float, completions: list[str], **_: Any) -> list[float]:
    return [share for _ in completions]


class Scorer:
    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [self._limit for _ in completions]

    pays = __call__


class Odd:
    """Raises whatever it is asked."""

    def __len__(self) -> int:
        raise RuntimeError("not now")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("never")


def test_what_a_function_reads_may_be_anything(tmp_path: Path) -> None:
    odd, scalar = Odd(), torch.tensor(2.0)

    def pays(completions: list[str], **_: Any) -> list[float]:
        return [float(scalar) if odd else 0.0 for _ in completions]

    assert "reward.scalar" in made(reward=pays)._settings()


READ: dict[str, tuple[Any, Any, str]] = {
    "a closure's value": (enclosing(1.0), enclosing(2.0), "reward.threshold 1 -> 2"),
    "an argument": (partial(worth, 1.0), partial(worth, 2.0), "reward.0 1 -> 2"),
    "an object": (Scorer(1.0), Scorer(2.0), "reward.limit 1 -> 2"),
    "a method": (Scorer(1.0).pays, Scorer(2.0).pays, "reward.limit 1 -> 2"),
    "a lambda": (
        lambda completions, **_: [1.0 for _ in completions],
        lambda completions, **_: [2.0 for _ in completions],
        "reward (<lambda>) changed",
    ),
}


@pytest.mark.parametrize("part", READ)
def test_what_a_reward_holds_is_part_of_it(part: str) -> None:
    before, now, said = READ[part]
    first = made(reward=before)._settings()
    assert run_identity.differences(first, made(reward=now)._settings()) == [said]
    assert run_identity.differences(first, made(reward=before)._settings()) == []


USES = "import re\nimport helper_of_rewards\nFLOOR = {}\nWORD = re.compile('{}')\n"
USES += "def lowest():\n    return FLOOR if WORD else 0\n"
USES += "def pays(completions, **_):\n    return [helper_of_rewards.one() + lowest() for _ in completions]\n"


@pytest.mark.parametrize(
    ("helper", "floor", "word", "said"),
    [
        ("1.0", 0, "a", []),
        ("2.0", 0, "a", ["reward.constants_of_rewards (constants_of_rewards) changed"]),
        ("1.0", 3, "a", ["reward.FLOOR 0 -> 3"]),
        ("1.0", 0, "b", ["reward.WORD.pattern changed"]),
    ],
)
def test_what_a_reward_reads_from_elsewhere_is_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str, floor: int, word: str, said: list[str]
) -> None:
    """Globals of its module, and modules of the user's that it imports, also by way of each other."""
    noted, names = [], ("constants_of_rewards", "helper_of_rewards", "module_of_rewards")
    for number, (one, low, pattern) in enumerate([("1.0", 0, "a"), (helper, floor, word)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "constants_of_rewards.py").write_text(f"ONE = {one}\n")
        text = "import constants_of_rewards\ndef one():\n    return constants_of_rewards.ONE\n"
        (folder / "helper_of_rewards.py").write_text(text)
        (folder / "module_of_rewards.py").write_text(USES.format(low, pattern))
        with monkeypatch.context() as there:
            there.syspath_prepend(folder)
            for name in names:
                there.delitem(sys.modules, name, raising=False)
            noted.append(made(reward=importlib.import_module("module_of_rewards").pays)._settings())
            for name in names:
                sys.modules.pop(name)
    assert run_identity.differences(*noted) == said


def test_a_file_that_is_edited_while_the_run_goes_on_is_noted_as_it_was(tmp_path: Path, begun: Path) -> None:
    """A checkpoint tells what its run used, and not what lies there when it is written."""
    file = tmp_path / "edited_of_rewards.py"
    file.write_text("def pays(completions, **_):\n    return [float(len(set(text))) for text in completions]\n")
    spec = importlib.util.spec_from_file_location("edited_of_rewards", file)
    assert spec is not None and spec.loader is not None
    sys.modules["edited_of_rewards"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = made(reward=module.pays)
    run.identity.settings = run._settings()
    file.write_text("def pays(completions, **_):\n    return [0.0 for text in completions]\n")
    linecache.checkcache()
    saved: dict[str, Any] = {}
    run.on_save_checkpoint(saved)
    assert saved["run"]["settings"] == run.identity.settings != run._settings()
    assert torch.load(begun, weights_only=True)["run"]["settings"]["trainer.max_steps"] == 1
    del sys.modules["edited_of_rewards"]


def test_one_row_of_a_large_tensor_is_seen() -> None:
    """Such as the embedding of a token that a tokenizer was given anew."""
    base = torch.randn(20_000, 40)
    other = base.clone()
    other[12_345] += 1
    assert run_identity.weights_digest({"embed": base}) != run_identity.weights_digest({"embed": other})
    assert run_identity.weights_digest({"embed": base}) == run_identity.weights_digest(
        {"embed": base.to(torch.bfloat16)}
    )


def test_tools_and_limits_of_an_environment_are_part_of_a_run(tmp_path: Path) -> None:
    def tools(**settings: Any) -> dict[str, Any]:
        return made(env=FunctionTools(**{"functions": [add], "max_turns": 3, **settings}))._settings()

    assert run_identity.differences(tools(), tools(max_turns=2)) == ["env.max_turns 3 -> 2"]
    assert run_identity.differences(tools(), tools(functions=[add, another_tool])) == ["env.functions changed"]
    noted, text = [], '    """Add.\n\n    Args:\n        a: One.\n    """\n    return a + {}\n'
    for number in (1, 1, 2):
        (tmp_path / "mine.py").write_text("def more(a: int) -> int:\n" + text.format(number))
        linecache.checkcache()
        noted.append(tools(functions=[f"{tmp_path / 'mine.py'}:more"]))
    assert run_identity.differences(noted[0], noted[1]) == []
    assert run_identity.differences(noted[0], noted[2]) == ["env.functions changed"]


def test_a_property_that_raises_keeps_no_checkpoint_from_being_written() -> None:
    class Client:
        def __init__(self, key: str, tries: int) -> None:
            self.tries = tries

        @property
        def key(self) -> str:
            raise RuntimeError("only once")

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

    assert made(reward=Client("a", 3))._settings()["reward.tries"] == 3


def test_a_record_stays_small_and_the_same_at_every_start() -> None:
    """A table of a reward's, a package of many modules, a set in a lambda: each was noted anew, or entry by entry."""

    class Looks:
        def __init__(self, table: dict[str, int]) -> None:
            self._table = table

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

    small, one, large = ({str(n): n + add for n in range(size)} for size, add in ((60, 0), (60, 1), (20_000, 0)))
    notes = [made(reward=Looks(table))._settings() for table in (small, one, large)]
    assert all(len(note) < 90 for note in notes)
    assert run_identity.differences(notes[0], notes[1]) == ["reward.table changed"]
    code = "lambda completions, **_: [float(c in {'yes', 'no', 'perhaps'}) for c in completions]"
    script = f"from lit_rl.core.fingerprints import fingerprint_of; print(fingerprint_of({code}))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
