"""Common mistakes in using single modules: each raises an error with a remedy, and none is ignored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_specs import attention_spec
from numeric_parts import random_params

from transformer import (
    ALiBi,
    CausalLM,
    Decoder,
    Encoder,
    Execution,
    FeedForwardOptions,
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

X = jax.device_put(np.ones((2, 5, 12), np.float32))
CONFIG = TransformerConfig(vocab_size=7, d_model=12, num_layers=1, num_heads=3, feed_forward=FeedForwardOptions(d_ff=5))


def start(module, *inputs, **options):
    """Trace `init`, which is enough for its errors."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, **options))


pytestmark = pytest.mark.usefixtures("without_type_checks")


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (Sinusoidal(), r"\(Sinusoidal.add\)"),
        (Learned(max_length=9, features=12), r"Learned is added to embeddings"),
        (T5Bias(num_heads=3), r"T5Bias.*position_table=,.*\(32.*3\)"),
        (ALiBi(num_heads=8), r"ALiBi.*8.*num_heads.*3.*num_heads=3"),
        (Rotary(size=8), r"can't rotate 8 dimensions of a head of size 4"),
        (Rotary(size=3), r"can't rotate 3 dimensions of a head of size 4"),
        ("rotary", r"position.*Rotary\(\).*got 'rotary'"),
        (Rotary, r"position.*Rotary\(\)"),
    ],
)
def test_rejects_an_unsupported_position_scheme(position, message):
    with pytest.raises(ValueError, match=message):
        start(MultiHeadAttention(num_heads=3, position=position), X)


def test_reports_a_missing_axis():
    with pytest.raises(ValueError, match=r"x.*\(batch.*width\).*\(5.*12\).*x\[None\]"):
        start(MultiHeadAttention(num_heads=3), np.asarray(X)[0])
    with pytest.raises(ValueError, match=r"context.*\(batch.*width\).*\(5.*12\)"):
        start(MultiHeadAttention(num_heads=3), X, np.asarray(X)[0])
    with pytest.raises(ValueError, match=r"embeddings.*\(batch.*d_model 12\).*\(5.*12\)"):
        start(Encoder(CONFIG), np.asarray(X)[0])
    with pytest.raises(ValueError, match=r"d_model 12\).*\(2.*5.*8\)"):
        start(Encoder(CONFIG), np.asarray(X)[..., :8])


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        ([[1, 2]], "got list"),
        (np.ones((2, 3)), r"got float64 of shape \(2, 3\)"),
        (np.ones(3, np.int32), r"got int32 of shape \(3,\)\. For a single row"),
    ],
)
def test_rejects_tokens_of_a_wrong_dtype(tokens, got):
    with pytest.raises(ValueError, match=rf"\(batch.*length\).*{got}"):
        start(CausalLM(CONFIG), tokens)


def test_a_boolean_array_is_a_mask_everywhere():
    allowed = np.tri(5, dtype=bool)
    pairs = [
        (MultiHeadAttention(num_heads=3), {}),
        (Encoder(CONFIG.replace(**{"stack.period": (LayerKind(window=3),)})), {}),
        (Decoder(CONFIG, cross=True), {"context": X, "context_mask": jax.device_put(np.ones((5, 5), bool))}),
    ]
    for module, more in pairs:
        params = random_params(module, X, **more)

        @jax.jit
        def run(allowed, apply=module.apply, params=params, more=more):
            return [apply(params, X, mask=mask, **more)[0] for mask in (allowed, Mask.array(allowed))]

        np.testing.assert_allclose(*run(allowed))
    with pytest.raises(ValueError, match="An additive mask is a bias"):
        start(Encoder(CONFIG), X, mask=jax.device_put(np.zeros((5, 5), np.float32)))


def test_a_symbolic_length_uses_full_attention():
    """jax.export with a symbolic length: only the reference kernel does not need the number of blocks."""
    (length,) = jax.export.symbolic_shape("length")
    assert choose("auto", attention_spec(length)) == "reference"
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = random_params(CausalLM(CONFIG), np.zeros((1, 2), np.int32))
    program = jax.jit(lambda tokens: CausalLM(CONFIG, Execution(scan=False)).apply(params, tokens))
    assert jax.export.export(program)(tokens).out_avals[0].shape == (1, length, 7)
