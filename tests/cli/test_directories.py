"""Tests of the errors for a DIR that is not a model, or not a suitable one; they suggest what to pass instead."""

import re

import pytest
from inference_parts import write_models

from transformer.__main__ import main


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def error(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    return call


def test_suggests_the_nearest_variant(error):
    assert "directory gpt3 not found. Did you mean 'gpt2'? Pass" in error("generate", "gpt3", "--prompt", "x")


def test_suggests_the_nearest_workdir(error, tmp_path):
    (tmp_path / "number_words").mkdir()
    (tmp_path / "number_word.txt").touch()
    message = error("score", tmp_path / "number_word", "--text", "x")
    assert f"directory {tmp_path}/number_word not found. Did you mean '{tmp_path}/number_words'? Pass" in message
    assert "Did you mean" not in error("score", tmp_path / "no" / "such" / "place", "--text", "x")


@pytest.mark.parametrize(("name", "step"), [("checkpoints/300", " --step 300"), ("checkpoints", "")])
def test_a_checkpoint_path_points_to_its_run(error, tmp_path, name, step):
    run = tmp_path / "run"
    (run / name).mkdir(parents=True)
    (run / "recipe.json").write_text("{}")
    message = error("generate", run / name, "--prompt", "x")
    assert re.fullmatch(f"error: {re.escape(str(run / name))} .*: {re.escape(str(run))}{step}\n", message)


@pytest.mark.parametrize(
    ("name", "kind", "command"), [("classifier", "Classifier", "classify text"), ("encoder", "Embedder", "embed text")]
)
def test_a_model_that_cannot_generate_names_the_right_command(models, error, name, kind, command):
    message = error("generate", models[name], "--prompt", "the cat")
    assert f"{models[name]} contains a model of type {kind}. Use " in message
    assert "this command needs a causal model or an encoder-decoder for text; " in message
    assert f" {command} {models[name]} --text ..." in message
