"""From the config of a kind of data to its dataset, and the check of each batch."""

from __future__ import annotations

import numpy as np

from transformer.data._config import DataKind
from transformer.data._dataset import Batch, Dataset
from transformer.data._tokenizer import Tokenizer
from transformer.data.kinds import DATA


def prepare(config: DataKind, tokenizer: Tokenizer | None = None) -> Dataset:
    """Return the dataset of any kind of data, ready to train on.

    Args:
        config: one of the kinds in `DATA`, or a `DataKind` of the caller.
        tokenizer: encodes the texts, such as the tokenizer of a workdir; None: one is built from them.

    Raises:
        FileNotFoundError: a file is missing; the message says how to get it.
        ValueError: a file has other content than expected, or is too short.
        OSError: no network, or no room on the disk.
        ImportError: the package that contains the data is not installed; the message says what to install.
    """
    if not isinstance(config, DataKind):
        raise ValueError(f"data must be one of {', '.join(DATA)}, got {type(config).__name__}.")
    return config.prepare(tokenizer)


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
