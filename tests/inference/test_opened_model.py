"""Text in, text out: the methods of an opened model give what the functions and the commands give."""

import numpy as np
import pytest
from inference_parts import write_models

import transformer
from transformer.config import ConfigError
from transformer.generate import Sampling
from transformer.inference import classify, embed, open_model
from transformer.inference._generate import continue_texts


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Tiny models by name: language model, encoder-decoder, classifier, encoder."""
    directories = write_models(tmp_path_factory.mktemp("weights"))
    return {name: transformer.open(directory) for name, directory in directories.items()}


def test_open_is_an_alias_of_open_model_and_keeps_the_builtin():
    assert transformer.open is open_model
    assert "open" not in transformer.__all__


def test_a_causal_model_continues_a_text(opened):
    options = {"max_new_tokens": 4, "seed": 3}
    (expected,) = continue_texts(opened["writer"], ["the cat"], sampling=Sampling(temperature=0.8), **options)
    assert opened["writer"].generate("the cat", **options) == expected.output
    assert expected.output.strip()


def test_an_encoder_decoder_translates(opened):
    model = opened["translator"]
    found = model.translate(["the cat", "a dog"], max_new_tokens=4)
    assert len(found) == 2
    assert model.translate("the cat", max_new_tokens=4) == found[0]
    assert isinstance(model.generate("the cat", max_new_tokens=4), str)


def test_one_text_or_several_are_embedded_and_classified(opened):
    vectors = opened["encoder"].embed(["the cat", "a dog"])
    np.testing.assert_array_equal(vectors, embed(opened["encoder"], ["the cat", "a dog"]))
    np.testing.assert_allclose(opened["encoder"].embed("the cat"), vectors[0], atol=1e-6)
    found = opened["classifier"].classify(["the cat", "a dog"])
    assert found == classify(opened["classifier"], ["the cat", "a dog"])
    assert opened["classifier"].classify("a dog").label == found[1].label


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("encoder", lambda model: model.generate("the"), r"`embed`"),
        ("classifier", lambda model: model.generate("the"), r"`classify`"),
        ("translator", lambda model: model.chat("the"), "a conversation needs a causal model"),
        ("writer", lambda model: model.translate("the"), "which does not translate text"),
        ("writer", lambda model: model.classify("the"), "which is not a classifier"),
    ],
)
def test_reports_unsupported_options_of_a_model(opened, name, call, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        call(opened[name])
