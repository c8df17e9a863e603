"""A prepared dataset: fixed-shape batches of numpy arrays, shuffled and sharded by Grain, and the texts behind them."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer.config import nearest
from transformer.data.configs import LabeledConfig, PairConfig, TextConfig
from transformer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]
"""arrays by name: tokens, targets and weights (B, T); of pairs also source (B, S) and source_lengths (B,); of labeled
texts tokens (B, T) and lengths, targets and weights (B,)"""


@dataclass(frozen=True)
class Example:
    """One pair as text, `source` and `target`, with the group that its score is reported under (for number words: its
    number of digits).
    """

    source: str
    target: str
    group: str = ""


class Dataset(ABC):
    """What `prepare` gives: batches to train and evaluate on, the tokenizer, and a fingerprint of all of it. `task` is
    what it asks of a model: "causal_lm", "seq2seq" or "classifier".
    """

    task: str
    config: TextConfig | PairConfig | LabeledConfig
    tokenizer: Tokenizer
    fingerprint: str

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

    def train_batches(self, seed: int, rows: np.ndarray | None = None) -> grain.DatasetIterator:
        """An endless iterator over shuffled batches, whose `get_state()` / `set_state()` go on exactly where it was.

        The whole batch is chosen first, and of it a process that trains with others makes its `rows` alone (None: all),
        so the state (`{"next_index": n}`) does not depend on the number of processes. ValueError for rows outside.
        """
        import grain

        total = self.config.batch_size
        own = np.arange(total) if rows is None else np.asarray(rows)
        if not own.size or own.min() < 0 or own.max() >= total:
            raise ValueError(f"rows must be some of 0 to {total - 1}, those of a batch, got {own.tolist()}.")
        order = grain.MapDataset.range(self._size("train")).seed(seed).shuffle().repeat()
        batches = order.batch(total).map(lambda chosen: self._assemble("train", chosen[own]))
        # All is in memory, and a thread of the reader would only take time from the step.
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    def eval_batches(self, split: str = "validation") -> list[Batch]:
        """All of a split in order, in batches of `eval_batch_size`; the last is filled up with rows of weight 0."""
        self._check_split(split)
        rows, size = self._eval_rows(split), self.config.eval_batch_size
        batches = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            batch = self._assemble(split, np.resize(part, size))
            batch["weights"][len(part) :] = 0
            batches.append(batch)
        return batches

    @abstractmethod
    def examples(self, split: str = "validation", limit: int | None = None) -> list[Example]:
        """The pairs of a split as text. ValueError for running text, which has none."""

    @abstractmethod
    def prompts(self) -> list[str]:
        """A few held-out texts to give to the model: to continue, to translate or to classify."""

    def _check_split(self, split: str) -> None:
        if split not in self.splits:
            raise ValueError(
                f"split must be one of {', '.join(self.splits)}, got {split!r}.{nearest(split, self.splits)}"
            )


class Ragged:
    """Rows of different length in one array."""

    def __init__(self, rows: Iterable[Sequence[int]]):
        rows = list(rows)
        self.lengths = np.array([len(row) for row in rows], np.int32)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.values = np.array([i for row in rows for i in row], np.int32)
        self.longest = int(self.lengths.max())

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
