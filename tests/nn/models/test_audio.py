"""Speech encoders: convolutions of the samples and of the positions, padding, and bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numeric_parts import random_params
from scipy.special import erf

from transformer.config import (
    Audio,
    ConfigError,
    FeedForwardOptions,
    ParameterOptions,
    RotaryOptions,
    TransformerConfig,
)
from transformer.nn._parameter_axes import parameter_axes
from transformer.nn.models import SpeechEncoder, SpeechRecognizer
from transformer.nn.models._audio import PositionConvolution
from transformer.training import ctc_loss

AUDIO = Audio(
    features=(7, 5),
    kernel_sizes=(5, 3),
    strides=(3, 2),
    position_kernel_size=4,
    position_groups=3,
)
CONFIG = TransformerConfig(
    vocab_size=5,
    d_model=12,
    num_heads=3,
    num_layers=1,
    feed_forward=FeedForwardOptions(d_ff=17),
    position=None,
    input=AUDIO,
    parameters=ParameterOptions(initializer_range=0.4),
)
SAMPLES = jax.device_put(np.random.default_rng(1).normal(size=(2, 97)).astype(np.float32))


def changed(**fields):
    return CONFIG.replace(input=dataclasses.replace(AUDIO, **fields))


def test_frames_are_counted():
    assert AUDIO.stride == 6
    assert AUDIO.shortest == 11
    assert [AUDIO.frames(n) for n in (11, 16, 17, 97)] == [1, 1, 2, 15]
    model = SpeechEncoder(CONFIG)
    hidden, _ = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), SAMPLES))
    assert hidden.shape == (2, 15, 12)
    assert Audio().stride == 320  # 20 ms at 16 kHz
    assert Audio().shortest == 400  # 25 ms


@pytest.mark.parametrize("size", [4, 5])
def test_positions_are_a_grouped_convolution(size):
    """The kernel of each position has its own norm; an even kernel reads one frame more of the past."""
    config = changed(position_kernel_size=size)
    x = np.random.default_rng(2).normal(size=(2, 9, 12)).astype(np.float32)
    module = PositionConvolution(config)
    params = random_params(module, x)["params"]
    params = params | {"scale": np.arange(1.0, size + 1), "bias": np.arange(12.0)}
    padded = np.pad(x, ((0, 0), (size // 2, size), (0, 0)))
    expected = np.zeros((2, 9, 12))
    for k in range(size):
        kernel = np.asarray(params["kernel"][k])
        kernel = kernel * (k + 1) / np.linalg.norm(kernel)
        for group in range(3):
            part = slice(4 * group, 4 * group + 4)
            expected[..., part] += padded[:, k : k + 9, part] @ kernel[:, part]
    expected = expected + np.arange(12.0)
    expected = x + expected * (1 + erf(expected / np.sqrt(2))) / 2
    np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_padding_changes_nothing(norm):
    """A row with padding, even NaN, gives the logits that it gives alone."""
    model = SpeechRecognizer(changed(norm=norm, use_bias=True))
    params = random_params(model, SAMPLES)
    length, padded = 61, np.array(SAMPLES)
    padded[1, length:] = 1e3

    @jax.jit
    def run(params, samples, padded):
        both = model.apply(params, padded, jnp.asarray([97, length]))
        return model.apply(params, samples[1:, :length]), both, model.apply(params, samples)

    alone, both, plain = jax.device_get(run(params, SAMPLES, padded))
    np.testing.assert_allclose(both[1, : alone.shape[1]], alone[0], atol=1e-5)
    np.testing.assert_allclose(both[0], plain[0], atol=1e-5)


def test_training_with_ctc_learns_a_text():
    model = SpeechRecognizer(CONFIG)
    targets, lengths = np.asarray([[1, 2, 1], [3, 0, 0]]), np.asarray([3, 1])
    optimizer = optax.adam(0.01)

    def loss(params):
        logits = model.apply(params, SAMPLES)
        return ctc_loss(logits, jnp.asarray([15, 15]), jnp.asarray(targets), jnp.asarray(lengths))[0]

    def step(carry, _):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def train(key):
        params = model.init(key, SAMPLES)
        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), length=200)
        return losses, model.apply(params, SAMPLES).argmax(-1)

    losses, tokens = jax.device_get(train(jax.random.key(0)))
    assert losses[0] > 5
    found = [[int(t) for t, before in zip(row, [0, *row], strict=False) if t and t != before] for row in tokens]
    assert found == [[1, 2, 1], [3]]


def test_axes_of_all_kernels_are_declared():
    assert parameter_axes("feature_encoder/conv_3/kernel", (3, 7, 5)) == (None, None, "embed")
    assert parameter_axes("position_convolution/kernel", (4, 4, 12)) == (None, None, "embed")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Audio(features=(3,)), r"kernel_sizes"),
        (
            lambda: Audio(features=(0,), kernel_sizes=(1,), strides=(1,)),
            r"of at least 1, one per convolution, got \(0,",
        ),
        (lambda: Audio(features=3, kernel_sizes=(1,), strides=(1,)), r"must be tuples of integers .* got 3"),
        (lambda: Audio(features=(1,) * 33, kernel_sizes=(1,) * 33, strides=(1,) * 33), "has 33 convolutions"),
        (lambda: changed(position_groups=5), r"d_model \(12\).*input.position_groups \(5\)"),
        (lambda: Audio(norm="batch"), "norm must be one of"),
    ],
)
def test_rejects_invalid_configs(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (SpeechEncoder(CONFIG.replace(input=None)), (SAMPLES,), r"SpeechEncoder.*input=Audio"),
        (SpeechEncoder(CONFIG.replace(position=RotaryOptions())), (SAMPLES,), r"position.*RotaryOptions"),
        (SpeechRecognizer(CONFIG.replace(vocab_size=None)), (SAMPLES,), r"vocab_size"),
        (
            SpeechEncoder(CONFIG),
            (np.asarray(SAMPLES)[0],),
            r"samples.*got float32.*\(97,\)",
        ),
        (SpeechEncoder(CONFIG), (np.asarray(SAMPLES)[:, :10],), "with at least 11 samples"),
        (SpeechEncoder(CONFIG), (np.asarray(SAMPLES).astype(np.int32),), r"got int32"),
        (SpeechEncoder(CONFIG), (SAMPLES, np.asarray([3])), r"lengths.*\(2,\)"),
    ],
)
def test_rejects_invalid_inputs(model, given, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *given: model.init(jax.random.key(0), *given), *given)
