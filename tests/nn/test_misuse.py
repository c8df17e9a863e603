"""Common mistakes in using single modules: each raises an error that says what to do, and none is ignored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_specs import attention_spec

from transformer import (
    ALiBi,
    CausalLM,
    Decoder,
    Encoder,
    Execution,
    LayerKind,
    Learned,
    Mask,
    MultiHeadAttention,
    Rotary,
    Sinusoidal,
    T5Bias,
    TransformerConfig,
)
from transformer.nn.kernels import choose

X = jnp.ones((2, 5, 12))
KEY = jax.random.key(0)
CONFIG = TransformerConfig(vocab_size=7, d_model=12, num_layers=1, num_heads=3, d_ff=5)


pytestmark = pytest.mark.usefixtures("without_type_checks")


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (Sinusoidal(), r"Sinusoidal is added to embeddings.*Add it to x before \(Sinusoidal.add\), or use Rotary"),
        (Learned(max_length=9, features=12), r"Learned is added to embeddings"),
        (T5Bias(num_heads=3), r"T5Bias needs its learned table: pass position_table=, of shape \(32, 3\)"),
        (ALiBi(num_heads=8), r"ALiBi has a bias for 8 heads, but num_heads is 3\. Create it with num_heads=3"),
        (Rotary(size=8), r"can't rotate 8 dimensions of a head of size 4"),
        (Rotary(size=3), r"can't rotate 3 dimensions of a head of size 4"),
        ("rotary", r"position must be a position scheme such as Rotary\(\).*got 'rotary'"),
        (Rotary, r"position must be a position scheme such as Rotary\(\)"),
    ],
)
def test_a_position_scheme_that_attention_cannot_use(position, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(num_heads=3, position=position).init(KEY, X)


def test_an_axis_that_is_missing():
    with pytest.raises(ValueError, match=r"x must be \(batch, length, width\), got shape \(5, 12\).*x\[None\]"):
        MultiHeadAttention(num_heads=3).init(KEY, X[0])
    with pytest.raises(ValueError, match=r"context must be \(batch, length, width\), got shape \(5, 12\)"):
        MultiHeadAttention(num_heads=3).init(KEY, X, X[0])
    with pytest.raises(ValueError, match=r"embeddings must be \(batch, length, d_model 12\), got shape \(5, 12\)"):
        Encoder(CONFIG).init(KEY, X[0])
    with pytest.raises(ValueError, match=r"d_model 12\), got shape \(2, 5, 8\)\. Project them"):
        Encoder(CONFIG).init(KEY, X[..., :8])


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        ([[1, 2]], "got list"),
        (np.ones((2, 3)), r"got float64 of shape \(2, 3\)"),
        (jnp.ones(3, jnp.int32), r"got int32 of shape \(3,\)\. For a single row"),
    ],
)
def test_tokens_of_another_kind(tokens, got):
    with pytest.raises(ValueError, match=rf"array of integers of shape \(batch, length\), {got}"):
        CausalLM(CONFIG).init(KEY, tokens)


def test_a_boolean_array_is_a_mask_everywhere():
    allowed = jnp.tri(5, dtype=bool)
    pairs = [
        (MultiHeadAttention(num_heads=3), {}),
        (Encoder(CONFIG.replace(**{"stack.period": (LayerKind(window=3),)})), {}),
        (Decoder(CONFIG, cross=True), {"context": X, "context_mask": jnp.ones((5, 5), bool)}),
    ]
    for module, more in pairs:
        params = jax.jit(module.init)(KEY, X, **more)
        run = jax.jit(lambda mask, m=module, p=params, more=more: m.apply(p, X, mask=mask, **more)[0])
        np.testing.assert_allclose(run(allowed), run(Mask.array(allowed)))
    with pytest.raises(ValueError, match="An additive mask is a bias"):
        Encoder(CONFIG).init(KEY, X, mask=jnp.zeros((5, 5)))


def test_a_length_left_open_is_computed_whole():
    """jax.export with a symbolic length: only the reference kernel does not need the number of blocks."""
    (length,) = jax.export.symbolic_shape("length")
    assert choose("auto", attention_spec(length)) == "reference"
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = jax.jit(CausalLM(CONFIG).init)(KEY, jnp.zeros((1, 2), jnp.int32))
    program = jax.jit(lambda tokens: CausalLM(CONFIG, Execution(scan=False)).apply(params, tokens))
    assert jax.export.export(program)(tokens).out_avals[0].shape == (1, length, 7)
