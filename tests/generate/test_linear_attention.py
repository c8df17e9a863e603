"""Generation with linear attention: prompts of different lengths, texts that continue or restart, rejected options."""

import jax
import numpy as np
import pytest
from chat_parts import drawn_params

from transformer.config import Execution, GatedDelta, LayerKind, ParameterOptions, RotaryOptions, TransformerConfig
from transformer.generate import Draft, Sampling, TokenStream, generate
from transformer.nn import CausalLM, paged_cache

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[5, 3, 8], [7, 1, 2, 9, 4, 4, 6], [2]]


@pytest.fixture(scope="module")
def model():
    """A model with two layers of linear attention for each layer of attention, and its parameters."""
    linear = LayerKind(gated_delta=GatedDelta(num_heads=4, num_key_heads=2, key_dim=3, value_dim=5, conv_width=3))
    config = TransformerConfig(
        vocab_size=13,
        d_model=12,
        num_heads=2,
        num_layers=3,
        position=RotaryOptions(),
        parameters=ParameterOptions(initializer_range=0.4),
        **{"stack.period": (linear, linear, LayerKind())},
    )
    model = CausalLM(config)
    return model, drawn_params(model, 0.4)


@pytest.fixture(scope="module")
def without_cache(model):
    """A function from a prompt and a number of tokens to the greedy tokens, each from a whole forward pass."""
    one, params = model
    run = jax.jit(lambda params, row: one.apply({"params": params}, row))

    def text(prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            row = np.zeros((1, 24), np.int32)  # one compiled shape; the layers are causal
            row[0, : len(tokens)] = tokens
            tokens.append(int(np.asarray(run(params, row))[0, len(tokens) - 1].argmax()))
        return tokens[len(prompt) :]

    return text


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("options", [{}, {"slots": 2}])
def test_cached_equals_uncached(model, without_cache, options):
    expected = [without_cache(prompt, 8) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) == 3
    assert generate(*model, PROMPTS, max_new_tokens=8, sampling=GREEDY, **options) == expected


def test_scanned_and_unrolled_layers_generate_the_same(model):
    one, params = model
    unrolled = CausalLM(one.config, Execution(scan=False))
    rows = [generate(each, params, PROMPTS, max_new_tokens=5, sampling=GREEDY) for each in (one, unrolled)]
    assert rows[0] == rows[1]


@pytest.mark.programs(12, reason="a stream makes its cache outside of jit")
def test_a_stream_continues_or_restarts(model, without_cache):
    """The second prompt continues the first text, the third goes back to its beginning, which the state can't."""
    stream = TokenStream(*model)

    def text(prompt):
        return [token for piece in stream.generate(prompt, max_new_tokens=6, sampling=GREEDY) for token in piece.tokens]

    first = text(PROMPTS[1])
    assert first == without_cache(PROMPTS[1], 6)
    longer = [*PROMPTS[1], *first, 3, 5]
    assert text(longer) == without_cache(longer, 6)
    back = [*PROMPTS[1][:4], 11]
    assert text(back) == without_cache(back, 6)


def test_rejects_features_that_rewind_the_state(model):
    with pytest.raises(ValueError, match="a draft is not supported for models with linear attention"):
        generate(*model, PROMPTS, max_new_tokens=2, draft=Draft(model=model[0], params=model[1]))
    with pytest.raises(ValueError, match="linear attention has a state instead"):
        paged_cache(model[0], rows=1, pages_per_row=1, num_pages=1, page_size=4)
