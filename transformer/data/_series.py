"""Time series: shared options, values by split, and the dataset of input and forecast windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import ConfigError, check_whole
from transformer.data._dataset import Batch, DataKind, Dataset, fingerprint
from transformer.data.tokenizers._base import Tokenizer


@dataclass(frozen=True)
class Series:
    """A time series: values (steps, channels), and the steps that each split forecasts: first, one past the last."""

    values: np.ndarray
    columns: tuple[str, ...]
    splits: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class SeriesConfig(DataKind):
    """Options of all kinds of time series: from `context_length` steps, the model forecasts the next `horizon` steps.

    Values are standardized with the mean and standard deviation of the training steps.
    """

    task: ClassVar[str] = "forecaster"

    context_length: int = 512
    """number of input steps; must equal model.input.context_length"""
    horizon: int = 96
    """number of steps to forecast; must equal model.input.horizon"""
    columns: tuple[str, ...] = ()
    """names of the channels, in order; empty: all numeric columns"""
    mean: tuple[float, ...] = ()
    """mean subtracted from each channel; empty: the mean of the training steps"""
    std: tuple[float, ...] = ()
    """standard deviation that each channel is divided by; empty: the deviation of the training steps"""
    batch_size: int = 128
    """windows per step, over all devices and processes"""
    eval_batch_size: int = 256
    """windows per evaluation batch"""

    def __post_init__(self):
        check_whole(self, "context_length", "horizon", "batch_size", "eval_batch_size")
        if len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"columns must all be different, got {', '.join(self.columns)}.")
        if len(self.mean) != len(self.std) or (self.mean and len(self.mean) != len(self.columns)):
            raise ConfigError(
                f"mean and std must be set together, one number per column: got {len(self.mean)} and {len(self.std)} "
                f"for {len(self.columns)} columns. Remove them: they are then computed from the data."
            )
        if not all(std > 0 for std in self.std):
            raise ConfigError(f"std must be above 0, got {', '.join(map(str, self.std))}.")

    def prepare(self, tokenizer: Tokenizer | None = None) -> SeriesDataset:
        return SeriesDataset(self, self.read())


def to_model(config: SeriesConfig, values: np.ndarray) -> np.ndarray:
    """Standardize measured values (..., channels) for the model: (x - mean) / std, as float32."""
    return ((values - np.array(config.mean)) / np.array(config.std)).astype(np.float32)


def from_model(config: SeriesConfig, values: np.ndarray) -> np.ndarray:
    """Convert forecasts (..., channels) of the model back to the scale of the measurements: y std + mean."""
    return np.asarray(values, np.float64) * np.array(config.std) + np.array(config.mean)


class SeriesDataset(Dataset):
    """Windows of a standardized time series, one starting at every step (Zhou et al. 2021, arXiv 2012.07436).

    A window belongs to the split that contains all its forecast steps. The input steps of validation and test windows
    may belong to the previous split: at that time, they are known. Mean and standard deviation are those of the
    training steps alone, so that no held-out value influences training. `config` has columns, mean and std filled in.
    """

    without_pairs = "has numeric data and no texts. Use eval_batches()."

    def __init__(self, config: SeriesConfig, series: Series):
        first, last = series.splits["train"]
        training = series.values[first:last]
        mean, std = training.mean(0), training.std(0)
        if not (std > 0).all():
            raise ValueError(
                f"column {series.columns[int(np.argmin(std))]} of {config.kind} is constant in the training steps. "
                "Leave it out: --data.columns lists the columns to use."
            )
        if config.mean:
            mean, std = config.mean, config.std
            if len(mean) != len(series.columns):
                raise ValueError(f"mean and std have {len(mean)} channels, but the data has {len(series.columns)}.")
        self.config = dataclasses.replace(
            config, columns=series.columns, mean=tuple(map(float, mean)), std=tuple(map(float, std))
        )
        self._values = to_model(self.config, series.values)
        self._rows: dict[str, range] = {}
        """first input steps of the windows, by split"""
        for split, (first, last) in series.splits.items():
            # Held-out windows may start up to context_length steps before their first forecast step.
            begin = first if split == "train" else max(first - config.context_length, 0)
            starts = range(begin, last - config.context_length - config.horizon + 1)
            if not starts:
                raise ValueError(
                    f"the {split} steps of {config.kind} ({last - first}) are too few for a window: expected at least "
                    f"{config.horizon} to forecast after {config.context_length} input steps. Use a longer series, or "
                    "smaller --data.context-length and --data.horizon (and the same in model.input)."
                )
            self._rows[split] = starts
        # The fingerprint hashes int32 arrays: reinterpret the bits of the float32 values instead of rounding them.
        settings = [config.kind, config.context_length, config.horizon, list(series.columns)]
        bounds = [[starts.start, starts.stop] for starts in self._rows.values()]
        self.fingerprint = fingerprint([settings, bounds], {}, [self._values.view(np.int32)])

    def describe(self) -> str:
        config = self.config
        return (
            f"{config.kind}: {self._sizes} windows of {config.context_length} steps and {config.horizon} to forecast, "
            f"{len(config.columns)} channels ({', '.join(config.columns)})"
        )

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        steps = np.arange(self.config.context_length + self.config.horizon)
        windows = self._values[self._rows[split].start + rows[:, None] + steps]  # (B, steps, channels)
        past, future = np.split(windows, [self.config.context_length], axis=1)
        return {"values": past, "targets": future, "weights": np.ones(len(rows), np.float32)}
