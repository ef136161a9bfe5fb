"""The router's loss of scoring models: the number that the language model of the same weights reports, and its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from offline_cuts import PAIRS
from small_rollouts import EachBatch
from small_rollouts import trainer as quiet_trainer
from tiers import in_turn
from torch import Tensor

from lit_rl.algorithms import AdamW, Constant, ProcessRewardModeling, RewardModeling
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import TokenBatch
from lit_rl.data.example_module import PreferenceDataModule, StepwiseDataModule
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import score_texts
from lit_rl.models.scoring import scoring_logits

NO_IDS: dict[str, Any] = dict(bos_token_id=None, eos_token_id=None)
WIDTH: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, initializer_range=0.2, pad_token_id=0, **NO_IDS
)
SHAPE: dict[str, Any] = dict(WIDTH, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
SMALL: dict[str, Any] = dict(moe_intermediate_size=16, shared_expert_intermediate_size=16)
FOUR: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2)
FOUR_LOCAL: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {**SHAPE, **FOUR_LOCAL},
    "Qwen2Moe": {**SHAPE, **FOUR, **SMALL},
    "Qwen3Moe": {**SHAPE, **FOUR, **SMALL, "head_dim": 16},
    "Phimoe": {**SHAPE, **FOUR_LOCAL},
    "GptOss": {**SHAPE, **FOUR_LOCAL, "head_dim": 16},
    "JetMoe": {**WIDTH, **FOUR_LOCAL, "intermediate_size": 48, "num_key_value_heads": 1, "kv_channels": 16},
    "Doge": {**SHAPE, **FOUR, "is_moe": True},
}


def config_of(family: str, **changes: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**(FAMILIES[family] | changes))


def pair_of_models(family: str) -> tuple[Any, list[Any]]:
    """A language model, and classifiers on the same trunk."""
    torch.manual_seed(0)
    config = config_of(family)
    causal = transformers.AutoModelForCausalLM.from_config(config).eval()
    classifiers = []
    for auto in (transformers.AutoModelForSequenceClassification, transformers.AutoModelForTokenClassification):
        if type(config) in auto._model_mapping:
            classifiers.append(auto.from_config(config).eval())
            classifiers[-1].base_model.load_state_dict(causal.base_model.state_dict())
    return causal, classifiers


def tokens_of(texts: list[list[int]], right: int = 0) -> TokenBatch:
    width = max(map(len, texts)) + right
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    attended = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text)], attended[row, : len(text)] = torch.tensor(text), True
    return TokenBatch(ids, attended, attended & (torch.arange(width) > 0))


TEXTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 4, 3, 2], [9, 9, 1, 2, 30, 60]]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_language_models_and_its_gradient_reaches_the_router(family: str) -> None:
    causal, classifiers = pair_of_models(family)
    tokens = tokens_of(TEXTS)
    wanted = score_texts(causal, tokens, router_aux=True).aux_loss
    assert wanted is not None
    wanted.backward()
    reached = {name: p.grad for name, p in causal.base_model.named_parameters() if p.grad is not None}
    routers = [name for name in reached if ("router" in name or ".gate." in name) and reached[name].any()]
    assert classifiers and routers
    for classifier in classifiers:
        logits, found = scoring_logits(classifier, tokens, router_aux=True)
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
        found.backward()
        for name in routers:
            torch.testing.assert_close(classifier.base_model.get_parameter(name).grad, reached[name])
        plain, none = scoring_logits(classifier, tokens)
        assert none is None and torch.equal(plain, logits), "asking changes no score"


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_padding_counts_nothing(family: str) -> None:
    for classifier in pair_of_models(family)[1]:
        rows = [TEXTS[0], TEXTS[1][:3]]
        narrow, wide = (scoring_logits(classifier, tokens_of(rows, right), router_aux=True)[1] for right in (0, 5))
        torch.testing.assert_close(narrow, wide)
        alone = scoring_logits(classifier, tokens_of([TEXTS[0]]), router_aux=True)[1]
        assert alone is not None and not torch.allclose(alone, narrow)  # pyright: ignore


def test_experts_that_are_used_alike_report_their_number_and_one_for_all_reports_more() -> None:
    """Sum over experts of share times probability, times their number: 2 with two of four of even routing."""
    (classifier, _) = pair_of_models("Mixtral")[1]
    with torch.no_grad():
        for name, parameter in classifier.named_parameters():
            if ".gate." in name:
                parameter.zero_()
    even = scoring_logits(classifier, tokens_of(TEXTS), router_aux=True)[1]
    assert float(even) == pytest.approx(2.0), "probabilities of 1/4, whichever two are taken"  # pyright: ignore


# ---------------------------------------------------------------------- models without a load, and adapters


def test_a_family_that_reports_no_load_is_refused() -> None:
    """And a mixture all of whose layers are dense."""
    parts = (("Llama", {}), ("DeepseekV3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}))
    configs = [
        getattr(transformers, f"{family}Config")(**(SHAPE | {"num_key_value_heads": 2} | changes))
        for family, changes in parts
    ]
    for config in (*configs, config_of("Qwen3Moe", mlp_only_layers=[0, 1])):
        classifier = transformers.AutoModelForSequenceClassification.from_config(config)
        with pytest.raises(ConfigError, match=rf"algo\.router_aux_loss_coef.*{type(classifier).__name__}"):
            scoring_logits(classifier, tokens_of(TEXTS), router_aux=True)


def saved(folder: Path, vocabulary: int) -> str:
    """A mixture of experts with the shipped policy's tokenizer."""
    torch.manual_seed(0)
    config = config_of("Mixtral", vocab_size=vocabulary, pad_token_id=LanguageModel("tiny").pad_id)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    LanguageModel("tiny").tokenizer.save_pretrained(folder)
    return str(folder)


STEPS = [
    {"prompt": "17+25=", "completions": ["7+5=12", "1+2+1=4"], "labels": [True, True]},
    {"prompt": "3+4=", "completions": ["3+4=8"], "labels": [False]},
    {"prompt": "50+13=", "completions": ["0+3=3", "5+1=7"], "labels": [True, False]},
    {"prompt": "1+1=", "completions": ["1+1=2"], "labels": [True]},
]
METHODS: dict[str, tuple[Any, Any]] = {
    "pairs": (RewardModeling, lambda: PreferenceDataModule(rows=PAIRS[:4], batch_size=4, val_fraction=0.0)),
    "stepwise": (ProcessRewardModeling, lambda: StepwiseDataModule(rows=STEPS, batch_size=4, val_fraction=0.0)),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("mixture"), len(LanguageModel("tiny").tokenizer))


def gradient(module: Any, loss: Tensor) -> Tensor:
    trained = [p for p in module.policy.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(trained, found)])


@in_turn(kind=METHODS, lora=[None, Lora(r=2)])
def test_a_step_adds_its_mean_over_micro_batches(mixture: str, kind: str, lora: Lora | None) -> None:
    make, data_of = METHODS[kind]
    without, with_it = (make(LanguageModel(mixture, lora=lora), router_aux_loss_coef=coef) for coef in (0.0, 0.3))
    for module in (without, with_it):
        module.configure_model()
        module.policy.eval()
    data = data_of()
    data.prepare(with_it.tokenizer, kind)
    train, every = data.corpus.train, [0, 1, 2, 3]
    parts = [train.batch(rows, rows, train.totals(every, 2), step=0, slot=i) for i, rows in enumerate(([0, 1], [2, 3]))]
    losses = [with_it.loss(part) for part in parts]
    plain = sum(without.loss(part)[0] for part in parts)
    aux = [scoring_logits(with_it.policy, part.tokens, router_aux=True)[1] for part in parts]
    mean = (aux[0] + aux[1]) / 2
    total = losses[0][0] + losses[1][0]
    torch.testing.assert_close(total, plain + 0.3 * mean)
    torch.testing.assert_close([metrics["aux_loss"][0] for _, metrics in losses], aux)
    assert "aux_loss" not in without.loss(parts[0])[1]
    wanted = gradient(without, plain) + 0.3 * gradient(with_it, mean)
    torch.testing.assert_close(gradient(with_it, total), wanted, rtol=1e-4, atol=1e-6)
    assert gradient(with_it, mean).norm() > 1e-4


def test_a_run_logs_it_and_lowers_it(mixture: str, tmp_path: Path) -> None:
    module = RewardModeling(mixture, router_aux_loss_coef=10.0, optimizer=AdamW(lr=1e-2), scheduler=Constant())
    looks = EachBatch(lambda module: float(module.trainer.callback_metrics["train/aux_loss"]))
    trainer = quiet_trainer(tmp_path, max_steps=8, log_every_n_steps=1, callbacks=[looks], limit_val_batches=1.0)
    trainer.fit(module, datamodule=METHODS["pairs"][1]())
    assert len(looks.seen) == 8 and looks.seen[-1] < looks.seen[0] - 0.01


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_micro_batches_are_cut_by_length_only_where_no_loss_is_of_a_micro_batch(
    mixture: str, weight: float, tmp_path: Path
) -> None:
    module, seen = RewardModeling(mixture, router_aux_loss_coef=weight), []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch.rows)

    trainer = quiet_trainer(
        tmp_path, max_steps=1, accumulate_grad_batches=2, callbacks=[Watch()], limit_val_batches=1.0
    )
    rows = [{"prompt": "1+1=", "chosen": "2" * length, "rejected": "3"} for length in (2, 9, 3, 8)]
    trainer.fit(module, datamodule=PreferenceDataModule(rows=rows, batch_size=4, shuffle=False, val_fraction=0.0))
    assert seen == ([[0, 1], [2, 3]] if weight else [[1, 3], [0, 2]])


def test_a_dense_model_is_refused_in_a_run(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1, limit_val_batches=1.0)
    with pytest.raises(ConfigError, match=r"algo\.router_aux_loss_coef"):
        trainer.fit(RewardModeling("tiny", router_aux_loss_coef=0.1), datamodule=METHODS["pairs"][1]())
