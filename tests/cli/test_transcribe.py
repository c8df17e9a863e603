"""The command `transcribe`."""

import json

import pytest
import soundfile
import speech_parts

from transformer.__main__ import main
from transformer.cli._transcribe import _time, _with_kind


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return speech_parts.write_whisper(tmp_path_factory.mktemp("whisper"), salt="one", scale=2.0)


@pytest.fixture
def recordings(tmp_path):
    for number, (name, rate) in enumerate({"a.wav": 16_000, "b.flac": 8_000}.items()):
        soundfile.write(tmp_path / name, speech_parts.sound(0.6, number), rate)
    return [str(tmp_path / "a.wav"), str(tmp_path / "b.flac")]


@pytest.mark.programs(25, reason="a transcription measures silence with single operations")
def test_prints_text_json_and_timestamps(model, recordings, capsys):
    assert main(["transcribe", str(model), *recordings, "--json", "--timestamps"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["directory"] == str(model)
    assert [one["file"] for one in output["results"]] == recordings
    segments = output["results"][1]["segments"]
    assert len(segments) > 1
    assert max(segment["end"] for segment in segments) <= 1.2  # 0.6 s played at half of the speed

    assert main(["transcribe", str(model), *recordings, "--timestamps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{recordings[0]}:"
    assert lines[-1].startswith(f"[{_time(segments[-1]['start'])} --> {_time(segments[-1]['end'])}] ")

    assert main(["transcribe", str(model), recordings[0], "--language", "es", "--translate"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_times_are_minutes_and_seconds():
    assert _time(0.0) == "00:00.00"
    assert _time(125.299) == "02:05.30"
    assert _time(3725.5) == "1:02:05.50"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FILE is missing: audio files"),
        (["missing.wav"], "no file missing.wav. Check the path."),
        (["https://x.org/a.wav"], "is a URL"),
        (["a.wav", "--language", "english"], "--language must be one of de, en, es, got 'english'"),
    ],
)
def test_invalid_arguments_are_one_line_errors(model, recordings, monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["transcribe", str(model), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unsupported_model_kind_is_named(tmp_path, recordings, capsys):
    from golden import case, ours

    ours.write(tmp_path / "gpt2", case.golden("gpt2")["lm"])
    assert main(["transcribe", str(tmp_path / "gpt2"), recordings[0]]) == 2
    assert "contains a CausalLM, but transcription needs" in capsys.readouterr().err


def test_generate_points_to_this_command(model, capsys):
    assert main(["generate", str(model), "--prompt", "a"]) == 2
    assert f"transcribe {model} FILE" in capsys.readouterr().err


@pytest.mark.programs(26, reason="the package computes single operations outside of jit")
def test_prints_one_line_per_word(model, recordings, capsys):
    assert main(["transcribe", str(model), recordings[0], "--timestamps", "word", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    words = [word for segment in result["segments"] for word in segment["words"]]
    assert main(["transcribe", str(model), recordings[0], "--timestamps=word"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(words) > 0
    assert lines[0].startswith(f"[{_time(words[0]['start'])} --> {_time(words[0]['end'])}] ")


def test_timestamps_without_words_are_per_segment():
    assert _with_kind(["m", "--timestamps", "a.wav"]) == ["m", "--timestamps", "segment", "a.wav"]
    assert _with_kind(["m", "a.wav", "--timestamps"]) == ["m", "a.wav", "--timestamps", "segment"]
    assert _with_kind(["m", "--timestamps", "word", "a.wav"]) == ["m", "--timestamps", "word", "a.wav"]
