"""Pairs of texts: shared options, pairs by split, and the dataset of sources and targets."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from transformer.config._checks import ConfigError, check_whole
from transformer.data._buckets import TokenBatches
from transformer.data._dataset import Batch, DataKind, Dataset, Example, Ragged, fingerprint, spread
from transformer.data._packed_rows import packed_batches
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import tokenizer_of_splits
from transformer.data.tokenizers._normalization import NORMALIZERS

if TYPE_CHECKING:
    import grain

BLOCK = 4096
"""number of pairs per call of the tokenizer"""


@dataclass(frozen=True)
class Pairs:
    """Pairs by split, the `normalization` of their sources, and the number of `skipped` lines (one side empty)."""

    splits: Mapping[str, Sequence[Example]]
    normalization: str = "none"
    skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class PairConfig(DataKind):
    """Options of all kinds of paired text: the model reads a source and generates a target."""

    task: ClassVar[str] = "seq2seq"
    open_lengths: ClassVar[tuple[str, ...]] = ("max_source_length", "max_target_length")
    group_name: ClassVar[str] = "group"
    """name of the groups for which exact matches are reported"""
    bleu_tokenization: ClassVar[str | None] = "13a"
    """sacreBLEU tokenizer for BLEU; None: translations are scored by exact match instead"""

    max_source_length: int | None = None
    """maximum source length in tokens; longer pairs are skipped and counted (None: the longest in the data)"""
    max_target_length: int | None = None
    """maximum target length in tokens, including the end token; longer pairs are skipped and counted
    (None: the longest in the data)"""
    batch_size: int = 128
    """pairs per step, over all devices and processes; not used with batch_tokens"""
    batch_tokens: int | None = None
    """batch size in tokens of the longer side, including padding; pairs of similar length are batched together
    (None: use batch_size)"""
    buckets: int = 8
    """with batch_tokens: maximum number of different padded lengths; the training step is compiled once for each"""
    row_multiple: int = 8
    """with batch_tokens: the number of rows of every batch is a multiple of this;
    must be divisible by the number of devices and micro-batches"""
    packed_length: int | None = None
    """with batch_tokens: pack several pairs into one row of this many tokens per side (None: one pair per row)"""
    eval_batch_size: int = 250
    """pairs per evaluation batch"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size", "buckets", "row_multiple", "batch_tokens", "packed_length")
        self._check_unused("batch_tokens", "batch_size")
        self._check_unused("packed_length", "buckets")
        if self.packed_length is not None and not self.packed_rows:
            raise ConfigError(
                f"packed_length ({self.packed_length}) needs batch_tokens of at least row_multiple "
                f"({self.row_multiple}) times packed_length, got {self.batch_tokens}. Raise batch_tokens."
            )
        check_whole(self, "max_source_length")
        check_whole(self, "max_target_length", least=2)

    def prepare(self, tokenizer: Tokenizer | None = None) -> PairDataset:
        found = self.read()
        if tokenizer is None:
            normalize = NORMALIZERS[found.normalization]
            sides = {
                split: (part for pair in pairs for part in (normalize(pair.source), pair.target))
                for split, pairs in found.splits.items()
            }
            tokenizer = tokenizer_of_splits(self.tokenizer, sides, found.normalization)
        return PairDataset(self, tokenizer, found)

    def _check_unused(self, field: str, other: str) -> None:
        """Raise ConfigError if both `field` and `other` are set, but `other` has no effect with `field`."""
        value, usual = getattr(self, other), type(self).__dataclass_fields__[other].default
        if getattr(self, field) is not None and value != usual:
            options = [f"--data.{name.replace('_', '-')}" for name in (other, field)]
            raise ConfigError(
                f"{other} ({value}) has no effect with {field} ({getattr(self, field)}), which the recipe or an option "
                f"sets. Remove {options[0]}, or pass {options[1]} None."
            )

    @property
    def packed_rows(self) -> int:
        """Rows of a packed batch: as many as fit into batch_tokens, rounded down to a multiple of row_multiple."""
        return (self.batch_tokens or 0) // self.packed_length // self.row_multiple * self.row_multiple


class PairDataset(Dataset):
    """Pairs of source and target, padded on the right to one shape for all batches."""

    def __init__(self, config: PairConfig, tokenizer: Tokenizer, found: Pairs):
        if tokenizer.begin_id is None or tokenizer.eos_id is None:
            raise ValueError(
                "this tokenizer can't encode pairs: it has no begin token or no end token for targets. Use a tokenizer "
                "with both; config.json defines them as decoder_start_token_id and eos_token_id."
            )
        self.config, self.tokenizer = config, tokenizer
        self._pairs, self._skipped = found.splits, found.skipped
        self._rows: dict[str, np.ndarray] = {}  # indices of the kept pairs of each split
        self._sources: dict[str, Ragged] = {}
        self._targets: dict[str, Ragged] = {}
        digests = {split: [self._encode(split, pairs)] for split, pairs in found.splits.items()}
        self.max_source_length = config.max_source_length or max(r.longest for r in self._sources.values())
        self.max_target_length = config.max_target_length or max(r.longest for r in self._targets.values())
        self._check_packing()
        self._batches = None
        if config.batch_tokens is not None and config.packed_length is None:
            sizes = {"buckets": config.buckets, "row_multiple": config.row_multiple}
            lengths = self._sources["train"].lengths, self._targets["train"].lengths
            self._batches = TokenBatches(*lengths, batch_tokens=config.batch_tokens, **sizes)
        settings = [config.kind, self.max_source_length, self.max_target_length, tokenizer.state()]
        arrays = [ragged.values for side in (self._sources, self._targets) for ragged in side.values()]
        self.fingerprint = fingerprint(settings, digests, arrays)

    def _encode(self, split: str, pairs: Sequence[Example]) -> str:
        """Encode a split, keep the pairs within the maximum lengths, and return a hash of all its texts."""
        longest_source = self.config.max_source_length or np.inf
        longest_target = self.config.max_target_length or np.inf
        digest, places, sources, targets = hashlib.sha256(), [], [], []
        for start, block in _blocks(pairs):
            for text in itertools.chain.from_iterable((pair.source, pair.target) for pair in block):
                digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
            source_ids = _each_once(self.tokenizer.encode_sources, [pair.source for pair in block])
            target_ids = _each_once(self.tokenizer.encode_all, [pair.target for pair in block])
            kept = [
                place
                for place in range(len(block))
                # `<` for targets: the end token, which is added below, counts as well.
                if 0 < len(source_ids[place]) <= longest_source and 0 < len(target_ids[place]) < longest_target
            ]
            places.append(start + np.array(kept, np.int64))
            sources.append(Ragged(source_ids[place] for place in kept))
            targets.append(Ragged([*target_ids[place], self.tokenizer.eos_id] for place in kept))
        self._rows[split] = np.concatenate([np.zeros(0, np.int64), *places])
        if not len(self._rows[split]):
            raise ValueError(
                f"no {split} pair out of {len(pairs)} can be used: expected text on both sides, sources of at most "
                f"{self.config.max_source_length or 'any number of'} and targets of at most "
                f"{self.config.max_target_length or 'any number of'} tokens. Use larger --data.max-source-length and "
                "--data.max-target-length, or other data."
            )
        self._skipped += len(pairs) - len(self._rows[split])
        self._sources[split], self._targets[split] = Ragged.joined(sources), Ragged.joined(targets)
        return digest.hexdigest()

    def describe(self) -> str:
        packed = self.config.packed_length and self.config.packed_rows
        skipped = f", {self._skipped:,} skipped (empty or too long)" if self._skipped else ""
        return (
            f"{self.config.kind}: {self._sizes} pairs{skipped}; sources up to {self.max_source_length} and targets up "
            f"to {self.max_target_length} tokens, {self._vocabulary}"
            + ("" if self._batches is None else f"; {self._batches.describe()}")
            + (f"; packed into {packed} rows of {self.config.packed_length}" if packed else "")
        )

    def examples(self, split: str = "validation", limit: int | None = None) -> list[Example]:
        """Return the pairs of a split; at most `limit`, balanced over groups and evenly spaced in each group."""
        self._check_split(split)
        pairs, kept = self._pairs[split], self._rows[split].tolist()
        if limit is None or limit >= len(kept):
            return [pairs[place] for place in kept]
        groups = defaultdict(list)
        for place in kept:
            groups[pairs[place].group].append(place)
        # Smallest groups first: what they can't fill of their equal share is divided among the larger ones.
        chosen: list[int] = []
        by_size = sorted(groups.values(), key=len)
        for number, places in enumerate(by_size):
            share = min((limit - len(chosen)) // (len(by_size) - number), len(places))
            chosen += [places[i] for i in spread(len(places), share)]
        return [pairs[place] for place in sorted(chosen)]

    def _check_packing(self) -> None:
        length = self.config.packed_length
        longest = max(self._sources["train"].longest, self._targets["train"].longest)
        if length is not None and length < longest:
            raise ValueError(
                f"packed_length ({length}) is shorter than the longest pair, {longest} tokens on one side. Use at "
                f"least that length, or skip long pairs (--data.max-source-length, --data.max-target-length)."
            )

    def _train_batches(self, seed: int, own: Callable[[int], np.ndarray]) -> grain.MapDataset | grain.IterDataset:
        import grain

        if self.config.packed_length is not None:
            order = grain.MapDataset.range(self._size("train")).seed(seed).shuffle().repeat()
            sides = self._sources["train"], self._targets["train"]
            length, rows = self.config.packed_length, self.config.packed_rows
            return packed_batches(order, *sides, self.tokenizer, row_length=length, rows=rows, own=own)
        if self._batches is None:
            return super()._train_batches(seed, own)

        def assemble(item):
            bucket, chosen, filled = item
            rows = own(len(chosen))
            batch = self._assemble("train", chosen[rows], bucket.source_length, bucket.target_length)
            batch["weights"][rows >= filled] = 0  # rows that only fill up the batch
            return batch

        return grain.MapDataset.source(self._batches.seeded(seed)).map(assemble)

    def _assemble(
        self, split: str, rows: np.ndarray, source_length: int | None = None, target_length: int | None = None
    ) -> Batch:
        pad = self.tokenizer.pad_id
        source, source_lengths = self._sources[split].padded(rows, source_length or self.max_source_length, pad)
        targets, lengths = self._targets[split].padded(rows, target_length or self.max_target_length, pad)
        inside = np.arange(targets.shape[1]) < lengths[:, None]  # (B, T), false for padding
        # Teacher forcing: the decoder reads the targets shifted right by one, starting with the begin token. (B, T)
        shifted = np.concatenate([np.full((len(rows), 1), self.tokenizer.begin_id, np.int32), targets[:, :-1]], axis=1)
        return {
            "source": source,
            "source_lengths": source_lengths,
            "tokens": np.where(inside, shifted, np.int32(pad)),
            "targets": targets,
            "weights": inside.astype(np.float32),
        }


def _each_once(encode: Callable[[list[str]], list[list[int]]], texts: list[str]) -> list[list[int]]:
    """Encode each distinct text only once: number words contain the same numbers many times."""
    known = list(dict.fromkeys(texts))
    ids = dict(zip(known, encode(known), strict=True))
    return [ids[text] for text in texts]


def _blocks(pairs: Iterable[Example]) -> Iterator[tuple[int, list[Example]]]:
    """Yield blocks of pairs, large enough to use all threads, with the index of their first pair."""
    rest = iter(pairs)
    for start in itertools.count(0, BLOCK):
        if not (block := list(itertools.islice(rest, BLOCK))):
            return
        yield start, block
