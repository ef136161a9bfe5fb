"""Episodes that fork: those of agents that shorten their history, branch off or drop thoughts.

All tokens of an episode stay one row of `Completions`, in the order in which they came, and `Completions.follows` says
which token each of them stands behind. So a row is an episode, for groups, ranks, micro-batches and sums over a
sequence, and a token that several branches share is there once. A branch is the text from the prompt, or a new
beginning, to a token that no other follows. A model scores the branches as rows of their own (`branches_of`), in which
each sampled token is wanted once.

A place is a column of the response. Negative places are the prompt's: -1 is its last token, -n the first of n, and
-n - 1 is in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rl.core.rollout import Completions, Width, columns_of
from lit_rl.core.transfers import left_pad, right_pad, to_device


@dataclass
class TokenTree:
    """The tokens of an episode while they are written."""

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """0 on tokens that the policy read."""
    written: list[int] = field(default_factory=list)
    """1 on tokens that the policy sampled."""
    follows: list[int] = field(default_factory=list)
    """The place of the token that each stands behind."""
    branches: int = 0
    _next: dict[tuple[int, int], int] = field(default_factory=dict)
    """The first place that was found behind a place, by its token."""
    _inner: set[int] = field(default_factory=set)
    """Places of the response that another token follows."""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Set the prompt. Called once, before anything else."""
        self.prompt_ids = list(prompt_ids)
        for place, token in enumerate(self.prompt_ids, -len(self.prompt_ids)):
            self._next[place - 1, token] = place

    @property
    def root(self) -> int:
        """The place in front of the prompt."""
        return -len(self.prompt_ids) - 1

    @property
    def last(self) -> int:
        """The place of the newest token; -1 before the first."""
        return len(self.token_ids) - 1

    def path(self, place: int) -> list[int]:
        """Return the places of the text that ends at a place, in its order."""
        return _path(self.follows, place, len(self.prompt_ids))

    def text(self, place: int) -> list[int]:
        """Return the tokens of the text that ends at a place."""
        n = len(self.prompt_ids)
        return [self.token_ids[each] if each >= 0 else self.prompt_ids[each + n] for each in self.path(place)]

    def walk(self, place: int, ids: Sequence[int]) -> tuple[int, list[int]]:
        """Return the last place behind `place` at which the tree has these tokens, and the tokens that it lacks."""
        for number, token in enumerate(ids):
            if (following := self._next.get((place, token))) is None:
                return place, list(ids[number:])
            place = following
        return place, []

    def branches_with(self, place: int) -> int:
        """Return the number of branches there are once something stands behind this place."""
        return self.branches + (place < 0 or place in self._inner)

    def grow(self, place: int, read: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Put tokens behind a place: those that the policy read, then those that it sampled.

        Sampled tokens are never those that are there already: a text that was drawn twice is two draws.
        """
        if not read and not ids:
            return
        self.branches = self.branches_with(place)
        for token, logprob, ours in [
            *((token, 0.0, 0) for token in read),
            *((token, logprob, 1) for token, logprob in zip(ids, logprobs, strict=True)),
        ]:
            if place >= 0:
                self._inner.add(place)
            self.follows.append(place)
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            self.written.append(ours)
            self._next.setdefault((place, token), self.last)
            place = self.last


def _path(follows: Sequence[int], place: int, prompt: int) -> list[int]:
    places = list[int]()
    while place >= 0:
        places.append(place)
        place = follows[place]
    return [*range(-prompt, place + 1), *reversed(places)]


class Branch(NamedTuple):
    """One text that the policy read and wrote."""

    places: list[int]
    """The places of its tokens, in their order."""
    prompt: int
    """Tokens at its beginning that are the prompt of its row: as many as in front of its first sampled token, and no
    more than the episode's prompt has."""
    own: list[int]
    """The places of the sampled tokens that no earlier branch has."""


def branches_of_row(follows: Sequence[int], written: Sequence[bool | int], prompt: int) -> list[Branch]:
    """Return the branches of an episode, in the order in which they end.

    Args:
        follows: The place that each token of the response stands behind.
        written: Whether the policy sampled it.
        prompt: Tokens of the prompt.
    """
    inner, seen, found = {place for place in follows if place >= 0}, set[int](), list[Branch]()
    for last in range(len(follows)):
        if last in inner:
            continue
        places = _path(follows, last, prompt)
        sampled = [place for place in places if place >= 0 and written[place]]
        before = places.index(sampled[0]) if sampled else len(places)
        own = [place for place in sampled if place not in seen]
        seen.update(own)
        found.append(Branch(places, min(before, prompt), own))
    return found


def tokens_read(completions: Completions) -> Tensor:
    """Return long ``(b,)``, on the CPU: the tokens behind the prompt that a model reads of each row, those of several
    branches once in each."""
    host = completions.on_host
    lengths = host.prompt_mask.sum(1)
    if host.follows is None:
        return host.read_lengths
    read = [sum(len(branch.places) for branch in row) for row in _branches(host)]
    return (torch.tensor(read) - lengths).clamp(min=0)


def _branches(host: Completions) -> list[list[Branch]]:
    """Return the branches of each row of completions in the host's memory."""
    assert host.follows is not None
    lengths, prompts = host.read_lengths.tolist(), host.prompt_mask.sum(1).tolist()
    columns = zip(host.follows.tolist(), host.response_mask.tolist(), lengths, prompts, strict=True)
    return [branches_of_row(follows[:n], written[:n], prompt) for follows, written, n, prompt in columns]


@dataclass(frozen=True)
class Branches:
    """The branches of completions as rows of their own, and the way back."""

    rows: Completions
    """``r`` rows, one a branch: its text, of which the tokens are wanted (``response_mask``) that no earlier branch
    has. Rows of one prompt have one ``group_id``; a new beginning has its own."""
    branch: Tensor
    """Long ``(b, t)``: the row in which a sampled token is scored."""
    column: Tensor
    """Long ``(b, t)``: its column there."""
    sampled: Tensor
    """Bool ``(b, t)``."""

    def fold(self, scores: Tensor) -> Tensor:
        """Return the scores ``(b, t)`` of the sampled tokens, with gradient, of those ``(r, u)`` of the branches; 0 at
        all other tokens."""
        return scores[self.branch, self.column].masked_fill(~self.sampled, 0)


def branches_of(completions: Completions) -> Branches:
    """Return the branches of completions that fork."""
    host, device = completions.with_host().on_host, completions.device
    assert host.follows is not None and completions.vision is None
    listed = [(row, branch) for row, branches in enumerate(_branches(host)) for branch in branches if branch.own]
    responses, own = [branch.places[branch.prompt :] for _, branch in listed], [set(branch.own) for _, branch in listed]
    places = _Places(
        row=torch.tensor([row for row, _ in listed]),
        prompt=left_pad([branch.places[: branch.prompt] for _, branch in listed], _NOTHING)[0],
        response=right_pad(responses, _NOTHING)[0],
        own=right_pad([[place in mine for place in each] for mine, each in zip(own, responses)], False)[0],
    )
    branch_of, column_of = torch.zeros_like(host.response_ids), torch.zeros_like(host.response_ids)
    for number, ((row, branch), response) in enumerate(zip(listed, responses)):
        columns = {place: column for column, place in enumerate(response)}
        branch_of[row, branch.own] = number
        column_of[row, branch.own] = torch.tensor([columns[place] for place in branch.own], dtype=torch.long)
    rows = _rows_of(completions, places.to(device), host.prompt_mask.sum(1))
    if device.type != "cpu":
        rows = rows.with_host(_rows_of(host, places, host.prompt_mask.sum(1)))
    return Branches(rows, to_device(branch_of, device), to_device(column_of, device), completions.response_mask)


_NOTHING = torch.iinfo(torch.long).min
"""The place of padding."""


class _Places(NamedTuple):
    """The origin of every token of the branches."""

    row: Tensor
    """Long ``(r,)``: the row of the completions."""
    prompt: Tensor
    """Long ``(r, q)``: places."""
    response: Tensor
    """Long ``(r, u)``: columns of the response."""
    own: Tensor
    """Bool ``(r, u)``."""

    def to(self, device: torch.device) -> _Places:
        return _Places(*(to_device(each, device) for each in self))


def _rows_of(completions: Completions, places: _Places, prompts: Tensor) -> Completions:
    """Return the rows of the branches; `prompts` `(b,)` are the tokens of each row's prompt."""
    row, p = places.row[:, None], completions.prompt_ids.shape[1]
    prompt_mask, attended = places.prompt != _NOTHING, places.response != _NOTHING
    everything = torch.cat([completions.prompt_ids, completions.response_ids], 1)
    columns = places.response.masked_fill(~attended, 0)
    values = {
        name: value[places.row] if width is Width.NONE else value[row, columns]
        for name, width, value in columns_of(completions)
        if value is not None and width is not Width.PROMPT and name != "follows"
    }
    for name in ("sampler_logprobs", "kept_logmass"):
        if name in values:
            values[name] = values[name].masked_fill(~places.own, 0.0)
    # The whole prompt and nothing else: it may run once with the others of its group.
    whole = (places.prompt < 0).all(1) & (prompt_mask.sum(1) == to_device(prompts, row.device)[places.row])
    others = completions.group_id.max() + 1 + torch.arange(len(row), device=row.device)
    values |= {
        "prompt_ids": everything[row, (places.prompt + p).masked_fill(~prompt_mask, 0)],
        "prompt_mask": prompt_mask,
        "response_mask": places.own,
        "attended": attended,
        "group_id": torch.where(whole, completions.group_id[places.row], others),
    }
    return replace(completions, **values, follows=None, episodes=None, host=None)
