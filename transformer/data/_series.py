"""Time series: what their kinds share (options, values, and the dataset of windows to look back at and to forecast)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import ConfigError
from transformer.data._config import DataKind, check_whole
from transformer.data._dataset import Batch, Dataset, fingerprint
from transformer.data._tokenizer import Tokenizer


@dataclass(frozen=True)
class Series:
    """A time series: `values` (steps, channels), `columns`, which name the channels, and in `splits` which steps each
    split is to forecast, from the first up to and without the last.
    """

    values: np.ndarray
    columns: tuple[str, ...]
    splits: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class SeriesConfig(DataKind):
    """Options of every kind of time series: examples are windows of `context_length` steps that are looked back at and
    `horizon` steps that are forecast, on the scale of the training steps.

    Raises:
        ConfigError: a number out of range, or not one mean and deviation for each column.
    """

    task: ClassVar[str] = "forecaster"

    context_length: int = 512
    """steps that are looked back at, as model.series.context_length"""
    horizon: int = 96
    """steps that are forecast, as model.series.horizon"""
    columns: tuple[str, ...] = ()
    """names of the channels, in order; none: all that hold numbers"""
    mean: tuple[float, ...] = ()
    """taken off each channel before the model sees it; none: the mean of the training steps"""
    std: tuple[float, ...] = ()
    """by which each channel is divided then; none: the standard deviation of the training steps"""
    batch_size: int = 128
    """windows in one step, over all devices and processes together"""
    eval_batch_size: int = 256
    """windows in one batch of evaluation"""

    def __post_init__(self):
        check_whole(self, "context_length", "horizon", "batch_size", "eval_batch_size")
        if len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"columns must all be different, got {', '.join(self.columns)}.")
        if len(self.mean) != len(self.std) or (self.mean and len(self.mean) != len(self.columns)):
            raise ConfigError(
                f"mean and std must be given together, one number for each of columns: got {len(self.mean)} and "
                f"{len(self.std)} for {len(self.columns)} columns. Leave them out: they are computed."
            )
        if not all(std > 0 for std in self.std):
            raise ConfigError(f"std must be above 0, got {', '.join(map(str, self.std))}.")

    def prepare(self, tokenizer: Tokenizer | None = None) -> SeriesDataset:
        """Return the dataset of the series; it has no use for a tokenizer. Raises as `DataKind.prepare`."""
        del tokenizer
        return SeriesDataset(self, self.read())


def to_model(config: SeriesConfig, values: np.ndarray) -> np.ndarray:
    """Values (..., channels) as they were measured -> on the scale that a model of this data sees, float32."""
    return ((values - np.array(config.mean)) / np.array(config.std)).astype(np.float32)


def from_model(config: SeriesConfig, values: np.ndarray) -> np.ndarray:
    """A forecast (..., channels) on the scale of the model -> on that of the measurements."""
    return np.asarray(values, np.float64) * np.array(config.std) + np.array(config.mean)


class SeriesDataset(Dataset):
    """Windows of a time series, one at every step, scaled by mean and standard deviation of the training steps (Zhou et
    al. 2021, arXiv 2012.07436). A window belongs to the split that its forecast steps are all in; held-out ones may
    look back at steps of the split before.

    `config` is the one that was given, with columns, mean and std filled in.

    Raises:
        ValueError: a split without a window, a channel that is constant in training, or scales for other channels.
    """

    def __init__(self, config: SeriesConfig, series: Series):
        first, last = series.splits["train"]
        training = series.values[first:last]
        mean, std = training.mean(0), training.std(0)
        if not (std > 0).all():
            raise ValueError(
                f"column {series.columns[int(np.argmin(std))]} of {config.kind} is the same number at all steps to "
                "train on. Leave it out (--data.columns names those to take)."
            )
        if config.mean:
            mean, std = config.mean, config.std
            if len(mean) != len(series.columns):
                raise ValueError(f"mean and std are of {len(mean)} channels, but there are {len(series.columns)}.")
        self.config = dataclasses.replace(
            config, columns=series.columns, mean=tuple(map(float, mean)), std=tuple(map(float, std))
        )
        self._values = to_model(self.config, series.values)
        self._starts: dict[str, range] = {}
        for split, (first, last) in series.splits.items():
            begin = first if split == "train" else max(first - config.context_length, 0)
            starts = range(begin, last - config.context_length - config.horizon + 1)
            if not starts:
                raise ValueError(
                    f"the {split} steps of {config.kind} ({last - first}) hold no window: expected at least "
                    f"{config.horizon} to forecast after {config.context_length} to look back at. Give a longer "
                    "series, or smaller --data.context-length and --data.horizon (and those of model.series)."
                )
            self._starts[split] = starts
        settings = [config.kind, config.context_length, config.horizon, list(series.columns)]
        bounds = [[starts.start, starts.stop] for starts in self._starts.values()]
        self.fingerprint = fingerprint([settings, bounds], {}, [self._values.view(np.int32)])

    @property
    def splits(self) -> tuple[str, ...]:
        """`train`, `validation` and `test`."""
        return tuple(self._starts)

    def describe(self) -> str:
        """One line: windows, lengths, channels."""
        sizes = ", ".join(f"{len(starts):,} {split}" for split, starts in self._starts.items())
        config = self.config
        return (
            f"{config.kind}: {sizes} windows of {config.context_length} steps and {config.horizon} to forecast, "
            f"{len(config.columns)} channels ({', '.join(config.columns)})"
        )

    def _size(self, split: str) -> int:
        return len(self._starts[split])

    def _eval_rows(self, split: str) -> np.ndarray:
        return np.arange(self._size(split))

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        steps = np.arange(self.config.context_length + self.config.horizon)
        windows = self._values[self._starts[split].start + rows[:, None] + steps]
        past, future = np.split(windows, [self.config.context_length], axis=1)
        return {"values": past, "targets": future, "weights": np.ones(len(rows), np.float32)}
