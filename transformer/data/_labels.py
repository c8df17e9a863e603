"""Labeled texts: shared options, texts by split, and the dataset with one class per row."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import check_whole, shortened
from transformer.data._config import SUBWORDS, TokenizerConfig, check_labels
from transformer.data._dataset import Batch, DataKind, Dataset, Example, Ragged, fingerprint
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import tokenizer_of_splits
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.data.tokenizers._settings import truncated


@dataclass(frozen=True)
class Labeled:
    """Labeled texts by split: `splits` contains pairs of a text and the index of its label in `labels`."""

    splits: Mapping[str, Sequence[tuple[str, int]]]
    labels: tuple[str, ...]


def numbered(
    path: str, rows: list[tuple[str, str]], file_labels: tuple[str, ...], labels: tuple[str, ...]
) -> list[tuple[str, int]]:
    """Replace the label of each (text, label) by its index in `file_labels`, whose names for errors are `labels`."""
    numbers = {label: number for number, label in enumerate(file_labels)}
    if unknown := sorted({label for _, label in rows} - numbers.keys()):
        raise ValueError(
            f"{path} has the label {unknown[0]!r}: expected {', '.join(file_labels)} ({', '.join(labels)}). Fix the "
            "file, or list all labels (--data.labels)."
        )
    return [(text, numbers[label]) for text, label in rows]


def hold_out(texts: Sequence[str], labels: Sequence[str], share: float) -> list[bool]:
    """Choose the held-out texts, the same share of each class, and at least one of a class that has several texts.

    The texts of a class are ordered by their SHA-256, so that the choice does not depend on the order of the rows.
    Copies of a text with one label are in the same split, unless a class has nothing else. If each class has one text,
    one of them is held out. Returns whether each text is held out.
    """
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
    classes: dict[str, list[int]] = {}
    for row in sorted(range(len(texts)), key=lambda row: (digests[row], row)):
        classes.setdefault(labels[row], []).append(row)
    chosen = [False] * len(texts)
    for rows in classes.values():
        wanted = min(max(round(share * len(rows)), 1), len(rows) - 1)
        different = [i for i in range(1, len(rows)) if digests[rows[i - 1]] != digests[rows[i]]]
        for row in rows[: next((i for i in different if i >= wanted), (different or [wanted])[-1])]:
            chosen[row] = True
    if not any(chosen):
        chosen[min(range(len(texts)), key=lambda row: (digests[row], labels[row]))] = True
    return chosen


def warn_of_missing(targets: Mapping[str, np.ndarray], labels: Sequence[str]) -> None:
    """Warn of classes without an example (`targets`: class indices (N,) by split): not learned, or not evaluated."""
    for split, numbers in targets.items():
        missing = [repr(label) for number, label in enumerate(labels) if number not in set(np.unique(numbers).tolist())]
        if missing:
            effect = "the model can't learn it" if split == "train" else "the results say nothing about it"
            warnings.warn(
                f"the {split} split has no example of the class {shortened(missing)}, so {effect}. Add "
                f"examples, or choose another held-out set.",
                stacklevel=2,
            )


@dataclass(frozen=True, kw_only=True)
class LabeledConfig(DataKind):
    """Options of all kinds of labeled text: the model reads a text and predicts its class."""

    task: ClassVar[str] = "classifier"

    labels: tuple[str, ...] = ()
    """class labels as in the files, in the order of the class indices;
    empty: all labels of the training file, in alphabetical order"""
    max_length: int = 128
    """maximum length of a text in tokens, including special tokens; longer texts are truncated"""
    batch_size: int = 32
    """texts per step, over all devices and processes"""
    eval_batch_size: int = 64
    """texts per evaluation batch"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer; ignored if a pretrained model has its own"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size")
        check_whole(self, "max_length", least=2)
        check_labels(self.labels, "those of the training file")

    def prepare(self, tokenizer: Tokenizer | None = None) -> LabeledDataset:
        found = self.read()
        texts = {split: [text for text, _ in rows] for split, rows in found.splits.items()}
        return LabeledDataset(self, tokenizer or tokenizer_of_splits(self.tokenizer, texts), found)


class LabeledDataset(Dataset):
    """Texts and their class indices into `labels`, padded on the right to one shape for all batches."""

    def __init__(self, config: LabeledConfig, tokenizer: Tokenizer, found: Labeled):
        self.config = dataclasses.replace(config, labels=found.labels)
        self.tokenizer, self.labels = tokenizer, found.labels
        self._rows = {split: [text for text, _ in rows] for split, rows in found.splits.items()}
        self._targets = {split: np.array([n for _, n in rows], np.int32) for split, rows in found.splits.items()}
        warn_of_missing(self._targets, self.labels)
        self._tokens: dict[str, Ragged] = {}
        self._types: dict[str, Ragged] = {}
        self._cut = 0
        for split, texts in self._rows.items():
            encoded = [encode_within(tokenizer, text, config.max_length) for text in texts]
            self._tokens[split] = Ragged(ids for ids, _, _ in encoded)
            self._types[split] = Ragged(types for _, types, _ in encoded)
            self._cut += sum(truncated for _, _, truncated in encoded)
        self.longest = max(ragged.longest for ragged in self._tokens.values())
        self._has_types = any(ragged.values.any() for ragged in self._types.values())
        arrays = [ragged.values for ragged in self._tokens.values()] + list(self._targets.values())
        settings = [config.kind, self.longest, list(self.labels), tokenizer.state()]
        self.fingerprint = fingerprint(settings, self._rows, arrays)

    def describe(self) -> str:
        cut = f" ({self._cut:,} texts truncated)" if self._cut else ""
        return (
            f"{self.config.kind}: {self._sizes} texts of {len(self.labels)} classes ({', '.join(self.labels)}); up to "
            f"{self.longest} tokens{cut}, {self._vocabulary}"
        )

    def _pair_at(self, split: str, row: int) -> Example:
        return Example(self._rows[split][row], self.labels[self._targets[split][row]])

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        tokens, lengths = self._tokens[split].padded(rows, self.longest, self.tokenizer.pad_id)
        batch = {
            "tokens": tokens,
            "lengths": lengths,
            "targets": self._targets[split][rows],
            "weights": np.ones(len(rows), np.float32),
        }
        if self._has_types:
            batch["token_types"] = self._types[split].padded(rows, self.longest, 0)[0]
        return batch


def encode_within(tokenizer: Tokenizer, text: str, max_length: int) -> tuple[list[int], list[int], bool]:
    """Return ids and token types of a text, at most `max_length`, and whether it was truncated.

    Special tokens around the text are kept. Raises ValueError if the text has no tokens.
    """
    if not isinstance(tokenizer, PretrainedTokenizer):
        ids = tokenizer.encode_source(text)
        types = [0] * len(ids)
    else:
        ids, types = tokenizer.encode_model(text)
    if not ids:
        raise ValueError(f"the text {text!r} has no tokens after normalization. Remove it.")
    if len(ids) <= max_length:
        return ids, types, False
    if isinstance(tokenizer, PretrainedTokenizer):
        ids = truncated(ids, tokenizer.encode(text), max_length, tokenizer.truncation_side)
    return ids[:max_length], types[:max_length], True
