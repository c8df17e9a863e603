"""Texts from a text file of the user, one per line, for masked language modeling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.data._config import HeldOutEnd
from transformer.data._masked_texts import MaskedConfig, Texts
from transformer.data.files._texts import cut, read_lines


@dataclass(frozen=True, kw_only=True)
class MaskedText(HeldOutEnd, MaskedConfig):
    """Your own text file (UTF-8) with one text per line: a sentence, paragraph or document. Empty lines are skipped.

    Raises:
        ConfigError: an empty path, or a number out of range.
    """

    kind: ClassVar[str] = "masked_text"

    def read(self) -> Texts:
        """Return the nonempty lines; without validation_path, the last ones are held out."""

        def lines(path: str) -> list[str]:
            return [line for line in read_lines(path) if line]

        train = lines(self.path)
        if self.validation_path is not None:
            return Texts({"train": train, "validation": lines(self.validation_path)})
        end = cut(len(train), self.validation_share, self.path, "lines")
        return Texts({"train": train[:end], "validation": train[end:]})
