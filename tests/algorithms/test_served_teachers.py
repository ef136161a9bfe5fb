"""Teachers that are servers, and several by a column: what they say equals what the same model says in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from online_modules import VOCABULARY, completions, scores, small_policy
from small_rollouts import batch
from standin_server import standing_in
from standin_teacher import ModelAsTeacher

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.terms.served_teachers import ColumnTeachers, ServerTeacher
from lit_rl.algorithms.terms.teachers import (
    ModelTeacher,
    PrefixWeightedAdvantage,
    RolloutTeacher,
    StudentFacts,
    TeacherRequest,
    TopForwardKL,
)
from lit_rl.core.errors import ConfigError, DataError, GenerationError
from lit_rl.core.rollout import Completions, Rollout, Sampling
from lit_rl.models import LanguageModel
from lit_rl.models.forward import TokenScores
from lit_rl.models.language_model import DEFAULT
from lit_rl.ops.distillation import prefix_weights, token_advantages, top_forward_kl


class Letters:
    """A tokenizer of the small policies: each letter is a token."""

    all_special_tokens = ("z",)

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}

    def __len__(self) -> int:
        return VOCABULARY


PLAIN = Sampling(max_new_tokens=8)


def student(model: Any = None, sampling: Sampling = PLAIN) -> StudentFacts:
    small: Any = SimpleNamespace(tokenizer=Letters(), name="small") if model is None else model
    return StudentFacts(small, sampling, env=None, reward_names=[], group_size=2)


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Two servers, of models 1 and 2."""
    with ExitStack() as stack:
        served = [ModelAsTeacher(small_policy(seed), lambda text: Letters()(text)["input_ids"]) for seed in (1, 2)]
        yield [f"{stack.enter_context(standing_in(each)).url}/v1" for each in served]


def ready(teacher: Any, top: int) -> Any:
    teacher.check(student())
    teacher.start(top)
    return teacher


def request_of(drawn: Completions, top: int, held: Any = None, groups: Any = None) -> TeacherRequest:
    prompts = batch(range(len(drawn) // 2))
    if groups is not None:
        prompts = replace(prompts, columns={"source": groups})
    return TeacherRequest(
        Scored(prompts, drawn, scores([0.0] * len(drawn))), top=top, sampling=PLAIN, policy=small_policy(0), held=held,
        reference=lambda: None, encoder=None, source=None, options=DEFAULT, rows_at_once=2,  # pyright: ignore
    )  # fmt: skip


def local(seed: int) -> Any:
    """A local teacher without the checks of a tokenizer, which small models do not have."""

    class Local(RolloutTeacher):
        def module(self, policy: Any) -> Any:
            return small_policy(seed).requires_grad_(False)

        def score(self, request: TeacherRequest) -> Any:
            assert request.held is not None
            return request.scores_by(request.held, request.completions, request.completions.response_mask), {}

    return Local()


def with_tools(drawn: Completions) -> Completions:
    """Prompts of different lengths, and of the second row a token in the middle that a tool wrote."""
    prompt_mask = drawn.prompt_mask.clone()
    prompt_mask[:2, 0] = False
    mask = drawn.response_mask.clone()
    mask[1, 1] = False
    return replace(drawn, prompt_mask=prompt_mask, response_mask=mask, attended=drawn.response_mask)


@pytest.mark.parametrize("top", [0, 4])
@pytest.mark.parametrize("change", [lambda drawn: drawn, with_tools])
def test_a_server_says_what_its_model_says(urls, top, change):
    drawn = change(completions([3, 5, 1, 4]))
    said, metrics = ready(ServerTeacher(urls[0]), top).score(request_of(drawn, top))
    wanted, _ = local(1).score(request_of(drawn, top, small_policy(1)))
    mask = drawn.response_mask
    assert torch.equal(said.mask, mask)
    torch.testing.assert_close(said.log_probs[mask], wanted.log_probs[mask], atol=1e-5, rtol=0)
    assert not said.log_probs[~mask].any() or change is with_tools
    if top:
        torch.testing.assert_close(said.top_log_probs[mask], wanted.top_log_probs[mask], atol=1e-5, rtol=0)
        assert torch.equal(said.top_ids[mask], wanted.top_ids[mask])
    else:
        assert said.top_ids is None and said.top_log_probs is None
    means = {name: (above / below).item() for name, (above, below) in metrics.items()}
    assert means == {"teacher/requests": 1.0, "teacher/rate_limit_seconds": 0.0, "teacher/silent": 0.0}


def test_a_token_that_the_teacher_excludes_is_one_that_it_says_nothing_of():
    class Excludes(ModelAsTeacher):
        def _completion(self, body: Any) -> Any:
            said = super()._completion(body)
            for entry in said["choices"][0].get("prompt_logprobs", [])[-1:]:
                entry[next(iter(entry))]["logprob"] = -9999.0
            return said

    drawn = completions([3, 5])
    with standing_in(Excludes(small_policy(1), lambda text: Letters()(text)["input_ids"])) as server:
        said, metrics = ready(ServerTeacher(f"{server.url}/v1"), 0).score(request_of(drawn, 0))
    assert (drawn.response_mask & ~said.mask).sum(1).tolist() == [1, 1]
    assert said.log_probs.isfinite().all()
    assert metrics["teacher/silent"][0] == 2 and metrics["teacher/silent"][1] == 8


def test_each_row_is_taught_by_the_teacher_of_its_column(urls):
    drawn, top = completions([3, 5, 1, 4, 2, 2]), 3
    teacher = ready(ColumnTeachers("source", {"math": ServerTeacher(urls[0]), "3": local(1), "code": local(2)}), top)
    names = teacher.companions(small_policy(0))
    assert list(names) == ["teacher_policy_0", "teacher_policy_1"]
    said, metrics = teacher.score(request_of(drawn, top, groups=["code", "math", "code"]))
    for seed, rows in ((1, [2, 3]), (2, [0, 1, 4, 5])):
        wanted, _ = local(seed).score(request_of(drawn, top, small_policy(seed)))
        mask = drawn.response_mask[rows]
        assert torch.equal(said.mask[rows], mask)
        torch.testing.assert_close(said.log_probs[rows][mask], wanted.log_probs[rows][mask], atol=1e-5, rtol=0)
        torch.testing.assert_close(said.top_log_probs[rows][mask], wanted.top_log_probs[rows][mask], atol=1e-5, rtol=0)
        assert torch.equal(said.top_ids[rows][mask], wanted.top_ids[rows][mask])
    shares = {name: above.item() / below.item() for name, (above, below) in metrics.items() if "/rows/" in name}
    assert shares == {"teacher/rows/math": 2 / 6, "teacher/rows/code": 4 / 6, "teacher/rows/3": 0.0}
    assert metrics["teacher/requests/math"][1] == 2 and metrics["teacher/log_prob/3"][1] == 0


def test_ranks_with_other_rows_have_the_same_metrics(urls):
    drawn = completions([3, 5])
    teacher = ready(ColumnTeachers("source", {"math": ServerTeacher(urls[0]), "3": ServerTeacher(urls[1])}), 0)
    one, two = (teacher.score(request_of(drawn, 0, groups=[name]))[1] for name in ("math", 3))
    assert set(one) == set(two)
    assert one["teacher/requests/3"][1] == 0 and two["teacher/requests/3"][1] == 2


def data_of(*values: Any) -> Any:
    columns = {"source": list(values)}
    trainer = SimpleNamespace(strategy=None)
    return SimpleNamespace(columns_of_sets=lambda: [columns], trainer=trainer)


def test_a_value_without_a_teacher_is_refused_and_an_unused_teacher_is_said(capsys, caplog):
    teacher = ColumnTeachers("source", {"math": local(1), 7: local(2)})
    with caplog.at_level("INFO"):
        teacher.check_data(data_of("math", "math", 7))
        assert "math 2, 7 1" in caplog.text and "teaches nothing" not in caplog.text
        teacher.check_data(data_of("math"))
        assert "algo.teacher.teachers.7: it teaches nothing" in caplog.text
    with pytest.raises(DataError, match=r"source='maths'.*math, 7.*Did you mean 'math'.*teachers\.maths=server"):
        teacher.check_data(data_of("math", "maths"))
    with pytest.raises(DataError, match="source=None"):
        teacher.check_data(data_of(None))
    with pytest.raises(ConfigError, match=r"algo\.teacher\.column='origin' is no column.*source"):
        ColumnTeachers("origin", {"math": local(1)}).check_data(data_of("math"))
    with pytest.raises(ConfigError, match=r"algo\.teacher\.teachers is empty"):
        ColumnTeachers("source", {})
    with pytest.raises(ConfigError, match=r"algo\.teacher\.teachers\.math is a ColumnTeachers"):
        ColumnTeachers("source", {"math": teacher})


def test_the_teacher_that_is_wrong_is_named():
    teacher = ColumnTeachers("source", {"math": local(1), "code": ServerTeacher("http://127.0.0.1:9/v1", attempts=1)})
    teacher.check(student())
    with pytest.raises(GenerationError, match="The teacher of source=code: .*Is the teacher running"):
        teacher.start(0)
    with pytest.raises(ConfigError, match=r"The teacher of source=code: sampling\.temperature=0\.5"):
        teacher.check(student(sampling=Sampling(temperature=0.5)))
    with pytest.raises(ConfigError, match=r"The teacher of source=code: algo\.distillation\.top_k_of=student"):
        teacher.check(replace(student(), top_of="student"))


def test_models_of_several_teachers_are_in_the_memory_plan(tmp_path):
    teacher = ColumnTeachers(
        "source", {"a": ModelTeacher("tiny"), "b": ModelTeacher("tiny", device="cpu"), "c": local(1)}
    )
    teacher.check(student(LanguageModel("tiny")))
    assert list(teacher.frozen_models) == ["teacher of a"]


def test_the_column_counts_as_read(urls):
    module = GRPO("tiny", len, teacher=ColumnTeachers("source", {"math": ServerTeacher(urls[0])}), sampling=PLAIN)
    assert "source" in module.columns_read(["source", "other"]) and not module.needs_reference
    with pytest.raises(ConfigError, match=r"sampling\.temperature=0\.7"):
        GRPO("tiny", len, teacher=ServerTeacher(urls[0]), sampling=Sampling(temperature=0.7))


def test_forms_of_iw_opd_and_of_verl_are_their_formulas():
    drawn = completions([3, 5, 1, 4])
    teacher, _ = local(1).score(request_of(drawn, 4, small_policy(1)))
    old = torch.rand(drawn.response_ids.shape).log()
    rollout = Rollout(
        drawn, torch.zeros(4), advantages=torch.tensor([1.0, -1.0, 2.0, 0.0]), loss_mask=drawn.response_mask,
        old_logprobs=old, teacher_logprobs=teacher.log_probs, teacher_mask=teacher.mask,
    )  # fmt: skip
    gap = token_advantages(teacher.log_probs, old, teacher.mask)
    found = PrefixWeightedAdvantage(0.3, gamma=2.0).with_advantages(rollout).advantages
    wanted = rollout.advantages[:, None] + 0.3 * gap * prefix_weights(gap, teacher.mask, 2.0)
    torch.testing.assert_close(found, wanted)

    further = torch.rand(teacher.top_log_probs.shape).log()
    losses, metrics = TopForwardKL(0.3, top_k=4).losses(teacher, TokenScores(old, None, further=further), old)
    torch.testing.assert_close(losses, 0.3 * top_forward_kl(further, teacher.top_log_probs, teacher.mask))
    assert {"teacher/divergence", "teacher/mass", "teacher/student_mass"} <= set(metrics)


def test_overlap_is_the_share_of_likeliest_tokens_that_both_have():
    drawn = completions([3, 5, 1, 4, 2, 2, 3, 3, 1, 1])
    for seed in (0, 1):
        request = request_of(drawn, 4, small_policy(seed))
        teacher, _ = local(seed).score(request)
        ((name, (above, below)),) = request.overlap(teacher).items()
        assert name == "teacher/overlap" and below == drawn.lengths[:8].sum()
        ids, _ = local(0).score(request_of(drawn, 4, small_policy(0)))
        shares = [
            len({*ours} & {*theirs}) / 4
            for ours, theirs in zip(
                ids.top_ids[:8][drawn.response_mask[:8]].tolist(),
                teacher.top_ids[:8][drawn.response_mask[:8]].tolist(),
                strict=True,
            )
        ]
        assert above.item() == pytest.approx(sum(shares)) and (above < below if seed else above == below)
    assert request_of(drawn, 0, small_policy(1)).overlap(local(1).score(request_of(drawn, 0, small_policy(1)))[0]) == {}
