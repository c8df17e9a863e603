"""Fields of generation_config.json of an encoder-decoder: each reaches the search of every command, or is reported."""

import io
import json
import sys
import warnings

import pytest
from inference_parts import write_models
from starlette.testclient import TestClient

from transformer.__main__ import main
from transformer.cli._services import ServiceSettings, make_service
from transformer.config import ConfigError
from transformer.generate import Beam, Rules
from transformer.generate._beam import USUAL, Hypothesis
from transformer.inference import _generate as generating
from transformer.inference import _translate as translating
from transformer.inference import open_model
from transformer.inference._generation_settings import recommended_beam
from transformer.serve import _translations as translations

TEXT = "the big cat"
FIELDS = {
    "num_beams": 3,
    "length_penalty": 2.0,
    "early_stopping": True,
    "min_length": 4,
    "max_length": 30,
    "no_repeat_ngram_size": 2,
    "repetition_penalty": 1.5,
    "forced_eos_token_id": 4,
    "forced_bos_token_id": 6,
}
BEAM = Beam(
    size=3,
    alpha=2.0,
    norm=(1, 1),  # the forced start token counts
    early_stop=True,
    length_ratio=0.0,
    length_extra=28,
    rules=Rules(fewest=2, force_end=True, no_repeat_ngram=2, repetition_penalty=1.5, ranks_cut=True),
)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes an encoder-decoder with these generation settings, and returns its directory."""
    directory = write_models(tmp_path)["translator"]
    config = json.loads((directory / "config.json").read_text())

    def write(fields):
        given = {"decoder_start_token_id": config["decoder_start_token_id"], "eos_token_id": 4, **fields}
        (directory / "generation_config.json").write_text(json.dumps(given))
        (directory / "integrity.json").unlink(missing_ok=True)
        return directory

    return write


@pytest.fixture
def searches(monkeypatch):
    """Record the options of each search, which finds one token."""
    seen = []

    def search(model, params, sources, **options):
        seen.append(options)
        return [[Hypothesis([6], -1.0, -1.0, ended=True)] * options["beam"].n_best for _ in sources]

    for module in (translating, generating, translations):
        monkeypatch.setattr(module, "beam_search_all", search)
    return seen


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {}),
        ({"num_beams": 2}, {"size": 2, "alpha": 1.0, "norm": (0, 1), "early_stop": False, "estimated": True}),
        ({"num_beams": 2, "early_stopping": True}, {"size": 2, "alpha": 1.0, "norm": (0, 1)}),
        ({"num_beams": 2, "early_stopping": "never"}, {"size": 2, "alpha": 1.0, "norm": (0, 1), "early_stop": False}),
        ({"num_beams": 1}, {"size": 1, "alpha": 1.0, "norm": (0, 1)}),
        ({"max_length": 9}, {"length_ratio": 0.0, "length_extra": 8}),
        ({"max_length": 9, "max_new_tokens": 5}, {"length_ratio": 0.0, "length_extra": 5}),
        ({"min_length": 9}, {"rules": Rules(fewest=8)}),
        ({"min_length": 9, "min_new_tokens": 10}, {"rules": Rules(fewest=10)}),
        ({"no_repeat_ngram_size": 3}, {"rules": Rules(no_repeat_ngram=3)}),
        ({"repetition_penalty": 2}, {"rules": Rules(repetition_penalty=2.0)}),
        ({"forced_eos_token_id": 4}, {"rules": Rules(force_end=True)}),
        ({"num_beams": None, "length_penalty": None, "max_length": None, "no_repeat_ngram_size": None}, {}),
    ],
)
def test_fields_have_the_meaning_of_transformers(written, fields, wanted):
    found = recommended_beam(open_model(written(fields)))
    ranked = any(fields.get(name) is not None for name in ("num_beams", "length_penalty", "early_stopping"))
    wanted = {"rules": Rules(ranks_cut=ranked), **wanted}
    assert {name: getattr(found, name) for name in vars(USUAL)} == vars(USUAL) | wanted


def test_every_command_uses_the_recommended_search(written, searches, monkeypatch, capsys):
    directory = written(FIELDS)
    opened = open_model(directory)
    opened.translate(TEXT)
    assert opened.generate(TEXT) == opened.tokenizer.decode([6])
    assert main(["generate", str(directory), "--prompt", TEXT]) == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main(["translate", str(directory)]) == 0
    service = make_service(opened, ServiceSettings(slots=1, max_tokens=None))
    service.start()
    client = TestClient(service.application(), base_url="http://localhost")
    assert client.post("/v1/completions", json={"prompt": TEXT}).status_code == 200
    service.close()
    assert len(searches) == 5
    assert all(options["beam"] == BEAM for options in searches)
    assert all(options["begin"] == [opened.bos_id, 6] for options in searches)


def test_options_override_the_file(written, searches, monkeypatch):
    """Those that are given; the others stay as the file recommends. A forced token counts as a new one."""
    directory = written(FIELDS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main(["translate", str(directory), "--beam-size", "2", "--max-extra", "7"]) == 0
    assert searches.pop()["beam"] == Beam(
        **vars(BEAM) | {"size": 2, "length_ratio": 1.0, "length_extra": 7},
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main(["translate", str(directory), "--alpha", "0.5", "--exact"]) == 0
    assert searches.pop()["beam"] == Beam(**vars(BEAM) | {"alpha": 0.5, "norm": (5, 6), "early_stop": False})
    opened = open_model(directory)
    opened.generate(TEXT, max_new_tokens=12)
    assert searches.pop()["beam"] == Beam(**vars(BEAM) | {"length_extra": 11})
    opened.translate(TEXT, max_new_tokens=12)
    assert searches.pop()["max_new_tokens"] == 11
    opened.translate(TEXT, beam=USUAL)
    assert searches.pop()["beam"] == USUAL
    service = make_service(opened, ServiceSettings(slots=1, max_tokens=None))
    service.start()
    client = TestClient(service.application(), base_url="http://localhost")
    body = {"prompt": TEXT, "num_beams": 4, "length_penalty": 0, "n": 2, "max_tokens": 5}
    assert client.post("/v1/completions", json=body).status_code == 200
    service.close()
    options = searches.pop()
    assert options["beam"] == Beam(**vars(BEAM) | {"size": 4, "n_best": 2, "alpha": 0.0, "norm": (5, 6)})
    assert options["max_new_tokens"] == 4


def test_without_recommendations_a_text_is_greedy(written, searches, monkeypatch):
    """And so is one that samples, or has penalties."""
    sampled = []

    def generated(*rest, **options):
        sampled.append(options)
        return [[6]]

    monkeypatch.setattr(generating, "generate", generated)
    open_model(written({})).generate(TEXT)
    assert (sampled.pop()["max_new_tokens"], searches) == (128, [])
    directory = written({"no_repeat_ngram_size": 2})
    open_model(directory).generate(TEXT)
    assert not sampled
    found = searches.pop()["beam"]
    assert (found.size, found.rules, found.length_extra) == (1, Rules(no_repeat_ngram=2), 128)
    assert main(["generate", str(directory), "--prompt", TEXT, "--temperature", "0.7"]) == 0
    assert len(sampled) == 1
    assert not searches


def test_one_warning_lists_the_ignored_fields(written):
    fields = {"do_sample": True, "encoder_no_repeat_ngram_size": 3, "num_beam_groups": 2, "diversity_penalty": 0.5}
    fields |= {"bad_words_ids": [[6], [7, 8]], "forced_eos_token_id": 9, "begin_suppress_tokens": [5]}
    opened = open_model(written(fields))
    with pytest.warns(UserWarning, match="not supported") as caught:
        recommended_beam(opened)
    (message,) = [str(one.message) for one in caught]
    for name in fields:
        assert name in message
    neutral = {"do_sample": False, "num_beam_groups": 1, "bad_words_ids": [[6]], "forced_eos_token_id": 4}
    opened = open_model(written(neutral))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recommended_beam(opened)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", "4"),
        ("length_penalty", float("inf")),
        ("length_penalty", True),
        ("min_length", -1),
        ("max_length", 2.5),
        ("no_repeat_ngram_size", [3]),
        ("repetition_penalty", 0),
        ("early_stopping", "soon"),
    ],
)
def test_rejects_invalid_values(written, name, value):
    with pytest.raises(ConfigError, match=f"{name} in .* must be"):
        recommended_beam(open_model(written({name: value})))
