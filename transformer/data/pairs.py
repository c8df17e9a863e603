"""Pairs as a dataset: a source to be read, a target to be written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from transformer.data.configs import PairConfig
from transformer.data.dataset import Batch, Dataset, Example, Ragged, fingerprint, spread
from transformer.data.tokenizer import Tokenizer


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


def _remembering(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """The same function, computed once per text."""
    known: dict[str, list[int]] = {}

    def remembered(text: str) -> list[int]:
        if text not in known:
            known[text] = encode(text)
        return known[text]

    return remembered
