"""Read audio files as mono samples, and change their sampling rate."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path

LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000
"""Sampling rates in Hz that are supported. Below the lowest, a small file could become a very long one."""
MAX_SECONDS = 10 * 3600
"""Maximum duration of a recording in seconds: its samples are stored in memory."""

TAPS_PER_SIDE = 64
"""Length of the resampling filter: zero crossings of its impulse response on each side of the center."""
STOPBAND_DB = 80.0
"""Attenuation of frequencies that the new sampling rate can't represent, in dB."""


def read_audio(path: str | os.PathLike, rate: int) -> np.ndarray:
    """Read an audio file (WAV, FLAC or OGG) as mono samples at a sampling rate.

    Several channels are averaged. Integer samples are scaled to [-1, 1).

    Args:
        path: a local file.
        rate: sampling rate of the result in Hz.

    Returns:
        Samples (N,), float32.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: the package soundfile (extra `media`) is not installed.
        ValueError: the path is a URL or a directory; or the file is not audio, is damaged, empty or too long, or has
            samples that are not finite. The message names the file and the remedy.
    """
    try:
        import soundfile
    except ImportError:
        raise ImportError(
            f"reading {path} needs the package soundfile. Install it: pip install 'transformer-zoo[media]'."
        ) from None
    file = check_file(path)
    blocks, read = [], 0
    try:
        # Block by block: the number of samples in a header can't be trusted.
        with soundfile.SoundFile(file) as sound:
            found = sound.samplerate
            _check_rate(file, found)
            while len(block := sound.read(found, dtype="float32", always_2d=True)):
                blocks.append(block.mean(axis=1))
                read += len(block)
                if read > MAX_SECONDS * found:
                    raise ValueError(
                        f"{file} is longer than {MAX_SECONDS // 3600} hours, which is not supported. Split it into "
                        f"shorter files."
                    )
    except soundfile.LibsndfileError as error:
        raise ValueError(
            f"{file} can't be read as audio: expected a WAV, FLAC or OGG file, got: {error.error_string} Convert it, "
            f"for example with ffmpeg -i {file.name} {file.stem}.wav"
        ) from None
    if not read:
        raise ValueError(f"{file} has no samples: expected a recording. Record it again, or pass another file.")
    return resample(_finite(np.concatenate(blocks), str(file), found), found, rate)


def check_file(path: str | os.PathLike) -> Path:
    """Return the path of a local file; raise FileNotFoundError if it is missing, ConfigError for a URL or a folder."""
    file = local_path(path, "the audio file")
    if not file.exists():
        raise FileNotFoundError(f"no file {file}. Check the path.")
    if not file.is_file():
        raise ConfigError(f"{file} must be an audio file; a directory, pipe or device is not read. Pass a file.")
    return file


def check_samples(samples: Any, rate: int) -> np.ndarray:
    """Return samples as a float32 array.

    Args:
        samples: (N,), mono, floating-point.
        rate: their sampling rate in Hz, for messages.

    Raises:
        ValueError: another shape or dtype, no samples, or samples that are not finite.
    """
    array = np.asarray(samples)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"samples must be a floating-point array of shape (samples,), got {array.dtype} of shape {array.shape}. "
            f"Average the channels; divide 16-bit integers by 32768."
        )
    if not array.size:
        raise ValueError("samples is empty: expected a recording of at least one sample.")
    return _finite(array.astype(np.float32), "samples", rate)


def resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Change the sampling rate with a polyphase low-pass filter.

    The filter is a sinc windowed by a Kaiser window (Kaiser & Schafer 1980): linear phase, `TAPS_PER_SIDE` zero
    crossings per side, `STOPBAND_DB` attenuation. Frequencies up to 92 % of the lower Nyquist frequency pass unchanged.

    Args:
        samples: (N,), floating-point.
        rate: sampling rate of the samples in Hz.
        new_rate: sampling rate of the result in Hz.

    Returns:
        (ceil(N new_rate / rate),), float32.
    """
    if rate == new_rate:
        return samples.astype(np.float32)
    from scipy import signal

    divisor = math.gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    # The filter runs at the common rate, `up` times the old one, where a zero crossing of the sinc takes max(up, down)
    # samples. The transition band ends at the lower Nyquist frequency, which is 1 / max(up, down) in units of the
    # Nyquist frequency of the common rate, so that nothing above it is folded back.
    taps = 2 * TAPS_PER_SIDE * max(up, down) + 1
    transition = (STOPBAND_DB - 7.95) / (2.285 * math.pi * (taps - 1))  # Kaiser's formula, solved for the width
    cutoff = 1 / max(up, down) - transition / 2
    filter_ = signal.firwin(taps, cutoff, window=("kaiser", signal.kaiser_beta(STOPBAND_DB)))
    return signal.resample_poly(samples.astype(np.float32), up, down, window=filter_).astype(np.float32)


def _check_rate(file: Path, rate: int) -> None:
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise ValueError(
            f"{file} has a sampling rate of {rate} Hz: expected {LOWEST_RATE} to {HIGHEST_RATE} Hz. The file may be "
            f"damaged: export it again."
        )


def _finite(samples: np.ndarray, name: str, rate: int) -> np.ndarray:
    broken = np.flatnonzero(~np.isfinite(samples))
    if broken.size:
        first = broken[0]
        raise ValueError(
            f"{name} has {broken.size} samples that are not finite: sample {first} ({first / rate:.2f} s) is "
            f"{samples[first]}. Export the recording again, for example as 16-bit WAV."
        )
    return samples
