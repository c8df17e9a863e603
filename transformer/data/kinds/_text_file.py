"""Running text from a text file of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.data._config import HeldOutEnd
from transformer.data._texts import Documents, TextConfig
from transformer.data.files._texts import cut, read_text


@dataclass(frozen=True, kw_only=True)
class LocalText(HeldOutEnd, TextConfig):
    """Options of running text from your own file."""


@dataclass(frozen=True, kw_only=True)
class TextFile(LocalText):
    """Your own text file (UTF-8), read as one continuous text."""

    kind: ClassVar[str] = "text_file"

    def read(self) -> Documents:
        """Return the text; without validation_path, its end is held out."""
        train = read_text(self.path)
        if self.validation_path is not None:
            return Documents({"train": [train], "validation": [read_text(self.validation_path)]})
        end = cut(len(train), self.validation_share, self.path, "characters")
        return Documents({"train": [train[:end]], "validation": [train[end:]]})
