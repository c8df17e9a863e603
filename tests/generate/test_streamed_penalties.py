"""Penalties in a stream of tokens are those of `generate`, also for tokens of the prompt."""

import pytest
from serve_parts import tiny_parts

from transformer.generate import Sampling, generate
from transformer.generate._streaming import TokenStream


@pytest.mark.programs(20, reason="the programs of a stream, and its cache, which is made outside of jit")
def test_penalties_of_a_stream_equal_generate():
    """The repetition penalty is also for tokens of the prompt: the prompt has many of the likely tokens."""
    model, params, _ = tiny_parts(num_layers=1)
    prompt, greedy = list(range(5, 65)), Sampling(temperature=0.0)
    (plain,) = generate(model, params, [prompt], max_new_tokens=12, sampling=greedy)
    for penalty in ("repetition_penalty", "presence_penalty"):
        sampling = Sampling(temperature=0.0, **{penalty: 6.0})
        (wanted,) = generate(model, params, [prompt], max_new_tokens=12, sampling=sampling)
        stream = TokenStream(model, params)
        pieces = stream.generate(prompt, max_new_tokens=12, sampling=sampling)
        assert [token for piece in pieces for token in piece.tokens] == wanted
        assert wanted != plain
