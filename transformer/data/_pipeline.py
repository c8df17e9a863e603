"""Prepare a dataset from a data config, and check batches."""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from transformer.config._local_paths import local_path
from transformer.data._config import is_path_field
from transformer.data._dataset import Batch, DataKind, Dataset
from transformer.data.kinds import DATA
from transformer.data.tokenizers._base import Tokenizer


def prepare(config: DataKind, tokenizer: Tokenizer | None = None) -> Dataset:
    """Prepare the dataset of any kind of data.

    Args:
        config: one of the kinds in `DATA`, or your own `DataKind`.
        tokenizer: tokenizer for the texts, for example that of a workdir; None: build one from the texts.

    Raises:
        FileNotFoundError: a file is missing; the message explains how to get it.
        ValueError: a file has unexpected content, or is too short.
        OSError: no network, or the disk is full.
        ImportError: the package that contains the data is not installed; the message names the package to install.
    """
    if not isinstance(config, DataKind):
        raise ValueError(f"data must be one of {', '.join(DATA)}, got {type(config).__name__}.")
    check_local_paths(config)
    try:
        return config.prepare(tokenizer)
    except FileNotFoundError as error:
        raise FileNotFoundError(_with_option(config, str(error))) from None if error.errno is None else error


def check_local_paths(config: DataKind) -> None:
    """Raise ConfigError if a path of the data starts with a scheme, such as s3://."""
    for field in dataclasses.fields(config):
        if is_path_field(field.name):
            value = getattr(config, field.name)
            for path in (value,) if isinstance(value, str | os.PathLike) else value or ():
                local_path(path, f"--data.{field.name.replace('_', '-')}")


def _with_option(config: DataKind, text: str) -> str:
    """Return the text of an error about a missing file with the option that names the file."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, str) and value and f"no file {value}." in text:
            return text.replace("Check the path.", f"Pass an existing file: --data.{field.name.replace('_', '-')}.")
    return text


def check_batch(
    batch: Batch, vocab_size: int | None, source_vocab_size: int | None = None, num_classes: int | None = None
) -> None:
    """Raise ValueError if an id or label of a batch is out of range, or a number is NaN or infinite.

    JAX does not report such values: an id out of range gives NaN or the embedding of another token, and a label out of
    range gives a plausible loss. `targets` of rank 1 are labels of `num_classes`, floating-point `targets` are values
    to forecast, and all other `targets` are token ids.
    """
    for name in ("values", "targets"):
        if name in batch and np.issubdtype(batch[name].dtype, np.floating):
            _check_finite(name, batch[name])
    if "source" in batch:
        _check_range("source", batch["source"], source_vocab_size or vocab_size, "token id", "vocab_size")
    if "tokens" in batch:
        _check_range("tokens", batch["tokens"], vocab_size, "token id", "vocab_size")
    if "targets" in batch and batch["targets"].ndim == 1:
        if num_classes is None:
            raise ValueError("targets are labels, but num_classes is not set. Pass num_classes.")
        _check_range("targets", batch["targets"], num_classes, "label", "num_classes")
    elif "targets" in batch and vocab_size is not None:  # without a vocabulary the targets are values to forecast
        _check_range("targets", batch["targets"], vocab_size, "token id", "vocab_size")


def _check_finite(name: str, numbers: np.ndarray) -> None:
    """Raise ValueError with the index of the first number that is NaN or infinite."""
    if not np.isfinite(numbers).all():
        place = np.argwhere(~np.isfinite(numbers))[0].tolist()
        raise ValueError(f"{name}{place} is {numbers[tuple(place)]}: expected a finite number. Fix the data.")


def _check_range(name: str, numbers: np.ndarray, limit: int | None, what: str, field: str) -> None:
    """Raise ValueError with the index of the first number outside 0 to `limit` - 1, the value of a config `field`."""
    values = np.asarray(numbers)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {values.dtype}.")
    if limit is None:
        raise ValueError(f"the batch has {name}, but {field} is not set. Pass {field}.")
    if values.size and (values.min() < 0 or values.max() >= limit):
        place = tuple(int(i) for i in np.argwhere((values < 0) | (values >= limit))[0])
        raise ValueError(
            f"{what} {values[place]} in {name}{list(place)} is out of range: expected 0 to {limit - 1}. Use the "
            f"tokenizer and data that the model was made for, or change {field}."
        )
