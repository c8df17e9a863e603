"""A text file of the user, as one running text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.data._config import check_path, check_share
from transformer.data._local_files import cut, read_text
from transformer.data._texts import Documents, TextConfig


@dataclass(frozen=True, kw_only=True)
class LocalText(TextConfig):
    """Options of running text from your own file."""

    path: str
    """path of the training file"""
    validation_path: str | None = None
    """path of a second file for evaluation (None: the end of the training file)"""
    validation_share: float = 0.1
    """without validation_path: fraction at the end of the file for evaluation"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_share(self, "validation_share")


@dataclass(frozen=True, kw_only=True)
class TextFile(LocalText):
    """Your own text file (UTF-8), as one running text."""

    kind: ClassVar[str] = "text_file"

    def read(self) -> Documents:
        """Return the text; its end is held out, unless validation_path is set."""
        train = read_text(self.path)
        if self.validation_path is not None:
            return Documents({"train": [train], "validation": [read_text(self.validation_path)]})
        end = cut(len(train), self.validation_share, self.path, "characters")
        return Documents({"train": [train[:end]], "validation": [train[end:]]})
