"""Rollout functions whose episodes fork: by hand, and by an agent that shortens its history."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from lit_rl.core.branches import TokenTree
from lit_rl.generation import ChatEndpoint


def forking(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """Each completion is a tree of another shape: one text, a second turn, a turn drawn twice, a shorter history."""
    trees = [TokenTree() for _ in prompts]
    first = trainer.generate([trainer.encode(prompt) for prompt in prompts])
    for tree, ids, said, logprobs in zip(trees, *(first[key] for key in ("prompt_ids", "completion_ids", "logprobs"))):
        tree.begin(ids)
        tree.grow(-1, [], said, logprobs)
    for turn in range(2):
        rows = [row for row in range(len(trees)) if row % 4 > turn]
        asked = []
        for row in rows:
            tree = trees[row]
            if row % 4 == 2 and turn:
                asked.append((-1, []))
            elif row % 4 == 3 and turn:
                asked.append(tree.walk(tree.root, [*tree.prompt_ids[:1], 61, 62, 63]))
            else:
                asked.append((tree.last, [61]))
        texts = [[*trees[row].text(place), *read] for row, (place, read) in zip(rows, asked)]
        out = trainer.generate(texts, rows=rows)
        for row, (place, read), said, logprobs in zip(rows, asked, out["completion_ids"], out["logprobs"]):
            trees[row].grow(place, read, said, logprobs)
    columns = {"completion_ids": "token_ids", "env_mask": "written", "env_follows": "follows"}
    columns |= {name: name for name in ("prompt_ids", "logprobs")}
    return {key: [getattr(tree, name) for tree in trees] for key, name in columns.items()}


def letters(completions: Sequence[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 5) for text in completions]


def ask(url: str, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"model": "policy", "messages": list(messages)}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body)) as answer:
        return json.load(answer)["choices"][0]["message"]


def compacting(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """An agent that keeps no more than its task and its last answer in mind; every third begins no other text."""

    async def agent(number: int, url: str) -> None:
        task = {"role": "user", "content": prompts[number]}
        said = await asyncio.to_thread(ask, url, [task])
        for turn in range(2):
            kept = {"role": "user", "content": f"{prompts[number]} {said['content']}?"}
            history = [task, said, {"role": "user", "content": "?"}] if number % 3 == 0 and not turn else [kept]
            said = await asyncio.to_thread(ask, url, history)

    return ChatEndpoint(trainer, patience=60).play(agent).rollout
