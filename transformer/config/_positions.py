"""Position schemes of a model config. `transformer.nn` computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from transformer.config._checks import ConfigError, check_flags, check_positive, check_whole
from transformer.config._parts import RotaryScaling


@dataclass(frozen=True, kw_only=True)
class SinusoidalOptions:
    """Sines and cosines of the position, added to the embeddings (Vaswani et al. 2017, section 3.5).

    Raises:
        ConfigError: `halves` is not true or false.
    """

    section: ClassVar[str] = "position"
    halves: bool = False
    """all sines before all cosines (tensor2tensor, Marian); false: sines and cosines alternate"""

    def __post_init__(self):
        check_flags(self, "halves")


@dataclass(frozen=True, kw_only=True)
class LearnedOptions:
    """A learned vector per position, added to the embeddings (Gehring et al. 2017, arXiv 1705.03122).

    Raises:
        ConfigError: a number of rows below 1.
    """

    section: ClassVar[str] = "position"
    max_length: int | None = None
    """rows of the table; None: one for each position of an image or of a series"""
    source_max_length: int | None = None
    """rows of the encoder's table in an encoder-decoder; None: max_length"""

    def __post_init__(self):
        check_whole(self, "max_length", "source_max_length")


@dataclass(frozen=True, kw_only=True)
class RotaryOptions:
    """Rotation of queries and keys by their position (Su et al. 2021, arXiv 2104.09864).

    Raises:
        ConfigError: a value out of range, or restart_frequencies without sections.
    """

    section: ClassVar[str] = "position"
    base: float = 10_000.0
    """base of the rotary frequencies: wavelengths range from 2 pi to 2 pi base positions"""
    dim: int | None = None
    """number of head dimensions that are rotated, counted from the first; None: all"""
    scaling: RotaryScaling | None = None
    """frequency scaling for long sequences; None: no scaling"""
    sections: tuple[int, ...] | None = None
    """number of pairs of dimensions that each coordinate of a position rotates, for positions of several coordinates:
    M-RoPE, with time, row and column (Qwen2-VL, Wang et al. 2024, arXiv 2409.12191, section 2.1);
    None: a position is one number"""
    restart_frequencies: bool = False
    """with sections: the frequencies of each section start again with the highest; false: the pairs of all sections
    share one range of frequencies"""

    def __post_init__(self):
        check_whole(self, "dim")
        check_positive(self, "base")
        check_flags(self, "restart_frequencies")
        whole = isinstance(self.sections, tuple) and all(type(n) is int and n >= 1 for n in self.sections)
        if self.sections is not None and not (whole and self.sections):
            raise ConfigError(
                f"position.sections must be a tuple of integers of at least 1, got {self.sections!r:.80}. Correct it."
            )
        if self.restart_frequencies and self.sections is None:
            raise ConfigError("position.restart_frequencies is for position.sections. Set them, or remove it.")


@dataclass(frozen=True, kw_only=True)
class RotaryGridOptions:
    """Rotation of queries and keys by the row and the column of a patch (DINOv3, Siméoni et al. 2025, arXiv
    2508.10104).

    Raises:
        ConfigError: a base that is not above 0.
    """

    section: ClassVar[str] = "position"
    base: float = 10_000.0
    """base of the rotary frequencies"""

    def __post_init__(self):
        check_positive(self, "base")


@dataclass(frozen=True, kw_only=True)
class ALiBiOptions:
    """A bias on the attention scores, proportional to the distance (ALiBi, Press et al. 2021, arXiv 2108.12409)."""


@dataclass(frozen=True, kw_only=True)
class T5BiasOptions:
    """T5's relative position bias (Raffel et al. 2019, arXiv 1910.10683, section 2.1).

    Raises:
        ConfigError: a value out of range, or a max_distance of at most half of the buckets.
    """

    section: ClassVar[str] = "position"
    buckets: int = 32
    """number of distance buckets, the rows of the bias table"""
    max_distance: int = 128
    """distances of at least this many positions share one bucket"""
    per_layer: bool = False
    """each layer learns its own bias table; false: the layers of a stack share one"""

    def __post_init__(self):
        check_whole(self, "buckets", least=4)
        check_whole(self, "max_distance")
        check_flags(self, "per_layer")
        if self.max_distance <= self.buckets // 2:
            raise ConfigError(
                f"position.max_distance ({self.max_distance}) must be above position.buckets / 2 "
                f"({self.buckets // 2}): half of the buckets contain a single distance each. Change one of them."
            )


POSITIONS = {
    "sinusoidal": SinusoidalOptions,
    "learned": LearnedOptions,
    "rotary": RotaryOptions,
    "rotary_grid": RotaryGridOptions,
    "alibi": ALiBiOptions,
    "t5": T5BiasOptions,
}
"""position schemes by their name on the command line"""

Position: TypeAlias = (
    SinusoidalOptions | LearnedOptions | RotaryOptions | RotaryGridOptions | ALiBiOptions | T5BiasOptions | None
)
