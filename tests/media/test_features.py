"""Features of speech models: log-mel frames and normalized waveforms, and their settings."""

import dataclasses
import json

import numpy as np
import pytest

from transformer.media import LogMel, Waveform, load_features, mel_filters

TINY = LogMel(feature_size=5, n_fft=40, hop_length=16, chunk_length=1, sampling_rate=1600)


def test_mel_filters_are_triangles_of_area_1_around_mel_frequencies():
    filters = mel_filters(80, 400, 16_000)
    assert filters.shape == (201, 80)
    step = 40.0  # Hz from one Fourier frequency to the next
    # Wide filters are sampled finely enough to measure their area in Hz.
    np.testing.assert_allclose(filters[:, 60:].sum(0) * step, 1.0, atol=0.02)
    # 1000 Hz is 15 mel, 8000 Hz is 15 + 27 ln 8 / ln 6.4: the peaks are at equal distances on this scale.
    top = 15 + 27 * np.log(8) / np.log(6.4)
    mel = top * np.arange(1, 81) / 81
    peaks = np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))
    np.testing.assert_allclose(filters.argmax(0) * step, peaks, atol=step)


def test_a_tone_is_in_its_mel_bin_and_silence_is_the_floor():
    samples = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    frames = LogMel().frames(samples)
    assert frames.shape == (3000, 80)
    assert frames.dtype == np.float32
    peak = mel_filters(80, 400, 16_000)[25].argmax()  # 1000 Hz is Fourier frequency 25
    assert (frames[2:98].argmax(1) == peak).all()
    # The second half of the chunk is silence: 8 powers of ten below the maximum, and each counts 1/4.
    np.testing.assert_allclose(frames[200:], frames.max() - 2.0, atol=1e-6)


def test_the_window_is_periodic():
    """The Fourier transform of a periodic Hann window has three frequencies; a symmetric one has a bit of all."""
    samples = 0.5 * np.cos(2 * np.pi * 4000 * np.arange(480_000) / 16_000)  # Fourier frequency 100
    frames = LogMel().frames(samples)[2:-2]
    without = mel_filters(80, 400, 16_000)[99:102].sum(0) == 0
    assert 70 < without.sum() < 80
    np.testing.assert_allclose(frames[:, without], frames.max() - 2.0, atol=1e-6)  # the floor


def test_long_recordings_are_transformed_in_blocks(monkeypatch):
    samples = np.random.default_rng(0).normal(size=4_000)
    whole = TINY.frames(samples)
    assert whole.shape == (250, 5)
    monkeypatch.setattr("transformer.media._features.FRAMES_PER_BLOCK", 7)
    np.testing.assert_array_equal(TINY.frames(samples), whole)


def test_waveforms_are_normalized_on_request():
    samples = np.random.default_rng(0).normal(3.0, 2.0, 999)
    normalized = Waveform().frames(samples)
    assert abs(normalized.mean()) < 1e-5
    assert abs(normalized.std() - 1) < 1e-5
    np.testing.assert_array_equal(Waveform(do_normalize=False).frames(samples), samples.astype(np.float32))


def write(directory, name="preprocessor_config.json", **values):
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(values))
    return directory


CHANGES = {"feature_size": 8, "n_fft": 48, "hop_length": 8, "chunk_length": 2, "sampling_rate": 800}


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_is_read_and_changes_the_frames(tmp_path, field):
    fields = dataclasses.asdict(TINY)
    assert set(CHANGES) == set(fields)
    values = fields | {field: CHANGES[field]}
    read = load_features(write(tmp_path, feature_extractor_type="WhisperFeatureExtractor", **values))
    assert dataclasses.asdict(read) == values
    samples = np.random.default_rng(0).normal(size=700)
    before, after = TINY.frames(samples), read.frames(samples)
    assert before.shape != after.shape or np.abs(before - after).max() > 1e-3


@pytest.mark.parametrize("normalizes", [True, False])
def test_waveform_normalization_setting_is_read(tmp_path, normalizes):
    written = write(tmp_path, feature_extractor_type="Wav2Vec2FeatureExtractor", do_normalize=normalizes)
    samples = np.random.default_rng(0).normal(3.0, 2.0, 999)
    rows, _ = load_features(written).batch([samples])
    assert (abs(rows.mean()) < 1e-4) == normalizes


def test_settings_are_read(tmp_path):
    whisper = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "padding_side": "right"}
    assert load_features(write(tmp_path / "a", **whisper)) == LogMel(feature_size=128)
    nested = write(tmp_path / "b", "processor_config.json", feature_extractor=whisper)
    assert load_features(nested) == LogMel(feature_size=128)
    waveform = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False, "feature_size": 1}
    assert load_features(write(tmp_path / "c", **waveform)) == Waveform(do_normalize=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"feature_extractor_type": "ViTImageProcessor"}, r"WhisperFeatureExtractor.*got 'ViTImage"),
        ({"dither": 0.1}, r"dither .* is 0\.1, which changes the features and is not supported"),
        ({"feature_size": 0}, r"feature_size.*1.*got 0"),
        ({"hop_length": 500}, r"hop_length \(500\).*n_fft \(400\)"),
    ],
)
def test_settings_that_are_not_supported_are_errors(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        load_features(write(tmp_path / "a", **{"feature_extractor_type": "WhisperFeatureExtractor"} | values))


def test_reports_missing_and_damaged_settings(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json"):
        load_features(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        load_features(tmp_path)
