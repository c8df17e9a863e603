"""Running text: shared options, documents by split, and the dataset of token windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import check_whole
from transformer.data._config import CHARACTERS, TokenizerConfig
from transformer.data._dataset import Batch, DataKind, Dataset, fingerprint, spread
from transformer.data._packed_rows import PackedRows, chunks
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._byte_counts import UNKNOWN_BYTES, bytes_after_first, token_bytes
from transformer.data.tokenizers._kinds import build_tokenizer

NO_PAIRS = "is running text and has no pairs of source and target. Use prompts()."


@dataclass(frozen=True)
class Documents:
    """Documents by split (`splits`). With `separate`, an end token is added after each document."""

    splits: Mapping[str, Sequence[str]]
    separate: bool = False


@dataclass(frozen=True, kw_only=True)
class TextConfig(DataKind):
    """Options of all kinds of running text: the model predicts next tokens in windows of `sequence_length` tokens."""

    task: ClassVar[str] = "causal_lm"

    sequence_length: int = 256
    """context length: tokens per training window"""
    batch_size: int = 32
    """windows per step, over all devices and processes"""
    eval_batch_size: int = 64
    """windows per evaluation batch"""
    tokenizer: TokenizerConfig = CHARACTERS
    """tokenizer"""

    def __post_init__(self):
        check_whole(self, "sequence_length", "batch_size", "eval_batch_size")

    def prepare(self, tokenizer: Tokenizer | None = None) -> TextDataset | DocumentDataset:
        found = self.read()
        tokenizer = tokenizer or build_tokenizer(self.tokenizer, found.splits["train"], found.splits["validation"])
        if self.segments:
            return DocumentDataset(self, tokenizer, found.splits)
        return TextDataset(self, tokenizer, found.splits, found.separate)


class _RunningText(Dataset):
    """Base class of the datasets of documents in memory (`_texts`, by split)."""

    without_pairs = NO_PAIRS
    _texts: Mapping[str, Sequence[str]]

    def prompts(self) -> list[str]:
        """Return the beginnings of three lines of the held-out text, or of the training text if that is blank.

        Each has at most 40 characters (or one word) and at most half of `sequence_length` tokens.
        """
        return beginnings(self.tokenizer, self._texts, self.config.sequence_length)


class DocumentDataset(_RunningText):
    """Separate documents packed into rows: attention stays within a document, and every target occurs once.

    Documents that are longer than a row are cut into parts, which are packed like separate documents.
    """

    def __init__(self, config: TextConfig, tokenizer: Tokenizer, splits: Mapping[str, Sequence[str]]):
        self.config, self.tokenizer, self._texts = config, tokenizer, splits
        end = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
        self._rows = {}
        for split, texts in splits.items():
            length = config.sequence_length
            parts = [part for text in texts for part in chunks(tokenizer.encode(text) + end, length)]
            if not parts:
                raise ValueError(f"the {split} documents are too short: expected at least 2 tokens in one of them.")
            self._rows[split] = PackedRows(parts, [[True] * len(part) for part in parts], length, tokenizer.pad_id)
        settings = [config.kind, config.sequence_length, "packing", tokenizer.state()]
        self.fingerprint = fingerprint(settings, splits, [a for rows in self._rows.values() for a in rows.arrays])

    def describe(self) -> str:
        parts = [
            f"{len(self._texts[split]):,} {split} documents: {rows.tokens:,} tokens in {len(rows):,} rows with "
            f"{100 * rows.padding:.1f} % padding"
            for split, rows in self._rows.items()
        ]
        return f"{self.config.kind}: {'; '.join(parts)}; {self._vocabulary}"

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        return self._rows[split].assemble(rows)


class TextDataset(_RunningText):
    """Windows of running text: training windows start at any token; evaluation windows contain each target once."""

    def __init__(self, config: TextConfig, tokenizer: Tokenizer, splits: Mapping[str, Sequence[str]], separate: bool):
        self.config, self.tokenizer, self._texts = config, tokenizer, splits
        end = [tokenizer.eos_id] if separate and tokenizer.eos_id is not None else []
        self._tokens = self._rows = {
            split: np.array([i for text in texts for i in tokenizer.encode(text) + end], np.int32)
            for split, texts in splits.items()
        }
        length = len(self._tokens["train"])
        if length <= config.sequence_length:
            raise ValueError(
                f"the training text is shorter than the context: expected more than sequence_length "
                f"({config.sequence_length}) tokens, got {length}. Add text, or use a smaller --data.sequence-length."
            )
        for split, tokens in self._tokens.items():
            if len(tokens) < 2:
                raise ValueError(
                    f"the {split} text is too short: expected at least 2 tokens, got {len(tokens)}. Add text."
                )
        self.fingerprint = fingerprint(
            [config.kind, config.sequence_length, tokenizer.state()], splits, self._tokens.values()
        )

    def describe(self) -> str:
        sizes = ", ".join(f"{len(tokens):,} {split} tokens" for split, tokens in self._tokens.items())
        return f"{self.config.kind}: {sizes}, {self._vocabulary}"

    def target_bytes(self, split: str = "validation", limit: int | None = None) -> int | None:
        self._check_split(split)
        tokens = self._tokens[split]
        rows = len(self._eval_rows(split)[: None if limit is None else limit * self.config.eval_batch_size])
        predicted = tokens[1 : rows * self.config.sequence_length + 1]  # the first token of the text is no target
        counts = token_bytes(self.tokenizer)
        if counts is not None and (counts[predicted] != UNKNOWN_BYTES).all():
            return int(counts[predicted].sum())
        if len(predicted) < len(tokens) - 1:
            return None
        return bytes_after_first(self.tokenizer, "".join(self._texts[split]), tokens[:1].tolist())

    def _size(self, split: str) -> int:
        return len(self._tokens[split]) - self.config.sequence_length

    def _eval_rows(self, split: str) -> np.ndarray:
        # Consecutive windows; the last token of the text is only a target.
        return np.arange(0, len(self._tokens[split]) - 1, self.config.sequence_length)

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        """Return the windows that start at `rows`; positions past the end of the text have weight 0."""
        tokens = self._tokens[split]
        # (B, T + 1): one token more than a window, because the targets are the tokens shifted left by one.
        places = rows[:, None] + np.arange(self.config.sequence_length + 1)
        inside = places < len(tokens)
        window = np.where(inside, tokens[np.minimum(places, len(tokens) - 1)], self.tokenizer.pad_id)
        return {"tokens": window[:, :-1], "targets": window[:, 1:], "weights": inside[:, 1:].astype(np.float32)}


def beginnings(tokenizer: Tokenizer, texts: Mapping[str, Sequence[str]], sequence_length: int) -> list[str]:
    """Return the beginnings of three lines, as `TextDataset.prompts` describes."""
    held_out, all_others = (texts[split] for split in ("validation", "train"))
    lines = _lines(held_out) or _lines(all_others)
    chosen = []
    for line in dict.fromkeys(lines[place] for place in spread(len(lines), 3)):
        # Cut between words: a part of a word may be unknown.
        cut = line[:40].rpartition(" ")[0] or line.partition(" ")[0]
        start = line if len(line) <= 40 else cut
        ids = tokenizer.encode(start)
        most = max(1, sequence_length // 2)
        chosen.append(start if len(ids) <= most else tokenizer.decode(ids[:most]))
    return chosen


def _lines(texts: Sequence[str]) -> list[str]:
    return [line.strip() for text in texts for line in text.split("\n") if line.strip()]
