"""The way from a config to batches: read the texts, make or take a tokenizer, put both together."""

from __future__ import annotations

import numpy as np

from transformer.data import sources
from transformer.data.configs import DataConfig
from transformer.data.dataset import Batch, Dataset
from transformer.data.labeled import LabeledDataset
from transformer.data.normalization import NORMALIZERS
from transformer.data.pairs import PairDataset
from transformer.data.texts import TextDataset
from transformer.data.tokenizer import Tokenizer, build_tokenizer


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """The dataset of any kind of data, ready to train on.

    With `tokenizer` (that of a workdir), texts are encoded by it; else one is made for them. FileNotFoundError or
    ValueError for files that are missing, no text, or too short; OSError where there is no network or no room.
    """
    texts = sources.read(config)
    if isinstance(texts, sources.Labeled):
        tokenizer = tokenizer or build_tokenizer(
            config.tokenizer, *([text for text, _ in texts.splits[split]] for split in ("train", "validation"))
        )
        return LabeledDataset(config, tokenizer, texts.splits, texts.labels)
    if isinstance(texts, sources.Documents):
        tokenizer = tokenizer or build_tokenizer(config.tokenizer, texts.splits["train"], texts.splits["validation"])
        return TextDataset(config, tokenizer, texts.splits, texts.separate)
    if tokenizer is None:
        normalize = NORMALIZERS[texts.normalization]
        sides = {
            split: [part for example in examples for part in (normalize(example.source), example.target)]
            for split, examples in texts.splits.items()
        }
        held_out = [text for split, parts in sides.items() if split != "train" for text in parts]
        tokenizer = build_tokenizer(config.tokenizer, sides["train"], held_out, texts.normalization)
    return PairDataset(config, tokenizer, texts.splits, texts.skipped)


def check_batch(
    batch: Batch, vocab_size: int, source_vocab_size: int | None = None, num_classes: int | None = None
) -> None:
    """Raises ValueError, naming the place, for an id or label that is out of range.

    JAX answers such an id with NaN or another token's row and such a label with a plausible loss. `targets` of rank 1
    are labels of `num_classes`; all others are token ids.
    """
    labels = "targets" in batch and batch["targets"].ndim == 1
    if labels and num_classes is None:
        raise ValueError("a batch whose targets are labels needs num_classes to be checked. Give it.")
    limits = {
        "source": source_vocab_size or vocab_size,
        "tokens": vocab_size,
        "targets": num_classes if labels else vocab_size,
    }
    for name, limit in limits.items():
        if name not in batch:
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
