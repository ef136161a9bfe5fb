"""The real vLLM in this process with toys of families whose processors need torchvision."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import perturb
from engine_fixtures import MAKERS
from engine_sights import CLOSE, SAMPLED, asked, gap, move_what_sees
from vision_kinds import kinds
from vision_toys import save

from lit_rl.models import LanguageModel


@pytest.mark.parametrize("kind", kinds("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm"))
def test_logprobs_are_the_policys_as_it_learns_to_see(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights that came first, and after updates of what sees and of all."""
    from vllm.model_executor.models import registry  # pyright: ignore

    # vLLM looks at a model's class in a process of its own, where torchvision is not beside.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    generator, model = MAKERS["vllm"](), LanguageModel(str(save(kind, tmp_path)), freeze=[])
    generator.prepare(model)
    policy, prompts = model.load(), asked(model)
    try:
        generator.sync(policy, 0)
        assert gap(policy, generator.generate(prompts, SAMPLED)) < CLOSE
        for version, move in enumerate((move_what_sees, perturb), 1):
            move(policy, version)
            generator.sync(policy, version)
            assert gap(policy, generator.generate(prompts, SAMPLED)) < CLOSE
            assert generator.gap is not None and generator.gap.tokens == 32 + 8 + 8, "the probe shows an image too"
    finally:
        generator.close()
