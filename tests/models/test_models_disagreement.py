"""Distributions of two models compared block by block: the same numbers and gradients as from whole logits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lit_rl.core.examples import TokenBatch
from lit_rl.models import LanguageModel
from lit_rl.models import frozen_teacher as module
from lit_rl.models.frozen_teacher import distillation_scores
from lit_rl.ops.imitation import generalized_jsd

DIVERGENCE = partial(generalized_jsd, beta=0.3, temperature=0.8)


def texts(learned: bool = True) -> TokenBatch:
    """Three rows of one text each, the last one padded."""
    ids = torch.randint(0, 200, (3, 9), generator=torch.Generator().manual_seed(0))
    attended, mask = torch.ones(3, 9, dtype=torch.bool), torch.zeros(3, 9, dtype=torch.bool)
    attended[2, 6:] = False
    mask[0, 3:], mask[1, 5:], mask[2, 2:6] = learned, learned, learned
    return TokenBatch(ids, attended, mask[:, 1:], None)


def asked(student, teacher, tokens, shared_tokens=None, **how):
    student.zero_grad()
    found = distillation_scores(
        student, teacher, tokens, DIVERGENCE, shared_tokens=shared_tokens, entropies=True, **how
    )
    (found.divergence * torch.linspace(1, 2, len(found.divergence))).sum().backward()
    numbers = [found.divergence.detach(), found.entropy, found.teacher_entropy, found.correct]
    return numbers, [p.grad.clone() for p in student.parameters() if p.grad is not None]


@pytest.fixture
def pair(make_model):
    student, teacher = (LanguageModel(str(make_model(kind)), dtype="float32").load() for kind in ("qwen2", "llama3.2"))
    return student.double(), teacher.double()


@pytest.mark.parametrize("shared_tokens", [None, 200])
@pytest.mark.parametrize("logits", [1, 1 << 10, 1 << 24], ids=["a token", "some tokens", "one block"])
def test_blocks_are_exact(pair, monkeypatch, logits, shared_tokens):
    whole, gradient = asked(*pair, texts(), shared_tokens, fused=False)
    monkeypatch.setattr(module, "LOGITS_PER_BLOCK", logits)
    found, gradient_of_blocks = asked(*pair, texts(), shared_tokens)
    assert len(gradient) == len(gradient_of_blocks) > 2 and whole[0].shape == (texts().learned.sum(),)
    for mine, theirs in zip([*found, *gradient_of_blocks], [*whole, *gradient]):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_blocks_add_no_error_to_the_gradient_of_the_head_under_autocast(make_model, monkeypatch):
    """The head's weight is float32, and its narrow copy is multiplied by a token at a time."""
    student, teacher = (LanguageModel(str(make_model(kind)), dtype="float32").load() for kind in ("qwen2", "llama3.2"))
    ids = torch.randint(0, 200, (8, 40), generator=torch.Generator().manual_seed(1))
    tokens, off = TokenBatch(ids, torch.ones_like(ids).bool(), torch.ones_like(ids[:, 1:]).bool(), None), {}

    def of_head(logits):
        monkeypatch.setattr(module, "LOGITS_PER_BLOCK", logits)
        student.zero_grad()
        distillation_scores(student, teacher, tokens, DIVERGENCE, shared_tokens=None).divergence.sum().backward()
        return student.get_output_embeddings().weight.grad.clone()

    wanted = of_head(1 << 24)
    for logits in (1 << 24, 1):
        with torch.autocast("cpu", torch.bfloat16):
            off[logits] = (of_head(logits) - wanted).norm() / wanted.norm()
    assert 0 < off[1] < 1.3 * off[1 << 24], off


def test_no_tensor_of_tokens_times_vocabulary_is_kept(pair, monkeypatch):
    monkeypatch.setattr(module, "LOGITS_PER_BLOCK", 1 << 9)
    tokens, kept = texts(), []
    vocabulary = pair[0].get_output_embeddings().out_features

    def pack(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        distillation_scores(*pair, tokens, DIVERGENCE, shared_tokens=None)
    assert kept and not [shape for shape in kept if len(shape) > 2 and shape[-1] == vocabulary]


def test_texts_without_a_learned_token_have_a_graph(pair):
    found = distillation_scores(*pair, texts(learned=False), DIVERGENCE, shared_tokens=None)
    assert len(found.divergence) == 0 and found.entropy is found.teacher_entropy is None
    found.divergence.sum().backward()
    assert all((p.grad == 0).all() for p in pair[0].parameters() if p.grad is not None)
