"""One warning when a text grows past the length where dynamic scaling or LongRoPE switches its frequencies."""

import numpy as np
import pytest
from numeric_parts import random_params

from transformer.config import RotaryOptions, RotaryScaling, TransformerConfig
from transformer.generate import Beam, Sampling, TokenStream, beam_search, generate
from transformer.generate import _prompts as prompts
from transformer.nn.models import CausalLM

SCALINGS = {
    "dynamic": RotaryScaling(kind="dynamic", factor=4.0, original_length=12),
    "longrope": RotaryScaling(
        kind="longrope", factor=2.0, original_length=12, short_factors=(1.0, 1.1), long_factors=(1.0, 3.0)
    ),
}
BASE = TransformerConfig(vocab_size=19, d_model=8, num_layers=1, num_heads=2, position=RotaryOptions())
PROMPT = [3, 1, 4, 1, 5, 9]


def streamed(model, params, row, count):
    return list(TokenStream(model, params).generate(row, max_new_tokens=count, sampling=Sampling()))


def generated(model, params, row, count):
    return generate(model, params, [[2], row], max_new_tokens=count, sampling=Sampling())


def searched(model, params, row, count):
    return beam_search(model, params, prompts=[row], max_new_tokens=count, beam=Beam(size=2), eos_id=None)


@pytest.mark.programs(12, reason="two lengths of prompts, by a stream in pieces")
@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (generated, "dynamic"),
        (streamed, "longrope"),
        pytest.param(searched, "dynamic", marks=pytest.mark.slow),
    ],
)
def test_a_text_that_crosses_the_original_length_warns_once(run, kind, recwarn):
    model = CausalLM(BASE.replace(**{"position.scaling": SCALINGS[kind]}))
    params = random_params(model, np.zeros((1, 2), np.int32))["params"]
    prompts._warn_once.cache_clear()
    run(model, params, PROMPT, 7)  # reads 12 tokens: the 13th token is the last one
    run(model, params, PROMPT + PROMPT + [2], 7)  # rotated as a long text from its first token on
    assert not recwarn.list
    with pytest.warns(UserWarning, match=rf"grew past 12 tokens.*{kind}, original_length 12.*new prompt"):
        run(model, params, PROMPT, 8)
    run(model, params, PROMPT, 8)
    assert not recwarn.list


def test_other_models_do_not_warn(recwarn):
    for changes in ({}, {"position.scaling": RotaryScaling(kind="linear", factor=2.0)}):
        prompts.warn_if_rescaled(BASE.replace(**changes), 6, 10**6)
    assert not recwarn.list
