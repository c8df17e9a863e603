"""Texts from a file of the user: running text, documents in JSON lines, or one text per line to mask."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from transformer.data._held_out import HeldOutEnd
from transformer.data._masked_texts import MaskedConfig
from transformer.data._texts import Documents, TextConfig
from transformer.data.files._texts import read_json_lines, read_lines, read_text


@dataclass(frozen=True, kw_only=True)
class TextFile(HeldOutEnd, TextConfig):
    """Your own text file (UTF-8), read as one continuous text."""

    kind: ClassVar[str] = "text_file"

    def read(self) -> Documents:
        """Return the text; without validation_path, its end is held out."""
        return Documents({split: [text] for split, text in self.read_splits(read_text, "characters").items()})


@dataclass(frozen=True, kw_only=True)
class JsonLines(HeldOutEnd, TextConfig):
    """Your own JSON-lines file: one JSON object per line, with a document in one of its fields."""

    kind: ClassVar[str] = "json_lines"

    field: str = "text"
    """name of the field that contains the document"""
    packing: bool = False
    """whole documents in each row, without attention across them; False: windows that start at any token"""

    @property
    def segments(self) -> bool:
        """Whether documents are packed."""
        return self.packing

    def read(self) -> Documents:
        """Return the documents; without validation_path, the last ones are held out."""
        read = functools.partial(read_json_lines, field=self.field)
        return Documents(self.read_splits(read, "documents"), separate=True)


@dataclass(frozen=True, kw_only=True)
class MaskedText(HeldOutEnd, MaskedConfig):
    """Your own text file (UTF-8) with one text per line: a sentence, paragraph or document. Empty lines are skipped.

    Raises:
        ConfigError: an empty path, or a number out of range.
    """

    kind: ClassVar[str] = "masked_text"

    def read(self) -> dict[str, list[str]]:
        """Return the nonempty lines by split; without validation_path, the last ones are held out."""
        return self.read_splits(lambda path: list(filter(None, read_lines(path))), "lines")
