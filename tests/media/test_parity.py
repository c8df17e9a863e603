"""Comparison of the features with those of transformers."""

import numpy as np
import pytest

from transformer.media import LogMel, Waveform, load_features, mel_filters

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def sounds():
    generator, time = np.random.default_rng(0), np.arange(16_000 * 2) / 16_000
    speech = np.sin(2 * np.pi * 220 * time) * np.sin(2 * np.pi * 3 * time) + 0.01 * generator.normal(size=len(time))
    return {
        "noise": 0.1 * generator.normal(size=30_000),
        "speech": 0.3 * speech,
        "short": 0.1 * generator.normal(size=37),
        "long": 0.1 * generator.normal(size=16_000 * 31 + 5),
    }


@pytest.mark.parametrize("name", ["noise", "speech", "short", "long"])
@pytest.mark.parametrize("size", [80, 128])
def test_log_mel_frames_equal_transformers(transformers, tmp_path, name, size):
    extractor = transformers.WhisperFeatureExtractor(feature_size=size)
    samples = sounds()[name].astype(np.float32)
    padding = {"truncation": False, "padding": "longest"} if name == "long" else {}
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np", **padding).input_features[0].T
    extractor.save_pretrained(tmp_path)
    features = load_features(tmp_path)
    assert features == LogMel(feature_size=size)
    np.testing.assert_allclose(features.frames(samples), expected, atol=1e-4)


def test_mel_filters_equal_transformers(transformers):
    for size, n_fft, rate in ((80, 400, 16_000), (128, 400, 16_000), (40, 512, 22_050)):
        extractor = transformers.WhisperFeatureExtractor(size, rate, 160, 30, n_fft)
        np.testing.assert_allclose(mel_filters(size, n_fft, rate), extractor.mel_filters, atol=1e-9)


@pytest.mark.parametrize("normalized", [True, False])
def test_waveforms_equal_transformers(transformers, tmp_path, normalized):
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=normalized)
    samples = sounds()["speech"].astype(np.float32)
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np").input_values[0]
    extractor.save_pretrained(tmp_path)
    assert load_features(tmp_path) == Waveform(do_normalize=normalized)
    np.testing.assert_allclose(load_features(tmp_path).frames(samples), expected, atol=1e-5)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_batch_of_waveforms_equals_transformers(transformers, normalized):
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=normalized, return_attention_mask=True)
    recordings = [sounds()[name].astype(np.float32) for name in ("short", "speech", "noise")]
    expected = extractor(recordings, sampling_rate=16_000, padding=True, return_tensors="np")
    rows, lengths = Waveform(do_normalize=normalized).batch(recordings)
    np.testing.assert_allclose(rows, expected.input_values, atol=1e-5)
    np.testing.assert_array_equal(lengths, expected.attention_mask.sum(1))
