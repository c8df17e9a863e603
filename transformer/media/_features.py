"""Features of speech models, computed from mono samples: log-mel frames, or the normalized waveform."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer.config._checks import ConfigError, check_whole
from transformer.config._local_paths import local_path
from transformer.config._untrusted import read_json_object

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of the features. The second one is written by transformers 5, and nests them."""
HIGHEST_FREQUENCY = 8000.0
"""Upper end of the mel filters in Hz, the same for all models of Whisper."""
FLOOR = 1e-10
"""Smallest energy before the logarithm."""
RANGE = 8.0
"""Dynamic range of the log-mel frames in powers of ten: smaller values are raised to the maximum minus this range."""
FRAMES_PER_BLOCK = 10_000
"""Frames that are transformed at once, which bounds the memory for a long recording."""


@dataclass(frozen=True, kw_only=True)
class LogMel:
    """Log-mel frames, the input of Whisper (Radford et al. 2022, arXiv 2212.04356, section 2.2).

    The names of the fields are those of preprocessor_config.json.

    Raises:
        ConfigError: a size below 1, or a hop that is longer than the window.
    """

    feature_size: int = 80
    """M, mel frequency bins per frame"""
    sampling_rate: int = 16_000
    """samples per second"""
    n_fft: int = 400
    """samples per window"""
    hop_length: int = 160
    """samples from one frame to the next"""
    chunk_length: int = 30
    """seconds that the model reads at once"""

    def __post_init__(self):
        check_whole(self, "feature_size", "sampling_rate", "n_fft", "hop_length", "chunk_length")
        if self.hop_length > self.n_fft:
            raise ConfigError(
                f"hop_length ({self.hop_length}) must be at most n_fft ({self.n_fft}): samples between two windows "
                f"would be lost. Correct it."
            )

    @property
    def chunk_samples(self) -> int:
        """Samples that the model reads at once."""
        return self.chunk_length * self.sampling_rate

    @property
    def chunk_frames(self) -> int:
        """Frames that the model reads at once."""
        return self.chunk_samples // self.hop_length

    def frames(self, samples: np.ndarray) -> np.ndarray:
        """Compute the frames of a recording.

        Recordings shorter than a chunk are padded with silence. Values are log10 of the mel energies, raised to at
        least the maximum minus 8, then (value + 4) / 4.

        Args:
            samples: (N,), mono, at `sampling_rate`, in [-1, 1].

        Returns:
            (F, M), float32, with F = max(N, chunk_samples) // hop_length.
        """
        padded = np.pad(samples, (0, max(0, self.chunk_samples - len(samples))))
        count = len(padded) // self.hop_length
        # Frame t is centered at sample t hop_length: reflect half a window at both ends.
        half = self.n_fft // 2
        # In float64: the rounding of float32 is visible in the logarithm of quiet frequencies next to loud ones.
        padded = np.pad(padded, half, mode="reflect").astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length][:count]
        # Periodic Hann window: sin^2(pi n / n_fft).
        hann = np.sin(np.pi * np.arange(self.n_fft) / self.n_fft) ** 2
        filters = mel_filters(self.feature_size, self.n_fft, self.sampling_rate)
        frames = np.empty((count, self.feature_size), np.float32)
        for start in range(0, count, FRAMES_PER_BLOCK):
            block = windows[start : start + FRAMES_PER_BLOCK]
            energies = np.abs(np.fft.rfft(block * hann, axis=-1)) ** 2
            frames[start : start + FRAMES_PER_BLOCK] = np.log10(np.maximum(energies @ filters, FLOOR))
        return (np.maximum(frames, frames.max() - RANGE) + 4.0) / 4.0


@dataclass(frozen=True, kw_only=True)
class Waveform:
    """The waveform itself, the input of wav2vec 2.0 and HuBERT (Baevski et al. 2020, arXiv 2006.11477, section 2).

    The names of the fields are those of preprocessor_config.json.
    """

    sampling_rate: int = 16_000
    """samples per second"""
    do_normalize: bool = True
    """scale each recording to mean 0 and variance 1"""

    def __post_init__(self):
        check_whole(self, "sampling_rate")

    def frames(self, samples: np.ndarray) -> np.ndarray:
        """Return the input (N,) of the model, float32, for samples (N,)."""
        if not self.do_normalize:
            return samples.astype(np.float32)
        return ((samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)).astype(np.float32)

    def batch(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs of several recordings, padded with zeros, and their lengths.

        Each recording is normalized on its own, without its padding.

        Args:
            recordings: (N,) each.

        Returns:
            (B, max N) float32, and (B,) int32: the number of samples of each row.

        Raises:
            ValueError: no recordings.
        """
        if not recordings:
            raise ValueError("recordings is empty: expected at least one recording.")
        lengths = np.array([len(samples) for samples in recordings], np.int32)
        rows = np.zeros((len(recordings), lengths.max()), np.float32)
        for row, samples in zip(rows, recordings, strict=True):
            row[: len(samples)] = self.frames(samples)
        return rows, lengths


@functools.lru_cache(maxsize=8)
def mel_filters(bins: int, n_fft: int, rate: int) -> np.ndarray:
    """Return triangular filters on the mel scale of Slaney (1998, Auditory Toolbox, Interval Research TR 1998-010).

    The scale is linear up to 1000 Hz (3 mel per 200 Hz) and logarithmic above (27 mel per factor 6.4). Each filter is
    scaled to area 1 in Hz.

    Args:
        bins: M, number of filters.
        n_fft: samples per window.
        rate: sampling rate in Hz.

    Returns:
        (n_fft // 2 + 1, M), float64: the weight of each Fourier frequency in each bin. The array is read-only.
    """
    frequencies = np.linspace(0.0, rate // 2, n_fft // 2 + 1)
    # M triangles need M + 2 corners, at equal distances on the mel scale.
    corners = _hertz(np.linspace(0.0, _mel(HIGHEST_FREQUENCY), bins + 2))
    widths = np.diff(corners)
    offsets = corners[None, :] - frequencies[:, None]  # (n_fft // 2 + 1, M + 2)
    rising, falling = -offsets[:, :-2] / widths[:-1], offsets[:, 2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (corners[2:] - corners[:-2]))
    filters.flags.writeable = False
    return filters


def _mel(hertz: float) -> float:
    return 3.0 * hertz / 200.0 if hertz < 1000.0 else 15.0 + 27.0 * np.log(hertz / 1000.0) / np.log(6.4)


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15.0, 200.0 * mel / 3.0, 1000.0 * np.exp((mel - 15.0) * np.log(6.4) / 27.0))


def load_features(directory: str | os.PathLike) -> LogMel | Waveform:
    """Load the feature settings of a speech model from preprocessor_config.json.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file is damaged, or describes features that are not supported.
    """
    directory = local_path(directory, "directory")
    values = _settings(directory)
    kind = values.get("feature_extractor_type")
    fixed = {"padding_value": 0.0, "dither": 0.0}
    if kind == "WhisperFeatureExtractor":
        feature_type, fixed = LogMel, fixed | {"do_normalize": False}
    elif kind == "Wav2Vec2FeatureExtractor":
        feature_type, fixed = Waveform, fixed | {"feature_size": 1}
    else:
        raise ConfigError(
            f"feature_extractor_type in {directory} must be WhisperFeatureExtractor or Wav2Vec2FeatureExtractor, got "
            f"{kind!r:.80}. Pass a speech model of one of these kinds."
        )
    for name, value in fixed.items():
        if values.get(name) not in (None, value):
            raise ConfigError(
                f"{name} in {directory} is {values[name]!r:.80}, which changes the features and is not supported "
                f"(supported: {value!r}). Correct it, or pass another model."
            )
    names = feature_type.__dataclass_fields__
    try:
        return feature_type(**{name: values[name] for name in names if name in values})
    except ConfigError as error:
        raise ConfigError(f"the feature settings in {directory} are invalid: {error}") from error


def _settings(directory: Path) -> Mapping[str, Any]:
    """Return the settings of the feature extractor of a directory."""
    for name in FILES:
        if os.path.lexists(directory / name):
            values = read_json_object(directory, name)
            settings = values.get("feature_extractor", values)
            if not isinstance(settings, dict):
                raise ConfigError(f"feature_extractor in {directory / name} must be an object. Download it again.")
            return settings
    raise FileNotFoundError(
        f"{directory} has no {FILES[0]}, which describes the features of a speech model. Download it from the page of "
        f"the model."
    )
