"""Tests of `inspect audio`: pictures and page of the attention of words over time, and errors."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import soundfile
import speech_parts
from attention_page_parts import data_of
from matplotlib.image import imread

from transformer.__main__ import main
from transformer.inference import TranscriptionOptions, open_model, speech_attention
from transformer.inference._transcribe import Transcriber
from transformer.viz import attention_maps


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    generation = speech_parts.GENERATION | {"alignment_heads": [[1, 0], [1, 1]]}
    directory = tmp_path_factory.mktemp("whisper")
    path = speech_parts.write_whisper(directory, salt="three", scale=1.0, generation=generation, decoder_layers=2)
    soundfile.write(path / "a.wav", speech_parts.sound(0.8), speech_parts.RATE)
    soundfile.write(path / "long.wav", speech_parts.sound(1.2), speech_parts.RATE)
    return path


@pytest.mark.programs(28, reason="scores of a window and attention are read outside of jit")
def test_writes_a_plot_of_the_alignment_heads_and_of_each_layer(model, tmp_path, capsys):
    words = ["inspect", "audio", str(model), str(model / "a.wav"), "--output", str(tmp_path), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    names = [name.rpartition("/")[2] for name in found["paths"]]
    assert names == ["audio_alignment.png", "audio_layer1.png", "audio_layer2.png"]
    assert all(imread(name)[..., :3].std() > 0 for name in found["paths"])
    assert all(0 <= word["start"] <= word["end"] <= 0.8 for word in found["words"])
    assert len(found["words"]) > 1


@pytest.mark.programs(28, reason="scores of a window and attention are read outside of jit")
def test_the_page_has_the_words_and_the_weights(model, tmp_path, capsys):
    page = tmp_path / "a.html"
    assert main(["inspect", "audio", str(model), str(model / "a.wav"), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    data = data_of(page.read_text())
    (group,) = data["panels"][0]["groups"]
    assert (group["kind"], len(group["layers"])) == ("cross", 2)
    assert data["words"]["encoder"][:2] == ["0.00s", "0.02s"]
    assert len(data["words"]["encoder"]) == 40
    assert "A row is a word" in data["rows"]


@pytest.mark.programs(51, reason="scores of a window and attention are read outside of jit")
def test_the_weights_of_a_word_are_the_mean_over_the_queries_that_predict_it(model):
    """Compare with the whole transcript read at once, without a cache."""
    opened = open_model(model)
    samples = speech_parts.sound(0.8)
    found = speech_attention(opened, samples)
    transcriber = Transcriber(opened, TranscriptionOptions(timestamps=True))
    frames = transcriber.features.frames(samples)
    window = transcriber.window(frames, None, True, jax.random.key(0))
    read = [speech_parts.START, *window.prompt, *window.best.tokens]
    execution = dataclasses.replace(opened.model.execution, attention="reference", sow_weights=True)
    model, variables = opened.model.clone(execution=execution), {"params": opened.params}
    apply = jax.jit(functools.partial(model.apply, mutable=["intermediates"]))
    _, seen = apply(variables, np.asarray(frames)[None], np.array([read]))
    maps = attention_maps(seen["intermediates"], model.config)
    weights = np.stack([one.weights for one in maps if one.kind == "cross"])[..., :40]
    places = [place - 1 for place, token in enumerate(read) if token < speech_parts.END]
    for number, word in enumerate(found.words):
        mine, places = places[: len(word.tokens)], places[len(word.tokens) :]
        np.testing.assert_allclose(found.weights[:, :, number], weights[:, :, mine].mean(2), atol=1e-5)
    assert places == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.wav"], "no file none.wav"),
        (["{model}/a.wav", "--prompt", "a"], "inspect audio has no option --prompt"),
        ([], "AUDIO is missing"),
        (["{model}/a.wav", "--html", "a.png"], "--html must name the HTML file to write"),
        (
            ["{model}/long.wav"],
            "must have at most 1 seconds, one window of the model, got 1.2",
        ),
    ],
)
def test_invalid_options_are_one_line_errors(model, capsys, words, message):
    assert main(["inspect", "audio", str(model), *[word.format(model=model) for word in words]]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_model_with_ctc_has_no_cross_attention(model, tmp_path, capsys):
    path = speech_parts.write_ctc(tmp_path)
    assert main(["inspect", "audio", str(path), str(model / "a.wav")]) == 2
    assert "which has no cross-attention" in capsys.readouterr().err
