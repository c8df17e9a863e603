"""Transcription: windows, languages, thresholds, and settings that are errors."""

import dataclasses

import numpy as np
import pytest
import speech_parts

from transformer.inference import TranscriptionOptions, open_model, transcribe
from transformer.inference._transcribe import Decoded, Transcriber, Window

FIRST = speech_parts.FIRST_TIME
PLAIN = {"temperatures": (0.0,), "max_compression_ratio": None, "min_log_probability": None, "max_no_speech": None}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(speech_parts.write_whisper(tmp_path_factory.mktemp("whisper"), salt="one", scale=2.0))


@pytest.mark.programs(14, reason="the package computes single operations outside of jit")
def test_windows_continue_at_the_last_timestamp(opened, monkeypatch):
    transcriber = Transcriber(opened, TranscriptionOptions(language="en", **PLAIN))
    samples, windows, used = speech_parts.sound(3.2), [], []
    read, divide = transcriber.window, transcriber._segments

    def recorded(*given):
        segments, frames = divide(*given)
        used.append((*given[1:3], frames))
        return segments, frames

    monkeypatch.setattr(transcriber, "window", lambda frames, *rest: windows.append(frames) or read(frames, *rest))
    monkeypatch.setattr(transcriber, "_segments", recorded)
    found = [segment for _, segments in transcriber.windows(samples) for segment in segments]

    starts, lengths, frames = zip(*used, strict=True)
    assert starts == (0, *np.cumsum(frames)[:-1])
    assert lengths == tuple(min(100, 320 - start) for start in starts)
    assert sum(frames) >= 320
    assert min(frames) < 100  # a window that ended at a timestamp
    whole = np.pad(transcriber.features.frames(samples), ((0, 100), (0, 0)))
    for start, window in zip(starts, windows, strict=True):
        np.testing.assert_array_equal(window, whole[start : start + 100])
    for segment in found:
        assert 0 <= segment.start <= segment.end <= 3.2
        assert segment.text == opened.tokenizer.decode([i for i in segment.tokens if i < FIRST])
    text = transcribe(opened, samples, transcriber.options).text
    assert text == "".join(segment.text for segment in found).strip()


def decoded(tokens, **changes):
    plain = Decoded(tokens, True, 0.0, average=-0.5, ratio=1.0, no_speech=0.0, fails=False, silent=False)
    return Window(language="en", best=dataclasses.replace(plain, **changes), cache=None, prompt=[])


@pytest.mark.parametrize(
    ("tokens", "segments", "used"),
    [
        # Two complete segments and an unfinished one, which the next window decodes again.
        ([FIRST, 65, FIRST + 5, FIRST + 5, 66, FIRST + 9, FIRST + 11, 67], [(0.0, 0.1), (0.1, 0.18)], 18),
        # A single timestamp at the end: no speech follows.
        ([FIRST, 65, FIRST + 5, FIRST + 7, 66, FIRST + 9], [(0.0, 0.1), (0.14, 0.18)], 90),
        # No pair: one segment up to the last timestamp, or up to the end.
        ([FIRST + 1, 65, FIRST + 30], [(0.0, 0.6)], 90),
        ([FIRST, 65, 66], [(0.0, 0.9)], 90),
        ([], [(0.0, 0.9)], 90),
    ],
)
def test_splits_a_window_into_segments(opened, tokens, segments, used):
    transcriber = Transcriber(opened, TranscriptionOptions())
    found, frames = transcriber._segments(decoded(tokens), 200, 90, True)
    assert [(segment.start, segment.end) for segment in found] == [
        (pytest.approx(2 + start), pytest.approx(2 + end)) for start, end in segments
    ]
    assert frames == used
    assert transcriber._segments(decoded(tokens, silent=True), 200, 90, True) == ([], 90)


@pytest.mark.programs(24, reason="a transcription measures silence with single operations")
def test_the_language_is_detected_or_given(opened):
    samples = speech_parts.sound(0.7)
    detected = transcribe(opened, samples, TranscriptionOptions(**PLAIN))
    assert detected.language in ("en", "es", "de")
    by_language = {
        language: transcribe(opened, samples, TranscriptionOptions(language=language, **PLAIN))
        for language in ("en", "es", "de")
    }
    assert by_language[detected.language] == detected
    assert len({one.segments[0].average_log_probability for one in by_language.values()}) == 3
    translated = transcribe(opened, samples, TranscriptionOptions(language="es", translate=True, **PLAIN))
    before = by_language["es"].segments[0]
    assert translated.segments[0].average_log_probability != before.average_log_probability


@pytest.mark.programs(14, reason="the package computes single operations outside of jit")
def test_a_result_that_fails_a_threshold_is_sampled_at_the_next_temperature(opened):
    samples = speech_parts.sound(0.7)
    greedy = transcribe(opened, samples, TranscriptionOptions(language="en", **PLAIN)).segments[0]
    assert greedy.temperature == 0.0
    options = {"language": "en", "max_no_speech": None, "temperatures": (0.0, 0.3, 0.6)}
    for limit in ({"min_log_probability": greedy.average_log_probability + 1e-3}, {"max_compression_ratio": 0.01}):
        none = {"min_log_probability": None, "max_compression_ratio": None}
        found = transcribe(opened, samples, TranscriptionOptions(**options | none | limit)).segments[0]
        assert found.temperature in (0.3, 0.6)
        assert found.tokens != greedy.tokens
    passing = {"min_log_probability": greedy.average_log_probability - 1e-3, "max_compression_ratio": 1e9}
    assert transcribe(opened, samples, TranscriptionOptions(**options | passing)).segments == [greedy]


@pytest.mark.programs(14, reason="the package computes single operations outside of jit")
def test_a_window_is_silent_if_no_speech_is_probable_and_the_text_is_not(opened):
    samples = speech_parts.sound(0.7)
    options = {"language": "en", "temperatures": (0.0,), "max_compression_ratio": None}
    silent = transcribe(opened, samples, TranscriptionOptions(**options, min_log_probability=0.0, max_no_speech=0.0))
    assert silent.segments == []
    assert silent.text == ""
    for limits in (
        {"min_log_probability": -1e3, "max_no_speech": 0.0},
        {"min_log_probability": 0.0, "max_no_speech": 1.0},
    ):
        assert transcribe(opened, samples, TranscriptionOptions(**options, **limits)).segments


@pytest.mark.programs(14, reason="the package computes single operations outside of jit")
def test_supports_a_model_of_one_language(tmp_path):
    generation = speech_parts.GENERATION | {"is_multilingual": False}
    opened = open_model(speech_parts.write_whisper(tmp_path / "en", generation=generation))
    assert transcribe(opened, speech_parts.sound(0.4), TranscriptionOptions(**PLAIN)).language is None
    with pytest.raises(
        ValueError, match=r"a single language, which only transcribes: language and translate can't be set"
    ):
        transcribe(opened, speech_parts.sound(0.4), TranscriptionOptions(language="en"))


def test_reports_an_unknown_language(opened):
    with pytest.raises(ValueError, match=r"language.*got 'english'"):
        transcribe(opened, speech_parts.sound(0.4), TranscriptionOptions(language="english"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": ()}, r"temperatures.*0.*got \(\)"),
        ({"temperatures": (-1.0,)}, r"temperatures must be"),
        ({"max_no_speech": "high"}, r"max_no_speech.*got 'high'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        TranscriptionOptions(**options)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"features": speech_parts.FEATURES | {"chunk_length": 2}}, r"must describe 100 frames of 8 mel bins"),
        ({"generation": {}}, r"0 to 315.*no_timestamps_token_id.*got None"),
        (
            {"generation": speech_parts.GENERATION | {"lang_to_id": {"<|en|>": 999}}},
            r"lang_to_id\['<\|en\|>'\].*got 999",
        ),
    ],
)
def test_reports_files_that_do_not_fit_the_model(tmp_path, files, message):
    opened = open_model(speech_parts.write_whisper(tmp_path / "model", **files))
    with pytest.raises(ValueError, match=message):
        transcribe(opened, speech_parts.sound(0.4))
