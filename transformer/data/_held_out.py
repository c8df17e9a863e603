"""Options of data kinds whose held-out set is the end of a file of the user, or a second file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformer.data._config import check_path, check_share
from transformer.data.files._records import Record, held_out_split, read_records
from transformer.data.files._texts import cut

Items = TypeVar("Items", bound=Sequence)


@dataclass(frozen=True, kw_only=True)
class HeldOutEnd:
    """Options of data kinds that read a text file; the held-out set is the end of the file, or a second file."""

    path: str
    """path of the training file"""
    validation_path: str | None = None
    """path of a second file for evaluation (None: hold out the end of the training file)"""
    validation_share: float = 0.1
    """without validation_path: fraction of the training file, at its end, to hold out for evaluation"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_share(self, "validation_share")

    def read_splits(self, read: Callable[[str], Items], what: str) -> dict[str, Items]:
        """Return the items (`what` they are, for errors) that a function reads from the files, by split."""
        train = read(self.path)
        if self.validation_path is not None:
            return {"train": train, "validation": read(self.validation_path)}
        return self._divided(train, what)

    def records(self, what: str) -> dict[str, list[Record]]:
        """Return the rows by split; without validation_path, a held-out split of a saved `DatasetDict`, or the last."""
        train = read_records(self.path)
        held_out = self.path if self.validation_path is None else self.validation_path
        split = held_out_split(held_out)
        if self.validation_path is None and split is None:
            return self._divided(train, what)
        return {"train": train, "validation": read_records(held_out, split)}

    def _divided(self, items: Items, what: str) -> dict[str, Items]:
        end = cut(len(items), self.validation_share, self.path, what)
        return {"train": items[:end], "validation": items[end:]}
