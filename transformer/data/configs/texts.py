"""Kinds of running text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.data.configs.common import TextConfig, check_path, check_share


@dataclass(frozen=True, kw_only=True)
class TinyShakespeare(TextConfig):
    """Karpathy's Tiny Shakespeare through TFDS: 1,115,394 characters, the last 10 % held out as nanoGPT does."""

    kind: ClassVar[str] = "tiny_shakespeare"

    data_dir: str | None = None
    """where TFDS keeps prepared data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """a folder that holds input.txt, for a machine without network"""


@dataclass(frozen=True, kw_only=True)
class LocalText(TextConfig):
    """What running text from one's own file has."""

    path: str
    """the file to train on"""
    validation_path: str | None = None
    """a second file to evaluate on (None: the end of the first)"""
    validation_share: float = 0.1
    """share at the end of the file to evaluate on when there is no validation_path"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_share(self, "validation_share")


@dataclass(frozen=True, kw_only=True)
class TextFile(LocalText):
    """A text file of one's own (UTF-8), as one running text."""

    kind: ClassVar[str] = "text_file"


@dataclass(frozen=True, kw_only=True)
class JsonLines(LocalText):
    """A file of one's own with one JSON object per line, each with a document in one of its fields."""

    kind: ClassVar[str] = "json_lines"

    field: str = "text"
    """the field that holds the document"""
