"""A prepared dataset: fixed-shape batches of numpy arrays, shuffled and sharded by Grain, and the texts behind them."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer.config import nearest
from transformer.data.configs import PairConfig, TextConfig
from transformer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Example:
    """One pair as text, with the group its score is reported under (for number words: its number of digits)."""

    source: str
    target: str
    group: str = ""


class Dataset(ABC):
    """What `prepare` gives: batches to train and evaluate on, the tokenizer, and a fingerprint of all of it."""

    task: str
    tokenizer: Tokenizer
    fingerprint: str

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Names that `eval_batches` and `examples` take."""

    @abstractmethod
    def describe(self) -> str:
        """One line: how much there is to train and evaluate on."""

    @abstractmethod
    def train_batches(self, seed: int, process_index: int = 0, process_count: int = 1) -> grain.DatasetIterator:
        """An endless iterator over shuffled batches, whose `get_state()` / `set_state()` go on exactly where it was.

        The global batch is formed first and each process takes its rows, so the state does not depend on the number of
        processes. ValueError if the batch size is no multiple of `process_count`.
        """

    @abstractmethod
    def eval_batches(self, split: str = "validation") -> list[Batch]:
        """All of a split in order, in batches of `eval_batch_size`; the last is filled up with rows of weight 0."""

    def examples(self, split: str = "validation", limit: int | None = None) -> list[Example]:
        """The pairs of a split as text, evenly spread over it when there are more than `limit`. Pair data only."""
        raise ValueError("running text has no pairs of source and target. Use prompts().")

    def prompts(self) -> list[str]:
        """A few beginnings of held-out text for a model to continue (for pairs: sources to translate)."""
        return [example.source for example in self.examples("validation", limit=3)]
