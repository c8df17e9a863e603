"""The way from a config to batches: read the texts, make or take a tokenizer, put both together."""

from __future__ import annotations

import itertools

import numpy as np

from transformer.data import sources
from transformer.data.configs import DataConfig
from transformer.data.dataset import Batch, Dataset
from transformer.data.images import ImageDataset
from transformer.data.labeled import LabeledDataset
from transformer.data.masked import MaskedDataset
from transformer.data.normalization import NORMALIZERS
from transformer.data.pairs import PairDataset
from transformer.data.series import SeriesDataset
from transformer.data.texts import TextDataset
from transformer.data.tokenizer import Tokenizer
from transformer.data.tokenizer_kinds import build_tokenizer


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """The dataset of any kind of data, ready to train on.

    With `tokenizer` (that of a workdir), texts are encoded by it; else one is made for them. FileNotFoundError or
    ValueError for files that are missing, not what they should be, or too short; OSError where there is no network or
    no room; ImportError, which says what to install, for data that a package brings along.
    """
    texts = sources.read(config)
    if isinstance(texts, sources.Series):
        return SeriesDataset(config, texts)
    if isinstance(texts, sources.Images):
        return ImageDataset(config, texts)
    if isinstance(texts, sources.Labeled):
        if tokenizer is None:
            parts = {split: [text for text, _ in rows] for split, rows in texts.splits.items()}
            held_out = [text for split, part in parts.items() if split != "train" for text in part]
            tokenizer = build_tokenizer(config.tokenizer, parts["train"], held_out)
        return LabeledDataset(config, tokenizer, texts.splits, texts.labels)
    if isinstance(texts, sources.Texts):
        held_out = [text for split, part in texts.splits.items() if split != "train" for text in part]
        tokenizer = tokenizer or build_tokenizer(config.tokenizer, texts.splits["train"], held_out, masked=True)
        return MaskedDataset(config, tokenizer, texts.splits)
    if isinstance(texts, sources.Documents):
        tokenizer = tokenizer or build_tokenizer(config.tokenizer, texts.splits["train"], texts.splits["validation"])
        return TextDataset(config, tokenizer, texts.splits, texts.separate)
    if tokenizer is None:
        normalize = NORMALIZERS[texts.normalization]
        sides = {
            split: (part for pair in pairs for part in (normalize(pair.source), pair.target))
            for split, pairs in texts.splits.items()
        }
        train = sides.pop("train")
        tokenizer = build_tokenizer(config.tokenizer, train, itertools.chain(*sides.values()), texts.normalization)
    return PairDataset(config, tokenizer, texts.splits, texts.skipped)


def check_batch(
    batch: Batch, vocab_size: int | None, source_vocab_size: int | None = None, num_classes: int | None = None
) -> None:
    """Raises ValueError, naming the place, for an id or label that is out of range, or a number that is not finite.

    JAX answers such an id with NaN or another token's row and such a label with a plausible loss. `targets` of rank 1
    are labels of `num_classes`, floating ones are to be forecast; all others are token ids.
    """
    for name in ("values", "targets"):
        numbers = batch.get(name)
        if numbers is not None and np.issubdtype(numbers.dtype, np.floating) and not np.isfinite(numbers).all():
            place = np.argwhere(~np.isfinite(numbers))[0].tolist()
            raise ValueError(f"{name}{place} is {numbers[tuple(place)]}: expected a finite number. Mend the data.")
    labels = "targets" in batch and batch["targets"].ndim == 1
    if labels and num_classes is None:
        raise ValueError("a batch whose targets are labels needs num_classes to be checked. Give it.")
    limits = {
        "source": source_vocab_size or vocab_size,
        "tokens": vocab_size,
        "targets": num_classes if labels else vocab_size,
    }
    for name, limit in limits.items():
        if name not in batch or (name == "targets" and vocab_size is None and not labels):
            continue
        values = np.asarray(batch[name])
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"{name} must be whole numbers, got {values.dtype}.")
        if values.size and (values.min() < 0 or values.max() >= limit):
            place = tuple(int(i) for i in np.argwhere((values < 0) | (values >= limit))[0])
            what, fix = ("label", "num_classes") if labels and name == "targets" else ("token id", "vocab_size")
            raise ValueError(
                f"{what} {values[place]} in {name}{list(place)} is out of range: expected 0 to {limit - 1}. Use the "
                f"tokenizer and data the model was made for, or change {fix}."
            )
