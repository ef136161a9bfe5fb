"""Tokens do not drift: what the policy wrote stands in its row, even where its text has other tokens."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lit_rl.core.episode import EnvironmentTurn, PolicyTurn, Responder
from lit_rl.core.rollout import PromptBatch, Prompts, Sampling
from lit_rl.environments import CustomEnvironment
from lit_rl.environments.games import GuessNumber
from lit_rl.environments.interaction import Interaction
from lit_rl.generation.native import NativeGenerator

PROMPT = "is it 12 or 34? 0..9="


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which most digits and letters stand in tokens of two and three characters too."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["1234 5678 1212 3434", "hello the cat abcabc", "?=?= <=<= >=>="] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")


class Recorded(Responder):
    """A responder, and all that was said to it and heard from it, by row."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self.said: dict[int, list[list[int]]] = {}
        self.heard: dict[int, list[list[int] | None]] = {}

    @property
    def max_tokens(self) -> int:
        return self._responder.max_tokens

    def tell(self, said: PolicyTurn) -> None:
        self.said.setdefault(said.row, []).append(list(said.token_ids))
        self._responder.tell(said)

    def answers(self, *, wait: bool) -> list[EnvironmentTurn]:
        answers = self._responder.answers(wait=wait)
        for answer in answers:
            ids = None if answer.token_ids is None else list(answer.token_ids)
            self.heard.setdefault(answer.row, []).append(ids)
        return answers


def test_what_the_policy_wrote_is_never_decoded_and_encoded_again() -> None:
    tokenizer: Any = merging_tokenizer()
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    policy = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes)).eval()
    end = tokenizer.eos_token_id
    game = CustomEnvironment(GuessNumber, max_turns=4)
    interaction = Interaction(game, tokenizer, eos_ids=(end,), chat=False, template_kwargs={})
    batch = PromptBatch((PROMPT,), [tokenizer(PROMPT)["input_ids"]], {}, [0], [0])
    (opened,), conversations = interaction.begin(batch, [3] * 8, max_new_tokens=6)
    responder = Recorded(conversations)
    generator = NativeGenerator()
    generator.sync(policy, 0)
    asked = Prompts([opened.ids], [11], 8, (end,), tokenizer.pad_token_id, tokenizer.decode, None, responder)
    out = generator.generate(asked, Sampling(max_new_tokens=6))
    conversations.episodes()
    conversations.close()

    def again(ids: list[int]) -> list[int]:
        return list(tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"])

    assert out.attended is not None
    drifting = 0
    for row, there in enumerate(out.attended):
        said, heard = responder.said[row], responder.heard[row]
        stood = [ids for turn, answer in zip(said, [*heard[: len(said) - 1], None]) for ids in (turn, answer or [])]
        assert out.response_ids[row][there].tolist() == [token for ids in stood for token in ids]
        drifting += sum(again(turn) != turn for turn in said)
    assert drifting > 8, "the case needs turns whose text has other tokens"
    assert any(heard for row in responder.heard.values() for heard in row), "the case needs answers"
    # Across the border of a turn too: its last token and the answer's first would merge into one.
    assert again([*tokenizer("?")["input_ids"], *tokenizer("=")["input_ids"]]) == tokenizer("?=")["input_ids"]
    assert len(tokenizer("?=")["input_ids"]) == 1
