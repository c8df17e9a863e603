"""A prepared dataset: fixed-shape batches of numpy arrays, shuffled and sharded by Grain, and the texts behind them."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class TextDataset(Dataset):
    """Running text: training windows start anywhere; evaluation takes each token of the held-out text once.

    Raises:
        ValueError: a training text shorter than a window, or a held-out one of less than 2 tokens.
    """

    task = "causal_lm"

    def __init__(self, config: TextConfig, tokenizer: Tokenizer, splits: Mapping[str, Sequence[str]], separate: bool):
        self.config = config
        self.tokenizer = tokenizer
        self._texts = splits
        end = [tokenizer.eos_id] if separate and tokenizer.eos_id is not None else []
        self._tokens = {
            split: np.array([i for text in texts for i in tokenizer.encode(text) + end], np.int32)
            for split, texts in splits.items()
        }
        length = len(self._tokens["train"])
        if length <= config.sequence_length:
            raise ValueError(
                f"the training text is shorter than the context: expected more than sequence_length "
                f"({config.sequence_length}) tokens, got {length}. Give more text, or a smaller --data.sequence-length."
            )
        for split, tokens in self._tokens.items():
            if len(tokens) < 2:
                raise ValueError(f"the {split} text is too short: expected at least 2 tokens, got {len(tokens)}.")
        self.fingerprint = fingerprint(
            [config.kind, config.sequence_length, tokenizer.state()], splits, self._tokens.values()
        )

    @property
    def splits(self) -> tuple[str, ...]:
        """`train` and `validation`."""
        return tuple(self._tokens)

    def describe(self) -> str:
        """One line: tokens and vocabulary."""
        sizes = ", ".join(f"{len(tokens):,} {split} tokens" for split, tokens in self._tokens.items())
        return f"{self.config.kind}: {sizes}, vocabulary of {self.tokenizer.vocab_size:,} ({self.tokenizer.kind})"

    def examples(self, split: str = "validation", limit: int | None = None) -> list[Example]:
        """Raises ValueError: running text has no pairs."""
        raise ValueError(f"{self.config.kind} is running text and has no pairs of source and target. Use prompts().")

    def prompts(self) -> list[str]:
        """Three beginnings of lines of the held-out text, of at most 40 characters and half a context."""
        lines = [line for text in self._texts["validation"] for line in text.split("\n") if line.strip()]
        chosen = []
        for line in dict.fromkeys(lines[place] for place in spread(len(lines), 3)):
            start = line if len(line) <= 40 else (line[:40].rsplit(" ", 1)[0] or line[:40])
            ids = self.tokenizer.encode(start)
            most = max(1, self.config.sequence_length // 2)
            chosen.append(start if len(ids) <= most else self.tokenizer.decode(ids[:most]))
        return chosen

    def _size(self, split: str) -> int:
        return len(self._tokens[split]) - self.config.sequence_length

    def _eval_rows(self, split: str) -> np.ndarray:
        return np.arange(0, len(self._tokens[split]) - 1, self.config.sequence_length)

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        """Windows that start at `rows`; places past the end of the text have weight 0."""
        tokens = self._tokens[split]
        places = rows[:, None] + np.arange(self.config.sequence_length + 1)
        inside = places < len(tokens)
        window = np.where(inside, tokens[np.minimum(places, len(tokens) - 1)], self.tokenizer.pad_id)
        return {"tokens": window[:, :-1], "targets": window[:, 1:], "weights": inside[:, 1:].astype(np.float32)}


class PairDataset(Dataset):
    """Pairs of source and target, padded on the right to one shape for all batches.

    Raises:
        ValueError: no pair of a split fits the lengths.
    """

    task = "seq2seq"

    def __init__(
        self, config: PairConfig, tokenizer: Tokenizer, splits: Mapping[str, Sequence[Example]], skipped: int = 0
    ):
        if tokenizer.begin_id is None or tokenizer.eos_id is None:
            raise ValueError(
                "this tokenizer has no token that begins a target, or none that ends it: no pairs can be written with "
                "it. Take a tokenizer with both: config.json names them as decoder_start_token_id and eos_token_id."
            )
        self.config = config
        self.tokenizer = tokenizer
        self._skipped = skipped
        self._examples: dict[str, list[Example]] = {}
        self._sources: dict[str, Ragged] = {}
        self._targets: dict[str, Ragged] = {}
        read, write = _remembering(tokenizer.encode_source), _remembering(tokenizer.encode)
        for split, examples in splits.items():
            kept = [
                example
                for example in examples
                if 0 < len(read(example.source)) <= (config.max_source_length or np.inf)
                and len(write(example.target)) + 1 <= (config.max_target_length or np.inf)
            ]
            if not kept:
                raise ValueError(
                    f"no {split} pair is left of {len(examples)}: expected some with sources of 1 to "
                    f"{config.max_source_length} and targets of at most {config.max_target_length} tokens. "
                    "Give larger --data.max-source-length and --data.max-target-length."
                )
            self._skipped += len(examples) - len(kept)
            self._examples[split] = kept
            self._sources[split] = Ragged(read(example.source) for example in kept)
            self._targets[split] = Ragged([*write(example.target), tokenizer.eos_id] for example in kept)
        self.max_source_length = config.max_source_length or max(r.longest for r in self._sources.values())
        self.max_target_length = config.max_target_length or max(r.longest for r in self._targets.values())
        texts = {split: [part for e in examples for part in (e.source, e.target)] for split, examples in splits.items()}
        arrays = [ragged.values for side in (self._sources, self._targets) for ragged in side.values()]
        settings = [config.kind, self.max_source_length, self.max_target_length, tokenizer.state()]
        self.fingerprint = fingerprint(settings, texts, arrays)

    @property
    def splits(self) -> tuple[str, ...]:
        """`train` and `validation`; for number words also `test` and `basics` (0-20 and d x 10^k)."""
        return tuple(self._examples)

    def describe(self) -> str:
        """One line: pairs, lengths, vocabulary, and how many pairs were left out."""
        sizes = ", ".join(f"{len(examples):,} {split}" for split, examples in self._examples.items())
        left_out = f", {self._skipped:,} left out (empty or too long)" if self._skipped else ""
        return (
            f"{self.config.kind}: {sizes} pairs{left_out}; sources up to {self.max_source_length} and targets up to "
            f"{self.max_target_length} tokens, vocabulary of {self.tokenizer.vocab_size:,} ({self.tokenizer.kind})"
        )

    def examples(self, split: str = "validation", limit: int | None = None) -> list[Example]:
        """The pairs of a split; of more than `limit`, as many of each group as there are, evenly spread within it."""
        self._check_split(split)
        examples = self._examples[split]
        if limit is None or limit >= len(examples):
            return list(examples)
        groups = defaultdict(list)
        for place, example in enumerate(examples):
            groups[example.group].append(place)
        chosen: list[int] = []
        by_size = sorted(groups.values(), key=len)
        for number, places in enumerate(by_size):
            share = min((limit - len(chosen)) // (len(by_size) - number), len(places))
            chosen += [places[i] for i in spread(len(places), share)]
        return [examples[place] for place in sorted(chosen)]

    def prompts(self) -> list[str]:
        """Three held-out sources."""
        return [example.source for example in self.examples(limit=3)]

    def _size(self, split: str) -> int:
        return len(self._examples[split])

    def _eval_rows(self, split: str) -> np.ndarray:
        return np.arange(self._size(split))

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        pad = self.tokenizer.pad_id
        source, source_lengths = self._sources[split].padded(rows, self.max_source_length, pad)
        targets, lengths = self._targets[split].padded(rows, self.max_target_length, pad)
        inside = np.arange(self.max_target_length) < lengths[:, None]
        begun = np.concatenate([np.full((len(rows), 1), self.tokenizer.begin_id, np.int32), targets[:, :-1]], axis=1)
        return {
            "source": source,
            "source_lengths": source_lengths,
            "tokens": np.where(inside, begun, np.int32(pad)),
            "targets": targets,
            "weights": inside.astype(np.float32),
        }


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


def _remembering(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """The same function, computed once per text."""
    known: dict[str, list[int]] = {}

    def remembered(text: str) -> list[int]:
        if text not in known:
            known[text] = encode(text)
        return known[text]

    return remembered


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
