"""Generated pictures of colored shapes, with a sentence that describes each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import ConfigError, check_whole
from transformer.data._captions import CaptionConfig, CaptioningConfig, Pictures
from transformer.data.kinds._number_words import role

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
    "purple": (150, 50, 170),
    "orange": (240, 140, 30),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "circle": lambda y, x, r: y * y + x * x <= r * r,
    "square": lambda y, x, r: (np.abs(y) <= r) & (np.abs(x) <= r),
    "triangle": lambda y, x, r: (np.abs(y) <= r) & (2 * np.abs(x) <= y + r),
    "diamond": lambda y, x, r: np.abs(y) + np.abs(x) <= r,
    "cross": lambda y, x, r: (np.maximum(np.abs(y), np.abs(x)) <= r) & (np.minimum(np.abs(y), np.abs(x)) <= r // 3),
    "ring": lambda y, x, r: (y * y + x * x <= r * r) & (4 * (y * y + x * x) > r * r),
}
"""functions of the offsets from the center, in pixels, and the radius: whether a pixel is inside"""
POSITIONS = (
    *("at the top left", "at the top", "at the top right"),
    *("on the left", "in the center", "on the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
"""cells of a 3 x 3 grid, row by row"""
SIZES = {"small": 30, "large": 50}
"""radius in percent of the width of a cell"""
GRAY = (96, 160)
"""range of the background, which no color of a shape is close to"""

HELD_OUT = 20_000
"""most pictures of a held-out split; there are 332,640 sentences, of which it has a tenth"""

Thing = tuple[int, str, str, str]
"""a shape: the cell, its size, its color, its name"""


@dataclass(frozen=True, kw_only=True)
class Shapes(CaptionConfig):
    """Generated pictures of one or two colored shapes, each with a sentence that describes it completely, such as "a
    large red ring at the top left and a small blue cross in the center".

    A hash of the sentence selects the split: eight of ten sentences are for training, one for validation, one for the
    test. So a held-out picture shows a scene that no training picture shows.

    Raises:
        ConfigError: a number out of range.
    """

    kind: ClassVar[str] = "shapes"

    image_size: int = 32
    """height and width of the pictures in pixels"""
    train_examples: int = 12_000
    """number of training pictures; a scene may occur several times, with other pixels"""
    validation_examples: int = 500
    """number of pictures for evaluation during training, with different sentences"""
    test_examples: int = 1000
    """number of pictures for the test, with different sentences"""
    seed: int = 0
    """seed of the pictures"""

    def __post_init__(self):
        super().__post_init__()
        check_whole(self, "train_examples", "validation_examples", "test_examples")
        check_whole(self, "seed", least=0)
        check_whole(self, "image_size", least=24)
        for field in ("validation_examples", "test_examples"):
            if (count := getattr(self, field)) > HELD_OUT:
                raise ConfigError(f"{field} must be at most {HELD_OUT:,}, got {count:,}. Lower it.")

    def read(self) -> dict[str, Pictures]:
        """Return the pictures and their sentences."""
        counts = {"train": self.train_examples, "validation": self.validation_examples, "test": self.test_examples}
        return {split: self._pictures(split, count) for split, count in counts.items()}

    def _pictures(self, split: str, count: int) -> Pictures:
        # Python's generator gives the same numbers on every platform and version for a text as its seed.
        draw = random.Random(f"shapes {split} {self.seed}")
        pixels = np.empty((count, self.image_size, self.image_size, 3), np.uint8)
        known: set[str] = set()
        captions: list[str] = []
        while len(captions) < count:
            scene = _draw_scene(draw)
            text = sentence(scene)
            if role(text) != split or (split != "train" and text in known):
                continue
            pixels[len(captions)] = picture(scene, self.image_size, draw)
            captions.append(text)
            known.add(text)
        return Pictures(pixels, captions, np.arange(count))


@dataclass(frozen=True, kw_only=True)
class ShapesCaptions(CaptioningConfig, Shapes):
    """The pictures and sentences of `Shapes`, for a model that reads a picture and writes its sentence.

    Raises:
        ConfigError: a number out of range.
    """

    kind: ClassVar[str] = "shapes_captions"
    group_name: ClassVar[str] = "shapes"

    def group_of(self, caption: str) -> str:
        """Return the number of shapes in a sentence."""
        return str(1 + caption.count(" and "))


def sentence(scene: list[Thing]) -> str:
    """Describe the shapes of a scene, in the order of reading.

    >>> sentence([(4, "small", "blue", "cross"), (0, "large", "orange", "ring")])
    'a large orange ring at the top left and a small blue cross in the center'
    """
    return " and ".join(f"a {size} {color} {name} {POSITIONS[cell]}" for cell, size, color, name in sorted(scene))


def picture(scene: list[Thing], image_size: int, draw: random.Random) -> np.ndarray:
    """Draw a scene on noisy gray, (image_size, image_size, 3), with shapes up to one pixel from the center of a cell.

    Only integers are computed, so that a picture has the same pixels on every machine.
    """
    shape = (image_size, image_size, 3)
    pixels = np.full(shape, draw.randint(*GRAY), np.int32)
    places = np.arange(image_size)
    for cell, size, color, name in scene:
        row, column = divmod(cell, 3)
        y = places[:, None] - ((2 * row + 1) * image_size // 6 + draw.randint(-1, 1))
        x = places[None, :] - ((2 * column + 1) * image_size // 6 + draw.randint(-1, 1))
        pixels[SHAPES[name](y, x, SIZES[size] * image_size // 300)] = COLORS[color]
    noise = np.frombuffer(draw.randbytes(pixels.size), np.uint8).reshape(shape) % 17  # 0 ... 16
    return np.clip(pixels + noise.astype(np.int32) - 8, 0, 255).astype(np.uint8)


def _draw_scene(draw: random.Random) -> list[Thing]:
    """Draw one or two shapes in different cells."""
    cells = draw.sample(range(len(POSITIONS)), draw.randint(1, 2))
    kinds = tuple(SIZES), tuple(COLORS), tuple(SHAPES)
    return [(cell, *(draw.choice(kind) for kind in kinds)) for cell in cells]
