"""Greedy CTC decoding: words and their times, windows of long recordings, and files that are errors."""

import json

import jax
import numpy as np
import pytest
import soundfile
import speech_parts

from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.inference import TranscriptionOptions, _ctc, export, open_model, transcribe
from transformer.inference._ctc import CTCVocabulary, recognize

PAD, DELIMITER, A, B, C = 0, 4, 5, 6, 7
VOCABULARY = CTCVocabulary(characters={i: text for text, i in speech_parts.CTC_VOCABULARY.items()})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return speech_parts.write_ctc(tmp_path_factory.mktemp("ctc"), salt="one")


def test_repeats_are_merged_and_blanks_are_removed():
    tokens = [PAD, A, A, PAD, A, B, DELIMITER, DELIMITER, PAD, DELIMITER, C, C]
    words = VOCABULARY.words(tokens)
    assert words == [[(A, 1, 3), (A, 4, 5), (B, 5, 6)], [(C, 10, 12)]]
    assert [VOCABULARY.text([token for token, _, _ in word]) for word in words] == ["AAB", "C"]
    assert VOCABULARY.words([PAD, DELIMITER]) == []


def test_a_long_recording_is_split_into_windows(tmp_path, monkeypatch):
    """Without attention a frame depends on nearby frames only, so that windows give the words of the whole."""
    out = [f"wav2vec2.encoder.layers.{i}.attention.out_proj.{part}" for i in (0, 1) for part in ("weight", "bias")]
    opened = open_model(speech_parts.write_ctc(tmp_path / "local", salt="two", tensors=out, num_conv_pos_embeddings=2))
    samples = speech_parts.sound(2.3)
    whole = recognize(opened, samples)
    read, lengths = _ctc._greedy, []
    monkeypatch.setattr(_ctc, "WINDOW_SECONDS", 1)
    monkeypatch.setattr(_ctc, "CONTEXT_SECONDS", 0)  # one frame
    monkeypatch.setattr(_ctc, "_greedy", lambda *given: lengths.append(given[2].shape) or read(*given))
    windows = recognize(opened, samples)
    assert len(lengths) > 2
    assert len(whole) > 3
    assert [(word.start, word.end, word.text, word.tokens) for word in windows] == [
        (word.start, word.end, word.text, word.tokens) for word in whole
    ]


def test_a_transcript_has_a_segment_per_word(directory):
    opened = open_model(directory)
    samples = speech_parts.sound(0.7)
    found = transcribe(opened, samples)
    assert found.language is None
    assert found.text == " ".join(segment.text.strip() for segment in found.segments)
    times = [time for segment in found.segments for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert times[-1] <= 0.7
    assert all(segment.average_log_probability < 0 for segment in found.segments)
    features = np.asarray((samples - samples.mean()) / np.sqrt(samples.var() + 1e-7))
    logits = jax.jit(opened.model.apply)({"params": opened.params}, features[None])
    tokens = [token for word in VOCABULARY.words(np.asarray(logits[0]).argmax(-1).tolist()) for token, _, _ in word]
    assert [token for segment in found.segments for token in segment.tokens] == tokens
    assert transcribe(opened, samples[:10]).text == ""  # too short for a frame
    with pytest.raises(ConfigError, match="a model for a single language"):
        transcribe(opened, samples, TranscriptionOptions(language="en"))


def test_transcribe_command_supports_ctc(directory, tmp_path, capsys):
    soundfile.write(tmp_path / "a.wav", speech_parts.sound(0.7), 16_000)
    assert main(["transcribe", str(directory), str(tmp_path / "a.wav"), "--timestamps"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith("[00:00.")
    assert main(["generate", str(directory), "--prompt", "a"]) == 2
    assert "transcribe" in capsys.readouterr().err
    assert main(["embed", "text", str(directory), "--text", "a"]) == 2
    assert "reads sound, not text" in capsys.readouterr().err


@pytest.mark.programs(7, reason="the package computes single operations outside of jit")
def test_export_copies_the_characters(directory, tmp_path):
    opened = open_model(directory)
    export(opened, tmp_path / "out")
    samples = speech_parts.sound(0.4)
    assert transcribe(open_model(tmp_path / "out"), samples) == transcribe(opened, samples)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", {"eng": {"a": 1}}, r"got \{'a'.*1\}.*'eng'"),
        ("vocab.json", {"a": 9}, r"0 to 8.*got 9.*'a'"),
        ("vocab.json", {"a": True}, "got True for 'a'"),
        ("vocab.json", {"a": 1}, r"'<pad>'.*CTC"),
        ("vocab.json", [], r"JSON"),
        ("vocab.json", None, r"vocab.json"),
        ("tokenizer_config.json", {"pad_token": 3}, r"pad_token.*got 3"),
        ("preprocessor_config.json", speech_parts.FEATURES, r"Wav2Vec2FeatureExtractor"),
    ],
)
def test_reports_files_that_do_not_fit(tmp_path, name, content, message):
    directory = speech_parts.write_ctc(tmp_path / "ctc")
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(json.dumps(content))
    opened = open_model(directory)
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        transcribe(opened, speech_parts.sound(0.2))
