"""From completions to what a policy, or its reference, thinks of each response token."""

from __future__ import annotations

from torch import Tensor, cat, nn

from lit_rl.ops.logprobs import logprobs_and_entropy
from lit_rl.rollout import Completions


def token_logits(model: nn.Module, completions: Completions) -> Tensor:
    """Logits ``(b, t, v)`` that predict each response token, in the model's own type.

    Positions count attended tokens, so padding changes nothing, also where positions are absolute (GPT-2). The head
    works on the t positions that predict a response token, never on the prompt.
    """
    mask = completions.attention_mask.long()
    t = completions.response_ids.shape[1]
    output = model(
        input_ids=cat([completions.prompt_ids, completions.response_ids], dim=1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=t + 1,
        use_cache=False,
        **completions.model_inputs,
    )
    return output.logits[:, -(t + 1) : -1]


def token_logprobs(model: nn.Module, completions: Completions, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens under ``softmax(logits / temperature)`` with gradient, and entropies without.

    Both are float32 ``(b, t)``. Values at padding are numbers without meaning: mask them.
    """
    return logprobs_and_entropy(token_logits(model, completions), completions.response_ids, temperature=temperature)
