"""Environments of rows with images, and a tool that looks at one. Worker processes load this file."""

from __future__ import annotations

from typing import Any


class Sizes:
    """The picture is as wide as the policy was told; half of the episodes are over after a turn."""

    def reset(self, *, seed: int, image: Any = None, answer: str = "") -> str | None:
        self.image, self.answer, self.turns = image, answer, 0
        return None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        over = self.turns == 3 or sum(map(ord, action)) % 3 == 0
        said = "no picture" if self.image is None else f"{self.image.width} wide, {self.image.open().getpixel((0, 0))}"
        return said, float(sum(map(ord, action)) % 5), over, False, {}


class Begins(Sizes):
    """It says a word of its own first, of a row."""

    def reset(self, *, seed: int, image: Any = None, answer: str = "") -> str | None:
        super().reset(seed=seed, image=image, answer=answer)
        return f" Row {answer}?"


class Says(Sizes):
    """It says messages of its own first."""

    def reset(self, *, seed: int, image: Any = None, answer: str = "") -> Any:  # pyright: ignore
        super().reset(seed=seed, image=image, answer=answer)
        return [{"role": "user", "content": f"and row {answer}"}]


class Looks:
    """A tool of a row's image."""

    def reset(self, *, image: Any = None) -> None:
        self.image = image

    def pixel(self, x: int, y: int) -> list[int]:
        """A pixel of the picture.

        Args:
            x: From the left.
            y: From above.
        """
        return list(self.image.open().getpixel((x, y)))


class Draws:
    """It gives images, in a form of the row's choice."""

    def reset(self, *, image: Any = None, form: str = "", at: str = "") -> Any:
        self.image, self.form = image, form
        return self._drawn() if at == "reset" else None

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._drawn(), 0.0, False, False, {}

    def _drawn(self) -> Any:
        import numpy

        part = {"type": "image", "image": self.image}
        return {
            "pil": self.image.open(),
            "reference": self.image,
            "part": [part, {"type": "text", "text": "there"}],
            "message": [{"role": "user", "content": [part]}],
            "array": numpy.asarray(self.image.open()),
        }[self.form]


class Shows:
    """Tools that give images."""

    def reset(self, *, image: Any = None) -> None:
        self.image = image

    def show(self, form: str) -> Any:
        """Show it.

        Args:
            form: In which form.
        """
        drawer = Draws()
        drawer.reset(image=self.image, form=form)
        return drawer._drawn()

    def files(self) -> Any:
        """A list of files, which is no image."""
        return [{"type": "image", "name": "a.png", "size": 3}]
