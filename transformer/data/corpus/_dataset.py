"""The dataset of a tokenized corpus: rows read from disk, in mixtures with exact proportions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from transformer.data._dataset import Batch, Dataset, fingerprint, spread
from transformer.data._packed_rows import packed_batch
from transformer.data._texts import NO_PAIRS, TextConfig, beginnings
from transformer.data.corpus._cache import Tokenized
from transformer.data.corpus._mixture import Mixture
from transformer.data.corpus._rows import PackedDocuments, Tokens, Windows
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._byte_counts import UNKNOWN_BYTES, token_bytes

if TYPE_CHECKING:
    import grain

_SHOWN, _SHOWN_TOKENS = 8, 64
"""documents, and tokens of each, that prompts are taken from"""


@dataclass(frozen=True)
class Corpus:
    """The tokenized sources of a corpus.

    Its `splits` are the sources of each split; its `weights` those of the training sources (empty: numbers of rows).
    """

    splits: Mapping[str, Sequence[Tokenized]]
    weights: tuple[float, ...] = ()


class CorpusDataset(Dataset):
    """Rows of a corpus. Memory does not depend on the size of the corpus: rows are read when they are needed.

    The rows of each source are shuffled again in each pass. With weights, the sources alternate in a fixed order, in
    which each has its share of the rows at any step; otherwise all rows are shuffled together. The state of an iterator
    is the index of the next batch. `config.segments` packs documents, otherwise rows are windows of continuous tokens.
    """

    without_pairs = NO_PAIRS
    read_options: ClassVar[Mapping[str, int]] = {"num_threads": 2, "prefetch_buffer_size": 4}
    """rows come from disk: two batches are read while the model computes"""

    def __init__(self, config: TextConfig, tokenizer: Tokenizer, corpus: Corpus):
        self.config, self.tokenizer, self._weights = config, tokenizer, corpus.weights
        kind = PackedDocuments if config.segments else Windows
        self._rows = {
            split: [kind(Tokens(one, split, tokenizer.vocab_size), config.sequence_length) for one in sources]
            for split, sources in corpus.splits.items()
        }
        self._patterns = {split: [one.source.pattern for one in part] for split, part in corpus.splits.items()}
        self._ends = {split: np.cumsum([len(one) for one in rows]) for split, rows in self._rows.items()}
        for split in self.splits:
            self._check_rows(split)
        hashes = [[split, [[f.sha256 for f in one.tokens.facts] for one in part]] for split, part in self._rows.items()]
        settings = [config.kind, config.sequence_length, config.segments, list(corpus.weights), tokenizer.state()]
        self.fingerprint = fingerprint([settings, hashes], {}, [])

    def _check_rows(self, split: str) -> None:
        rows = self._rows[split]
        if not self._size(split):
            documents = sum(one.tokens.documents for rows in self._rows.values() for one in rows)
            raise ValueError(
                f"the {split} set of {', '.join(self._patterns[split])} has no document of at least 2 tokens, of "
                f"{documents:,} documents in all. Use another --data.validation-share, or pass files for evaluation "
                "(--data.validation-paths)."
            )
        if split == "train" and self._weights and not all(map(len, rows)):
            empty = next(name for name, one in zip(self._patterns[split], rows, strict=True) if not len(one))
            raise ValueError(f"{empty} has no training document of at least 2 tokens. Remove it and its weight.")

    def describe(self) -> str:
        parts = []
        for split, sources in self._rows.items():
            documents, tokens = (sum(getattr(one.tokens, name) for one in sources) for name in ("documents", "count"))
            rows = self._size(split)
            padding = 1 - sum(one.targets for one in sources) / (rows * self.config.sequence_length)
            parts.append(
                f"{documents:,} {split} documents: {tokens:,} tokens in {rows:,} rows with {100 * padding:.1f} % "
                "padding"
            )
        if self._weights:
            pairs = zip(self._weights, self._patterns["train"], strict=True)
            shares = [f"{100 * weight / sum(self._weights):.4g} % {pattern}" for weight, pattern in pairs]
            parts.append(f"mixture of {', '.join(shares)}")
        return f"{self.config.kind}: {'; '.join(parts)}; {self._vocabulary}"

    def prompts(self) -> list[str]:
        """Return the beginnings of three lines of held-out documents, as `TextDataset.prompts` does."""
        texts = {"train": [], "validation": list(self._openings())}
        return beginnings(self.tokenizer, texts, self.config.sequence_length)

    def _openings(self) -> Iterator[str]:
        for source in self._rows["validation"]:
            shards = [shard for shard, facts in enumerate(source.tokens.facts) if facts.documents]
            for shard in (shards[place] for place in spread(len(shards), _SHOWN)):
                ends = source.tokens.ends(shard)
                for document in spread(len(ends), max(1, _SHOWN // len(shards))):
                    start = int(ends[document - 1]) if document else 0
                    ids = source.tokens.read(shard, start, min(int(ends[document]), start + _SHOWN_TOKENS))
                    # The last word may be cut.
                    text = self.tokenizer.decode(ids.tolist())
                    yield text.rpartition(" ")[0] if len(ids) == _SHOWN_TOKENS else text

    def eval_batches(self, split: str = "validation", limit: int | None = None) -> Sequence[Batch]:
        """Return the batches of a split, evenly mixed from its sources and files; each is read when it is accessed."""
        self._check_split(split)
        return _EvalBatches(self, split, limit)

    def target_bytes(self, split: str = "validation", limit: int | None = None) -> int | None:
        self._check_split(split)
        counts = token_bytes(self.tokenizer)
        if counts is None:
            return None
        total = 0
        for batch in self.eval_batches(split, limit):
            found = counts[batch["targets"][batch["weights"] > 0]]
            if (found == UNKNOWN_BYTES).any():
                return None
            total += int(found.sum())
        return total

    def _size(self, split: str) -> int:
        return int(self._ends[split][-1])

    def _eval_rows(self, split: str) -> np.ndarray:
        # Steps of about the golden ratio, without a common factor with the size: the first batches are a fair sample of
        # all sources and files, and all batches together contain each row once.
        size = self._size(split)
        step = max(1, round(size * 0.618))
        while np.gcd(step, size) != 1:
            step += 1
        return np.arange(size) * step % size

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        ends, pad, length = self._ends[split], self.tokenizer.pad_id, self.config.sequence_length
        found = []
        for row in rows.tolist():
            source = int(np.searchsorted(ends, row, side="right"))
            found.append(self._rows[split][source][row - (int(ends[source - 1]) if source else 0)])
        batch = packed_batch([[(ids, True) for ids in one] for one in found], length, pad)
        return batch if self.config.segments else {name: batch[name] for name in ("tokens", "targets", "weights")}

    def _train_batches(self, seed: int, own: Callable[[int], np.ndarray]) -> grain.MapDataset | grain.IterDataset:
        if not self._weights:
            return super()._train_batches(seed, own)
        import grain

        mixture, sizes = Mixture(self._weights), [len(one) for one in self._rows["train"]]
        starts = self._ends["train"] - sizes
        # Another seed for each source: sources of equal size would otherwise have the same order.
        orders = [
            grain.MapDataset.range(size).seed((seed + place) % 2**32).shuffle().repeat()
            for place, size in enumerate(sizes)
        ]

        def chosen(number: int) -> int:
            source, place = mixture[number]
            return int(starts[source]) + int(orders[source][place])

        rows = own(self.config.batch_size)
        order = grain.MapDataset.range(sys.maxsize // 2).map(chosen).batch(self.config.batch_size)
        return order.map(lambda numbers: self._assemble("train", numbers[rows]))


class _EvalBatches(Sequence[Batch]):
    """The first evaluation batches of a split; each is assembled when it is accessed."""

    def __init__(self, dataset: CorpusDataset, split: str, limit: int | None):
        self._dataset, self._split, self._size = dataset, split, dataset.config.eval_batch_size
        self._rows = dataset._eval_rows(split)[: None if limit is None else limit * self._size]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)

    def __getitem__(self, place: int | slice) -> Batch | list[Batch]:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        start = range(len(self))[place] * self._size
        return self._dataset._eval_batch(self._split, self._rows[start : start + self._size])
