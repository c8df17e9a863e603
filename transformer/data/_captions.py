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
from transformer.data.tokenizers._kinds import tokenizer_of_splits
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


@dataclass(frozen=True, kw_only=True)
class CaptionConfig(DataKind):
    """Options of all kinds of captioned images: the model learns which caption belongs to which image."""

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
        found = self.read()
        captions = {split: pictures.captions for split, pictures in found.items()}
        tokenizer = tokenizer or tokenizer_of_splits(self.tokenizer, captions)
        return CaptionDataset(self, tokenizer, found)


class CaptionDataset(Dataset):
    """Images with normalized pixels, and their captions, padded on the right to `max_length` tokens."""

    def __init__(self, config: CaptionConfig, tokenizer: Tokenizer, splits: Mapping[str, Pictures]):
        self.config, self.tokenizer, self._splits = config, tokenizer, splits
        self._rows = {split: pictures.captions for split, pictures in splits.items()}
        height, width, _ = self._shape
        self.processor = ImageProcessor(height=height, width=width, mean=HALF, std=HALF)
        if isinstance(files := splits["train"].pixels, ImageFiles):
            self.processor, self.read_options = files.processor, READING
        self._tokens: dict[str, Ragged] = {}
        self._truncated = 0
        for split, captions in self._rows.items():
            encoded = [self._encode(text) for text in captions]
            self._tokens[split] = Ragged(ids for ids, _ in encoded)
            self._truncated += sum(truncated for _, truncated in encoded)
        pixels = {name: _digest(pictures.pixels) for name, pictures in splits.items()}
        normalization = [list(HALF)] * 2  # mean and deviation
        settings = [config.kind, pixels, list(self._shape), *normalization, tokenizer.state(), config.max_length]
        arrays = [array for name, part in splits.items() for array in (part.places, self._tokens[name].values)]
        self.fingerprint = fingerprint(settings, self._rows, arrays)

    def _encode(self, text: str) -> tuple[list[int], bool]:
        """Return the token ids of a caption, and whether it was truncated."""
        ids, _, truncated = encode_within(self.tokenizer, text, self.config.max_length)
        return ids, truncated

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._splits["train"].pixels.shape[1:]

    def describe(self) -> str:
        truncated = f" ({self._truncated:,} truncated)" if self._truncated else ""
        height, width, channels = self._shape
        return (
            f"{self.config.kind}: {self._sizes} pairs of an image ({height} x {width} x {channels}) and a caption of "
            f"up to {self._longest} tokens{truncated}, {self._vocabulary}"
        )

    @property
    def _longest(self) -> int:
        return max(ragged.longest for ragged in self._tokens.values())

    def _pair_at(self, split: str, row: int) -> Example:
        return Example(self._rows[split][row], "")

    def eval_batches(self, split: str = "validation", limit: int | None = None) -> Sequence[Batch]:
        """Return the batches of a split, at most `limit`: of `eval_batch_size` rows each, padded with weight 0.

        The pairs are divided evenly: a short last batch would have few captions, and its retrieval would be easier.
        """
        self._check_split(split)
        rows = self._eval_rows(split)
        count = -(-len(rows) // self.config.eval_batch_size)  # rounded up
        return [self._eval_batch(split, part) for part in np.array_split(rows, count)[:limit]]

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
        return (pixels - np.asarray(HALF, np.float32)) / np.asarray(HALF, np.float32)


def _digest(array: np.ndarray | ImageFiles) -> str:
    return array.digest() if isinstance(array, ImageFiles) else hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CaptioningConfig(CaptionConfig):
    """Options of all kinds of captions to write: the model reads an image and writes its caption."""

    task: ClassVar[str] = "captioning"
    group_name: ClassVar[str] = "group"
    """name of the groups of captions whose scores are reported"""

    image_tokens: int
    """number of image tokens per image; must equal model.input.count"""
    prompt: str = ""
    """text between the image and the caption, the same in every row"""
    max_length: int = 64
    """length of every row in tokens, including image tokens; longer captions are truncated"""

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
        """Return the dataset. A tokenizer that is built from the captions has the special token `<image>`."""
        found = self.read()
        if tokenizer is None:
            texts = {split: [*pictures.captions, self.prompt] for split, pictures in found.items()}
            tokenizer = as_pretrained(tokenizer_of_splits(self.tokenizer, texts), [IMAGE_TOKEN])
        return CaptioningDataset(self, tokenizer, found)


class CaptioningDataset(CaptionDataset):
    """Rows of image tokens, a prompt, a caption and an end token, with normalized pixels. Only the caption and the end
    token have a weight.
    """

    def __init__(self, config: CaptioningConfig, tokenizer: Tokenizer, splits: Mapping[str, Pictures]):
        if not isinstance(tokenizer, PretrainedTokenizer) or IMAGE_TOKEN not in tokenizer.special_tokens:
            raise ValueError(
                f"the tokenizer has no special token {IMAGE_TOKEN}, which represents a part of an image. Start from a "
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
        super().__init__(config, tokenizer, splits)

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
        caption = self._rows[split][row]
        return Example(self.config.prompt, caption, self.config.group_of(caption))

    def prompts(self) -> list[str]:
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
