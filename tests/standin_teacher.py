"""A stand-in for vLLM's server of a teacher: a small model in the test's own process, behind the API of completions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from standin_server import Handler, answers


class ModelAsTeacher:
    """Behaves as vLLM's server does, by the log-probs of a Hugging Face model: not vLLM, and one request at a time.

    Args:
        model: A causal language model.
        encode: Text to token ids, for the comparison of vocabularies.
    """

    def __init__(self, model: Any, encode: Callable[[str], list[int]]) -> None:
        self.model, self.encode = model.eval(), encode
        self.rows: list[list[int]] = []
        """The rows that were asked about, in the order in which they came."""
        self.fails_from: float = float("inf")
        """Number of the row from which on every request is answered with 500."""
        self._lock = threading.Lock()

    def __call__(self, handler: Handler) -> None:
        with self._lock:
            if handler.command == "GET":
                said: Any = {"data": [{"id": "teacher", "max_model_len": 512}]}
            else:
                said = self._completion(handler.asked)
            status = 500 if len(self.rows) > self.fails_from else 200
        answers(said, status)(handler)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        text = isinstance(body["prompt"], str)
        ids = self.encode(body["prompt"]) if text else body["prompt"]
        choice: dict[str, Any] = {"index": 0, "prompt_token_ids": ids}
        if not text:
            self.rows.append(ids)
            with torch.no_grad():
                logprobs = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            best = logprobs.topk(body["prompt_logprobs"]).indices.tolist()
            listed = [
                {
                    str(token): {"logprob": logprobs[at, token].item()}
                    for token in dict.fromkeys([ids[at + 1], *best[at]])
                }
                for at in range(len(ids) - 1)
            ]
            choice["prompt_logprobs"] = [None, *listed]
        return {"choices": [choice]}
