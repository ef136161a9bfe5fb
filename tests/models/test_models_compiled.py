"""`model.compile`: the same numbers where a model is trained, the very same bits where it is not, few programs.

Most tests run the programs that `torch.compile` makes by torch's own kernels, without a C++ compiler: in less time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from tiers import in_turn
from torch import Tensor, nn

from lit_rl.core.errors import BackendError, ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.generation.fast_decoding import LeanSteps
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import score
from lit_rl.models.kernels import compiled, fixed_order
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.scoring import SEQUENCES, load_scoring
from lit_rl.ops import fused_head as head
from lit_rl.ops.fused_head import Distribution, linear_logprobs

SAMPLING = Sampling(max_new_tokens=4)
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def alike(ours: Tensor, theirs: Tensor, within: float = 5e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=within * max(1.0, float(theirs.abs().max())))


@pytest.fixture
def clean() -> Iterator[None]:
    """No program is there, and functions do not look at shapes, which no compiler follows."""
    with_checks = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    torch._dynamo.reset()
    compiled.cache_clear()
    yield
    compiled.cache_clear()
    torch._dynamo.reset()
    jaxtyping.config.update("jaxtyping_disable", with_checks)


@pytest.fixture
def programs(clean: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that were made so far."""
    made: list[Any] = []
    compiler: Any = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda *args, **how: compiler(*args, backend=backend, **how))
    return made


@pytest.fixture
def pair(make_model) -> Callable[..., list[Any]]:
    """The same model without and with compiled pieces."""

    def load(kind: str = "qwen3", **settings: Any) -> list[Any]:
        folder, models = str(make_model(kind, initializer_range=0.05)), []
        for compiles in (False, True):
            torch.manual_seed(3)
            models.append(LanguageModel(folder, compile=compiles, **settings).load())
            for name, parameter in models[-1].named_parameters():
                if "lora_B" in name:  # zero at first, and then half of the gradients are
                    nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(5))
        return models

    return load


def learned(model: Any, completions: Any, options: ForwardOptions) -> dict[str, Tensor]:
    found = score(model, completions, SAMPLING, entropy=True, options=options)
    (found.logprobs * completions.response_mask).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    there = completions.response_mask
    assert found.entropy is not None
    return {"logprobs": found.logprobs[there].detach(), "entropy": found.entropy[there].detach(), **grads}


@pytest.mark.parametrize(
    "kind, settings, options",
    [
        ("qwen3", {}, ForwardOptions()),
        ("qwen2", {"lora": Lora(r=4), "gradient_checkpointing": True}, ForwardOptions(shared_prompts=False)),
        ("qwen3", {}, ForwardOptions(fused_head=False, shared_prompts=False, folded_attention=False)),
    ],
    ids=["shared prompts", "recomputed lora", "logits"],
)
def test_a_model_learns_the_same_with_as_many_programs_for_all_its_layers(
    pair, programs, completions, kind, settings, options
):
    plain, ours = pair(kind, **settings)
    assert plain.state_dict().keys() == ours.state_dict().keys()
    theirs, found = (learned(model, completions, options) for model in (plain, ours))
    assert theirs.keys() == found.keys()
    for name, value in theirs.items():
        alike(found[name], value)
    assert 0 < len(programs) <= 12


@pytest.mark.usefixtures("programs")
def test_without_gradient_it_computes_as_it_does_uncompiled(pair, programs, completions):
    """Scores and decoding: bit for bit, nothing is compiled, and lean steps are taken."""
    plain, ours = pair()
    with torch.no_grad():
        assert torch.equal(plain.eval()(IDS).logits, ours.eval()(IDS).logits)
        found = [score(model, completions, SAMPLING).logprobs for model in (plain, ours)]
        assert torch.equal(*found)
        engine = NativeGenerator()
        engine.sync(ours, 0)
        kind: Any = engine._choose_steps(ours, 20)
    assert getattr(kind, "func", kind) is LeanSteps
    assert not programs


def test_other_lengths_and_layers_take_the_programs_that_are_there(pair, programs):
    _, ours = pair()
    counts = []
    for rows, length in ((2, 4), (3, 6), (5, 9), (4, 17)):
        ours(IDS.repeat(3, 5)[:rows, :length]).logits.sum().backward()
        counts.append(len(programs))
    assert counts[1:] == counts[1:2] * 3 and counts[0] >= 3


@pytest.mark.usefixtures("programs")
def test_a_copy_computes_with_its_own_weights(pair):
    _, ours = pair()
    twin = copy.deepcopy(ours)
    before = ours(IDS).logits.detach()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert torch.equal(ours(IDS).logits, before)
    assert not torch.allclose(twin(IDS).logits, before)


@pytest.mark.usefixtures("programs")
def test_a_scoring_model_has_them_too(make_model):
    folder, scores = str(make_model("qwen3")), []
    for compiles in (False, True):
        torch.manual_seed(0)
        scorer = load_scoring(LanguageModel(folder, compile=compiles), SEQUENCES)
        assert any("forward" in vars(part) for part in scorer.modules()) == compiles
        scores.append(scorer(IDS).logits.detach())
    alike(scores[1], scores[0])


def softmax(compiles: bool, dtype: torch.dtype, distribution: Distribution) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator).to(dtype).requires_grad_() for size in (9, 200))
    ids = torch.randint(200, (9,), generator=generator)
    found = linear_logprobs(hidden, weight, ids, distribution, compiler=compiled if compiles else None)
    loss = (found.logprobs * torch.arange(1, 10)).sum()
    if found.entropy is not None and distribution.entropy_gradient:
        loss = loss + found.entropy.square().sum()
    loss.backward()
    others = [found.entropy] if found.entropy is not None else []
    others += [found.stats.log_sum_sq, found.stats.correct, found.stats.mean_logit] if found.stats else []
    return [part.detach().float() for part in (found.logprobs, hidden.grad, weight.grad, *others) if part is not None]


@in_turn(
    distribution=[
        Distribution(entropy=True),
        Distribution(temperature=0.7, entropy=True, entropy_gradient=True),
        Distribution(stats=True),
    ],
    dtype=[torch.float32, torch.bfloat16],
)
def test_the_compiled_softmax_is_the_same_over_blocks(programs, monkeypatch, dtype, distribution):
    """Own ids in each block of the vocabulary, the last of which is narrower; logits made twice."""
    monkeypatch.setattr(head, "COLUMNS", 64)
    monkeypatch.setattr(head, "KEPT", 0)
    for ours, theirs in zip(softmax(True, dtype, distribution), softmax(False, dtype, distribution), strict=True):
        alike(ours, theirs, 1e-6 if dtype == torch.float32 else 1e-2)
    assert len(programs) == 2


@pytest.mark.usefixtures("clean")
def test_a_backward_pass_may_run_in_a_fixed_order(monkeypatch):
    """As each of a run on a CPU does: torch refuses one that was not made for it."""
    compiler: Any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **how: compiler(*args, backend="aot_eager", **how))
    x = torch.randn(4, 3, requires_grad=True)
    loss = compiled(torch.square)(x).sum()
    with fixed_order(x.device):
        loss.backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


@pytest.mark.all
@pytest.mark.usefixtures("clean")
def test_inductor_gives_the_same_and_itself_again():
    """Real code of a C++ compiler: the softmax, which has a sum, a highest number and a write in place."""
    asked = torch.float32, Distribution(entropy=True)
    first, plain = softmax(True, *asked), softmax(False, *asked)
    torch._dynamo.reset()
    compiled.cache_clear()
    for ours, theirs, again in zip(first, plain, softmax(True, *asked), strict=True):
        alike(ours, theirs, 1e-6)
        assert torch.equal(ours, again)


class TestRefusals:
    def test_a_model_of_other_pieces(self, make_model):
        with pytest.raises(ConfigError, match=r"model\.compile=true: GPT2LMHeadModel has no RMSNorm"):
            LanguageModel(str(make_model("gpt2")), compile=True).load()

    @pytest.mark.usefixtures("clean")
    def test_a_compiler_that_is_not_there(self, monkeypatch):
        from torch._inductor import config

        monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
        monkeypatch.setattr(config, "force_disable_caches", True)

        def shifted(x: Tensor) -> Tensor:
            return x.exp() + 1

        with pytest.raises(BackendError, match=r"model\.compile=true: torch\.compile fails.*CXX.*model\.compile=false"):
            compiled(shifted)(torch.ones(300))
