"""GKD: who writes, that a step is the same however it is cut, what is refused, and that a student learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from small_rollouts import trainer
from tiers import in_turn
from torch import Tensor

from lit_rl.algorithms import GKD, AdamW, Constant
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.gkd import as_tokens, prompts_to_rewrite, writer_of
from lit_rl.core.errors import ConfigError, DataError, GenerationError, LitRLError
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.loaders import ExampleLoader
from lit_rl.models import LanguageModel
from lit_rl.models.adapters import Lora
from lit_rl.rewards import exact_match

ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
MODEL = LanguageModel("tiny")
ROWS = [
    {"prompt": prompt, "completion": answer}
    for prompt, answer in [("1+2=", "3"), ("11+22=", "33"), ("5+5=", "10"), ("40+2=", "42"), ("7+1=", "8"),
                           ("60+60=", "120"), ("9+9=", "18"), ("1+2=", "3")]
]  # fmt: skip
"""The last row is the first one's twin: two rows, so two samples."""


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped policy's first layer, as a model of its own."""
    folder = tmp_path_factory.mktemp("one_layer")
    model = LanguageModel("tiny", init_kwargs=ONE_LAYER)
    model.load().save_pretrained(str(folder))
    model.tokenizer.save_pretrained(str(folder))
    return str(folder)


def module_of(student: str, **settings: Any) -> GKD:
    settings = {"teacher": "tiny", "sampling": Sampling(max_new_tokens=5), **settings}
    return GKD(LanguageModel(student), **settings)


def loaded(student: str, **settings: Any) -> GKD:
    module = module_of(student, **settings)
    module.configure_model()
    return module


def data_of(rows: Any = ROWS, **settings: Any) -> SupervisedDataModule:
    data = SupervisedDataModule(**{"rows": rows, "batch_size": 8, "shuffle": False, "val_fraction": 0.0, **settings})
    data.prepare(MODEL.tokenizer, "texts")
    return data


def micro_batches(data: SupervisedDataModule, accumulate: int = 1) -> list[Any]:
    loader = ExampleLoader(data.corpus.train, data.order(False), accumulate=accumulate, group_by_length=True)
    return loader.batches(list(range(data.batch_size)), 3)


def learned(module: GKD, batches: Any) -> tuple[float, Tensor, dict[str, float]]:
    averages, losses = Averages(), []
    for batch in batches:
        loss, metrics = module.loss(batch)
        losses.append(loss)
        averages.add(metrics)
    total = torch.stack(losses).sum()
    gradients = torch.autograd.grad(total, [p for p in module.policy.parameters() if p.requires_grad])
    return total.item(), torch.cat([g.flatten() for g in gradients]), averages.reduce(Ranks())


# ---------------------------------------------------------------- who writes


def test_the_writer_is_drawn_from_the_seed_and_the_step():
    def share(fraction: float, seed: int = 0, teacher: bool = False) -> list[str]:
        return [
            writer_of(step, seed=seed, on_policy_fraction=fraction, teacher_completions=teacher) for step in range(2000)
        ]

    assert set(share(0.0)) == {"data"} and set(share(0.0, teacher=True)) == {"teacher"}
    assert set(share(1.0)) == {"student"}
    assert share(0.3) == share(0.3) != share(0.3, seed=1)
    assert share(0.3).count("student") == pytest.approx(600, abs=80)
    more = zip(share(0.3), share(0.6), strict=True)
    assert all(high == "student" for low, high in more if low == "student")


def test_prompts_are_what_stands_before_the_completion():
    batch = prompts_to_rewrite(micro_batches(data_of(), 2), Ranks())
    assert sorted(batch.rows) == list(range(8)) and batch.rollout == 3 and batch.occurrences == [0] * 8
    assert [MODEL.tokenizer.decode(ids) for ids in batch.prompt_ids] == [ROWS[row]["prompt"] for row in batch.rows]


def test_completions_become_rows_that_are_padded_on_the_right():
    def padded(rows: list[list[int]], left: bool) -> Tensor:
        width = max(map(len, rows))
        return torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])

    prompts, answers = [[5, 6, 7], [8]], [[1], [2, 0, 3]]  # the padding's id inside a text is a token
    completions = Completions(
        prompt_ids=padded(prompts, True),
        prompt_mask=padded([[1] * len(row) for row in prompts], True).bool(),
        response_ids=padded(answers, False),
        response_mask=padded([[1] * len(row) for row in answers], False).bool(),
        sampler_logprobs=torch.zeros(2, 3),
        ended=torch.ones(2, dtype=torch.bool),
        group_id=torch.arange(2),
    )
    ids, attended, mask = as_tokens(completions, torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7, 1, 0, 0], [8, 2, 0, 3, 0, 0]]
    assert attended.sum(1).tolist() == [4, 4] and attended[:, :4].all()
    assert mask.int().tolist() == [[0, 0, 0, 1, 0, 0], [0, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("writer", ["student", "teacher"])
def test_what_is_written_is_the_writers_own(one_layer: str, writer: Any):
    module, data = loaded(one_layer, sampling=Sampling(temperature=0, max_new_tokens=5)), data_of()
    (fresh,) = module.rewritten(micro_batches(data)[0], writer)
    model: Any = module.policy if writer == "student" else module.teacher_policy
    tokens = fresh.tokens
    with torch.no_grad():
        likeliest = model(tokens.input_ids, attention_mask=tokens.attention_mask.long()).logits[:, :-1].argmax(-1)
    assert bool((likeliest == tokens.input_ids[:, 1:])[tokens.learned].all())
    assert fresh.totals.tokens == int(tokens.loss_mask.sum()) and fresh.totals.rows == 8
    assert fresh.totals.attended == int(tokens.attention_mask.sum())


# ---------------------------------------------------------------- laws of the loss


@in_turn(accumulate=[4, 8], writer=["student", "teacher"])
def test_cutting_a_step_that_was_written_changes_nothing(one_layer: str, writer: Any, accumulate: int):
    module, data = loaded(one_layer, beta=0.3), data_of()

    def step(count: int) -> Any:
        return learned(module, module.rewritten(micro_batches(data, count)[0], writer))

    (whole, slope, seen), (parts, other, also) = step(1), step(accumulate)
    assert parts == pytest.approx(whole, rel=1e-5)
    assert (other - slope).norm() <= 1e-5 * slope.norm() and slope.norm() > 0
    assert also == pytest.approx(seen, rel=1e-5)


def test_a_teacher_that_is_the_student_has_nothing_to_teach():
    loss, slope, _ = learned(loaded("tiny", beta=0.5), micro_batches(data_of()))
    assert loss == pytest.approx(0.0, abs=1e-7) and slope.norm() < 1e-5


def test_adapters_are_taught_and_a_teacher_on_the_cpu_is_no_module_of_ours(one_layer: str):
    model = LanguageModel(one_layer, lora=Lora(r=2))
    modules = [GKD(model, teacher="tiny", teacher_device=device) for device in (None, "cpu")]
    found = []
    for module in modules:
        module.configure_model()
        found.append(learned(module, micro_batches(data_of())))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert "teacher_policy" in dict(modules[0].named_children())
    assert "teacher_policy" not in dict(modules[1].named_children())
    assert not any(p.requires_grad for p in modules[0].teacher_policy.parameters())  # pyright: ignore


def test_packed_rows_are_the_same_texts(one_layer: str):
    module = loaded(one_layer, teacher_device="cpu")
    alone = learned(module, micro_batches(data_of()))
    packed = data_of(packing="best_fit", max_length=24, batch_size=1)
    count = len(packed.corpus.train)
    assert count < len(ROWS)
    packed.batch_size = count
    together = learned(module, micro_batches(packed))
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    assert (together[1] - alone[1]).norm() <= 1e-4 * alone[1].norm()


# ---------------------------------------------------------------- embeddings that are padded


def padded(folder: Path, rows: int, name: str = "tiny", logit: float = 0.0) -> str:
    """A model whose embedding and head have rows that no token has; as if trained to give them these logits."""
    model: Any = LanguageModel(name).load()
    torch.manual_seed(1)
    model.resize_token_embeddings(len(MODEL.tokenizer) + rows, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(MODEL.tokenizer) :] += logit
    model.save_pretrained(str(folder))
    MODEL.tokenizer.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("logit", [0.0, 3.0])
def test_rows_that_pad_the_teachers_embedding_change_nothing(one_layer: str, tmp_path: Path, logit: float):
    teacher = padded(tmp_path / "teacher", 5, logit=logit)
    assert LanguageModel(teacher).config.vocab_size == 264 > MODEL.config.vocab_size
    settings: dict[str, Any] = {"beta": 0.3, "temperature": 0.7}
    expected = learned(loaded(one_layer, **settings), micro_batches(data_of()))
    found = learned(loaded(one_layer, teacher=teacher, **settings), micro_batches(data_of()))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert (found[1] - expected[1]).norm() <= 1e-6 * expected[1].norm()
    assert found[2] == pytest.approx(expected[2], rel=1e-6)


def test_rows_that_pad_the_students_embedding_learn_nothing(one_layer: str, tmp_path: Path):
    student = padded(tmp_path / "student", 3, one_layer, logit=2.0)
    module = loaded(student, teacher=padded(tmp_path / "teacher", 7, logit=1.0))
    expected = learned(loaded(one_layer), micro_batches(data_of()))
    loss, _, metrics = learned(module, micro_batches(data_of()))
    assert loss == pytest.approx(expected[0], rel=1e-6) and metrics == pytest.approx(expected[2], rel=1e-6)
    module.loss(micro_batches(data_of())[0])[0].backward()
    slope: Any = module.policy.get_output_embeddings().weight.grad  # pyright: ignore
    assert slope[: len(MODEL.tokenizer)].norm() > 0 and not slope[len(MODEL.tokenizer) :].any()


def test_embeddings_of_one_length_are_compared_whole(one_layer: str, tmp_path: Path):
    """As in the paper and in TRL: the rows after the tokenizer's are tokens like any other."""
    student, teacher = padded(tmp_path / "s", 5, one_layer), padded(tmp_path / "t", 5, logit=3.0)
    module: Any = loaded(student, teacher=teacher, beta=0.0)
    (batch,) = micro_batches(data_of())
    tokens, mask = batch.tokens, batch.tokens.learned
    with torch.no_grad():
        s, t = (
            model(tokens.input_ids, attention_mask=tokens.attention_mask.long()).logits[:, :-1].log_softmax(-1)
            for model in (module.policy.eval(), module.teacher_policy)  # pyright: ignore
        )
    by_hand = (t.exp() * (t - s)).sum(-1)[mask].sum() / mask.sum()
    assert module.loss(batch)[0].item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_a_token_that_the_tokenizer_lacks_is_refused_when_it_is_written(one_layer: str, tmp_path: Path):
    module = loaded(padded(tmp_path / "student", 4, one_layer))
    with torch.no_grad():  # one of each sign, so that one of them is ever the likeliest
        rows = module.policy.get_output_embeddings().weight[-4:]  # pyright: ignore
        rows.copy_(torch.tensor([[9.0], [-9.0], [9.0], [-9.0]]).expand_as(rows))
    with pytest.raises(GenerationError, match=r"token id 2\d\d.*algo.on_policy_fraction=0"):
        module.rewritten(micro_batches(data_of())[0], "student")


# ---------------------------------------------------------------- runs


@pytest.mark.all
def test_a_random_student_learns_to_add(tmp_path: Path):
    """The teacher is the shipped policy; the student has its shape and no weights of it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    folder = tmp_path / "random"
    AutoModelForCausalLM.from_config(MODEL.config).save_pretrained(folder)
    MODEL.tokenizer.save_pretrained(folder)
    module = module_of(
        str(folder),
        reward=exact_match,
        on_policy_fraction=0.25,
        optimizer=AdamW(lr=2e-3),
        scheduler=Constant(),
    )
    data = SupervisedDataModule(task=SamePrompts(), batch_size=36, val_batch_size=36)
    runner = trainer(tmp_path, max_steps=60, limit_val_batches=1.0, num_sanity_val_steps=0)
    before = measured(runner, module, data)
    runner.fit(module, datamodule=data)
    after = measured(runner, module, data)
    print(f"{before} -> {after}")
    assert after["val/loss"] < 0.5 * before["val/loss"]
    assert before["val/reward"] == 0.0 and after["val/reward"] >= 0.3


class SamePrompts:
    """Sums that the teacher gets right more often than not, measured on what was learned: to add those that it never
    saw, a random student would need longer than a test."""

    def train(self) -> list[dict[str, Any]]:
        pairs = [(a, b) for a in range(60, 66) for b in range(60, 66)]
        return [{"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a, b in pairs]

    val = train


def measured(runner: L.Trainer, module: GKD, data: Any) -> dict[str, float]:
    runner.validate(module, datamodule=data, verbose=False)
    return {name: float(runner.callback_metrics[name]) for name in ("val/loss", "val/reward")}


# ---------------------------------------------------------------- what is refused


def test_another_vocabulary_is_refused(tmp_path: Path):
    MODEL.config.save_pretrained(tmp_path)
    tokenizer = LanguageModel("tiny").tokenizer
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"algo\.teacher\.name=.* has another vocabulary.*<other>"):
        module_of("tiny", teacher=LanguageModel(str(tmp_path), init_kwargs={"vocab_size": 300})).configure_model()


@pytest.mark.parametrize(
    ("settings", "data", "error", "match"),
    [
        ({"teacher": "tiny", "student": "tiny"}, {}, ConfigError, "very weights"),
        ({}, {"packing": "best_fit"}, ConfigError, "data.packing=best_fit"),
        ({}, {"learn": "all"}, ConfigError, "data.learn=all"),
        ({}, {"rows": [{"text": "1+2=3"}] * 8}, DataError, "has no prompt"),
        (
            {"sampling": Sampling(max_new_tokens=510)},
            {},
            ConfigError,
            "Lower sampling.max_new_tokens to 506, or data.max_length to 2",
        ),
    ],
)
def test_what_could_not_be_learned_from_is_refused_before_loading(
    one_layer: str, tmp_path: Path, settings: dict[str, Any], data: dict[str, Any], error: type[LitRLError], match: str
):
    module = module_of(settings.pop("student", one_layer), **settings)
    rows = SupervisedDataModule(**{"rows": ROWS, "batch_size": 1, "val_fraction": 0.0, **data})
    with pytest.raises(error, match=match):
        trainer(tmp_path, max_steps=1).fit(module, datamodule=rows)
    assert module.policy is None
