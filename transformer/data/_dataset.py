"""A prepared dataset: fixed-shape batches of numpy arrays, shuffled and sharded by Grain, and the texts behind them."""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer.config._checks import nearest
from transformer.data._config import DataKind
from transformer.data._tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]
"""arrays by name: tokens, targets and weights (B, T); of pairs also source (B, S) and source_lengths (B,); of labeled
texts tokens (B, T) and lengths, targets and weights (B,); of numbers values (B, ...), targets and weights (B,)"""


IN_MEMORY = {"num_threads": 0, "prefetch_buffer_size": 0}
"""how Grain reads: all is in memory, and a thread of the reader would only take time from the step"""


@dataclass(frozen=True)
class Example:
    """One pair as text, `source` and `target`, with the group that its score is reported under (for number words: its
    number of digits).
    """

    source: str
    target: str
    group: str = ""


class Dataset(ABC):
    """What `prepare` returns: batches to train and evaluate on, the tokenizer (None for numbers), and a fingerprint of
    all of it.
    """

    config: DataKind
    """the options, with those filled in that the data determined"""
    tokenizer: Tokenizer | None = None
    fingerprint: str

    @property
    def task(self) -> str:
        """Name of the task that a model learns from it, one of `training.tasks.TASKS`."""
        return self.config.task

    def is_known_as(self, fingerprint: str) -> bool:
        """Whether a fingerprint is of this data, computed now or by an earlier version."""
        return fingerprint == self.fingerprint

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Names that `eval_batches` takes."""

    @abstractmethod
    def describe(self) -> str:
        """One line: how much there is to train and evaluate on."""

    @abstractmethod
    def _size(self, split: str) -> int:
        """Number of rows of a split."""

    @abstractmethod
    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        """The batch of these rows."""

    @abstractmethod
    def _eval_rows(self, split: str) -> np.ndarray:
        """Rows that together hold every token of a split once, in order."""

    def train_batches(self, seed: int, rows: Callable[[int], np.ndarray] | None = None) -> grain.DatasetIterator:
        """An endless iterator over shuffled batches, whose `get_state()` / `set_state()` go on exactly where it was.

        The whole batch is chosen first, and of it a process that trains with others makes its own `rows` alone: a
        function from the number of rows to the places it holds (None: all). So the state (`{"next_index": n}`) does not
        depend on the number of processes.
        """
        import grain

        batches = self._train_batches(seed, np.arange if rows is None else rows)
        if isinstance(batches, grain.MapDataset):
            batches = batches.to_iter_dataset(grain.ReadOptions(**IN_MEMORY))
        return iter(batches)

    def _train_batches(self, seed: int, own: Callable[[int], np.ndarray]) -> grain.MapDataset | grain.IterDataset:
        """All batches to train on, endless, of each the rows that are `own`."""
        import grain

        order = grain.MapDataset.range(self._size("train")).seed(seed).shuffle().repeat()
        rows = own(self.config.batch_size)
        return order.batch(self.config.batch_size).map(lambda chosen: self._assemble("train", chosen[rows]))

    def eval_batches(self, split: str = "validation", limit: int | None = None) -> list[Batch]:
        """A split in order, in batches of `eval_batch_size`, all or the first `limit` of them; the last is filled up
        with rows of weight 0.
        """
        self._check_split(split)
        rows, size = self._eval_rows(split), self.config.eval_batch_size
        batches = []
        for start in range(0, len(rows), size)[:limit]:
            part = rows[start : start + size]
            batch = self._assemble(split, np.resize(part, size))
            batch["weights"][len(part) :] = 0
            batches.append(batch)
        return batches

    def examples(self, split: str = "validation", limit: int | None = None) -> list[Example]:
        """The pairs of a split as text. ValueError for running text and for numbers, which have none."""
        raise ValueError(f"{self.config.kind} is numbers and has no texts. Use eval_batches().")

    def prompts(self) -> list[str]:
        """A few held-out texts to give to the model: to continue, to translate or to classify. None of numbers."""
        return []

    def _check_split(self, split: str) -> None:
        if split not in self.splits:
            raise ValueError(
                f"split must be one of {', '.join(self.splits)}, got {split!r}.{nearest(split, self.splits)}"
            )


def padding(batch: Batch) -> tuple[int, int] | None:
    """How many places for tokens hold padding, rows of weight 0 included, and how many there are; None of a batch that
    is never padded.
    """
    inside = batch["weights"] > 0
    if "source_lengths" in batch:
        used = int(batch["source_lengths"][inside.any(1)].sum() + inside.sum())
        places = batch["source"].size + batch["tokens"].size
    elif "source_segment_ids" in batch:
        used = int((batch["source_segment_ids"] > 0).sum() + inside.sum())
        places = batch["source"].size + batch["tokens"].size
    elif "lengths" in batch:
        counted = inside if inside.ndim == 1 else slice(None)  # where tokens have weights, 0 says not to be predicted
        used, places = int(batch["lengths"][counted].sum()), batch["tokens"].size
    else:
        return None
    return places - used, places


class Ragged:
    """Rows of different length in one array."""

    def __init__(self, rows: Iterable[Sequence[int]]):
        rows = list(rows)
        self.lengths = np.array([len(row) for row in rows], np.int32)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.values = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(self.lengths.sum()))
        self.longest = int(self.lengths.max(initial=0))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, one after the other."""
        whole = cls([])
        whole.lengths = np.concatenate([part.lengths for part in parts])
        whole.starts = np.cumsum(whole.lengths) - whole.lengths
        whole.values = np.concatenate([part.values for part in parts])
        whole.longest = max(part.longest for part in parts)
        return whole

    def row(self, place: int) -> np.ndarray:
        """One row as it is."""
        return self.values[self.starts[place] : self.starts[place] + self.lengths[place]]

    def padded(self, rows: np.ndarray, width: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
        """These rows, filled up with `pad` to `width`, and their lengths."""
        lengths = self.lengths[rows]
        columns = np.arange(width)
        places = np.minimum(self.starts[rows][:, None] + columns, len(self.values) - 1)
        return np.where(columns < lengths[:, None], self.values[places], np.int32(pad)), lengths


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` places out of `count`, evenly spread."""
    wanted = min(count, wanted)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def fingerprint(settings: Any, texts: Mapping[str, Sequence[str]], arrays: Iterable[np.ndarray]) -> str:
    """SHA-256 of everything that decides what a model is shown, except the order (the seed's) and the batch size."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for split, parts in texts.items():
        digest.update(f"{split} {len(parts)}".encode())
        for part in parts:
            digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    for array in arrays:
        digest.update(np.ascontiguousarray(array, "<i4").tobytes())
    return digest.hexdigest()
