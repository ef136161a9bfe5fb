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


class Paints:
    """It shows a new picture at each step, of the row's size and of what was said; a reset may show one too."""

    def reset(self, *, answer: str = "", opens: str = "") -> Any:
        self.number, self.turns = int(answer), 0
        return {
            "": None,
            "image": painted(self.number),
            "parts": [{"type": "text", "text": " See:"}, {"type": "image", "image": encoded(self.number)}],
            "message": [{"role": "user", "content": [{"type": "image", "image": painted(self.number)}]}],
        }[opens]

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        said = sum(map(ord, action))
        shown: Any = [{"type": "image", "image": encoded(said % 11)}, {"type": "text", "text": "seen"}]
        if said % 3 == 0:
            shown = "nothing to see"
        elif said % 3 == 1:
            shown = painted(said % 7)
        return shown, float(said % 5), self.turns == 3, False, {}


class Camera:
    """A tool that gives an image."""

    def reset(self, *, answer: str = "") -> None:
        self.number = int(answer)

    def look(self, form: str = "pil") -> Any:
        """Look at what is there.

        Args:
            form: Of what is given.
        """
        shown, data = painted(self.number), encoded(self.number)
        return {
            "pil": shown,
            "bytes": data,
            "parts": [{"type": "image", "image": shown}, {"type": "text", "text": "there"}],
            "spells": [{"type": "text", "text": "<image> <|end|>"}, {"type": "image", "image": data}],
            "broken": data[:40],
            "cut": data[:-100],
            "large": painted(self.number, 200),
            "many": [{"type": "image", "image": shown}] * 20,
            "path": {"type": "image", "image": "/etc/passwd"},
        }[form]


def painted(number: int, width: int = 32) -> Any:
    """A picture of random pixels, the same for a number."""
    import numpy
    from PIL import Image

    pixels = numpy.random.default_rng(number).integers(0, 255, (32, width + number % 9, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def encoded(number: int) -> bytes:
    """The same as JPEG."""
    import io

    data = io.BytesIO()
    painted(number).save(data, "JPEG")
    return data.getvalue()
