"""The micro-batches of a stream, exact to resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lit_rl.data.loader import go_on_with_others, other_world, whole_steps
from lit_rl.data.offline.loader import ExampleLoader
from lit_rl.data.offline.stream import Place, Windows
from lit_rl.errors import DataError
from lit_rl.examples import ExampleBatch


class StreamLoader:
    """An iterable over this rank's micro-batches of one window's steps after another's, as `ExampleLoader` is.

    Its rows have no end: an iteration is `length` batches, and the next one continues with the step after.
    `state_dict` is the same on every rank. A state taken at any batch resumes with the batch that would have come next;
    with another number of ranks, with the next whole step.

    Args:
        windows: The rows.
        length: Batches of an iteration on this rank: those of the whole run.
        seed: Seed of the order within windows.
        shuffle: Off, every window has the order of its sources, evenly mixed.
        overfit: Every iteration begins with the first row again.
        accumulate: Micro-batches of a step on each rank.
        limit: `trainer.limit_train_batches`. It only tells which batch is an epoch's last.
        allow_changed: Load a state also where the rows, their order or the slots are no longer those of the state.
        part: Arguments by which `ExampleLoader` shares out a step: `rank`, `world_size` and `group_by_length`.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        length: int,
        seed: int = 0,
        shuffle: bool = True,
        overfit: bool = False,
        accumulate: int = 1,
        limit: int | float = 1.0,
        allow_changed: bool = False,
        **part: Any,
    ) -> None:
        self._windows, self._length = windows, length
        self._seed, self._shuffle, self._overfit = seed, shuffle, overfit
        self._slots, self._part = accumulate, part
        self._last = int(length * limit) if isinstance(limit, float) else min(limit, length)
        self._allow_changed = allow_changed
        self._place = windows.start
        self._position = 0  # batches of the window that were taken
        self._taken = 0  # batches of the epoch
        self._continues = False
        self.given: Mapping[str, Any] = {}
        """See `SlottedLoader.given`."""

    def __len__(self) -> int:
        """Return the number of batches of the run on this rank."""
        return self._length

    def __iter__(self) -> Iterator[ExampleBatch]:
        # All of this runs at the first `next`: Lightning may make an iterator that it never uses.
        if self._continues:
            self._continues = False
        else:
            self._taken = 0
            if self._overfit:
                self._place, self._position = self._windows.start, 0
            # An epoch that was cut inside a step: the next one begins with a whole step.
            self._position = -(-self._position // self._slots) * self._slots
        while self._taken < self._length:
            yield from self._rest_of_window()

    def _rest_of_window(self) -> Iterator[ExampleBatch]:
        # A generator of its own: once it ends nothing holds the window, and the next one can be read.
        loader, end = self._loader(), self._windows.at(self._place).end
        rows, size = loader.order.epoch(self._place.number), loader.order.prompts_per_rollout
        step, first_slot = divmod(self._position, self._slots)
        for index in range(step, loader.order.rollouts_per_epoch):
            whole = rows[index * size : (index + 1) * size]
            for batch in loader.batches(whole, self._place.steps + index)[first_slot:]:
                if self._taken >= self._length:
                    return
                self._position += 1
                self._taken += 1
                yield batch
            first_slot = 0
        self._place, self._position = end, 0

    def _loader(self) -> ExampleLoader:
        """Return the loader of the window at hand."""
        window = self._windows.at(self._place)
        order = window.order(self._windows.batch_size, self._seed, self._shuffle)
        loader = ExampleLoader(window.data, order, accumulate=self._slots, **self._part)
        loader.given = self.given
        return loader

    def state_dict(self) -> dict[str, Any]:
        return {
            "place": self._place.plain(),
            "position": self._position,
            "taken": self._taken,
            "fingerprint": self.fingerprint,
            "made_by": self._loader().made_by(self._slots),
            "slots": self._slots,
            "world_size": self._part.get("world_size", 1),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved loader was.

        Raises:
            DataError: the state belongs to other rows or another order, and `allow_changed` is off; or to a run that
                had all rows from its beginning.
        """
        if "place" not in state:
            raise DataError(
                "The checkpoint's run had all rows from its beginning, and this one reads them as it needs them: leave "
                "data.stream_buffer out."
            )
        self._place = Place.of(state["place"], len(self._windows.sources))
        other = other_world(state, self._part.get("world_size", 1))
        slots = state["slots"] if other else self._slots
        loader = self._loader()
        if state["fingerprint"] != loader.fingerprint_of(slots):
            go_on_with_others(loader, state, slots, allowed=self._allow_changed)
        taken = (state[name] for name in ("position", "taken"))
        self._position, self._taken = (whole_steps(n, slots) * self._slots if other else n for n in taken)
        self._continues = self._taken < self._last

    @property
    def fingerprint(self) -> str:
        """Equal where the same position in this window means the same batch."""
        return self._loader().fingerprint
