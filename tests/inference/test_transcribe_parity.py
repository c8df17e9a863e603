"""Comparison of transcripts with those of transformers: tiny random models of Whisper, greedy decoding."""

import numpy as np
import pytest
import speech_parts

from transformer.inference import TranscriptionOptions, open_model, transcribe

pytestmark = pytest.mark.parity

PLAIN = {"temperatures": (0.0,), "max_compression_ratio": None, "min_log_probability": None, "max_no_speech": None}


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["one", "two", "three"])
def pair(request, transformers, tmp_path_factory):
    """(reference model, feature extractor, our model): three random models."""
    return opened(transformers, tmp_path_factory.mktemp("whisper"), request.param)


def opened(transformers, directory, salt, **generation):
    speech_parts.write_whisper(directory, salt=salt, scale=2.0, generation=speech_parts.GENERATION | generation)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(directory, attn_implementation="eager").eval()
    return theirs, transformers.WhisperFeatureExtractor.from_pretrained(directory), open_model(directory)


def expected_segments(theirs, extractor, samples, **options):
    """Return (start, end, tokens) of each segment of the reference."""
    import torch

    size = {"truncation": False, "padding": "longest"} if len(samples) > speech_parts.RATE else {}
    features = extractor(samples, sampling_rate=speech_parts.RATE, return_tensors="pt", **size).input_features
    with torch.no_grad():
        found = theirs.generate(features, task="transcribe", return_segments=True, **options)
    first, segments = speech_parts.FIRST_TIME, []
    for one in found["segments"][0]:
        tokens = one["tokens"].tolist()
        if len(tokens) > 1 and tokens[-1] >= first and tokens[-2] >= first:
            tokens.pop()  # the start of the next segment, which the reference repeats
        segments.append((float(one["start"]), float(one["end"]), tokens))
    return segments


@pytest.mark.parametrize("language", [None, "es"])
def test_one_window_with_timestamps_equals_transformers(pair, language):
    theirs, extractor, ours = pair
    for seed in range(2):
        samples = speech_parts.sound(1.0, seed)
        expected = expected_segments(theirs, extractor, samples, return_timestamps=True, language=language)
        got = transcribe(ours, samples, TranscriptionOptions(timestamps=True, language=language, **PLAIN))
        assert [tokens for _, _, tokens in expected] == [segment.tokens for segment in got.segments]


@pytest.mark.parametrize("salt", ["one", "two", "three"])
def test_one_window_without_timestamps_equals_transformers(transformers, tmp_path, salt):
    # A random model may generate timestamps without being asked, at which the reference starts another window.
    times = list(range(speech_parts.FIRST_TIME, speech_parts.VOCAB_SIZE))
    suppressed = {"suppress_tokens": speech_parts.GENERATION["suppress_tokens"] + times}
    theirs, extractor, ours = opened(transformers, tmp_path, salt, **suppressed)
    for seed, language in enumerate((None, "es")):
        samples = speech_parts.sound(0.8, seed)
        expected = expected_segments(theirs, extractor, samples, return_timestamps=False, language=language)
        got = transcribe(ours, samples, TranscriptionOptions(language=language, **PLAIN))
        assert [tokens for _, _, tokens in expected] == [segment.tokens for segment in got.segments]


def test_long_recordings_equal_transformers(pair):
    theirs, extractor, ours = pair
    for seed, seconds in enumerate((2.5, 4.3)):
        samples = speech_parts.sound(seconds, seed)
        expected = expected_segments(theirs, extractor, samples, language="en")
        got = transcribe(ours, samples, TranscriptionOptions(language="en", **PLAIN))
        assert len(expected) > 2
        assert [tokens for _, _, tokens in expected] == [segment.tokens for segment in got.segments]
        times = [(segment.start, segment.end) for segment in got.segments]
        np.testing.assert_allclose(times, [(min(a, seconds), min(b, seconds)) for a, b, _ in expected], atol=0.011)


def test_thresholds_and_silence_equal_transformers(pair):
    """The mean log-probability and the probability of no speech, which decide whether a window is silent."""
    theirs, extractor, ours = pair
    samples = speech_parts.sound(4.0, 5)
    every = transcribe(ours, samples, TranscriptionOptions(language="en", **PLAIN)).segments
    likely = float(np.median([segment.average_log_probability for segment in every]))
    silent = float(np.median([segment.no_speech for segment in every]))
    limits = {"logprob_threshold": likely, "no_speech_threshold": silent}
    expected = expected_segments(theirs, extractor, samples, language="en", temperature=(0.0,), **limits)
    limits = {"min_log_probability": likely, "max_no_speech": silent}
    got = transcribe(ours, samples, TranscriptionOptions(language="en", **PLAIN | limits))
    assert [tokens for _, _, tokens in expected] == [segment.tokens for segment in got.segments]
