"""Captioned images, to match or to describe: shared options, pairs by split, and the datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from transformer.chat._image_prompts import ImagePrompts, ImageText
from transformer.config._checks import ConfigError, check_whole
from transformer.data._config import WORDS, TokenizerConfig
from transformer.data._dataset import Batch, DataKind, Dataset, Example, Ragged, fingerprint
from transformer.data._labels import encode_within
from transformer.data.files._images import READING, ImageFiles
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.media._images import ImageProcessor

HALF = (0.5, 0.5, 0.5)
"""mean and deviation that map the values of pixels to -1 ... 1"""
IMAGE_TOKEN = "<image>"
"""name of the image token of a tokenizer that is built from the captions"""


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


@dataclass(frozen=True, kw_only=True)
class CaptioningConfig(CaptionConfig):
    """Options of all kinds of captions to write: the model reads an image and writes its caption.

    Raises:
        ConfigError: a number out of range, or no room for a caption after the image.
    """

    task: ClassVar[str] = "captioning"
    group_name: ClassVar[str] = "group"
    """name of the groups of captions whose scores are reported"""

    image_tokens: int
    """number of image tokens per image: that of the model, input.count"""
    prompt: str = ""
    """text between the image and the caption, the same in every row"""
    max_length: int = 64
    """length of every row in tokens, including those of the image; longer captions are truncated"""

    def __post_init__(self):
        super().__post_init__()
        check_whole(self, "image_tokens")
        if self.max_length <= self.image_tokens:
            raise ConfigError(
                f"max_length ({self.max_length}) must be above image_tokens ({self.image_tokens}), because a row "
                f"contains the tokens of its image. Raise it by the length of a caption."
            )

    def group_of(self, caption: str) -> str:
        """Return the group under which the score of a caption is reported; "" for none."""
        return ""

    def prepare(self, tokenizer: Tokenizer | None = None) -> CaptioningDataset:
        """Return the dataset. A tokenizer that is built from the captions has the special token `<image>`.

        Raises the errors of `DataKind.prepare`.
        """
        found = self.read()
        if tokenizer is None:
            texts = {split: [*pictures.captions, self.prompt] for split, pictures in found.splits.items()}
            held_out = [text for split, part in texts.items() if split != "train" for text in part]
            tokenizer = as_pretrained(build_tokenizer(self.tokenizer, texts["train"], held_out), [IMAGE_TOKEN])
        return CaptioningDataset(self, tokenizer, found)


class CaptioningDataset(CaptionDataset):
    """Rows of image tokens, a prompt, a caption and an end token, with normalized pixels. Only the caption and the end
    token have a weight.

    Raises:
        ValueError: a caption has no tokens, the tokenizer has no image token or end token, or the image and the prompt
            fill a row.
    """

    def __init__(self, config: CaptioningConfig, tokenizer: Tokenizer, found: Captioned):
        if not isinstance(tokenizer, PretrainedTokenizer) or IMAGE_TOKEN not in tokenizer.special_tokens:
            raise ValueError(
                f"the tokenizer has no special token {IMAGE_TOKEN}, which stands for a part of an image. Start from a "
                f"vision-language model, or without --init."
            )
        if tokenizer.eos_id is None:
            raise ValueError("the tokenizer has no end token, which ends a caption. Add eos_token to its files.")
        self.image_token_id = sorted(tokenizer.special_ids)[tokenizer.special_tokens.index(IMAGE_TOKEN)]
        prompts = ImagePrompts(
            text=ImageText(), token=IMAGE_TOKEN, token_id=self.image_token_id, count=config.image_tokens, read=list
        )
        self.prefix = prompts.encode(config.prompt, 1, tokenizer)
        """token ids before the caption: those of the image and of the prompt"""
        if len(self.prefix) >= config.max_length:
            raise ValueError(
                f"max_length ({config.max_length}) has no room for a caption: the image and the prompt have "
                f"{len(self.prefix)} tokens. Raise --data.max-length."
            )
        super().__init__(config, tokenizer, found)

    def _encode(self, text: str) -> tuple[list[int], bool]:
        ids = self.tokenizer.encode(text)
        if not ids:
            raise ValueError(f"the caption {text!r:.80} has no tokens. Remove it, with its image.")
        # One more than max_length: the first tokens of this row are the tokens, the last ones the targets.
        row = [*self.prefix, *ids, self.tokenizer.eos_id]
        return row[: self.config.max_length + 1], len(row) > self.config.max_length + 1

    @property
    def _longest(self) -> int:
        return super()._longest - len(self.prefix)

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of a caption, with its end token."""
        return self.config.max_length + 1 - len(self.prefix)

    def _pair_at(self, split: str, row: int) -> Example:
        caption = self._splits[split].captions[row]
        return Example(self.config.prompt, caption, self.config.group_of(caption))

    def prompts(self) -> list[str]:
        """Return the prompt."""
        return [self.config.prompt]

    def values(self, split: str, places: Sequence[int]) -> np.ndarray:
        """Return the normalized pixels of rows, (B, height, width, channels), as the model reads them."""
        return self._values(split, np.asarray(places))

    def picture_file(self, split: str, place: int, folder: Path) -> Path:
        """Return a file with the image of a row, which is written into a folder if the data has no files."""
        pictures = self._splits[split]
        if isinstance(pictures.pixels, ImageFiles):
            return pictures.pixels.paths[pictures.places[place]]
        path = folder / f"{split}-{place}.png"
        if not path.exists():
            from PIL import Image  # here, because training needs no Pillow

            folder.mkdir(exist_ok=True)
            Image.fromarray(pictures.pixels[pictures.places[place]]).save(path)
        return path

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        width = self.config.max_length + 1
        whole, lengths = self._tokens[split].padded(rows, width, self.tokenizer.pad_id)
        # Position t predicts the token after it: the last token before the caption is the first one with a weight.
        places = np.arange(width - 1)[None, :]
        counts = (places >= len(self.prefix) - 1) & (places < lengths[:, None] - 1)
        return {
            "values": self._values(split, rows),
            "tokens": whole[:, :-1],
            "targets": whole[:, 1:],
            "weights": counts.astype(np.float32),
            "lengths": lengths - 1,
            "prefix_lengths": np.full(len(rows), len(self.prefix), np.int32),
        }
