"""Captions to write: shared options, and the dataset of rows with image tokens, a prompt and a caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from transformer.chat._image_prompts import ImagePrompts, ImageText
from transformer.config._checks import ConfigError, check_whole
from transformer.data._dataset import Batch, Example
from transformer.data._image_captions import CaptionConfig, CaptionDataset, Captioned
from transformer.data.files._images import ImageFiles
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._pretrained import PretrainedTokenizer

IMAGE_TOKEN = "<image>"
"""name of the image token of a tokenizer that is built from the captions"""


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
