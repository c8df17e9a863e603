"""The requests of the HTTP benchmark, and its servers; nothing is measured."""

import sys

import numpy as np
import pytest

from benchmarks.serving_http import ANSWER_TOKENS, PROMPT_TOKENS, asks, free_port, server, write_model
from transformer.chat import ChatPrompts
from transformer.inference import open_model


def test_lengths_are_those_of_sharegpt():
    """Their means, if nothing is cut; the same seed gives the same requests."""
    many = asks(20_000, 100_000)
    assert np.mean([len(one.prompt) for one in many]) == pytest.approx(PROMPT_TOKENS, rel=0.05)
    assert np.mean([one.tokens for one in many]) == pytest.approx(ANSWER_TOKENS, rel=0.05)
    assert asks(9, 512) == asks(9, 512)
    assert asks(9, 512) != asks(9, 512, seed=1)
    assert all(len(one.prompt) >= 4 and len(one.prompt) + one.tokens < 512 for one in asks(1_000, 512))


def test_a_character_is_a_token(tmp_path):
    write_model(tmp_path / "model", small=True, longest=512)
    opened = open_model(tmp_path / "model")
    for one in asks(20, 512):
        found = ChatPrompts(opened.tokenizer).encode([{"role": "user", "content": one.prompt}])
        assert len(found.ids) == len(one.prompt)
    assert opened.context == 512


def test_a_server_that_ends_is_reported():
    with (
        pytest.raises(RuntimeError, match=r"does not run: install the extra serving$"),
        server([sys.executable, "-c", "print('one'); print('install the extra serving')"], free_port()),
    ):
        pytest.fail("it does not answer")
