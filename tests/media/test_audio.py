"""Audio files: channels, sampling rates, and files that can't be used."""

import numpy as np
import pytest
import soundfile

from transformer.media import check_samples, read_audio, resample

RATE = 16_000


def sine(frequency, rate, seconds=0.5, amplitude=0.5):
    return amplitude * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def inner(samples, rate=RATE):
    """Return samples without 50 ms at both ends, where the filter reads silence outside of the recording."""
    return samples[rate // 20 : -rate // 20]


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 48_000])
def test_a_tone_keeps_its_frequency_amplitude_and_phase(rate):
    got = resample(sine(440, rate), rate, RATE)
    assert got.dtype == np.float32
    assert len(got) == RATE // 2
    np.testing.assert_allclose(inner(got), inner(sine(440, RATE)), atol=1e-3)


def test_resampling_passes_92_percent_of_the_band_and_blocks_above_it():
    for frequency in (7_300, 7_360):
        np.testing.assert_allclose(
            inner(resample(sine(frequency, 48_000), 48_000, RATE)), inner(sine(frequency, RATE)), atol=1e-3
        )
    for frequency in (8_000, 8_500, 12_000, 20_000):
        assert np.abs(inner(resample(sine(frequency, 48_000), 48_000, RATE))).max() < 0.5 * 10 ** (-75 / 20)


@pytest.mark.parametrize(
    ("suffix", "subtype", "tolerance"), [("wav", "PCM_16", 1e-4), ("flac", "PCM_24", 1e-6), ("ogg", "VORBIS", 0.03)]
)
def test_reads_every_format_and_averages_channels(tmp_path, suffix, subtype, tolerance):
    left, right = sine(440, RATE), sine(900, RATE, amplitude=0.3)
    soundfile.write(tmp_path / f"a.{suffix}", np.stack([left, right], 1), RATE, subtype=subtype)
    got = read_audio(tmp_path / f"a.{suffix}", RATE)
    assert got.shape == left.shape
    np.testing.assert_allclose(inner(got), inner((left + right) / 2), atol=tolerance)


def test_8_khz_mono_is_resampled(tmp_path):
    soundfile.write(tmp_path / "phone.wav", sine(440, 8_000), 8_000)
    np.testing.assert_allclose(inner(read_audio(tmp_path / "phone.wav", RATE)), inner(sine(440, RATE)), atol=1e-3)


def damaged(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF" + bytes(200))
    return path


def empty(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(0), RATE)
    return tmp_path / "a.wav"


def with_nan(tmp_path):
    samples = sine(440, RATE)
    samples[4_000] = np.nan
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    return tmp_path / "a.wav"


def slow(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(50), 1)
    return tmp_path / "a.wav"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (damaged, ValueError, r"a\.wav.*WAV.*FLAC.*OGG.*a\.wav"),
        (empty, ValueError, r"a\.wav"),
        (with_nan, ValueError, r"a\.wav.*1.*4000 \(0\.25 s\)"),
        (slow, ValueError, r"a\.wav.*1.*1000.*768000"),
        (lambda tmp_path: tmp_path, ValueError, r"must be an audio file; a directory"),
        (lambda tmp_path: tmp_path / "b.wav", FileNotFoundError, r"b\.wav"),
        (lambda _: "https://x.org/a.wav", ValueError, r"https://x\.org/a\.wav.*URL"),
    ],
)
def test_unusable_files_are_errors_with_a_remedy(tmp_path, make, error, message):
    with pytest.raises(error, match=message) as raised:
        read_audio(make(tmp_path), RATE)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((2, 5)), r"samples.*\(samples,\).*got float64.*\(2.*5\)"),
        (np.zeros(5, np.int16), r"got int16.*16-bit.*32768"),
        (np.zeros(0), r"samples is empty"),
        (np.array([0.0, np.inf]), r"samples.*1"),
    ],
)
def test_arrays_are_checked(samples, message):
    with pytest.raises(ValueError, match=message):
        check_samples(samples, RATE)
