"""Options of texts reach `generate`: sampling, suppressed tokens, seeds, limits. Nothing is generated."""

import dataclasses
import json

import numpy as np
import pytest
from chat_parts import write_chat_model
from inference_parts import write_models

from transformer.chat import Chat
from transformer.generate import Sampling
from transformer.generate._streaming import Piece, TokenStream
from transformer.inference import _generate as generating
from transformer.inference import open_model

SAMPLING = Sampling(temperature=0.7, top_k=5, repetition_penalty=1.2)
FILES = {"suppress_tokens": [7], "bad_words_ids": [[9]], "eos_token_id": 11}


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    return open_model(write_chat_model(tmp_path_factory.mktemp("models") / "tiny", **FILES))


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    folder = write_models(tmp_path_factory.mktemp("weights"))["translator"]
    path = folder / "generation_config.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | FILES | {"decoder_start_token_id": 0}))
    return open_model(folder)


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of each call of `generate`, which writes three tokens, or as many as it may."""
    seen = []

    def generate(model, params, prompts, **options):
        seen.append({**options, "prompts": prompts})
        return [[12, 13, 14][: options["max_new_tokens"]] for _ in prompts]

    monkeypatch.setattr(generating, "generate", generate)
    return seen


@pytest.fixture
def streamed(monkeypatch):
    """The keyword arguments of each stream of tokens, which has one piece of three tokens."""
    seen = []

    def generate(self, prompt, **options):
        seen.append({**options, "prompt": prompt})
        return iter([Piece([12, 13, 14], [-1.0, -1.0, -1.0], True)])

    monkeypatch.setattr(TokenStream, "generate", generate)
    return seen


def suppressing(sampling, *ids):
    return dataclasses.replace(sampling, suppress=ids)


def test_options_reach_continuations(writer, calls):
    generating.continue_texts(writer, ["Hello", "a"], max_new_tokens=5, sampling=SAMPLING, seed=3, slots=2)
    (call,) = calls
    assert call["sampling"] == suppressing(SAMPLING, 7, 9)
    assert (call["seed"], call["max_new_tokens"], call["slots"]) == ([3, 3 + 7919], 5, 2)
    assert call["eos_id"] == [11]


def test_options_reach_streamed_continuations(writer, calls):
    """A text that fills the context: each piece has its own seed, and the limit counts all of them."""
    short = dataclasses.replace(writer, context=4)
    (text,) = generating.continue_texts(short, ["Hi"], max_new_tokens=7, sampling=SAMPLING, seed=3)
    assert sum(call["max_new_tokens"] for call in calls) == 7
    assert len({call["seed"][0] for call in calls}) == len(calls) > 1
    assert not text.ended


def test_options_reach_translations(translator, calls):
    generating.translate(translator, ["the cat"], max_new_tokens=5, sampling=SAMPLING, seed=3)
    (call,) = calls
    assert call["sampling"] == suppressing(SAMPLING, 7, 9)
    assert (call["seed"], call["max_new_tokens"], call["eos_id"]) == (3, 5, [11])


@pytest.mark.programs(10, reason="the stream makes its cache outside of jit")
def test_options_reach_a_stream(writer, streamed):
    stream = TokenStream(writer.model, writer.params)
    options = {"max_new_tokens": 5, "sampling": SAMPLING, "seed": 3}
    whole = generating.stream_text(writer, stream, "Hello", **options)
    (call,) = streamed
    assert call["sampling"] == suppressing(SAMPLING, 7, 9)
    assert (call["seed"], call["max_new_tokens"], call["eos_id"]) == (3, 5, [11])
    assert whole.finish == "end"
    stop = whole.output[1:]
    assert stop
    assert generating.stream_text(writer, stream, "Hello", **options, stop=[stop]).finish == "stop"


@pytest.mark.programs(10, reason="the stream makes its cache outside of jit")
def test_options_reach_a_reply(writer, streamed):
    chat = Chat(writer.model, writer.params, writer.tokenizer, suppress=writer.suppressed)
    own = suppressing(SAMPLING, 12)
    chat.reply([{"role": "user", "content": "Hello"}], max_new_tokens=5, sampling=own, seed=3)
    chat.replies([{"role": "user", "content": "Hello"}], samples=2, seed=2**32 - 1)
    assert streamed[0]["sampling"] == suppressing(SAMPLING, 12, 7, 9)
    assert (streamed[0]["seed"], streamed[0]["max_new_tokens"]) == (3, 5)
    assert [call["seed"] for call in streamed[1:]] == [2**32 - 1, 0]
    assert 11 in np.atleast_1d(streamed[0]["eos_id"])


@pytest.mark.programs(10, reason="the stream makes its cache outside of jit")
def test_options_reach_methods_of_a_loaded_model(writer, translator, calls, streamed):
    writer.generate("Hello", max_new_tokens=5, temperature=0.3, top_k=4, top_p=0.6, seed=9)
    translator.generate("the cat", max_new_tokens=5, temperature=0.3, top_k=4, top_p=0.6, seed=9)
    filters = {"top_k": 4, "top_p": 0.6}
    assert calls[0]["sampling"] == suppressing(Sampling(temperature=0.3, **filters), 7, 9)
    assert calls[1]["sampling"] == suppressing(Sampling(temperature=0.0, **filters), 7, 9)
    assert (calls[0]["seed"], calls[1]["seed"]) == ([9], 9)
    assert [call["max_new_tokens"] for call in calls] == [5, 5]
    writer.chat("Hello", max_new_tokens=4, sampling=SAMPLING, seed=8)
    assert streamed[0]["sampling"] == suppressing(SAMPLING, 7, 9)
    assert (streamed[0]["seed"], streamed[0]["max_new_tokens"]) == (8, 4)
