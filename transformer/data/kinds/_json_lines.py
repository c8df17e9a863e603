"""Documents from a JSON-lines file of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.data._texts import Documents
from transformer.data.files._texts import cut, read_json_lines
from transformer.data.kinds._text_file import LocalText


@dataclass(frozen=True, kw_only=True)
class JsonLines(LocalText):
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
        train = read_json_lines(self.path, self.field)
        if self.validation_path is not None:
            held_out = read_json_lines(self.validation_path, self.field)
            return Documents({"train": train, "validation": held_out}, separate=True)
        end = cut(len(train), self.validation_share, self.path, "documents")
        return Documents({"train": train[:end], "validation": train[end:]}, separate=True)
