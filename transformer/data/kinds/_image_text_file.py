"""Pairs of images and texts of the user: JSON lines or CSV, with the path of an image in each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import ConfigError, nearest
from transformer.data._captions import CaptionConfig, CaptioningConfig, Pictures
from transformer.data._config import check_path, check_share
from transformer.data.files._images import ImageFiles, ImageFilesConfig, image_rows, split_by_digest
from transformer.data.files._texts import read_json_objects, read_table


@dataclass(frozen=True, kw_only=True)
class ImageTextFile(ImageFilesConfig, CaptionConfig):
    """Your own images and texts, for a model that learns which text belongs to which image.

    The file has JSON lines (.jsonl, .json), or a table with column names in the first line (.tsv: separated by tabs,
    other endings: by commas). Paths of images are relative to the folder of the file, and no file outside of this
    folder is read. Every image is decoded once when the data is prepared, to find damaged files.

    Raises:
        ConfigError: an empty path, a share out of range, or the same column for image and text.
    """

    kind: ClassVar[str] = "image_text_file"

    path: str
    """path of the training file"""
    validation_path: str | None = None
    """path of a second file for evaluation; None: hold out a part of the images"""
    validation_share: float = 0.1
    """without validation_path: fraction of the images to hold out for evaluation, by the SHA-256 of an image file"""
    image_column: str = "image"
    """name of the column with the path of the image"""
    text_column: str = "text"
    """name of the column with the text"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_share(self, "validation_share")
        if not self.image_column or not self.text_column or self.image_column == self.text_column:
            raise ConfigError(
                f"image_column and text_column must be two different columns, got {self.image_column!r} and "
                f"{self.text_column!r}. Change one."
            )

    def read(self) -> dict[str, Pictures]:
        """Return the images and their texts. Errors about an image, or a row without one or without text, name it."""
        images, texts = self._rows(self.path)
        if self.validation_path is not None:
            return {"train": _pictures(images, texts), "validation": _pictures(*self._rows(self.validation_path))}
        parts = split_by_digest(images.digests, {"validation": self.validation_share}, self.path)
        return {name: _pictures(images.subset(rows), [texts[i] for i in rows]) for name, rows in parts.items()}

    def _rows(self, path: str) -> tuple[ImageFiles, list[str]]:
        """Return the checked images of a file, and their texts."""
        rows = read_image_texts(path, self.image_column, self.text_column)
        return image_rows(path, rows, self.processor).checked(), [text for _, _, text in rows]


@dataclass(frozen=True, kw_only=True)
class CaptionFile(CaptioningConfig, ImageTextFile):
    """Your own images and captions, in the files of `ImageTextFile`, for a model that writes the caption of an image.

    Raises:
        ConfigError: as `ImageTextFile`, or no room for a caption after the image.
    """

    kind: ClassVar[str] = "caption_file"


def _pictures(images: ImageFiles, texts: list[str]) -> Pictures:
    return Pictures(images, texts, np.arange(len(texts)))


def read_image_texts(path: str, image_column: str, text_column: str) -> list[tuple[int, str, str]]:
    """Read (line, path of the image, text) of the rows of a file. Raises ValueError if one has no image or text."""
    if path.lower().endswith((".jsonl", ".json", ".ndjson")):
        rows = list(read_json_objects(path))
    else:
        separator = "\t" if path.lower().endswith(".tsv") else ","
        header, table = read_table(
            path, "Correct its quotes: a text with a separator needs double quotes.", separator=separator, strict=True
        )
        rows = [(line, dict(zip(header, row, strict=True))) for line, row in table]
    triples = []
    for line, row in rows:
        for column in (image_column, text_column):
            value = row.get(column)
            if not isinstance(value, str) or not value.strip():
                got, hint = "null" if value is None else f"{value!r:.40}", ""
                if column not in row:
                    got = f"the columns {', '.join(map(str, row))[:100] or 'none'}"
                    hint = nearest(column, list(map(str, row)))
                raise ValueError(
                    f"{path}, line {line}: expected text in the column {column!r}, got {got}.{hint} Correct the line, "
                    f"or set --data.image-column and --data.text-column."
                )
        triples.append((line, row[image_column].strip(), row[text_column].strip()))
    if not triples:
        raise ValueError(f"{path} has no rows: expected images and texts. Check the file.")
    return triples
