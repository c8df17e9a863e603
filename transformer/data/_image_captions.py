"""Images with captions: shared options, pairs by split, and the dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import check_whole
from transformer.data._config import WORDS, TokenizerConfig
from transformer.data._dataset import Batch, DataKind, Dataset, Example, Ragged, fingerprint
from transformer.data._labels import encode_within
from transformer.data.files._images import READING, ImageFiles
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.media._images import ImageProcessor

HALF = (0.5, 0.5, 0.5)
"""mean and deviation that map the values of pixels to -1 ... 1"""


@dataclass(frozen=True)
class Pictures:
    """Pairs of an image and a caption."""

    pixels: np.ndarray | ImageFiles
    """images (N, height, width, channels): uint8, or files that are read as normalized pixels"""
    captions: Sequence[str]
    """captions (M,)"""
    places: np.ndarray
    """index of the image of each caption, (M,)"""


@dataclass(frozen=True)
class Captioned:
    """Pairs of images and captions by split, and the normalization of pixels: (pixels / 255 - mean) / std."""

    splits: Mapping[str, Pictures]
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF


@dataclass(frozen=True, kw_only=True)
class CaptionConfig(DataKind):
    """Options of all kinds of captioned images: the model learns which caption belongs to which image.

    Raises:
        ConfigError: a number out of range.
    """

    task: ClassVar[str] = "contrastive"

    max_length: int = 32
    """length of every caption in tokens: shorter captions are padded, longer ones are truncated"""
    batch_size: int = 128
    """pairs per step, over all devices and processes; each caption is compared with all images of the step"""
    eval_batch_size: int = 100
    """most pairs per evaluation batch; retrieval finds a caption among those of its batch"""
    tokenizer: TokenizerConfig = WORDS
    """tokenizer; ignored if a pretrained model has its own"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size", "max_length", least=2)

    def prepare(self, tokenizer: Tokenizer | None = None) -> CaptionDataset:
        """Return the dataset of the pairs. Raises the errors of `DataKind.prepare`."""
        found = self.read()
        if tokenizer is None:
            parts = {split: pictures.captions for split, pictures in found.splits.items()}
            held_out = [text for split, part in parts.items() if split != "train" for text in part]
            tokenizer = build_tokenizer(self.tokenizer, list(parts["train"]), held_out)
        return CaptionDataset(self, tokenizer, found)


class CaptionDataset(Dataset):
    """Images with normalized pixels, and their captions, padded on the right to `max_length` tokens.

    Raises:
        ValueError: a caption has no tokens.
    """

    def __init__(self, config: CaptionConfig, tokenizer: Tokenizer, found: Captioned):
        self.config = config
        self.tokenizer = tokenizer
        self._splits, self._mean, self._std = found.splits, found.mean, found.std
        self.splits = tuple(found.splits)
        height, width, _ = self._shape
        self.processor = ImageProcessor(height=height, width=width, mean=found.mean, std=found.std)
        if isinstance(files := found.splits["train"].pixels, ImageFiles):
            self.processor, self.read_options = files.processor, READING
        self._tokens: dict[str, Ragged] = {}
        self._truncated = 0
        for split, pictures in found.splits.items():
            encoded = [self._encode(text) for text in pictures.captions]
            self._tokens[split] = Ragged(ids for ids, _ in encoded)
            self._truncated += sum(truncated for _, truncated in encoded)
        self.fingerprint = self._fingerprint()

    def _encode(self, text: str) -> tuple[list[int], bool]:
        """Return the token ids of a caption, and whether it was truncated."""
        ids, _, truncated = encode_within(self.tokenizer, text, self.config.max_length)
        return ids, truncated

    def _fingerprint(self) -> str:
        pixels = {name: _digest(pictures.pixels) for name, pictures in self._splits.items()}
        shape = list(self._shape)
        settings = [self.config.kind, pixels, shape, list(self._mean), list(self._std), self.tokenizer.state()]
        arrays = [array for name, part in self._splits.items() for array in (part.places, self._tokens[name].values)]
        captions = {name: pictures.captions for name, pictures in self._splits.items()}
        return fingerprint([*settings, self.config.max_length], captions, arrays)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._splits["train"].pixels.shape[1:]

    def describe(self) -> str:
        """Describe pairs, sizes, vocabulary and the number of truncated captions in one line."""
        sizes = ", ".join(f"{len(pictures.captions):,} {split}" for split, pictures in self._splits.items())
        truncated = f" ({self._truncated:,} truncated)" if self._truncated else ""
        height, width, channels = self._shape
        return (
            f"{self.config.kind}: {sizes} pairs of an image ({height} x {width} x {channels}) and a caption of up to "
            f"{self._longest} tokens{truncated}, vocabulary of {self.tokenizer.vocab_size:,} ({self.tokenizer.kind})"
        )

    @property
    def _longest(self) -> int:
        """Number of tokens of the longest caption."""
        return max(ragged.longest for ragged in self._tokens.values())

    def _pair_at(self, split: str, row: int) -> Example:
        return Example(self._splits[split].captions[row], "")

    def eval_batches(self, split: str = "validation", limit: int | None = None) -> Sequence[Batch]:
        """Return the batches of a split, at most `limit`: of `eval_batch_size` rows each, padded with weight 0.

        The pairs are divided evenly. Otherwise a short last batch would have few captions to choose from, and its
        retrieval would be easier.
        """
        self._check_split(split)
        rows = self._eval_rows(split)
        count = -(-len(rows) // self.config.eval_batch_size)  # rounded up
        return [self._eval_batch(split, part) for part in np.array_split(rows, count)[:limit]]

    def _size(self, split: str) -> int:
        return len(self._splits[split].captions)

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        tokens, lengths = self._tokens[split].padded(rows, self.config.max_length, self.tokenizer.pad_id)
        return {
            "values": self._values(split, rows),
            "tokens": tokens,
            "lengths": lengths,
            "weights": np.ones(len(rows), np.float32),
        }

    def _values(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Return the normalized pixels of the images of these captions, (B, height, width, channels)."""
        pictures = self._splits[split]
        if isinstance(pictures.pixels, ImageFiles):
            return pictures.pixels[pictures.places[rows]]
        pixels = pictures.pixels[pictures.places[rows]].astype(np.float32) / np.float32(255.0)
        return (pixels - np.asarray(self._mean, np.float32)) / np.asarray(self._std, np.float32)


def _digest(array: np.ndarray | ImageFiles) -> str:
    """Return the SHA-256 of an array of bytes, or of files."""
    if isinstance(array, ImageFiles):
        return array.digest()
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()
