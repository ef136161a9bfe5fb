"""Policies, prompts and oracles of the tests of engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import logits_process as peer

from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.noise import prompt_key
from lit_rl.models import LanguageModel, Lora

LONG = 300
"""Tokens of a long prompt: more than two blocks of vLLM's cache on a CPU, so that a stale one shows."""


def untied_folder(tiny: Path, folder: Path) -> Path:
    """A random model of the shipped one's shape, with a head of its own, as a Hugging Face folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(tiny, tie_word_embeddings=False)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def described(folder: Path, **settings: Any) -> LanguageModel:
    return LanguageModel(str(folder), **settings)


def with_lora(folder: Path, rank: int = 4) -> LanguageModel:
    return LanguageModel(str(folder), lora=Lora(r=rank))


def ask(model: LanguageModel, *, group_size: int = 3, seed: int = 0, **changes: Any) -> Prompts:
    """Two short prompts and two long ones that begin alike."""
    tokenizer: Any = model.tokenizer
    short = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("12+30=", "7+1=")]
    long = [[5 + (7 * i) % 200 for i in range(LONG)] + [end] for end in (65, 70)]
    prompts = {
        "token_ids": [*short, *long],
        "keys": [prompt_key(seed, 0, row, 0) for row in range(4)],
        "group_size": group_size,
        "eos_ids": model.eos_ids,
        "pad_id": model.pad_id,
        "decode": tokenizer.decode,
        "encode": lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
    }
    return Prompts(**(prompts | changes))


def perturb(policy: nn.Module, seed: int, size: float = 0.02) -> None:
    """Move everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def rows(completions: Completions, prompts: Prompts) -> Iterator[tuple[list[int], list[int], Tensor]]:
    """Prompt, response and the engine's log-probs of each row."""
    for row, length in enumerate(completions.lengths.tolist()):
        prompt = prompts.token_ids[row // prompts.group_size]
        yield prompt, completions.response_ids[row, :length].tolist(), completions.sampler_logprobs[row, :length]


@torch.no_grad()
def logits_of(policy: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Float32 logits of each response token, of one forward pass without padding or cache."""
    was_training = policy.training
    policy.eval()
    logits = policy(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    policy.train(was_training)
    return logits


def largest_gap(policy: Any, completions: Completions, prompts: Prompts, temperature: float = 1.0) -> float:
    """The largest difference between the engine's log-probs and those of a fresh forward pass, in nats."""
    gaps = []
    for prompt, response, logprobs in rows(completions, prompts):
        fresh = (logits_of(policy, prompt, response) / temperature).log_softmax(-1)
        gaps.append((logprobs - fresh.gather(1, torch.tensor(response)[:, None])[:, 0]).abs().max().item())
    return max(gaps)


DISTRIBUTIONS: dict[str, tuple[Sampling, list[Any]]] = {
    "warm": (Sampling(temperature=1.7), [peer.TemperatureLogitsWarper(1.7)]),
    "cold": (Sampling(temperature=0.7), [peer.TemperatureLogitsWarper(0.7)]),
    "top_p": (Sampling(temperature=1.7, top_p=0.8), [peer.TemperatureLogitsWarper(1.7), peer.TopPLogitsWarper(0.8)]),
    "top_k": (Sampling(top_k=4), [peer.TopKLogitsWarper(4)]),
    "min_p": (Sampling(min_p=0.05), [peer.MinPLogitsWarper(0.05)]),
    "penalty": (Sampling(repetition_penalty=1.3), [peer.RepetitionPenaltyLogitsProcessor(1.3)]),
    "bias": (Sampling(logit_bias={20: 3.0, 21: -4.0}), [peer.SequenceBiasLogitsProcessor({(20,): 3.0, (21,): -4.0})]),
    "greedy": (Sampling(temperature=0, top_p=0.5), []),
}


def drawn_from(processors: list[Any], policy: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probs of each response token, under transformers' own processors of the text before it."""
    logits, steps = logits_of(policy, prompt, response), range(len(response))
    for processor in processors:
        logits = torch.cat([processor(torch.tensor([prompt + response[:t]]), logits[t : t + 1]) for t in steps])
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
