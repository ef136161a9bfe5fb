"""Liger's kernels: the same numbers, in one model and not in the next, and a clear word where they cannot run.

The kernels themselves are interpreted on the CPU, in the environment that has them (`make test-agents`). Triton reads
`TRITON_INTERPRET` when it is imported, so a test cannot set it.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_rl.algorithms import GRPO, RewardModeling
from lit_rl.core.errors import BackendError, ConfigError
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.generation.fast_decoding import LeanSteps
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel, Lora
from lit_rl.models import kernels as liger
from lit_rl.models.forward import score
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.scoring import SEQUENCES, load_scoring
from lit_rl.rewards import exact_match

INTERPRETED = importlib.util.find_spec("liger_kernel") is not None and os.environ.get("TRITON_INTERPRET") == "1"
SAMPLING = Sampling(max_new_tokens=4)


class TestRefusals:
    def test_another_device_is_refused(self, make_model, monkeypatch):
        """Before the weights are read, and before a Trainer loads anything."""
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        model = LanguageModel(str(make_model()), use_liger_kernel=True)
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match=r"model\.use_liger_kernel=true.*CUDA"):
                model.load()
        for module in (GRPO(model, exact_match), RewardModeling(model)):
            trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
            trainer.strategy.connect(module)
            module.trainer = trainer
            with pytest.raises(ConfigError, match=r"model\.use_liger_kernel=true.*this is cpu"):
                module.setup("fit")

    @pytest.mark.parametrize(
        "kind, changes, said",
        [
            ("gpt2", {}, "a gpt2 model, and tested are .*llama.*qwen3.*Leave it out"),
            ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu', and Liger's of qwen2 computes silu"),
        ],
    )
    def test_models_that_the_kernels_would_change_are_refused(self, make_model, monkeypatch, kind, changes, said):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(ConfigError, match=said):
            LanguageModel(str(make_model(kind, **changes)), use_liger_kernel=True).load()

    def test_a_missing_package_tells_how_to_install_it(self, make_model, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(BackendError, match=r"pip install 'lit-rl\[liger\]'"):
            LanguageModel(str(make_model()), use_liger_kernel=True).load()


@pytest.fixture(scope="module")
def kernels() -> Iterator[list[str]]:
    """Triton's interpreter runs kernels on the CPU. It lacks two things of its compiler: there a float that a kernel is
    given is a float32 scalar, and CUDA's own functions can be called. Yields the names of kernels that were run."""
    with pytest.MonkeyPatch.context() as patch:
        import numpy as np
        import triton.language as tl
        from liger_kernel.ops import rms_norm
        from triton.runtime import interpreter

        ran: list[str] = []
        convert, run = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

        def with_floats(value: Any) -> Any:
            if isinstance(value, float):
                return tl.core.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
            return convert(value)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            ran.append(self.fn.__name__)
            return run(self, *args, **kwargs)

        patch.setattr(interpreter, "_implicit_cvt", with_floats)
        patch.setattr(interpreter.GridExecutor, "__call__", noted)
        patch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
        tanh: Callable[[Any], Any] = lambda x: 2 * tl.sigmoid(2 * x) - 1  # noqa: E731
        patch.setattr(sys.modules["liger_kernel.ops.geglu"], "tanh", tanh)
        yield ran


def alike(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * max(1.0, float(theirs.abs().max())))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.skipif(not INTERPRETED, reason="liger-kernel or its interpreter is not there: make test-agents")
@pytest.mark.usefixtures("kernels")
class TestKernels:
    @pytest.fixture
    def ways(self, make_model) -> Callable[..., list[Any]]:
        """The same model without and with the kernels."""

        def load(kind: str = "qwen3", **settings: Any) -> list[Any]:
            folder = str(make_model(kind, initializer_range=0.05))
            models = []
            for use_liger_kernel in (False, True):
                torch.manual_seed(3)
                models.append(LanguageModel(folder, use_liger_kernel=use_liger_kernel, **settings).load())
            return models

        return load

    @pytest.mark.parametrize("family", liger.LIGER_ACTIVATIONS)
    def test_logits_and_gradients_are_those_of_transformers(self, family, kernels):
        sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
        heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0)
        torch.manual_seed(0)
        plain: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads))
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        theirs = copy.deepcopy(plain)
        liger.use_liger_kernels(theirs)
        used = [part for part in theirs.modules() if "forward" in vars(part)]
        assert len(used) >= 1 + 2 * 4  # the last norm; in each layer two more, an attention and an MLP
        kernels.clear()
        ids, weights = torch.randint(40, (2, 7)), torch.randn(2, 7, 40)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        results = []
        for model in (plain, theirs):
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            (logits.log_softmax(-1) * weights * mask[..., None]).sum().backward()
            assert bool(kernels) == (model is theirs)
            results.append((logits.detach()[mask.bool()], gradients(model)))
        assert {"rms", "rope", "glu"} == {word for word in ("rms", "rope", "glu") if word in " ".join(kernels)}
        (ours, our_gradients), (others, their_gradients) = results
        alike(others, ours)
        assert our_gradients.keys() == their_gradients.keys()
        for name, gradient in our_gradients.items():
            alike(their_gradients[name], gradient)

    @pytest.mark.parametrize(
        "settings, options",
        [({}, ForwardOptions()), ({"lora": Lora(r=4)}, ForwardOptions()), ({}, ForwardOptions(False, False))],
        ids=["full", "lora", "repeated prompts, logits"],
    )
    def test_scores_and_their_gradients_are_the_same(self, ways, completions, settings, options):
        """Through the fused head, prompts that are shared and folded attention, as without them."""
        results = []
        for model in ways(**settings):
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero at first, and then half of the gradients are
                    nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(5))
            scored = score(model, completions, SAMPLING, entropy=True, options=options)
            (scored.logprobs * completions.response_mask).sum().backward()
            results.append((scored, gradients(model)))
        (ours, our_gradients), (theirs, their_gradients) = results
        there = completions.response_mask
        alike(theirs.logprobs[there].detach(), ours.logprobs[there].detach())
        alike(theirs.entropy[there].detach(), ours.entropy[there].detach())
        assert our_gradients.keys() == their_gradients.keys()
        for name, gradient in our_gradients.items():
            alike(their_gradients[name], gradient)

    @pytest.mark.parametrize("settings", [{}, {"lora": Lora(r=4)}], ids=["full", "lora"])
    def test_decoding_keeps_its_lean_steps_and_writes_the_same(self, ways, settings):
        written = []
        for model in ways(**settings):
            engine = NativeGenerator()
            engine.sync(model, 0)
            kind: Any = engine._choose_steps(model.eval(), 20)
            assert getattr(kind, "func", kind) is LeanSteps
            prompts = Prompts([[5, 6, 7, 8], [9, 10]], [1, 2], 2, (258,), 256)
            written.append(engine.generate(prompts, Sampling(max_new_tokens=2)))
        ours, theirs = written
        assert torch.equal(ours.response_ids, theirs.response_ids)
        alike(theirs.sampler_logprobs, ours.sampler_logprobs)

    def test_only_the_model_that_asked_has_the_kernels(self, ways):
        """Of one family and loaded later, or another's copy: `transformers` itself is as it was."""
        module = sys.modules["transformers.models.qwen3.modeling_qwen3"]
        before = dict(vars(module))
        _, theirs = ways()
        assert all(before[name] is value for name, value in vars(module).items() if name in before)
        later, _ = ways()
        assert not any("forward" in vars(part) for part in later.modules())
        assert later.state_dict().keys() == theirs.state_dict().keys()
        twin = copy.deepcopy(theirs)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.5)
        ids = torch.tensor([[5, 6, 7]])
        assert not torch.allclose(twin(ids).logits, theirs(ids).logits)  # its methods are bound to it
        alike(theirs(ids).logits, later(ids).logits)

    def test_on_another_device_a_copy_computes_as_before(self, ways, monkeypatch):
        """A reference on the CPU of a policy on a GPU: no kernel is called."""
        ours, theirs = ways()
        monkeypatch.delenv("TRITON_INTERPRET")
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(ours(ids).logits, theirs(ids).logits)

    def test_a_scoring_model_has_them_too(self, make_model):
        folder, scores, terms, ids = str(make_model("qwen3")), [], [], torch.tensor([[5, 6, 7]])
        for use_liger_kernel in (False, True):
            torch.manual_seed(0)
            model = LanguageModel(folder, use_liger_kernel=use_liger_kernel)
            scorer = load_scoring(model, SEQUENCES).eval()
            assert any("forward" in vars(part) for part in scorer.modules()) == use_liger_kernel
            scores.append(scorer(ids).logits.detach())
            hidden: Any = scorer.base_model(ids).last_hidden_state[:, -1].detach()
            terms.append(hidden * scorer.get_submodule("score").get_parameter("weight").detach())
        alike(terms[1], terms[0])
        # A score is a sum that may be near 0: what rounding leaves of it goes by the size of its terms.
        assert (scores[1] - scores[0]).abs().max() <= 1e-6 * terms[0].abs().sum()
