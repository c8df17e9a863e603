"""Base classes of kinds of data, and of the datasets that they prepare: NumPy batches of fixed shapes."""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from transformer.config._checks import nearest
from transformer.data.tokenizers._base import Tokenizer
from transformer.media._images import ImageProcessor

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]
"""Arrays by name. Every batch has targets and weights; targets of weight 0 do not count in the loss. Running text:
tokens, targets and weights (B, T); in packed rows also segment_ids and positions (B, T). Pairs: in addition source
(B, S) and source_lengths (B,). Labeled text: tokens (B, T) with lengths, targets and weights (B,). Numeric data: values
(B, ...) with targets, and weights (B,). Captioned images: values (B, ...), tokens (B, T) with lengths and weights (B,),
without targets: the caption of a row is that of its image. Captions to write: values (B, ...), tokens, targets and
weights (B, T), with lengths and prefix_lengths (B,), the number of tokens before the caption."""


IN_MEMORY = {"num_threads": 0, "prefetch_buffer_size": 0}
"""Grain options without reader threads: all data is in memory, so they would only take CPU time from training"""


@dataclass(frozen=True)
class Example:
    """A pair of texts, `source` and `target`, and the `group` of its score (for number words, the number of digits)."""

    source: str
    target: str
    group: str = ""


class DataKind(ABC):
    """Base class of all kinds of data: a frozen dataclass whose fields are the options of the kind.

    `batch_size` and `eval_batch_size` are fields of every kind. A kind of data usually inherits from the base class of
    its task (`TextConfig`, `PairConfig`, `LabeledConfig`, `MaskedConfig`, `SeriesConfig`, `ImageConfig`,
    `CaptionConfig`), which implements `prepare`; it adds its fields and implements `read`.
    """

    kind: ClassVar[str]
    """name of the kind, as saved in recipe.json"""
    task: ClassVar[str]
    """name of the training task, one of `training.tasks.TASKS`"""
    open_lengths: ClassVar[tuple[str, ...]] = ()
    """maximum lengths in tokens that may be None, in which case the data determines them"""
    segments: ClassVar[bool] = False
    """whether a row can consist of several sequences, told apart by segment ids"""

    @abstractmethod
    def read(self) -> Any:
        """Read and return the texts or numeric data of every split.

        Raises:
            FileNotFoundError: a file is missing; the message explains how to get it.
            ValueError: a file has unexpected content.
            OSError: no network, or the disk is full.
            ImportError: the package that contains the data is not installed.
        """

    @abstractmethod
    def prepare(self, tokenizer: Tokenizer | None = None) -> Dataset:
        """Return the dataset; build a tokenizer from the texts if `tokenizer` is None.

        Raises the errors of `read`, and ValueError if the data is too short.
        """


class Dataset(ABC):
    """The result of `prepare`: batches for training and evaluation, the tokenizer (None for numeric data), and a
    fingerprint that identifies the data and tokenizer.
    """

    read_options: Mapping[str, int] = IN_MEMORY
    """Grain options of the reader threads"""
    config: DataKind
    """the options, completed with values that the data determines"""
    tokenizer: Tokenizer | None = None
    processor: ImageProcessor | None = None
    """preprocessing of images that a trained model is given; None: it reads no images, or none from files"""
    image_token_id: int | None = None
    """id of the token that represents a part of an image; None: the rows have no images between tokens"""
    fingerprint: str
    without_pairs: ClassVar[str] = ""
    """the reason why the data has no pairs of texts; empty: it has pairs"""

    @property
    def task(self) -> str:
        """Name of the training task, one of `training.tasks.TASKS`."""
        return self.config.task

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that `eval_batches` accepts: `train`, `validation` and, if the data has one, `test`."""
        return tuple(self._rows)

    @abstractmethod
    def describe(self) -> str:
        """Describe the size of the data in one line."""

    _rows: Mapping[str, Sized]
    """rows by split"""

    def _size(self, split: str) -> int:
        """Return the number of rows of a split."""
        return len(self._rows[split])

    @property
    def _sizes(self) -> str:
        """The number of rows of each split, for `describe`."""
        return ", ".join(f"{len(rows):,} {split}" for split, rows in self._rows.items())

    @property
    def _vocabulary(self) -> str:
        return f"vocabulary of {self.tokenizer.vocab_size:,} ({self.tokenizer.kind})"

    @abstractmethod
    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        """Assemble a batch of the given rows (indices into the split)."""

    def _eval_rows(self, split: str) -> np.ndarray:
        """Return the rows for evaluation, in order; together they contain every token once. Default: all rows."""
        return np.arange(self._size(split))

    def train_batches(self, seed: int, rows: Callable[[int], np.ndarray] | None = None) -> grain.DatasetIterator:
        """Return an endless iterator over shuffled batches; `set_state(get_state())` resumes it exactly.

        The rows of the global batch are selected first, and then each process assembles only its own rows. The state
        (`{"next_index": n}`) therefore does not depend on the number of processes.

        Args:
            seed: random seed of the order.
            rows: function from the number of rows in the global batch to the indices that this process needs; None: all
                rows.
        """
        import grain

        batches = self._train_batches(seed, np.arange if rows is None else rows)
        if isinstance(batches, grain.MapDataset):
            batches = batches.to_iter_dataset(grain.ReadOptions(**self.read_options))
        return iter(batches)

    def _train_batches(self, seed: int, own: Callable[[int], np.ndarray]) -> grain.MapDataset | grain.IterDataset:
        """Return an endless sequence of training batches; each contains only the rows selected by `own`."""
        import grain

        order = grain.MapDataset.range(self._size("train")).seed(seed).shuffle().repeat()
        rows = own(self.config.batch_size)
        return order.batch(self.config.batch_size).map(lambda chosen: self._assemble("train", chosen[rows]))

    def eval_batches(self, split: str = "validation", limit: int | None = None) -> Sequence[Batch]:
        """Return the batches of a split in order, `eval_batch_size` rows each; at most `limit` batches if given.

        The last batch is padded with rows of weight 0.
        """
        self._check_split(split)
        rows, size = self._eval_rows(split), self.config.eval_batch_size
        return [self._eval_batch(split, rows[start : start + size]) for start in range(0, len(rows), size)[:limit]]

    def _eval_batch(self, split: str, rows: np.ndarray) -> Batch:
        """Assemble an evaluation batch of at most `eval_batch_size` rows."""
        # np.resize repeats the rows of a short last batch, so that all batches have one compiled shape.
        batch = self._assemble(split, np.resize(rows, self.config.eval_batch_size))
        batch["weights"][len(rows) :] = 0
        return batch

    def target_bytes(self, split: str = "validation", limit: int | None = None) -> int | None:
        """Return the number of UTF-8 bytes of text that the targets of `eval_batches` stand for; None: not known."""
        return None

    def examples(self, split: str = "validation", limit: int | None = None) -> list[Example]:
        """Return evenly spaced pairs of a split as text (limit None: all). Raises ValueError for data without pairs."""
        if self.without_pairs:
            raise ValueError(f"{self.config.kind} {self.without_pairs}")
        self._check_split(split)
        return [self._pair_at(split, row) for row in self.places(split, limit)]

    def places(self, split: str, limit: int | None) -> Sequence[int]:
        """Return the indices of the rows that `examples` returns."""
        count = self._size(split)
        return range(count) if limit is None else spread(count, limit)

    def _pair_at(self, split: str, row: int) -> Example:
        """Return a row as a pair of texts."""
        raise NotImplementedError

    @property
    def example(self) -> list[tuple[str, bool]]:
        """Parts of a training text, and whether they are trained; empty if everything is trained."""
        return []

    def prompts(self) -> list[str]:
        """Return a few held-out texts as example inputs of the model. Empty for numeric data."""
        return [] if self.without_pairs else [pair.source for pair in self.examples(limit=3)]

    def _check_split(self, split: str) -> None:
        if split not in self.splits:
            raise ValueError(
                f"split must be one of {', '.join(self.splits)}, got {split!r}.{nearest(split, self.splits)}"
            )


def padding(batch: Batch) -> tuple[int, int] | None:
    """Return the numbers of padding tokens (with rows of weight 0) and of all tokens; None: never padded."""
    inside = batch["weights"] > 0
    if "source_lengths" in batch:
        # Pairs: a row counts if any of its targets has a weight; otherwise it only fills up the batch.
        used = int(batch["source_lengths"][inside.any(1)].sum() + inside.sum())
        places = batch["source"].size + batch["tokens"].size
    elif "source_segment_ids" in batch:
        # Packed pairs: segment id 0 marks padding.
        used = int((batch["source_segment_ids"] > 0).sum() + inside.sum())
        places = batch["source"].size + batch["tokens"].size
    elif "segment_ids" in batch:
        # Packed sequences: segment id 0 marks padding; the tokens of a prompt have no weight.
        used, places = int((batch["segment_ids"] > 0).sum()), batch["tokens"].size
    elif "lengths" in batch:
        counted = inside if inside.ndim == 1 else slice(None)  # per-token weights can be 0 for real tokens
        used, places = int(batch["lengths"][counted].sum()), batch["tokens"].size
    else:
        return None
    return places - used, places


class Ragged:
    """Rows of different lengths in one flat array `values`; row i starts at `starts[i]` and has `lengths[i]` values."""

    def __init__(self, rows: Iterable[Sequence[int]]):
        rows = list(rows)
        self.lengths = np.array([len(row) for row in rows], np.int32)
        self.starts = np.cumsum(self.lengths) - self.lengths  # the exclusive cumulative sum
        # fromiter fills an int32 array directly, without a list of Python integers.
        self.values = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(self.lengths.sum()))
        self.longest = int(self.lengths.max(initial=0))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of all parts."""
        whole = cls([])
        whole.lengths = np.concatenate([part.lengths for part in parts])
        whole.starts = np.cumsum(whole.lengths) - whole.lengths
        whole.values = np.concatenate([part.values for part in parts])
        whole.longest = max(part.longest for part in parts)
        return whole

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, place: int) -> np.ndarray:
        return self.values[self.starts[place] : self.starts[place] + self.lengths[place]]

    def padded(self, rows: np.ndarray, width: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
        """Return these rows, padded with `pad` to `width`, and their lengths."""
        lengths = self.lengths[rows]
        columns = np.arange(width)
        # (rows, width) indices into the flat array. Those past the end of a row are replaced by padding below; the
        # minimum only keeps them inside the array.
        places = np.minimum(self.starts[rows][:, None] + columns, len(self.values) - 1)
        return np.where(columns < lengths[:, None], self.values[places], np.int32(pad)), lengths


def same_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many of their first items two sequences have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def spread(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` evenly spaced indices below `count`."""
    wanted = min(count, wanted)
    # The midpoint of each of `wanted` equal intervals: floor((i + 1/2) count / wanted).
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def fingerprint(settings: Sequence[object], texts: Mapping[str, Sequence[str]], arrays: Iterable[np.ndarray]) -> str:
    """Return the SHA-256 of all settings, texts and arrays that determine the training data.

    The order (seed) and the batch size are not included: they may change when a run is resumed.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for split, parts in texts.items():
        digest.update(f"{split} {len(parts)}".encode())
        for part in parts:
            # Hashing each text separately keeps the boundaries between texts. "surrogatepass" accepts any Python str.
            digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    for array in arrays:
        digest.update(np.ascontiguousarray(array, "<i4").tobytes())  # little-endian on every machine
    return digest.hexdigest()
